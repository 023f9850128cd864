"""Whether files of a folder can be read and written past the system's cache: found by doing it."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

from pagefold.files.private import open_private
from pagefold.store.frame import ALIGNMENT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PROBE_NAME", "why_not_direct"]

PROBE_NAME = "probe.tmp"
_NUM_BYTES = 4 * ALIGNMENT


def why_not_direct(folder: Path) -> str:
    """Return why direct I/O (O_DIRECT) does not work in ``folder``; empty if it does.

    A file is written, read back and compared, once past the cache and once through it. Some file systems refuse
    O_DIRECT, and some have taken it and returned something else.

    Raises:
        OSError: the folder cannot be written at all.
    """
    file = folder / PROBE_NAME
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    os.close(open_private(file, flags))
    try:
        fd = open_private(file, flags | os.O_DIRECT)
    except OSError as error:
        file.unlink()
        return f"the file system refuses it: {error.strerror}"
    try:
        return "" if _round_trip(fd, file) else "what was read is not what was written"
    except OSError as error:
        return f"the file system refuses it: {error.strerror}"
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            file.unlink()


def _round_trip(fd: int, file: Path) -> bool:
    wrote, read = mmap.mmap(-1, _NUM_BYTES), mmap.mmap(-1, _NUM_BYTES)
    with wrote, read:
        wrote[:] = os.urandom(_NUM_BYTES)
        # Two buffers at an offset, as frames are.
        with memoryview(wrote) as whole, whole[:ALIGNMENT] as head, whole[ALIGNMENT:] as rest:
            os.pwritev(fd, [head, rest], ALIGNMENT)
        num_read = os.preadv(fd, [read], ALIGNMENT)
        return num_read == _NUM_BYTES and read[:] == wrote[:] == file.read_bytes()[ALIGNMENT:]
