"""printable: text of others, as it may go to a terminal."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return a text without what would move a cursor."""
    return text if text.isprintable() else ascii(text)[1:-1]
