"""What makes a folder a model folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pagefold.errors import ModelNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_model_folder"]

# As transformers names them; other .bin files (optimizer state, training arguments) are no weights.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_model_folder(folder: Path) -> None:
    """Check that ``folder`` holds ``config.json`` and weights, all the parts of them if there is an index.

    Raises:
        ModelNotFoundError: it does not; the message says what is missing.
    """
    remedy = "A model folder holds config.json and *.safetensors (or pytorch_model*.bin), as transformers saves them."
    if not folder.is_dir():
        message = f"{folder} is not a folder."
        raise ModelNotFoundError(message, remedy=remedy)
    if not (folder / "config.json").is_file():
        message = f"{folder} holds no config.json."
        raise ModelNotFoundError(message, remedy=remedy)
    missing = _missing_parts(folder)
    if missing:
        message = f"{folder} lacks {len(missing)} of its weight files, such as {min(missing)}."
        raise ModelNotFoundError(message, remedy="Finish the download, or fetch it again.")
    # A broken link (a cache that was cleared) is not a file.
    if not any(path.is_file() for pattern in _WEIGHTS for path in folder.glob(pattern)):
        message = f"{folder} holds no weights."
        raise ModelNotFoundError(message, remedy=remedy)


def _missing_parts(folder: Path) -> set[str]:
    for name in _INDEXES:
        try:
            parts = set(json.loads((folder / name).read_bytes())["weight_map"].values())
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{folder / name} cannot be read as an index of weights."
            raise ModelNotFoundError(message, remedy="Fetch it again.") from error
        missing = {part for part in parts if not (folder / part).is_file()}
        if missing:
            return missing
    return set()
