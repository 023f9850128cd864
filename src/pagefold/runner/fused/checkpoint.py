"""Checkpoint: the weight files of a model folder, a tensor at a time. Nothing is read before it is asked for.

Where matrices are quantized (``quantized/``), it has them by the names and of the shapes that they stand for.
"""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open

from pagefold.errors import PagefoldError, UnsupportedModelError
from pagefold.files.json_object import read_json_object
from pagefold.files.stored_matrix import StoredMatrix
from pagefold.files.weights import find_weight_files
from pagefold.gguf.architectures import find_architecture
from pagefold.gguf.file import GgufFile
from pagefold.quantized import Part, read_quantization, tensors_of
from pagefold.quantized.codes import settled
from pagefold.quantized.dequantize import dequantize
from pagefold.quantized.tiles import kind_of, stored_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from pagefold.quantized import MatrixLayout

__all__ = ["Checkpoint"]

_BASE, _HEAD, _WEIGHT = "model.", "lm_head.", ".weight"
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
        UnsupportedModelError: a file cannot be read, or matrices are quantized in a way that is not computed.
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
        self._quantization = read_quantization(read_json_object(folder / "config.json"))
        is_quantized = self._quantization is not None
        self._parts = {name: file.part(name) for name, file in self._files.items()} if is_quantized else {}

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._files or self._layout(name) is not None

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
            found = self._shape(name)
            if found != shape:
                msg = f"{self._folder} has {name} of shape {list(found)}, where its config asks for {list(shape)}."
                raise UnsupportedModelError(msg, remedy=_REMEDY)
            self._check_bias(name, shapes)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as float32, dequantized if need be. It may lie in the file: read it, do not write to it.

        Raises:
            UnsupportedModelError: what is stored of a quantized matrix contradicts itself.
        """
        layout = self._layout(name)
        if layout is not None:
            return dequantize(layout, self._read)
        return self._read(self._stored(name)).to(torch.float32)

    def stored(self, name: str) -> StoredMatrix | None:
        """Return a quantized matrix as its file has it, or in blocks that are exactly it.

        None where :meth:`tensor` loses nothing, or no blocks are exactly it.

        Raises:
            UnsupportedModelError: what is stored of it contradicts itself.
        """
        layout = self._layout(name)
        if layout is not None:
            return stored_matrix(layout, self._read)
        stored = self._stored(name)
        return self._files[stored].stored(stored)

    def kind(self, name: str) -> str | None:
        """Return in which of GGML's kinds :meth:`stored` returns a matrix; None for in none. Its codes are not read.

        Raises:
            UnsupportedModelError: what is stored of it contradicts itself.
        """
        layout = self._layout(name)
        if layout is not None:
            return kind_of(layout, self._read)
        stored = self.stored(name)
        return None if stored is None else stored.kind

    def kinds(self) -> dict[str, str]:
        """Return the kinds of all matrices that :meth:`stored` returns, by transformers' names of them.

        Raises:
            UnsupportedModelError: what is stored of one contradicts itself.
        """
        kinds = {name: self.kind(name) for name in self.names()}
        names = {name: name if name.startswith((_BASE, _HEAD)) else f"{_BASE}{name}" for name in kinds}
        return {names[name]: kind for name, kind in kinds.items() if kind is not None}

    def names(self) -> list[str]:
        """Return the names of all tensors, as the files have them; of quantized matrices those of the matrices."""
        if self._quantization is None:
            return list(self._files)
        return list(tensors_of(self._quantization, self._parts))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, by the names of :meth:`names`."""
        return {name: self._shape(name) for name in self.names()}

    def _check_bias(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a quantized matrix with a bias that its model has not. Tools write some of zeros."""
        bias = self._stored(f"{name.removesuffix(_WEIGHT)}.bias")
        if bias not in self._parts or f"{name.removesuffix(_WEIGHT)}.bias" in shapes or self._layout(name) is None:
            return
        if bool(self._read(bias).any()):
            msg = f"{self._folder} has {bias}, a bias that is not zero, where its config asks for none."
            raise UnsupportedModelError(msg, remedy=_REMEDY)

    def _layout(self, name: str) -> MatrixLayout | None:
        """Return how a quantized matrix is stored; None for what is not quantized."""
        if self._quantization is None or not name.endswith(_WEIGHT):
            return None
        module = name.removesuffix(_WEIGHT)
        for each in dict.fromkeys((module, module.removeprefix(_BASE))):
            layout = self._quantization.layout(each, self._parts)
            if layout is not None:
                return settled(layout, self._read)
        return None

    def _shape(self, name: str) -> tuple[int, ...]:
        layout, stored = self._layout(name), self._stored(name)
        return self._files[stored].part(stored).shape if layout is None else layout.shape

    def _read(self, stored: str) -> torch.Tensor:
        return self._files[stored].tensor(stored)

    def _stored(self, name: str) -> str:
        """Return the name under which the files have it."""
        return name if name in self._files else name.removeprefix(_BASE)


class _File(Protocol):
    def names(self) -> Iterable[str]: ...

    def part(self, name: str) -> Part: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def stored(self, name: str) -> StoredMatrix | None: ...


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self._opened: Any = safe_open(path, framework="pt")

    def names(self) -> Iterable[str]:
        return list(self._opened.keys())

    def part(self, name: str) -> Part:
        tensor = self._opened.get_slice(name)
        return Part(tensor.get_dtype(), tuple(tensor.get_shape()))

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

    def part(self, name: str) -> Part:
        return Part(str(self._tensors[name].dtype), tuple(self._tensors[name].shape))

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

    def part(self, name: str) -> Part:
        weight = self._weights[name]
        return Part(self._opened.tensors[weight.gguf_name].kind.name, weight.shape)

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
