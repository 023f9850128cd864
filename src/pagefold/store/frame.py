"""Frames: how a block looks outside memory. A header that says all that must be right of it, then the block's bytes.

::

    offset  bytes  field
         0      8  magic: "PAGEFOLD"
         8      4  version: 1; 2 where the payload is packed; 3 where there is a note, packed or not
        12      4  bytes of the header: a multiple of 4,096, so that the payload is aligned
        16     32  layout: digest of weights, config, dtype, block size and who computed the block
        48     32  namespace: digest of the whole namespace, tenant and salt included
        80     32  parent: digest of the path before the block
       112     32  block: digest of the path up to its end
       144      4  bytes of the tokens
       148      4  the bytes of the payload as it is packed; zero if it is not
       152      8  bytes of the block, which is the payload if it is not packed
       160     16  checksum of the block: XXH3, 128 bits
       176      n  the block's tokens, 4 bytes each
     176+n  2 + m  in version 3 alone: bytes of the note, and the note: what goes with a block of a packed chunk
                   (``kv/chunk_notes.py``)
               16  checksum of all before it
                   zeros to the end of the header, then the payload

All numbers are little-endian. A frame is used only if every field is what the request needs; whatever is not is a miss
with a cause. Digests are those of ``kv/names.py``. How a payload is packed: ``transport/packing.py``.
"""

from __future__ import annotations

import os
import struct
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from pagefold.kv import TOKEN_BYTES, BlockName, KVGeometry, Namespace, root_digest
from pagefold.kv.transfers import MissCause

if TYPE_CHECKING:
    from pagefold.store.protocol import Get
    from pagefold.transport.block_form import BlockForm
    from pagefold.transport.packing import Packing

__all__ = ["ALIGNMENT", "VERSION", "BlockName", "FrameFormat", "checksum_of", "sizes_of"]

ALIGNMENT = 4096
"""Headers are multiples of it, and so are frames on a disk: what direct I/O asks for at most."""

VERSION = 1
"""The version of frames as they are written here, unpacked."""
PACKED_VERSION = 2
"""The version of frames whose payload is packed."""
NOTED_VERSION = 3
"""The version of frames that have a note. Frames of other versions are not read."""

_MAGIC = b"PAGEFOLD"
_HEAD = struct.Struct("<8sII32s32s32s32sIIQ16s")
_CHECKSUM_BYTES = 16
_NOTE_SIZE = struct.Struct("<H")


class _Header(NamedTuple):
    """What a header says."""

    name: BlockName
    checksum: bytes
    num_packed: int


def checksum_of(payload: memoryview | bytes) -> bytes:
    """Return the checksum of a block's bytes: XXH3, 128 bits."""
    return xxhash.xxh3_128_digest(payload)


