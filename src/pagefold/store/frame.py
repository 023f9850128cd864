"""Frames: how a block looks outside memory. A header that says all that must be right of it, then the block's bytes.

::

    offset  bytes  field
         0      8  magic: "PAGEFOLD"
         8      4  version: 1
        12      4  bytes of the header: a multiple of 4,096, so that the payload is aligned
        16     32  layout: digest of weights, config, dtype, block size and who computed the block
        48     32  namespace: digest of the whole namespace, tenant and salt included
        80     32  parent: digest of the path before the block
       112     32  block: digest of the path up to its end
       144      4  bytes of the tokens
       148      4  zero
       152      8  bytes of the payload
       160     16  checksum of the payload: XXH3, 128 bits
       176      n  the block's tokens, 4 bytes each
     176+n     16  checksum of all before it
                   zeros to the end of the header, then the payload

All numbers are little-endian. A frame is used only if every field is what the request needs; whatever is not is a miss
with a cause. Digests are those of ``kv/names.py``.
"""

from __future__ import annotations

import struct

import xxhash

from pagefold.kv import TOKEN_BYTES, BlockName, KVGeometry, Namespace, root_digest
from pagefold.transfers import MissCause

__all__ = ["ALIGNMENT", "VERSION", "BlockName", "FrameFormat", "checksum_of", "sizes_of"]

ALIGNMENT = 4096
"""Headers are multiples of it, and so are frames on a disk: what direct I/O asks for at most."""

VERSION = 1
"""Of the frames that are written here. Frames of another one are not read."""

_MAGIC = b"PAGEFOLD"
_HEAD = struct.Struct("<8sII32s32s32s32sIIQ16s")
_CHECKSUM_BYTES = 16


def checksum_of(payload: memoryview | bytes) -> bytes:
    """Return the checksum of a block's bytes: XXH3, 128 bits."""
    return xxhash.xxh3_128_digest(payload)


class FrameFormat:
    """Writes and checks the headers of blocks of one model and layout.

    Args:
        layout: digest of all that decides how a block's bytes are to be read; 32 bytes.
        block_bytes: of a block.
        key_bytes: of a block's packed tokens.

    Attributes:
        header_bytes: of every header.
        frame_bytes: of a header and a payload.
    """

    def __init__(self, layout: bytes, block_bytes: int, key_bytes: int) -> None:
        self.layout = layout
        self.block_bytes = block_bytes
        self.key_bytes = key_bytes
        self.header_bytes = -(-(_HEAD.size + key_bytes + _CHECKSUM_BYTES) // ALIGNMENT) * ALIGNMENT
        self.frame_bytes = self.header_bytes + block_bytes

    @classmethod
    def of(cls, namespace: Namespace, geometry: KVGeometry) -> FrameFormat:
        """Return the format of a model's blocks.

        Args:
            namespace: of its blocks; what is a tenant's or an adapter's is not looked at.
            geometry: of its KV.
        """
        layout = Namespace(model=namespace.model, layout=namespace.layout, dtype=namespace.dtype)
        return cls(root_digest(layout.key()), geometry.bytes_per_block, geometry.block_size * TOKEN_BYTES)

    def header(self, name: BlockName, checksum: bytes) -> bytes:
        """Return the header of a block, whose payload has ``checksum``."""
        assert len(name.key) == self.key_bytes, "a block of another size"
        head = _HEAD.pack(
            _MAGIC,
            VERSION,
            self.header_bytes,
            self.layout,
            name.namespace,
            name.parent,
            name.digest,
            self.key_bytes,
            0,
            self.block_bytes,
            checksum,
        )
        head += name.key
        return (head + checksum_of(head)).ljust(self.header_bytes, b"\0")

    def read_header(self, header: memoryview | bytes) -> tuple[BlockName, bytes] | MissCause:
        """Return what a header says it is the header of, and the checksum of its payload; or what is wrong with it."""
        raw = bytes(header)
        if len(raw) < _HEAD.size or raw[: len(_MAGIC)] != _MAGIC:
            return MissCause.DAMAGED
        _, version, header_bytes, layout, namespace, parent, digest, key_bytes, _, block_bytes, checksum = (
            _HEAD.unpack_from(raw)
        )
        if version != VERSION:
            return MissCause.OTHER_VERSION
        end = _HEAD.size + key_bytes
        if raw[end : end + _CHECKSUM_BYTES] != checksum_of(raw[:end]):
            return MissCause.DAMAGED
        if (layout, key_bytes, block_bytes, header_bytes) != (
            self.layout,
            self.key_bytes,
            self.block_bytes,
            self.header_bytes,
        ):
            return MissCause.OTHER_LAYOUT
        return BlockName(digest, parent, namespace, raw[_HEAD.size : end]), checksum

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
        name, checksum = found
        if name.namespace != wanted.namespace:
            return MissCause.OTHER_NAMESPACE
        if name != wanted:
            return MissCause.OTHER_BLOCK
        if memoryview(payload).nbytes != self.block_bytes or checksum_of(payload) != checksum:
            return MissCause.DAMAGED
        return checksum


def sizes_of(header: bytes) -> FrameFormat | None:
    """Return the format that the begin of a header, its first 4,096 bytes, says a frame has; None if it is damaged."""
    if len(header) < _HEAD.size or header[: len(_MAGIC)] != _MAGIC:
        return None
    fields = _HEAD.unpack_from(header)
    layout, key_bytes, block_bytes = fields[3], fields[7], fields[9]
    end = _HEAD.size + key_bytes
    frames = FrameFormat(layout, block_bytes, key_bytes)
    if fields[2] != frames.header_bytes:
        return None
    if end + _CHECKSUM_BYTES <= len(header) and header[end : end + _CHECKSUM_BYTES] != checksum_of(header[:end]):
        return None
    return frames
