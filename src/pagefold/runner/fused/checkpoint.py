"""Checkpoint: the weight files of a model folder, a tensor at a time. Nothing is read before it is asked for."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open

from pagefold.errors import PagefoldError, UnsupportedModelError
from pagefold.files.stored_matrix import StoredMatrix
from pagefold.files.weights import find_weight_files
from pagefold.gguf.architectures import find_architecture
from pagefold.gguf.file import GgufFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
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
        GgufError: a GGUF file is damaged.
        UnsupportedModelError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        for path in find_weight_files(folder):
            try:
                file = _KINDS.get(path.suffix, _Pickled)(path)
            except PagefoldError:
                raise  # it says more than we could
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

    def stored(self, name: str) -> StoredMatrix | None:
        """Return a matrix as its file has it, where that is quantized; None where :meth:`tensor` loses nothing."""
        stored = self._stored(name)
        return self._files[stored].stored(stored)

    def names(self) -> list[str]:
        """Return the names of all tensors, as the files have them."""
        return list(self._files)

    def _stored(self, name: str) -> str:
        """Return the name under which the files have it."""
        return name if name in self._files else name.removeprefix(_BASE)


class _File(Protocol):
    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def stored(self, name: str) -> StoredMatrix | None: ...


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

    def stored(self, name: str) -> StoredMatrix | None:  # noqa: ARG002 - none is
        return None


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

    def stored(self, name: str) -> StoredMatrix | None:  # noqa: ARG002 - none is
        return None


class _Gguf:
    """A file that stays mapped: whoever has a matrix as it lies there has no copy of it."""

    def __init__(self, path: Path) -> None:
        self._opened = GgufFile(path)
        architecture = find_architecture(self._opened)
        self._weights = architecture.weights(self._opened, architecture.config(self._opened))

    def names(self) -> Iterable[str]:
        return self._weights.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape

    def tensor(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return torch.from_numpy(weight.of_model(self._opened.read(weight.gguf_name)))

    def stored(self, name: str) -> StoredMatrix | None:
        weight = self._weights[name]
        kind = self._opened.tensors[weight.gguf_name].kind
        if not kind.is_quantized or len(weight.shape) != 2:  # noqa: PLR2004 - a matrix
            return None
        num_rows, num_columns = weight.shape
        blocks = self._opened.blocks(weight.gguf_name)
        return StoredMatrix(kind.name, (num_rows, num_columns), blocks, weight.row_order())


_KINDS: dict[str, Callable[[Path], _File]] = {".safetensors": _Safetensors, ".gguf": _Gguf}
