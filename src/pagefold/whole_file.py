"""Files that are there whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pagefold.errors import ConfigError

__all__ = ["write_whole"]


def write_whole(file: Path, content: str | bytes) -> None:
    """Write ``content`` to ``file``, replacing what is there when all of it is written.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
            part.chmod(0o666 & ~_umask())
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        message = f"Cannot write {file}: {error.strerror}."
        raise ConfigError(message, remedy="Name a file in a folder that can be written.") from None


def _umask() -> int:
    """Return what a file that is simply opened would not be allowed."""
    umask = os.umask(0)
    os.umask(umask)
    return umask
