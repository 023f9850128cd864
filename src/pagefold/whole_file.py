"""Files that are there whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_whole"]


def write_whole(file: Path, content: str | bytes) -> None:
    """Write ``content`` to ``file``, replacing what is there when all of it is written.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    part = file.parent / f"{file.name}.{os.getpid()}"
    try:
        try:
            part.write_bytes(data)
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        message = f"Cannot write {file}: {error.strerror}."
        raise ConfigError(message, remedy="Name a file in a folder that can be written.") from None
