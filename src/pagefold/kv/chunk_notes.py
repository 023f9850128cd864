"""ChunkNotes: what a slow tier has of a packed chunk beside its blocks: which chunk that is, and what was kept of it.

Every block of a packed chunk has the note of the whole chunk, so that blocks of two packings are never taken for one.
A note may have been damaged, or written by somebody else: it is checked against what a chunk can be.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from pagefold.kv.held_block import HeldChunk

if TYPE_CHECKING:
    from pagefold.kv.names import BlockName

__all__ = ["ChunkNotes", "CountsForm"]

_HEAD = struct.Struct("<IH")


class CountsForm(Protocol):
    """How :attr:`~pagefold.kv.PackedChunk.counts` looks outside memory; whoever packs knows."""

    def encode(self, counts: object) -> bytes:
        """Return the counts of a chunk as bytes."""

    def decode(self, raw: bytes) -> object | None:
        """Return the counts that these bytes are; None if they are none that a chunk can have."""

    def num_blocks(self, counts: object) -> int:
        """Return how many blocks so many entries fill."""


class ChunkNotes:
    """Writes and reads notes.

    Args:
        num_groups: cache groups: blocks of packed chunks are named by numbers behind theirs.
        chunk_blocks: how many blocks a chunk fills at most.
        counts: how counts look outside memory.
    """

    HEAD_BYTES = _HEAD.size
    """Of a note, before the counts."""

    def __init__(self, num_groups: int, chunk_blocks: int, counts: CountsForm) -> None:
        self._num_groups = num_groups
        self._chunk_blocks = chunk_blocks
        self._counts = counts

    def is_packed(self, name: BlockName) -> bool:
        """Whether ``name`` is that of a block of a packed chunk."""
        return name.group >= self._num_groups

    def write(self, number: int, num_blocks: int, counts: object) -> bytes:
        """Return the note of a chunk; arguments are the fields of :class:`~pagefold.kv.held_block.HeldChunk`."""
        return _HEAD.pack(number, num_blocks) + self._counts.encode(counts)

    def read(self, name: BlockName, note: bytes) -> HeldChunk | None:
        """Return the chunk that a block of this name says it is of; None where no chunk is so."""
        if len(note) < _HEAD.size:
            return None
        number, num_blocks = _HEAD.unpack_from(note)
        if not name.group - self._num_groups < num_blocks <= self._chunk_blocks:
            return None
        counts = self._counts.decode(note[_HEAD.size :])
        if counts is None or self._counts.num_blocks(counts) != num_blocks:
            return None
        return HeldChunk(number, num_blocks, counts, note)
