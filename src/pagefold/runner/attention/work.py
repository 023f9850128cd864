"""AttentionWork: what attention has to do in a step, as kernels take it: records of arrays, and who sees what.

It is dealt out in ``dealing.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.kernels.compiled import part
from pagefold.runner.attention.kept_work import KeptWork

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagefold.kv import KeepRule

__all__ = [
    "ALL_SPLITS",
    "APART",
    "AttentionWork",
    "GroupWork",
    "Keeps",
    "end_seen",
    "first_seen",
    "num_apart",
    "work_of",
]

ALL_SPLITS, APART = -1, -2
"""What an item has instead of a split: its tokens see all of their splits, one after another; or what lies apart.

With ``APART - k`` that are the sink tokens of split ``k``; or, of a group that packs, what was kept of chunk ``k``.
"""


class Keeps(NamedTuple):
    """A :class:`~pagefold.kv.keep.KeepRule` as kernels read it.

    Attributes:
        window: its window; 0 for none.
        is_chunked: whether windows lie side by side.
        num_sinks: how many of the first entries are sink tokens.
        num_before: how many windows before its own a token sees, where they lie side by side.
        packs: whether it sees what was kept of those before these.
    """

    window: int
    is_chunked: bool
    num_sinks: int
    num_before: int
    packs: bool

    @classmethod
    def of(cls, rule: KeepRule) -> Keeps:
        """Return what kernels read of a rule."""
        return cls(rule.window or 0, rule.is_chunked, rule.num_sinks, rule.num_before, rule.packs)


class GroupWork(NamedTuple):
    """The work of a step's attention in one cache group; the same in all its layers. T tokens, S sequences, I items.

    Attributes:
        query_starts: int32 ``[S + 1]``.
        seq_of: int32 ``[T]``: the sequence of each token.
        tables: int32 ``[S, Hkv or 1, max_blocks]``; 1 where all heads share a table.
        first_blocks: int32 ``[S]``: which of its blocks each sequence's tables begin with.
        lengths: int32 ``[S, Hkv or 1]``.
        keeps: which entries a token sees.
        sink_tables: int32 ``[S, Hkv or 1, blocks]``: the first blocks of each sequence, where sink tokens are kept.
        cells: int32 ``[S or 1, L, Hkv]``; those of the group's layers are the group's own.
        items: int32 ``[I, 5]``: KV head, split or :data:`ALL_SPLITS` or :data:`APART` and below, sequence whose
            table is read, first and end of its tokens in ``tokens``. Dearest first.
        tokens: int32: the tokens of all items.
        first_slots: int32 ``[T]``: where a token's partial results begin, with that of the first split that it sees; -1
            for a token that needs none. Before them lie those of what lies apart: that of ``APART - k`` at
            ``first_slots[t] - 1 - k``.
        split_size: entries a split.
        residual_ids: int32 ``[S]``: where each sequence has its unsealed block; empty where blocks are not sealed.
        first_opened: int32 ``[S]``: where the step has the blocks that each sequence has begun and filled in it.
        seals: int32 ``[N, 3]``: blocks that are full after the step's writes: sequence, KV head, which of its blocks.
        mask_of: int32 ``[S]``: by which mask each sequence keeps older entries, where the group packs;
            :data:`~pagefold.kv.NO_MASK` for one that sees all.
        kept: what is packed, where the group packs.
    """

    query_starts: NDArray[np.int32]
    seq_of: NDArray[np.int32]
    tables: NDArray[np.int32]
    first_blocks: NDArray[np.int32]
    lengths: NDArray[np.int32]
    keeps: Keeps
    sink_tables: NDArray[np.int32]
    cells: NDArray[np.int32]
    items: NDArray[np.int32]
    tokens: NDArray[np.int32]
    first_slots: NDArray[np.int32]
    split_size: int
    residual_ids: NDArray[np.int32]
    first_opened: NDArray[np.int32]
    seals: NDArray[np.int32]
    mask_of: NDArray[np.int32]
    kept: KeptWork


class AttentionWork(NamedTuple):
    """The work of one step's attention in all of its G cache groups, of which kernels take one: :func:`work_of`.

    It is one flat record of arrays because a team's members can be handed no other.

    Attributes:
        query_starts, seq_of, cells, split_size, residual_ids, first_opened, seals, mask_of: of all groups.
        group_of_layer: int32 ``[L]``.
        tables, first_blocks, lengths, sink_tables, first_slots: of each group, one behind the other: ``[G, ...]``.
        keeps: int32 ``[G, 5]``: of each group the fields of :class:`Keeps`.
        item_starts: int32 ``[G + 1]``: a group has the items ``[item_starts[g], item_starts[g + 1])``.
        items: int32 ``[I, 5]``: of all groups.
        tokens: int32: the tokens of all items.
        num_slots: of partial results, at most in one group.
        num_opened: blocks that the step's sequences have begun and filled in it, of all sequences.
        chunk_ids, kept_counts, kept_units, kept_blocks, packs, num_packed_units, block_units: the fields of
            :class:`~pagefold.runner.attention.kept_work.KeptWork`, of the group that packs.
    """

    query_starts: NDArray[np.int32]
    seq_of: NDArray[np.int32]
    cells: NDArray[np.int32]
    group_of_layer: NDArray[np.int32]
    tables: NDArray[np.int32]
    first_blocks: NDArray[np.int32]
    lengths: NDArray[np.int32]
    sink_tables: NDArray[np.int32]
    keeps: NDArray[np.int32]
    item_starts: NDArray[np.int32]
    items: NDArray[np.int32]
    tokens: NDArray[np.int32]
    first_slots: NDArray[np.int32]
    num_slots: int
    split_size: int
    residual_ids: NDArray[np.int32]
    first_opened: NDArray[np.int32]
    num_opened: int
    seals: NDArray[np.int32]
    mask_of: NDArray[np.int32]
    chunk_ids: NDArray[np.int32]
    kept_counts: NDArray[np.int32]
    kept_units: NDArray[np.int32]
    kept_blocks: NDArray[np.int32]
    packs: NDArray[np.int32]
    num_packed_units: NDArray[np.int32]
    block_units: int


@part(forceinline=True)
def work_of(work, layer):
    """Return the :class:`GroupWork` of a layer's group."""
    g = work.group_of_layer[layer]
    return GroupWork(
        query_starts=work.query_starts,
        seq_of=work.seq_of,
        tables=work.tables[g],
        first_blocks=work.first_blocks[g],
        lengths=work.lengths[g],
        keeps=Keeps(work.keeps[g, 0], work.keeps[g, 1] != 0, work.keeps[g, 2], work.keeps[g, 3], work.keeps[g, 4] != 0),
        sink_tables=work.sink_tables[g],
        cells=work.cells,
        items=work.items[work.item_starts[g] : work.item_starts[g + 1]],
        tokens=work.tokens,
        first_slots=work.first_slots[g],
        split_size=work.split_size,
        residual_ids=work.residual_ids,
        first_opened=work.first_opened,
        seals=work.seals,
        mask_of=work.mask_of,
        kept=KeptWork(
            work.chunk_ids,
            work.kept_counts,
            work.kept_units,
            work.kept_blocks,
            work.packs,
            work.num_packed_units,
            work.block_units,
        ),
    )


@part(forceinline=True)
def first_seen(keeps, mask, entry):
    """Return the first entry that ``entry`` sees; see :class:`~pagefold.kv.keep.KeepRule`.

    Args:
        keeps: of the group.
        mask: of the sequence: with none it sees all where others have chunks packed.
        entry: that looks.
    """
    if keeps.window == 0 or (keeps.packs and mask < 0):
        return 0
    if keeps.is_chunked:
        return max(0, entry - entry % keeps.window - keeps.num_before * keeps.window)
    return max(0, entry + 1 - keeps.window)


@part(forceinline=True)
def end_seen(work, head, t):
    """Return with how many entries what token ``t`` sees of its sequence is over, in the cache of KV head ``head``."""
    s = work.seq_of[t]
    length = work.lengths[s, head if work.lengths.shape[1] > 1 else 0]
    return length - (work.query_starts[s + 1] - 1 - t)


@part(forceinline=True)
def num_apart(keeps, mask, entry, split_size):
    """Return how many splits ``entry`` sees of what lies apart: of sink tokens, or what was kept of chunks."""
    if keeps.packs:
        return first_seen(keeps, mask, entry) // split_size
    return (min(keeps.num_sinks, first_seen(keeps, mask, entry)) + split_size - 1) // split_size
