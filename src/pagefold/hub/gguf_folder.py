"""The model folder of a GGUF file: configs and a tokenizer out of its header, and a link to the file itself.

So a file is a model everywhere, and nobody copies or converts its weights. Such a folder takes some MiB, or as much as
the vocabulary does; another one is made when the file becomes another one.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from pagefold.errors import ModelNotFoundError
from pagefold.files.weights import GGUF_WEIGHTS
from pagefold.gguf.file import GgufFile
from pagefold.hub.convert import write_all_but_weights
from pagefold.hub.progress import Progress, silent
from pagefold.hub.publish import publish_folder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["find_gguf", "gguf_folder", "write_gguf_folder"]

FOLDER_VERSION = 1
"""Part of the folder's name: raise it whenever anything is written differently."""
_MAX_NAME = 100
"""Bytes of a file's name that its folder's has: names may have 255."""
_MAGIC = b"GGUF"


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` is, or that is alone in that folder beside no config; None if there is none.

    Raises:
        ModelNotFoundError: the folder has several.
    """
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" or _begins_so(path) else None
    if (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        message = f"{path} holds {len(found)} GGUF files and no config.json: {names}."
        raise ModelNotFoundError(message, remedy=f"Name one of them, such as {found[0]}")
    return found[0] if found else None


def gguf_folder(path: Path, cache_dir: Path, *, progress: Progress = silent) -> Path:
    """Return the model folder of a GGUF file, after having made it if it is not there.

    Args:
        path: of the file, from the root.
        cache_dir: where the folder is kept, under ``models/``.
        progress: told when another process has to be waited for.

    Raises:
        GgufError: the file is damaged, or has tensors of a kind that is not known.
        UnsupportedModelError: its architecture or tokenizer is not known.
        ConfigError: the cache folder cannot be written.
    """
    with GgufFile(path) as gguf:
        stat = path.stat()
        told = f"{FOLDER_VERSION} {path} {stat.st_size} {stat.st_mtime_ns} ".encode()
        digest = hashlib.sha256(told + gguf.raw()).hexdigest()

        def build(folder: Path, _scratch: Path) -> None:
            write_all_but_weights(gguf, folder)
            (folder / GGUF_WEIGHTS).symlink_to(path)

        stem = os.fsencode(path.stem)[:_MAX_NAME].decode(errors="ignore")
        target = cache_dir / "models" / f"{stem}-{digest[:8]}"
        return publish_folder(target, build, about={"source": str(path)}, progress=progress)


def write_gguf_folder(path: Path, folder: Path, *, moves: bool) -> None:
    """Write the model's files into ``folder``, which exists; with the file itself in it if it ``moves``, else a link.

    Raises:
        GgufError: the file is damaged, or has tensors of a kind that is not known.
        UnsupportedModelError: its architecture or tokenizer is not known.
        OSError: the folder cannot be written.
    """
    with GgufFile(path) as gguf:
        write_all_but_weights(gguf, folder)
    if moves:
        path.replace(folder / GGUF_WEIGHTS)
    else:
        (folder / GGUF_WEIGHTS).symlink_to(path.absolute())


def _begins_so(path: Path) -> bool:
    """Whether a file that is not called so is one, as in stores that call files by their digests."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False
