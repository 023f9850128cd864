"""What JSON can tell: Python's parser takes numbers, halves of characters and depths that it cannot write."""

from __future__ import annotations

import json
from typing import Any, TypeVar

__all__ = ["arguments_object", "is_tellable", "tellable"]

_T = TypeVar("_T")


def is_tellable(value: object) -> bool:
    """Whether ``value`` can be written as JSON in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # half of a surrogate pair is a ValueError too
        return False
    return True


def tellable(value: _T) -> _T:
    """Check that ``value`` can be written as JSON in UTF-8."""
    if not is_tellable(value):
        msg = "it holds half of a surrogate pair, a number that JSON does not have, or nests without end"
        raise ValueError(msg)
    return value


def arguments_object(text: str) -> dict[str, Any] | None:
    """Return the object that a call's arguments are; None if they are none that JSON can tell, as in one cut off."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and is_tellable(found) else None
