"""Native memory: what the C library holds for libraries. Elsewhere than on glibc nothing is known of it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["allocated_bytes", "give_back_memory"]

_NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Info(ctypes.Structure):
    """The C library's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES.split())


def allocated_bytes() -> int | None:
    """Return how many bytes this process has allocated and not freed; None where that cannot be told."""
    info = _function("mallinfo2", _Info)
    if info is None:
        return None
    told = info()
    return int(told.uordblks + told.hblkhd)


def give_back_memory() -> None:
    """Give back to the system what is freed: the C library keeps it else, once it had to have it.

    Takes some 50 ms after much was freed; other threads go on meanwhile.
    """
    trim = _function("malloc_trim", ctypes.c_int)
    if trim is not None:
        trim(0)


@cache
def _function(name: str, returns: Any) -> Any:  # noqa: ANN401 - ctypes has no type for it
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    found.restype = returns
    return found
