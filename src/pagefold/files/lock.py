"""A file that one process at a time holds, and that the system releases when the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["locked"]


@contextlib.contextmanager
def locked(file: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold ``file``, which is made and stays: to remove it would let two processes hold two locks of one name.

    Args:
        file: to hold. It says nothing.
        waiting: called once if another process, or another holder in this one, has it.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)  # releases the lock too