class FrameFormat:
    """Writes and checks the headers of blocks of one model and layout.

    Args:
        layout: digest of all that decides how a block's bytes are to be read; 32 bytes.
        block_bytes: bytes of a block.
        key_bytes: bytes of a block's packed tokens.
        form: how a block is made; None reads and writes no packed frames.
        dropped_bits: of codes of 8 bit, when a block is packed; None packs none, and reads those of others.

    Attributes:
        header_bytes: of every header.
        frame_bytes: of a header and a payload, if it is not packed.
    """

    def __init__(
        self,
        layout: bytes,
        block_bytes: int,
        key_bytes: int,
        form: BlockForm | None = None,
        dropped_bits: int | None = None,
    ) -> None:
        assert form is None or form.block_bytes == block_bytes, "the form of other blocks"
        self._form = form
        self._dropped_bits = dropped_bits
        self.layout = layout
        self.block_bytes = block_bytes
        self.key_bytes = key_bytes
        self.header_bytes = -(-(_HEAD.size + key_bytes + _CHECKSUM_BYTES) // ALIGNMENT) * ALIGNMENT
        self.frame_bytes = self.header_bytes + block_bytes

    @property
    def most_note_bytes(self) -> int:
        """Of a note: what there is room for in a header."""
        return self.header_bytes - _HEAD.size - self.key_bytes - _NOTE_SIZE.size - _CHECKSUM_BYTES

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a block, and of its packed tokens."""
        return self.block_bytes, self.key_bytes

    @classmethod
    def of(cls, namespace: Namespace, geometry: KVGeometry) -> FrameFormat:
        """Return the format of a model's blocks.

        Args:
            namespace: of its blocks; what is a tenant's or an adapter's is not looked at.
            geometry: of its KV.
        """
        layout = Namespace(model=namespace.model, layout=namespace.layout, dtype=namespace.dtype)
        return cls(root_digest(layout.key()), geometry.bytes_per_block, geometry.block_size * TOKEN_BYTES)

    def for_transport(self, form: BlockForm, dropped_bits: int | None) -> FrameFormat:
        """Return the format for stores that take frames of any size; see the arguments of the class.

        What is not restored to the same bytes is another layout: nobody takes it for the block itself.
        """
        layout = self.layout
        if dropped_bits:
            layout = root_digest(Namespace(model=layout.hex(), layout=f"lossy{8 - dropped_bits}").key())
        return FrameFormat(layout, self.block_bytes, self.key_bytes, form, dropped_bits)

    @cached_property
    def _packing(self) -> Packing | None:
        """Made when it is first needed: it compiles."""
        if self._form is None:
            return None
        from pagefold.transport.packing import Packing  # noqa: PLC0415 - as above

        return Packing(self._form, self._dropped_bits or 0)

    def trial_block(self) -> bytes:
        """Return bytes as a block may have them, for trying a store: they can be packed as well as those of blocks."""
        if self._dropped_bits is None or self._packing is None:
            return os.urandom(self.block_bytes)
        return bytes(self._packing.coarsened(memoryview(self._packing.trial_block())))

    def encode(
        self, name: BlockName, payload: memoryview, checksum: bytes, note: bytes = b""
    ) -> tuple[bytes, memoryview]:
        """Return the header and the payload of a frame as it travels: packed if that makes it smaller.

        Args:
            name: of the block.
            payload: uint8, its bytes.
            checksum: checksum of the payload.
            note: what goes with it.
        """
        if self._dropped_bits is None or self._packing is None:
            return self.header(name, checksum, note=note), payload
        if self._dropped_bits and checksum_of(payload) != checksum:
            return self.header(name, checksum, note=note), payload  # damaged: whoever reads it shall see that
        restored = self._packing.coarsened(payload)
        if restored is not payload:
            checksum = checksum_of(restored)
        packed = self._packing.pack(restored)
        if len(packed) >= self.block_bytes:
            return self.header(name, checksum, note=note), restored
        return self.header(name, checksum, len(packed), note), memoryview(packed)

    def decode(
        self, header: memoryview | bytes, sent: memoryview, into: memoryview, wanted: BlockName
    ) -> bytes | MissCause:
        """Restore a block from a frame that has travelled; return its checksum, or what is wrong.

        Args:
            header: what was read where the header should be.
            sent: uint8, what was read behind it.
            into: uint8, ``block_bytes``, where the block goes; after a miss it means nothing.
            wanted: the block that was asked for.
        """
        found = self._read_header(header)
        if isinstance(found, MissCause):
            return found
        num_packed = found.num_packed
        if num_packed:
            if self._packing is None or len(sent) != num_packed or not self._packing.unpack(sent, into):
                return MissCause.DAMAGED
        elif len(sent) != self.block_bytes:
            return MissCause.DAMAGED
        else:
            into[:] = sent
        return self._verdict(found.name, found.checksum, into, wanted)

    def take(self, header: memoryview | bytes, sent: memoryview, get: Get) -> bytes | MissCause:
        """Restore what was asked for; see :meth:`decode`."""
        found = self.decode(header, sent, get.into, get.name)
        if get.note is not None and not isinstance(found, MissCause):
            get.note.extend(self.note_of(header))
        return found

    def header(self, name: BlockName, checksum: bytes, num_packed: int = 0, note: bytes = b"") -> bytes:
        """Return the header of a block that has ``checksum``, and is packed into so many bytes, or 0 if it is not."""
        assert len(name.key) == self.key_bytes, "a block of another size"
        assert len(note) <= self.most_note_bytes, "a note that no header has room for"
        head = _HEAD.pack(
            _MAGIC,
            NOTED_VERSION if note else PACKED_VERSION if num_packed else VERSION,
            self.header_bytes,
            self.layout,
            name.namespace,
            name.parent,
            name.digest,
            self.key_bytes,
            num_packed,
            self.block_bytes,
            checksum,
        )
        head += name.key
        if note:
            head += _NOTE_SIZE.pack(len(note)) + note
        return (head + checksum_of(head)).ljust(self.header_bytes, b"\0")

    def read_header(self, header: memoryview | bytes) -> tuple[BlockName, bytes] | MissCause:
        """Return what a header says it is the header of, and the checksum of its payload; or what is wrong with it.

        It is one whose payload is not packed.
        """
        found = self._read_header(header)
        if isinstance(found, MissCause):
            return found
        return MissCause.OTHER_VERSION if found.num_packed else found[:2]

    def note_of(self, header: memoryview | bytes) -> bytes:
        """Return the note of a frame whose header was found to be right; empty where it has none."""
        raw = bytes(header)
        key_end = _HEAD.size + self.key_bytes
        return raw[key_end + _NOTE_SIZE.size : _end_of_note(raw, _HEAD.unpack_from(raw)[1], key_end)]

    def _read_header(self, header: memoryview | bytes) -> _Header | MissCause:
        """Return what a header says, or what is wrong with it."""
        raw = bytes(header)
        if len(raw) < _HEAD.size or raw[: len(_MAGIC)] != _MAGIC:
            return MissCause.DAMAGED
        _, version, header_bytes, layout, namespace, parent, digest, key_bytes, num_packed, block_bytes, checksum = (
            _HEAD.unpack_from(raw)
        )
        if version not in {VERSION, PACKED_VERSION, NOTED_VERSION}:
            return MissCause.OTHER_VERSION
        key_end = _HEAD.size + key_bytes
        end = _end_of_note(raw, version, key_end)
        if raw[end : end + _CHECKSUM_BYTES] != checksum_of(raw[:end]):
            return MissCause.DAMAGED
        if (layout, key_bytes, block_bytes, header_bytes) != (
            self.layout,
            self.key_bytes,
            self.block_bytes,
            self.header_bytes,
        ):
            return MissCause.OTHER_LAYOUT
        if version != NOTED_VERSION and (num_packed > 0) != (version == PACKED_VERSION):
            return MissCause.DAMAGED
        name = BlockName(digest, parent, namespace, raw[_HEAD.size : key_end])
        return _Header(name, checksum, num_packed)

    def check(self, header: memoryview | bytes, payload: memoryview | bytes, wanted: BlockName) -> bytes | MissCause:
        """Return the checksum of ``payload`` if this is the frame of ``wanted``, whole and unchanged; or what is wrong.

        Args:
            header: what was read where the header should be.
            payload: what was read where the block should be; shorter where the frame was cut off.
            wanted: the block that was asked for.
        """
        found = self.read_header(header)
        if isinstance(found, MissCause):
            return found
        return self._verdict(*found, payload, wanted)

    def _verdict(
        self, name: BlockName, checksum: bytes, block: memoryview | bytes, wanted: BlockName
    ) -> bytes | MissCause:
        if name.namespace != wanted.namespace:
            return MissCause.OTHER_NAMESPACE
        if name._replace(group=wanted.group) != wanted:  # the digest says the group too
            return MissCause.OTHER_BLOCK
        if memoryview(block).nbytes != self.block_bytes or checksum_of(block) != checksum:
            return MissCause.DAMAGED
        return checksum


def _end_of_note(raw: bytes, version: int, end: int) -> int:
    """Return where a header's note ends, whose tokens end at ``end``; ``end`` where it has none."""
    if version != NOTED_VERSION or len(raw) < end + _NOTE_SIZE.size:
        return end
    return end + _NOTE_SIZE.size + int(_NOTE_SIZE.unpack_from(raw, end)[0])


def sizes_of(header: bytes) -> FrameFormat | None:
    """Return the format that the begin of a header, its first 4,096 bytes, says a frame has; None if it is damaged."""
    if len(header) < _HEAD.size or header[: len(_MAGIC)] != _MAGIC:
        return None
    fields = _HEAD.unpack_from(header)
    layout, key_bytes, block_bytes = fields[3], fields[7], fields[9]
    end = _HEAD.size + key_bytes
    if not block_bytes or not key_bytes:
        return None
    frames = FrameFormat(layout, block_bytes, key_bytes)
    if fields[2] != frames.header_bytes:
        return None
    end = _end_of_note(header, fields[1], end)
    if end + _CHECKSUM_BYTES <= len(header) and header[end : end + _CHECKSUM_BYTES] != checksum_of(header[:end]):
        return None
    return frames
