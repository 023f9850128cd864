"""Private files: files and folders of their owner alone. What comes from prompts or keys is written to such ones.

A file is made with mode 0600 and a folder with 0700, whatever the umask, and before a byte is in it. What is there
already with wider permissions is not changed unless somebody asks for it: it is told, with the remedy.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["check_private", "create_private", "make_private_folder", "open_private"]

_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_private(path: Path, flags: int) -> int:
    """Open a file as :func:`os.open` does. If that makes it, it is its owner's alone."""
    fd = os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)
    if flags & os.O_CREAT:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & _FILE_MODE == mode != _FILE_MODE:  # the umask took something from its owner too
            os.fchmod(fd, _FILE_MODE)
    return fd


def create_private(path: Path) -> BinaryIO:
    """Make a new file for its owner alone, in place of one that is there, and open it to be written."""
    path.unlink(missing_ok=True)
    return os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW), "wb")


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for its owner alone. One that is there stays as it is.

    Raises:
        OSError: it cannot be made, or is no folder.
    """
    try:
        folder.mkdir(_FOLDER_MODE)
    except FileNotFoundError:
        if folder.parent.is_dir():  # it says so of a folder that cannot be made there, as in /proc
            raise
        make_private_folder(folder.parent)
        make_private_folder(folder)
    except OSError:
        if not folder.is_dir():
            raise
    else:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & _FOLDER_MODE != _FOLDER_MODE:  # as above
            folder.chmod(mode | _FOLDER_MODE)


class _Found(NamedTuple):
    """A file or a folder whose permissions are wider than Pagefold's.

    Attributes:
        path: the file or folder.
        stat: what the system says of it.
    """

    path: Path
    stat: os.stat_result

    def __str__(self) -> str:
        return f"{self.path} (mode {stat.S_IMODE(self.stat.st_mode):04o})"


def check_private(what: str, top: Path, below: Iterable[Path] = (), *, fix: bool = False) -> list[str]:
    """Return what people should be told of files that others on the machine can read or change, a line each.

    What is not there, and what cannot be looked at, is left to those who use it.

    Args:
        what: the file or the folder is, for people.
        top: a file, or a folder.
        below: what is in that folder, without anything behind a link.
        fix: whether to take all rights from others. No link is followed for that.
    """
    is_link = top.is_symlink()
    named = top.resolve() if is_link else top
    found = [one for path in (named, *below) if (one := _look(path)) is not None]
    told = [_told_owner(what, one) for one in found[:1] if one.stat.st_uid not in (os.geteuid(), 0)]
    wide = [one for one in found if stat.S_IMODE(one.stat.st_mode) & _OTHERS]
    if not wide:
        return told
    if not fix:
        return [*told, _told_wide(what, named, wide)]
    reasons = ["it is reached by a link, which is not followed" if is_link else _mend(one) for one in wide]
    told += [
        f"the permissions of {one}, of {what}, are as they were: {reason}. Run: {_command(one)}"
        for one, reason in zip(wide, reasons, strict=True)
        if reason
    ]
    if num_mended := reasons.count(""):
        told.append(f"others on this machine could read {what}: {num_mended:,} files and folders are its owner's now")
    return told


def _look(path: Path) -> _Found | None:
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return None
    return _Found(path, found) if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) else None


def _mend(one: _Found) -> str:
    """Take all rights from others; return why that cannot be, or nothing."""
    try:
        fd = os.open(one.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            now = os.fstat(fd)
            if not os.path.samestat(now, one.stat):
                return "another file has taken its place"
            if stat.S_ISREG(now.st_mode) and now.st_nlink > 1:
                return "it has a second name elsewhere (a hard link)"
            os.fchmod(fd, stat.S_IMODE(now.st_mode) & ~_OTHERS)
        finally:
            os.close(fd)
    except OSError as error:
        return f"{error.strerror or error}; its owner is {_owner(one)}"
    return ""


def _told_owner(what: str, one: _Found) -> str:
    mine, theirs = _user(os.geteuid()), _owner(one)
    return f"{what} belongs to {theirs}, who can read what {mine} puts there: {one}. Run as {theirs}, or chown it"


def _told_wide(what: str, named: Path, wide: list[_Found]) -> str:
    more = f" and {len(wide) - 1:,} more files and folders of it" if len(wide) > 1 else ""
    command = _command(wide[0]) if len(wide) == 1 else f"chmod -R go= {named}"
    return (
        f"others on this machine can read or change {what}: {wide[0]}{more} should be its owner's alone. "
        f"Run: {command} (or give --fix-permissions)"
    )


def _command(one: _Found) -> str:
    return f"chmod {_FOLDER_MODE if stat.S_ISDIR(one.stat.st_mode) else _FILE_MODE:o} {one.path}"


def _owner(one: _Found) -> str:
    return _user(one.stat.st_uid)


def _user(user_id: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(user_id).pw_name
    return f"user {user_id}"
