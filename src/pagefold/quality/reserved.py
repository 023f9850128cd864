"""Reserved parts: the end of each default text is for calibrating masks, and what is before it for evaluating them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.quality.texts import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["for_calibrating", "for_evaluating"]

_RESERVED = 0.1
"""The share of a text's characters that is for calibrating."""


def for_calibrating(texts: Sequence[Text]) -> list[Text]:
    """Return the last tenth of each text."""
    return [Text(text.name, text.content[_end(text) :]) for text in texts]


def for_evaluating(texts: Sequence[Text]) -> list[Text]:
    """Return all of each text but its last tenth."""
    return [Text(text.name, text.content[: _end(text)]) for text in texts]


def _end(text: Text) -> int:
    return round(len(text.content) * (1 - _RESERVED))
