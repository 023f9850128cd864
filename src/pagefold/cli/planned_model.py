"""Which model a command plans for: as the planner names them, or a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagefold.config import cache_dir
from pagefold.errors import ModelNotFoundError

if TYPE_CHECKING:
    from pagefold.plan import ModelShape

__all__ = ["planned_model"]


def planned_model(name: str) -> ModelShape:
    """Return the shape of a model; a file, or a name with a quantization behind a colon, is first made a folder.

    Raises:
        ModelNotFoundError: nobody knows it.
        PagefoldError: a file cannot be read, or its model cannot be sized; see :func:`~pagefold.hub.resolve`.
    """
    from pagefold.hub import resolve  # noqa: PLC0415 - not of every command
    from pagefold.plan import find_model  # noqa: PLC0415 - likewise

    try:
        return find_model(name)
    except ModelNotFoundError:
        is_of_gguf = name.lower().endswith(".gguf") or ":" in name or _is_folder_of_gguf(name)
        if not is_of_gguf:
            raise
    return replace(find_model(str(resolve(name, cache_dir()))), name=name)


def _is_folder_of_gguf(name: str) -> bool:
    try:
        folder = Path(name).expanduser()
        return folder.is_dir() and not (folder / "config.json").exists() and any(folder.glob("*.gguf"))
    except (RuntimeError, OSError):  # no such home, or no name of a file
        return False
