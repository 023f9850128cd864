"""Packing: a block's bytes, smaller, and back. Lossless; or with codes of 8 bit rounded first, by choice.

After CacheGen (Liu et al., SIGCOMM 2024), which stores differences along tokens and codes them by statistics of each
layer and channel. Here codes of 8 bit go through ``kernel.py``, which has its statistics from the block itself, so
that a frame needs nothing but itself to be read. All other bytes (scales, numbers of 16 and 32 bit, codes of 4 bit)
are sorted into planes, the first bytes of all numbers, then the second ones, and compressed by zstd.

::

    4 x 4 bytes  words of each stream
        4 bytes  bytes of the compressed planes
          n x 4  the streams, one behind the other
                 the compressed planes
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from pagefold.transport.kernel import NUM_STREAMS, PART_FIELDS, RECIPROCALS, pack_parts, unpack_parts
from pagefold.transport.tables import MAX_BITS, tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.transport.block_form import BlockForm

__all__ = ["Packing"]

_HEAD = struct.Struct("<4II")
_TRIAL_SCALE = 30
_LEVEL = 1
"""zstd's: higher ones find no more in what is almost noise."""


class Packing:
    """Packs blocks of one form. Any thread may call it.

    Args:
        form: how the blocks are made.
        dropped_bits: how many of the lower bits of codes of 8 bit are rounded away: 0 for none.

    Attributes:
        form: as above.
        dropped_bits: as above.
    """

    def __init__(self, form: BlockForm, dropped_bits: int = 0) -> None:
        self.form = form
        self.dropped_bits = dropped_bits
        self._parts = np.array(form.parts, np.int64).reshape(-1, len(PART_FIELDS))
        self._order = _plane_order(form)
        self._tables = tables()
        # Rows are dealt to the streams in turn, so each has a quarter of the numbers.
        numbers = int((self._parts[:, 2] * self._parts[:, 3]).sum())
        self._stream_words = numbers // NUM_STREAMS * MAX_BITS // 32 + 2 if numbers else 0
        self._own = threading.local()

    def coarsened(self, payload: memoryview) -> memoryview:
        """Return the bytes that will be restored: ``payload`` itself, or a copy with its codes rounded."""
        if not self.dropped_bits:
            return payload
        block = np.frombuffer(payload, np.uint8).copy()
        step = 1 << self.dropped_bits
        for begin, _, num_rows, num_slots, *_ in self._parts.tolist():
            codes = block[begin : begin + num_rows * num_slots].view(np.int8)
            rounded = (codes.astype(np.int16) + step // 2) // step * step
            codes[:] = np.minimum(rounded, 128 - step)
        return block.data

    def trial_block(self) -> bytes:
        """Return random bytes that can be packed about as well as those of blocks are."""
        rng = np.random.default_rng()
        block = rng.integers(0, 256, self.form.block_bytes, dtype=np.uint8)
        for begin, _, num_rows, num_slots, *_ in self._parts.tolist():
            codes = rng.normal(0, _TRIAL_SCALE, num_rows * num_slots).clip(-127, 127)
            block[begin : begin + num_rows * num_slots] = codes.astype(np.int8).view(np.uint8)
        return block.tobytes()

    def pack(self, payload: memoryview) -> bytes:
        """Return ``payload``, which :meth:`coarsened` returned, packed. It may be larger than it was."""
        block = np.frombuffer(payload, np.uint8)
        words, ends = np.empty(0, np.uint32), [0] * NUM_STREAMS
        if self._stream_words:
            streams, used = np.empty((NUM_STREAMS, self._stream_words), np.uint32), np.zeros(NUM_STREAMS, np.int64)
            found = self._tables
            pack_parts(
                block, self._parts, self.dropped_bits, found.codes.ravel(), found.nearest, RECIPROCALS, streams, used
            )
            ends = used.tolist()
            words = np.concatenate([stream[:end] for stream, end in zip(streams, ends, strict=True)])
        planes = self._zstd[0].compress(block[self._order].data) if len(self._order) else b""
        return _HEAD.pack(*ends, len(planes)) + words.astype("<u4").tobytes() + planes

    def unpack(self, packed: memoryview, into: memoryview) -> bool:
        """Restore a block into ``into``, uint8 ``[block_bytes]``; return False for what :meth:`pack` cannot have made.

        What is damaged may be restored to something else: the caller has a checksum.
        """
        raw = memoryview(packed).cast("B")
        if len(raw) < _HEAD.size:
            return False
        *lengths, num_planes = _HEAD.unpack_from(raw)
        num_words = sum(lengths)
        if len(raw) != _HEAD.size + 4 * num_words + num_planes or (num_words and not self._stream_words):
            return False
        block = np.frombuffer(into, np.uint8)
        if self._stream_words:
            words = np.zeros(num_words + 1, np.uint32)
            words[:-1] = np.frombuffer(raw, "<u4", num_words, _HEAD.size)
            ends = np.cumsum([0, *lengths])
            found = self._tables
            unpack_parts(
                words, ends, self._parts, self.dropped_bits, found.symbols.ravel(), found.nearest, RECIPROCALS, block
            )
        return self._unpack_planes(raw[_HEAD.size + 4 * num_words :], block)

    def _unpack_planes(self, packed: memoryview, block: NDArray[np.uint8]) -> bool:
        if not len(self._order):
            return not len(packed)
        try:
            # Looked at first: a frame may say that it holds more than there is memory.
            if zstandard.frame_content_size(packed) != len(self._order):
                return False
            planes = self._zstd[1].decompress(packed)
        except zstandard.ZstdError:
            return False
        if len(planes) != len(self._order):
            return False
        block[self._order] = np.frombuffer(planes, np.uint8)
        return True

    @property
    def _zstd(self) -> tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor]:
        """This thread's own: they are not for several at once."""
        if not hasattr(self._own, "zstd"):
            self._own.zstd = zstandard.ZstdCompressor(level=_LEVEL), zstandard.ZstdDecompressor()
        found: tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor] = self._own.zstd
        return found


def _plane_order(form: BlockForm) -> NDArray[np.int64]:
    """Return the places of all bytes that belong to no part, plane by plane."""
    widths = sorted({width for _, _, width in form.planes})
    order = [
        np.arange(begin + at, end, width)
        for width in widths
        for at in range(width)
        for begin, end, of in form.planes
        if of == width
    ]
    found: NDArray[np.int64] = np.concatenate(order) if order else np.empty(0, np.int64)
    return found
