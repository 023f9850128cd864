"""Which files of a model folder are its weights, and what the header of one says. Nobody else decides this."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import ModelNotFoundError
from pagefold.gguf.header import GgufError, GgufHeader

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "GGUF_WEIGHTS",
    "QuantizedTensors",
    "count_quantized",
    "find_weight_files",
    "num_elements",
    "read_header",
    "tensor_headers",
]

_SINGLES = ("model.safetensors", "pytorch_model.bin")
_GGUF = ".gguf"
GGUF_WEIGHTS = f"model{_GGUF}"
"""What the weights of a folder are called that was made of a GGUF file."""


def find_weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load from ``folder``, in order of their names; none if there are none.

    They are ``model.safetensors``, or the parts that its index names, or ``pytorch_model.bin`` likewise. Others hold
    the same weights again for other programs, or no weights; but where there is none of those, ``model.gguf`` is the
    file that the folder was made of.

    Raises:
        ModelNotFoundError: an index cannot be read, or names parts that are not there.
    """
    for single in _SINGLES:
        if (folder / single).is_file():  # a broken link, of a cache that was cleared, is no file
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _parts(index)
    return [folder / GGUF_WEIGHTS] if (folder / GGUF_WEIGHTS).is_file() else []


def _parts(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        parts = [index.parent / name for name in sorted(names)]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        message = f"{index} cannot be read as an index: it does not say which tensors are in which file."
        raise ModelNotFoundError(message, remedy="Download it again.") from None
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        message = f"{index.parent} lacks {len(missing)} of its weight files, such as {missing[0]}."
        raise ModelNotFoundError(message, remedy="Finish the download, or fetch it again.")
    return parts


def read_header(file: Path) -> bytes:
    """Return the header of a weight file that is whole: JSON of safetensors, whatever it is of GGUF.

    Raises:
        ModelNotFoundError: it is not whole: the data of its tensors do not end where the file does.
    """
    if file.suffix == _GGUF:
        with _opened(file) as gguf:
            return gguf.raw()
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = opened.read(min(length, size))
        end = max((tensor["data_offsets"][1] for tensor in _tensors(header)), default=0)
        is_whole = 8 + length + end == size
    except (struct.error, ValueError, OSError, AttributeError, TypeError, LookupError):
        is_whole = False
    if not is_whole:
        message = f"{file} is not a whole safetensors file."
        raise ModelNotFoundError(message, remedy="Download it again.")
    return header


def num_elements(file: Path) -> int:
    """Return the elements of all tensors in a weight file; of a pickled one, as if each took two bytes.

    Raises:
        ModelNotFoundError: it is a safetensors or GGUF file that is not whole.
    """
    if file.suffix == _GGUF:
        with _opened(file) as gguf:
            return sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
    if file.suffix != ".safetensors":
        return file.stat().st_size // 2
    return sum(math.prod(tensor["shape"]) for tensor in _tensors(read_header(file)))


class QuantizedTensors(NamedTuple):
    """The matrices of a GGUF file that are quantized.

    Attributes:
        num_elements: of all of them.
        num_bytes: that they take in the file.
    """

    num_elements: int
    num_bytes: int


def count_quantized(file: Path) -> QuantizedTensors:
    """Return how much of a GGUF file's weights is quantized matrices.

    Raises:
        ModelNotFoundError: it is not whole.
    """
    with _opened(file) as gguf:
        found = [one for one in gguf.tensors.values() if one.kind.is_quantized and len(one.shape) == 2]  # noqa: PLR2004
        return QuantizedTensors(sum(math.prod(one.shape) for one in found), sum(one.num_bytes for one in found))


def tensor_headers(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype, by safetensors' name, and the shape of each tensor in a safetensors file.

    Raises:
        ModelNotFoundError: it is not whole.
    """
    found = {}
    for name, tensor in json.loads(read_header(file)).items():
        if name == "__metadata__":
            continue
        shape = tensor.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            message = f"{file} says that {name[:80]} is of shape {repr(shape)[:80]}."
            raise ModelNotFoundError(message, remedy="Download it again.")
        found[name] = (str(tensor.get("dtype")), tuple(shape))
    return found


def _opened(file: Path) -> GgufHeader:
    try:
        return GgufHeader(file)
    except GgufError as error:
        raise ModelNotFoundError(error.message, remedy=error.remedy or "Fetch it again.") from error


def _tensors(header: bytes) -> list[dict[str, Any]]:
    return [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
