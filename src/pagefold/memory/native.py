"""Native memory: what the C library holds for libraries. Elsewhere than on glibc nothing is known of it."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

__all__ = ["allocated_bytes", "give_back_memory", "have_few_arenas"]

_M_ARENA_MAX = -8
"""The C library's name for how many arenas there may be: heaps of which each serves some threads."""
_MAX_ARENAS = 2

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


def have_few_arenas() -> None:
    """Let all threads that start from now on allocate from two heaps. By default it would be eight a core.

    What is freed in one heap serves nobody in another, and a heap of which a little is used is not given back. So a
    server with many threads would hold tens of MiB that nobody uses. ``MALLOC_ARENA_MAX`` in the environment is
    heeded instead.
    """
    if "MALLOC_ARENA_MAX" not in os.environ and (set_option := _function("mallopt", ctypes.c_int)) is not None:
        set_option(_M_ARENA_MAX, _MAX_ARENAS)


@cache
def _function(name: str, returns: Any) -> Any:  # noqa: ANN401 - ctypes has no type for it
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    found.restype = returns
    return found
