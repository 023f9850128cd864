"""What makes a folder a model folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import ModelNotFoundError
from pagefold.files.weights import find_weight_files

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_model_folder"]


def check_model_folder(folder: Path) -> None:
    """Check that ``folder`` holds ``config.json`` and weights, all the parts of them if there is an index.

    Raises:
        ModelNotFoundError: it does not; the message says what is missing.
    """
    remedy = "A model folder holds config.json and weights, named as save_pretrained names them."
    if not folder.is_dir():
        message = f"{folder} is not a folder."
        raise ModelNotFoundError(message, remedy=remedy)
    if not (folder / "config.json").is_file():
        message = f"{folder} holds no config.json."
        raise ModelNotFoundError(message, remedy=remedy)
    if not find_weight_files(folder):
        message = f"{folder} holds no weights."
        raise ModelNotFoundError(message, remedy=remedy)
