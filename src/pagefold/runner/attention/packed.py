"""Packed chunks: where the kept entries of a sequence's older chunks lie, in units.

A sequence's entries come in chunks of fixed length at fixed places. A token sees its own chunk and the one before it
whole, the first tokens of its sequence, and of older chunks those entries that were kept, which differ by layer and KV
head. They are packed into *units*: cells of blocks that hold nothing else. A unit has the slots of a cell, for K and V
of one head, so a kernel reads it as it reads any cell.

The units of a chunk are one run of cells, without a gap: those of the first layer's first head, of its second head, and
so on, layer by layer. Each (layer, head) begins with a unit of its own. So how many entries each has kept says where
all of them are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagefold.kv import num_blocks_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["KeptUnits", "PackedInputs", "Slots", "UnitShape", "Units"]


class Units(NamedTuple):
    """Some units, in order: int32 ``[n]`` each.

    Attributes:
        block_ids: the block of each,
        cells: and the cell in it.
    """

    block_ids: NDArray[np.int32]
    cells: NDArray[np.int32]


class Slots(NamedTuple):
    """Where some entries lie, in order: int32 ``[n]`` each.

    Attributes:
        block_ids: the block of each,
        cells: the cell in it,
        slots: and the slot in that.
    """

    block_ids: NDArray[np.int32]
    cells: NDArray[np.int32]
    slots: NDArray[np.int32]


class UnitShape(NamedTuple):
    """What blocks of units are like. Counts are those of entries kept, of any integer dtype and shape.

    Attributes:
        block_size: slots a unit.
        num_cells: units a block.
    """

    block_size: int
    num_cells: int

    def num_units(self, counts: NDArray[np.integer]) -> int:
        """Return how many units lists of so many entries take, each a list of its own."""
        return int((-(-counts // self.block_size)).sum())

    def num_blocks_for(self, counts: NDArray[np.integer]) -> int:
        """Return how many blocks these units take, if nothing else lies there."""
        return num_blocks_for(self.num_units(counts), self.num_cells)

    def most_blocks(self, chunk_size: int, num_layers: int, num_kv_heads: int) -> int:
        """Return how many blocks a chunk takes at most: if every layer and head keeps all of it."""
        return self.num_blocks_for(np.full((num_layers, num_kv_heads), chunk_size))

    def num_unused_slots(self, counts: NDArray[np.integer]) -> int:
        """Return how many slots of these blocks hold no entry: at the ends of lists, and in the cells behind them."""
        return self.num_blocks_for(counts) * self.num_cells * self.block_size - int(counts.sum())


@dataclass(frozen=True, slots=True)
class KeptUnits:
    """Where the kept entries of one chunk lie. L layers, Hkv KV heads.

    While a step runs, layers pack one after another: rows of those that have not yet are 0. Where a layer's entries lie
    depends on the layers before it alone.

    Attributes:
        shape: of the blocks.
        block_ids: int32 ``[B]``: blocks that were granted, of which the last may not be needed.
        counts: int32 ``[L, Hkv]``: entries that each layer and head has kept; 0 of layers that pack nothing. It is the
            directory.
    """

    shape: UnitShape
    block_ids: NDArray[np.int32]
    counts: NDArray[np.int32]

    def first_unit(self, layer: int, head: int) -> int:
        """Return which unit of the chunk's run the entries of a layer and head begin with."""
        before = self.counts.reshape(-1)[: layer * self.counts.shape[1] + head]
        return self.shape.num_units(before)

    def units(self, layer: int, head: int) -> Units:
        """Return the units that hold the entries of a layer and head; none where it has kept nothing."""
        first = self.first_unit(layer, head)
        run = np.arange(first, first + self.shape.num_units(self.counts[layer, head]), dtype=np.int32)
        places, cells = np.divmod(run, np.int32(self.shape.num_cells))
        assert not len(run) or places[-1] < len(self.block_ids), "more was kept than blocks were granted for"
        return Units(self.block_ids[places], cells)

    def slots(self, layer: int, head: int) -> Slots:
        """Return where each kept entry of a layer and head lies, in the order of entries."""
        units, size = self.units(layer, head), self.shape.block_size
        own, slots = np.divmod(np.arange(self.counts[layer, head], dtype=np.int32), np.int32(size))
        return Slots(units.block_ids[own], units.cells[own], slots)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Where each sequence of a step has its older chunks. S sequences.

    It stands beside :class:`~pagefold.runner.attention.inputs.AttentionInputs`, which says where they have what is seen
    whole, and their first entries.

    Attributes:
        chunk_size: entries of a chunk: chunk ``c`` has the entries ``[c * chunk_size, (c + 1) * chunk_size)``.
        num_sinks: how many of the first entries every token sees. They are never packed.
        chunks: of each sequence its packed chunks, the first first: ``num_packed(n)`` of them where it has ``n``
            entries after the step. Sequences may share some.
        num_old: how many of each sequence's chunks are packed before the step; it packs the others, and says of which
            layer and head it has kept how many. None where all are.
        mask_of: int32 ``[S]``: by which of the model's masks each sequence keeps older entries;
            :data:`~pagefold.kv.NO_MASK` for one that sees all, and has no chunks. None where there is one mask, for
            all.
    """

    chunk_size: int
    num_sinks: int
    chunks: tuple[tuple[KeptUnits, ...], ...]
    num_old: tuple[int, ...] | None = None
    mask_of: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        assert self.num_sinks <= self.chunk_size, "sinks beyond the first chunk"

    def num_packed(self, entry: int) -> int:
        """Return how many chunks the token of an entry sees only what was kept of: the first so many.

        After a step that many are packed for the entry that comes next: behind it nobody sees more of them.
        """
        return max(0, entry // self.chunk_size - 1)

    def first_whole(self, entry: int) -> int:
        """Return the entry from which on the token of ``entry`` sees all, up to its own."""
        return self.num_packed(entry) * self.chunk_size
