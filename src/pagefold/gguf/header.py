"""Read the header of a GGUF file: its metadata, and where its tensors lie. Standard library only.

Little-endian files of versions 2 and 3. The layout of a file::

    magic "GGUF" | version u32 | num_tensors u64 | num_keys u64
    num_keys    x (key string | value type u32 | value)
    num_tensors x (name string | num_dims u32 | dims u64... | tensor type u32 | offset u64)
    padding to the alignment | tensor data, each tensor at its offset from here

Nothing in the file is trusted: every count is checked against the bytes that are left before anything is allocated for
it, and against what any model has, so that a header takes a few hundred MiB at most, however large the file is.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

from pagefold.errors import PagefoldError
from pagefold.gguf.kinds import OTHER_KINDS, TENSOR_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from pagefold.gguf.kinds import TensorKind

__all__ = ["GgufError", "GgufFormatError", "GgufHeader", "GgufTypeError", "MetadataValue", "TensorInfo"]

Scalar = str | int | float | bool
MetadataValue = Scalar | list[Scalar]
T = TypeVar("T", str, int, float, bool)

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT_BYTES = 32

_MAX_ENTRIES = 1 << 16
"""Keys, and tensors: a model of a trillion parameters has some thousands."""
_MAX_ITEMS = 1 << 22
"""Items of all lists: the largest vocabularies have 300,000 tokens and 500,000 merges."""
_MAX_NAME_BYTES = 1 << 16
"""Of a key or a tensor's name, which GGUF itself bounds so."""
_MAX_TEXT_BYTES = 1 << 26
"""Of all strings: a chat template has some thousands, a vocabulary some millions."""

_STRING = 8
_ARRAY = 9
# The value types of a fixed width, with their struct codes.
_FIXED_WIDTH = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufError(PagefoldError):
    """A GGUF file that cannot be used."""


class GgufFormatError(GgufError):
    """A file that is not GGUF, is cut short, or contradicts itself."""


class GgufTypeError(GgufError):
    """A tensor of a kind (of quantization) that is not known here."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: GGUF's name, such as ``blk.0.attn_q.weight``.
        shape: rows first, as numpy and torch have it (the file stores it reversed).
        kind: how its numbers are stored.
        offset_bytes: from the start of the file.
        num_bytes: as stored.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    offset_bytes: int
    num_bytes: int


class GgufHeader:
    """The header of a GGUF file, which stays mapped. Use it in a ``with`` statement, or call ``close``.

    Attributes:
        path: the file.
        metadata: every key of the header.
        tensors: every tensor by its name, in the file's order.
        num_bytes: of the header: tensors begin behind it.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read its header.

        Args:
            path: the file.

        Raises:
            GgufFormatError: bad magic, an unknown version, or a file that is cut short or contradicts itself.
            GgufTypeError: a tensor of a kind that is not known here.
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
            cursor = _Cursor(self._buffer, path)
            self.metadata, self.tensors = _read_header(cursor)
            self.num_bytes = cursor.position
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the file."""
        self._buffer.close()

    def __enter__(self) -> Self:
        """Return the header itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def raw(self) -> bytes:
        """Return the header's bytes."""
        return self._buffer[: self.num_bytes]

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

    def _wrong(self, key: str, found: object) -> GgufFormatError:
        what = "is missing" if found is None else f"has an unexpected value of type {type(found).__name__}"
        return GgufFormatError(f"{self.path}: the metadata key {key!r} {what}.")


