"""Files that are there whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import os
from errno import EISDIR
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.files.private import create_private

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_writable", "write_whole"]


def write_whole(file: Path, content: str | bytes, *, is_private: bool = False) -> None:
    """Write ``content`` to ``file``, replacing what is there when all of it is written.

    Args:
        file: to write.
        content: all that the file holds then.
        is_private: whether it is its owner's alone, whatever the umask.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    part = _part_of(file)
    try:
        try:
            if is_private:
                with create_private(part) as out:
                    out.write(data)
            else:
                part.write_bytes(data)
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise _cannot_write(file, error) from None


def check_writable(file: Path) -> None:
    """Find out whether ``write_whole`` could write ``file``, before the work is done that it is to hold.

    Raises:
        ConfigError: the file cannot be written.
    """
    part = _part_of(file)
    try:
        if file.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        try:
            part.touch(exist_ok=False)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _cannot_write(file, error) from None


def _part_of(file: Path) -> Path:
    return file.parent / f"{file.name}.{os.getpid()}"


def _cannot_write(file: Path, error: OSError | ValueError) -> ConfigError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"Cannot write {file}: {why}.", remedy="Name a file in a folder that can be written.")
