"""KeptCounts: how what was kept of a chunk looks in a slow tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagefold.errors import ConfigError
from pagefold.kv import ChunkNotes
from pagefold.runner.attention.packed import UnitShape

if TYPE_CHECKING:
    from pagefold.kv import KVGeometry

__all__ = ["KeptCounts", "check_notes", "chunk_notes"]


class KeptCounts:
    """Counts of entries by layer and head, int32 ``[L, Hkv]``, as 2 bytes each; see :class:`~pagefold.kv.CountsForm`.

    Args:
        geometry: of the model's KV; one group packs.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        group = geometry.packing
        assert group is not None, "no group packs"
        assert group.keeps.window is not None, "chunks have a size"
        self._shape = UnitShape(group.block_size, group.num_cells)
        self._most = np.zeros((geometry.num_layers, geometry.num_kv_heads), np.int32)
        self._most[list(group.layers)] = group.keeps.window  # other layers keep nothing so

    @property
    def num_bytes(self) -> int:
        """Bytes that the counts of a chunk take."""
        return 2 * self._most.size

    def encode(self, counts: object) -> bytes:
        """Return the counts of a chunk as bytes, little-endian."""
        assert isinstance(counts, np.ndarray), "the core keeps what it was told"
        return counts.astype("<u2").tobytes()

    def decode(self, raw: bytes) -> np.ndarray | None:
        """Return the counts that these bytes are; None if they are none that a chunk can have."""
        if len(raw) != self.num_bytes:
            return None
        counts = np.frombuffer(raw, "<u2").reshape(self._most.shape).astype(np.int32)
        return None if (counts > self._most).any() else counts

    def num_blocks(self, counts: object) -> int:
        """Return how many blocks so many entries fill."""
        assert isinstance(counts, np.ndarray), "counts as they were decoded"
        return self._shape.num_blocks_for(counts)


def chunk_notes(geometry: KVGeometry) -> ChunkNotes | None:
    """Return what slow tiers have of packed chunks beside the blocks; None where no chunks are packed."""
    group = geometry.packing
    if group is None:
        return None
    return ChunkNotes(len(geometry.groups), group.keeps.chunk_blocks(group.block_size), KeptCounts(geometry))


def check_notes(geometry: KVGeometry, most_bytes: int) -> None:
    """See that slow tiers have room for what they must know of packed chunks.

    Args:
        geometry: of the model's KV.
        most_bytes: what there is room for beside a block.

    Raises:
        ConfigError: there is not.
    """
    num_pairs = geometry.num_layers * geometry.num_kv_heads
    if geometry.packing is not None and KeptCounts(geometry).num_bytes + ChunkNotes.HEAD_BYTES > most_bytes:
        most = (most_bytes - ChunkNotes.HEAD_BYTES) // 2
        msg = f"kv_keep is set beside a disk or a pool, and the model has {num_pairs:,} KV heads in all its layers."
        raise ConfigError(msg, remedy=f"Leave one of them out: both together are for up to {most:,}.")