class _Cursor:
    """Reads one value after another; reaching past the end is a typed error, never a short value."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.position = 0
        self.items_left = _MAX_ITEMS
        self.text_bytes_left = _MAX_TEXT_BYTES

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

    def count_of(self, what: str) -> int:
        """Read how many keys or tensors there are."""
        count = self.u64()
        if count > _MAX_ENTRIES:
            self.fail(f"a header of {count} {what}")
        return count

    def name(self) -> str:
        start = self.position
        (name,) = self.texts(1)
        if self.position - start - 8 > _MAX_NAME_BYTES:
            self.fail(f"a name of {self.position - start - 8} bytes, {name[:20]!r} and so on")
        return name

    def texts(self, count: int) -> list[str]:
        # A vocabulary and its merges are 100,000 strings, most of the header's time: hence the local names.
        buffer, position = self.buffer, self.position
        self.require(count * 8)
        # Whichever comes first: the end of the file, or of what is read of any.
        end = min(len(buffer), position + 8 * count + self.text_bytes_left)
        found = []
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = position + 8
                if start > end:
                    self.fail_at(end)
                position = start + length_at(buffer, position)[0]
                if position > end:
                    self.fail_at(end)
                found.append(buffer[start:position].decode())
        except UnicodeDecodeError:
            self.fail("a string in its header is not UTF-8")
        self.text_bytes_left -= position - self.position - 8 * count
        self.position = position
        return found

    def fail_at(self, end: int) -> NoReturn:
        if end < len(self.buffer):
            self.fail(f"strings of more than {_MAX_TEXT_BYTES} bytes in its header")
        self.fail_short()

    def value(self) -> MetadataValue:
        type_id = self.u32()
        if type_id != _ARRAY:
            return self.items(type_id, 1)[0]
        item_type_id, count = self.u32(), self.u64()
        return self.items(item_type_id, count)

    def items(self, type_id: int, count: int) -> list[Scalar]:
        # Before anything is made of it: struct itself overflows on an absurd count.
        self.require(count)
        self.items_left -= count
        if self.items_left < 0:
            self.fail(f"more than {_MAX_ITEMS} values in its header")
        if type_id == _STRING:
            return list(self.texts(count))
        if type_id not in _FIXED_WIDTH:
            self.fail(f"metadata of the unknown type {type_id}")
        return self.numbers(_FIXED_WIDTH[type_id], count)


def _read_header(cursor: _Cursor) -> tuple[Mapping[str, MetadataValue], Mapping[str, TensorInfo]]:
    cursor.position = 4
    version = cursor.u32()
    if version not in _VERSIONS:
        message = f"{cursor.path} is GGUF of version {version} (or big-endian); versions 2 and 3 can be read."
        raise GgufFormatError(message)
    num_tensors, num_keys = cursor.count_of("tensors"), cursor.count_of("keys")
    metadata: dict[str, MetadataValue] = {}
    for _ in range(num_keys):
        key = cursor.name()
        if key in metadata:
            cursor.fail(f"it has the key {key} twice")
        metadata[key] = cursor.value()
    listed = [_read_tensor_info(cursor) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if type(alignment) is not int or alignment <= 0:
        cursor.fail(f"an alignment of {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in listed:
        kind = _kind_of(cursor, name, type_id)
        if shape[-1] % kind.block_size:
            cursor.fail(f"rows of {shape[-1]} numbers in its tensor {name} are not whole blocks of {kind.name}")
        num_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
        info = TensorInfo(name, shape, kind, data_start + offset, num_bytes)
        if offset % alignment:
            cursor.fail(f"its tensor {name} lies at byte {offset}, which is no multiple of {alignment}")
        if info.offset_bytes + num_bytes > len(cursor.buffer):
            cursor.fail(f"it ends at byte {len(cursor.buffer)}, before the end of its tensor {name}")
        if name in tensors:
            cursor.fail(f"it has two tensors named {name}")
        tensors[name] = info
    _hold_apart(cursor, tensors)
    return metadata, tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.name(), cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(f"its tensor {name} has {num_dims} dimensions")
    dims = [cursor.u64() for _ in range(num_dims)]
    if 0 in dims:
        cursor.fail(f"its tensor {name} is empty")
    return name, tuple(reversed(dims)), cursor.u32(), cursor.u64()


def _kind_of(cursor: _Cursor, name: str, type_id: int) -> TensorKind:
    kind = TENSOR_KINDS.get(type_id)
    if kind is None:
        known = ", ".join(known.name for known in TENSOR_KINDS.values())
        said = OTHER_KINDS.get(type_id, str(type_id))
        message = f"{cursor.path}: the tensor {name} is of type {said}, which cannot be read; these can: {known}."
        raise GgufTypeError(message, remedy="Use a file of one of those types, or the model's original folder.")
    return kind


def _hold_apart(cursor: _Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    end = 0
    for info in sorted(tensors.values(), key=lambda info: info.offset_bytes):
        if info.offset_bytes < end:
            cursor.fail(f"its tensor {info.name} lies on another one")
        end = info.offset_bytes + info.num_bytes
