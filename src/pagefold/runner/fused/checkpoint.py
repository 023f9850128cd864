"""Checkpoint: the weight files of a model folder, a tensor at a time. Nothing is read before it is asked for."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open

from pagefold.errors import UnsupportedModelError
from pagefold.files.weights import find_weight_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["Checkpoint"]

_BASE = "model."
_MAX_WHY = 300
_REMEDY = "Check that config.json and the weights belong together, or download them again."


class Checkpoint:
    """The tensors of a model folder, by the names that transformers gives them.

    A model that was saved without its head has no ``model.`` in its names; it is found all the same.

    Args:
        folder: the model's.

    Raises:
        ModelNotFoundError: a file is not there.
        UnsupportedModelError: one cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        for path in find_weight_files(folder):
            try:
                file = _Safetensors(path) if path.suffix == ".safetensors" else _Pickled(path)
            except Exception as error:  # a damaged pickle can raise anything
                why = " ".join(str(error).split()) or type(error).__name__
                msg = f"{path} cannot be read: {why[:_MAX_WHY]}"
                raise UnsupportedModelError(msg, remedy="Download it again.") from error
            self._files |= dict.fromkeys(file.names(), file)

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._files

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that all these tensors are there. Others do not matter.

        Raises:
            UnsupportedModelError: some lack, or one has another shape.
        """
        missing = sorted(name for name in shapes if name not in self)
        if missing:
            msg = f"{self._folder} lacks {len(missing)} of the tensors that its config asks for, such as {missing[0]}."
            raise UnsupportedModelError(msg, remedy=_REMEDY)
        for name, shape in sorted(shapes.items()):
            stored = self._stored(name)
            found = self._files[stored].shape(stored)
            if found != shape:
                msg = f"{self._folder} has {name} of shape {list(found)}, where its config asks for {list(shape)}."
                raise UnsupportedModelError(msg, remedy=_REMEDY)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as float32. It may lie in the file: read it, do not write to it."""
        stored = self._stored(name)
        return self._files[stored].tensor(stored).to(torch.float32)

    def _stored(self, name: str) -> str:
        """Return the name under which the files have it."""
        return name if name in self._files else name.removeprefix(_BASE)


class _File(Protocol):
    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> torch.Tensor: ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self._opened: Any = safe_open(path, framework="pt")

    def names(self) -> Iterable[str]:
        return list(self._opened.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened.get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._opened.get_tensor(name)
        return tensor


class _Pickled:
    """Tensors alone: whatever else a pickle asks for is refused by torch."""

    def __init__(self, path: Path) -> None:
        is_mappable = zipfile.is_zipfile(path)  # files of torch before 1.6 are not
        loaded: Mapping[str, Any] = torch.load(path, map_location="cpu", mmap=is_mappable, weights_only=True)
        self._tensors = {name: one for name, one in loaded.items() if isinstance(one, torch.Tensor)}

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()
