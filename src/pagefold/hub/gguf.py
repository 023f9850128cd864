"""Read a GGUF file: its metadata, and its tensors as float32 arrays.

Only what a model folder needs: little-endian files of versions 2 and 3, and the tensor types of 4-bit and 8-bit files.
The layout of a file::

    magic "GGUF" | version u32 | num_tensors u64 | num_keys u64
    num_keys    x (key string | value type u32 | value)
    num_tensors x (name string | num_dims u32 | dims u64... | tensor type u32 | offset u64)
    padding to the alignment | tensor data, each tensor at its offset from here

Nothing in the file is trusted: every count is checked against the bytes that are left before anything is allocated
for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from pagefold.errors import PagefoldError
from pagefold.hub.dequantize import OTHER_TYPES, TENSOR_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["GgufError", "GgufFile", "GgufFormatError", "GgufTypeError", "MetadataValue", "TensorInfo"]

Scalar = str | int | float | bool
MetadataValue = Scalar | list[Scalar]
T = TypeVar("T", str, int, float, bool)

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT_BYTES = 32

_STRING = 8
_ARRAY = 9
# The value types of a fixed width, with their struct codes.
_FIXED_WIDTH = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufError(PagefoldError):
    """A GGUF file that cannot be used."""


class GgufFormatError(GgufError):
    """A file that is not GGUF, is cut short, or contradicts itself."""


class GgufTypeError(GgufError):
    """A tensor of a type (a kind of quantization) that is not known here."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: GGUF's name, such as ``blk.0.attn_q.weight``.
        shape: rows first, as numpy and torch have it (the file stores it reversed).
        type_id: GGML's number of the tensor type.
        offset_bytes: from the start of the file.
        num_bytes: as stored.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int
    num_bytes: int


class GgufFile:
    """An open GGUF file. Use it in a ``with`` statement, or call ``close``.

    Attributes:
        path: the file.
        metadata: every key of the header.
        tensors: every tensor by its name, in the file's order.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read its header.

        Args:
            path: the file.

        Raises:
            GgufFormatError: bad magic, an unknown version, or a file that is cut short or contradicts itself.
            GgufTypeError: a tensor of a type that is not known here.
            GgufError: the file cannot be opened.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                # Before it is mapped: an empty file cannot be.
                if file.read(4) != b"GGUF":
                    message = f"{path} is not a GGUF file: it does not begin with the bytes 'GGUF'."
                    raise GgufFormatError(message)
                self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            message = f"{path} cannot be read: {error.strerror or error}."
            raise GgufError(message) from error
        try:
            self.metadata, self.tensors = _read_header(_Cursor(self._buffer, path))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the file. Arrays that were read stay valid: they are copies."""
        self._buffer.close()

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the metadata value of ``key``, which must be of type ``kind`` (a whole number will do for a float).

        Raises:
            GgufFormatError: the key is missing and there is no default, or its value is of another type.
        """
        found = self.metadata.get(key, default)
        if kind is float and type(found) is int:
            found = float(found)
        # `type`, not isinstance: a bool must not pass for an int.
        if type(found) is not kind:
            raise self._wrong(key, found)
        return found

    def values(self, key: str, kind: type[T]) -> list[T]:
        """Return the metadata list of ``key``, all of whose items must be of type ``kind``.

        Raises:
            GgufFormatError: the key is missing, or is not such a list.
        """
        found = self.metadata.get(key)
        if type(found) is not list:
            raise self._wrong(key, found)
        items = [item for item in found if type(item) is kind]
        if len(items) != len(found):
            raise self._wrong(key, found)
        return items

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor, dequantized: float32, C-contiguous, of the shape in ``tensors[name].shape``.

        The numbers are equal in bits to what other readers of the file get.

        Raises:
            KeyError: no tensor of that name.
        """
        info = self.tensors[name]
        return self._numbers(info, 0, info.num_bytes).reshape(info.shape)

    def read_rows(self, name: str, num_rows: int) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor as ``read`` has it, ``num_rows`` rows at a time; the last of them may be fewer.

        A vector comes whole: its blocks may hold several of its rows, which are single numbers.

        Raises:
            KeyError: no tensor of that name.
        """
        info = self.tensors[name]
        if len(info.shape) == 1:
            yield self.read(name)
            return
        row_bytes = info.num_bytes // info.shape[0]
        for start in range(0, info.shape[0], num_rows):
            rows = min(num_rows, info.shape[0] - start)
            yield self._numbers(info, start * row_bytes, rows * row_bytes).reshape(rows, *info.shape[1:])

    def _numbers(self, info: TensorInfo, start_bytes: int, num_bytes: int) -> NDArray[np.float32]:
        form = TENSOR_TYPES[info.type_id]
        raw = np.frombuffer(self._buffer, np.uint8, count=num_bytes, offset=info.offset_bytes + start_bytes)
        return form.dequantize(raw.reshape(-1, form.block_bytes))

    def _wrong(self, key: str, found: object) -> GgufFormatError:
        what = "is missing" if found is None else f"has an unexpected value of type {type(found).__name__}"
        return GgufFormatError(f"{self.path}: the metadata key {key!r} {what}.")


class _Cursor:
    """Reads one value after another; reaching past the end is a typed error, never a short value."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        message = f"{self.path} is damaged: {what}."
        raise GgufFormatError(message, remedy="Fetch the file again.")

    def fail_short(self) -> NoReturn:
        self.fail(f"it ends at byte {len(self.buffer)}, in the middle of its header")

    def require(self, num_bytes: int) -> None:
        if num_bytes > len(self.buffer) - self.position:
            self.fail_short()

    def numbers(self, code: str, count: int) -> list[Scalar]:
        layout = f"<{count}{code}"
        self.require(struct.calcsize(layout))
        found = struct.unpack_from(layout, self.buffer, self.position)
        self.position += struct.calcsize(layout)
        return list(found)

    def u32(self) -> int:
        return int(self.numbers("I", 1)[0])

    def u64(self) -> int:
        return int(self.numbers("Q", 1)[0])

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        # A vocabulary and its merges are 100,000 strings, most of the header's time: hence the local names.
        buffer, position, end = self.buffer, self.position, len(self.buffer)
        self.require(count * 8)
        found = []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = position + 8
            if start > end:
                self.fail_short()
            position = start + length_at(buffer, position)[0]
            if position > end:
                self.fail_short()
            found.append(buffer[start:position])
        self.position = position
        try:
            return [item.decode() for item in found]
        except UnicodeDecodeError:
            self.fail("a string in its header is not UTF-8")

    def value(self) -> MetadataValue:
        type_id = self.u32()
        if type_id != _ARRAY:
            return self.items(type_id, 1)[0]
        item_type_id, count = self.u32(), self.u64()
        return self.items(item_type_id, count)

    def items(self, type_id: int, count: int) -> list[Scalar]:
        if type_id == _STRING:
            return list(self.texts(count))
        if type_id not in _FIXED_WIDTH:
            self.fail(f"metadata of the unknown type {type_id}")
        # Before the layout is built: struct itself overflows on an absurd count.
        self.require(count)
        return self.numbers(_FIXED_WIDTH[type_id], count)


