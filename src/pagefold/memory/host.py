"""Host memory for blocks: whole pages, taken from the system as they are first written, huge ones where it has them.

Attention and copies read blocks in pieces of some kilobytes, all over the memory of all blocks. With pages of 4 KiB a
core keeps looking up where they are; huge ones (2 MiB) are few enough to be known.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["host_memory"]

_HUGE_PAGE_BYTES = 2**21


def host_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Return ``num_bytes`` of memory that begin at a page of the largest size."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system, or a kernel, without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    begin = -everything.ctypes.data % _HUGE_PAGE_BYTES
    return everything[begin : begin + num_bytes]
