"""FolderLock: one process at a time writes to a cache folder, and others are told who does."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.files.private import open_private

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LOCK_NAME", "FolderLock", "holder_of"]

LOCK_NAME = "lock"
_MAX_BYTES = 1024


class FolderLock:
    """Holds a folder until it is released or its process ends, however that ends.

    Args:
        folder: an existing one.

    Raises:
        ConfigError: somebody else holds it, or no lock can be made there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        try:
            self._fd = open_private(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            msg = f"The cache folder {folder} cannot be written: {error.strerror}."
            raise ConfigError(msg, remedy="Name a folder that this user may write to.") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(self._fd)
            os.close(self._fd)
            msg = f"The cache folder {folder} is in use by {holder or 'another process'}."
            raise ConfigError(msg, remedy="Stop it, or name another folder.") from None
        except OSError as error:
            os.close(self._fd)
            msg = f"The cache folder {folder} cannot be locked: {error.strerror}."
            raise ConfigError(msg, remedy="Name a folder of a local disk.") from None
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # a full disk: it is locked all the same, and nobody is told by whom
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(who).encode()[:_MAX_BYTES], 0)

    @property
    def is_there(self) -> bool:
        """Whether the folder is still the one that was locked: nobody removed or replaced it."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def release(self) -> None:
        """Let go. The file stays: whoever removed it could take it from somebody who has it open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def holder_of(folder: Path) -> str:
    """Return who holds a folder now, for people; empty if nobody does."""
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(fd) or "another process"
    except OSError:
        return ""
    finally:
        os.close(fd)
    return ""


def _read(fd: int) -> str:
    try:
        who = json.loads(os.pread(fd, _MAX_BYTES, 0))
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # it has just been taken