def _read_header(cursor: _Cursor) -> tuple[Mapping[str, MetadataValue], Mapping[str, TensorInfo]]:
    cursor.position = 4
    version = cursor.u32()
    if version not in _VERSIONS:
        message = f"{cursor.path} is GGUF of version {version} (or big-endian); versions 2 and 3 can be read."
        raise GgufFormatError(message)
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_keys):
        key = cursor.text()
        metadata[key] = cursor.value()
    listed = [_read_tensor_info(cursor) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment <= 0:
        cursor.fail(f"an alignment of {alignment!r}")
    data_start = math.ceil(cursor.position / alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in listed:
        info = TensorInfo(name, shape, type_id, data_start + offset, _stored_bytes(cursor, name, shape, type_id))
        if info.offset_bytes + info.num_bytes > len(cursor.buffer):
            cursor.fail(f"it ends at byte {len(cursor.buffer)}, before the end of its tensor {name}")
        if name in tensors:
            cursor.fail(f"it has two tensors named {name}")
        tensors[name] = info
    return metadata, tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.text(), cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(f"its tensor {name} has {num_dims} dimensions")
    dims = [cursor.u64() for _ in range(num_dims)]
    if 0 in dims:
        cursor.fail(f"its tensor {name} is empty")
    return name, tuple(reversed(dims)), cursor.u32(), cursor.u64()


def _stored_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int) -> int:
    form = TENSOR_TYPES.get(type_id)
    if form is None:
        known = ", ".join(known.name for known in TENSOR_TYPES.values())
        type_name = OTHER_TYPES.get(type_id, str(type_id))
        message = f"{cursor.path}: the tensor {name} is of type {type_name}, which cannot be read; these can: {known}."
        raise GgufTypeError(message, remedy="Use a file of one of those types, or the model's original folder.")
    if shape[-1] % form.block_size:
        cursor.fail(f"rows of {shape[-1]} numbers in its tensor {name} are not whole blocks of {form.name}")
    return math.prod(shape) // form.block_size * form.block_bytes
