"""What somebody may have meant: the nearest known names to one that is not known."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["nearest_names"]

_ENOUGH_ALIKE = 0.3


def nearest_names(name: str, known: Iterable[str], *, at_most: int = 3) -> list[str]:
    """Return the known names that look most like ``name``, the nearest first; upper and lower case are alike."""
    wanted = name.lower()

    def likeness(other: str) -> float:
        other = other.lower()
        tail = other.rsplit("/", 1)[-1]
        return max(difflib.SequenceMatcher(None, wanted, text).ratio() for text in (other, tail))

    scored = sorted(((likeness(other), other) for other in set(known)), key=lambda pair: (-pair[0], pair[1]))
    return [other for score, other in scored[:at_most] if score >= _ENOUGH_ALIKE]
