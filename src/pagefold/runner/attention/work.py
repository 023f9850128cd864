"""Dealing out attention: what is one piece of work, what of it is shared, and what is put together at the end.

The entries that a token sees are cut into *splits* of fixed length at fixed positions (``split_size``). A token's
result is the left fold of its splits' partial results, in order. So it is the same, to the bit, whoever else is in the
batch, however a prompt was cut into chunks, and whatever came out of the cache; and dealing is free to do what is fast:

- a long prompt's tokens are dealt in tiles, each of which walks all its splits and folds as it goes;
- the splits of a token that is alone (decoding) are dealt one by one, so that a few long sequences keep all cores busy;
- a split that lies in the same blocks for several sequences is dealt once for all of them: K and V are read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit

from pagefold.kernels.compiled import part, specialised

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagefold.runner.attention.inputs import AttentionInputs

__all__ = ["AttentionWork", "WorkDealer"]

_ROWS = 42
"""Query rows (tokens times the heads of a group) of one item: whole register tiles, and scores that stay in cache."""

_MIN_SPLIT = 256

_NO_SEALS = np.zeros((0, 3), np.int32)


class AttentionWork(NamedTuple):
    """The work of one step's attention; the same in all layers. T tokens, S sequences, I items.

    Attributes:
        query_starts: int32 ``[S + 1]``.
        seq_of: int32 ``[T]``: the sequence of each token.
        tables: int32 ``[S, Hkv or 1, max_blocks]``; 1 where all heads share a table.
        lengths: int32 ``[S, Hkv or 1]``.
        cells: int32 ``[S or 1, L, Hkv]``.
        items: int32 ``[I, 5]``: KV head, split or -1 for all splits, sequence whose table is read, first and end of its
            tokens in ``tokens``. Dearest first.
        tokens: int32: the tokens of all items.
        first_slots: int32 ``[T]``: where a token's partial results begin; -1 for a token that needs none.
        num_slots: of partial results.
        split_size: entries a split.
        residual_ids: int32 ``[S]``: where each sequence has its unsealed block; empty where blocks are not sealed.
        first_opened: int32 ``[S]``: where the step has the blocks that each sequence has begun and filled in it.
        num_opened: of those, of all sequences.
        seals: int32 ``[N, 3]``: blocks that are full after the step's writes: sequence, KV head, which of its blocks.
    """

    query_starts: NDArray[np.int32]
    seq_of: NDArray[np.int32]
    tables: NDArray[np.int32]
    lengths: NDArray[np.int32]
    cells: NDArray[np.int32]
    items: NDArray[np.int32]
    tokens: NDArray[np.int32]
    first_slots: NDArray[np.int32]
    num_slots: int
    split_size: int
    residual_ids: NDArray[np.int32]
    first_opened: NDArray[np.int32]
    num_opened: int
    seals: NDArray[np.int32]


class WorkDealer:
    """Deals out attention over blocks of one shape.

    Args:
        num_blocks: of the slab.
        block_size: entries a block.
        group: query heads a KV head.
        seals: whether blocks are sealed when they are full.
    """

    def __init__(self, num_blocks: int, block_size: int, group: int, *, seals: bool = False) -> None:
        self._seals = seals
        self.split_size = block_size * max(1, _MIN_SPLIT // block_size)
        self.tokens_per_item = max(1, _ROWS // group)
        self._block_size = block_size
        self._kernel: Callable[..., Any] | None = None
        self._owner = np.full(num_blocks, -1, np.int32)  # which item reads a split that ends in this block

    def deal(self, inputs: AttentionInputs) -> AttentionWork:
        """Return the work of a step."""
        tables = _broadcast_as_one(inputs.tables, 1)
        lengths = _broadcast_as_one(inputs.lengths, 1)
        cells = _broadcast_as_one(inputs.cells, 0)
        num_kv_heads = inputs.cells.shape[2]
        seq_of = np.repeat(np.arange(inputs.num_seqs, dtype=np.int32), np.diff(inputs.query_starts))
        arguments = (
            inputs.query_starts,
            tables,
            lengths,
            self._owner if len(cells) == 1 else self._owner[:0],
            self._block_size,
            self.split_size,
            self.tokens_per_item,
        )
        if self._kernel is None:
            self._kernel = specialised(_deal, arguments)
        items, costs, tokens, first_slots, num_slots = self._kernel(*arguments)
        items = items[np.argsort(-costs, kind="stable")]
        if lengths.shape[1] == tables.shape[1] == 1 and num_kv_heads > 1:  # what is dealt for one head serves all
            items = np.repeat(items, num_kv_heads, axis=0)
            items[:, 0] = np.tile(np.arange(num_kv_heads, dtype=np.int32), len(items) // num_kv_heads)
        return AttentionWork(
            inputs.query_starts,
            seq_of,
            tables,
            lengths,
            cells,
            items,
            tokens,
            first_slots,
            num_slots,
            self.split_size,
            *self._unsealed(inputs),
        )

    def _unsealed(self, inputs: AttentionInputs) -> tuple[Any, ...]:
        """Return the fields of the work that are about sealing."""
        nothing = np.zeros(0, np.int32)
        if not self._seals:
            return nothing, nothing, 0, _NO_SEALS
        assert inputs.residual_ids is not None, "blocks are sealed, and nobody said where the unsealed ones are"
        size, num_new = self._block_size, np.diff(inputs.query_starts)[:, None]
        first = (inputs.lengths - num_new) // size  # [S, Hkv]: the block that each begins in
        num_opened = ((inputs.lengths - 1) // size - first).max(1)
        begins_inside = (inputs.lengths - num_new) % size > 0
        assert not num_opened[begins_inside.any(1)].any(), "a row begins inside a block and ends beyond it"
        num_full = (inputs.lengths // size - first).ravel()
        rows = np.repeat(np.arange(len(num_full)), num_full)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
        num_heads = inputs.lengths.shape[1]
        seals = np.stack((rows // num_heads, rows % num_heads, first.ravel()[rows] + nth), 1).astype(np.int32)
        first_opened = (np.cumsum(num_opened) - num_opened).astype(np.int32)
        return inputs.residual_ids, first_opened, int(num_opened.sum()), seals


def _broadcast_as_one(array: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    """Return ``array`` with ``axis`` of length 1 where it is broadcast, contiguous."""
    if array.strides[axis] == 0 and array.shape[axis] > 1:
        array = array[:, :1] if axis else array[:1]
    return np.ascontiguousarray(array)


@part()
def _put(item, head, split, seq, first, end):
    item[0], item[1], item[2], item[3], item[4] = head, split, seq, first, end


@njit(cache=True, nogil=True)
def _deal(query_starts, tables, lengths, owner, block_size, split_size, tokens_per_item):
    """Return (items, their costs, tokens, first_slots, num_slots); see :class:`AttentionWork`."""
    num_seqs, num_heads = len(query_starts) - 1, max(tables.shape[1], lengths.shape[1])
    table_step, length_step = int(tables.shape[1] > 1), int(lengths.shape[1] > 1)
    num_tokens = query_starts[num_seqs]
    blocks_a_split = split_size // block_size
    first_slots = np.full(num_tokens, -1, np.int32)
    num_slots = 0
    max_items = max_item_tokens = 0
    for s in range(num_seqs):
        num_new = query_starts[s + 1] - query_starts[s]
        longest = lengths[s].max()
        num_splits = (longest + split_size - 1) // split_size
        max_items += num_heads * (num_splits + num_new)
        max_item_tokens += num_heads * (num_splits * min(num_new, tokens_per_item) + num_new)
        if num_new < tokens_per_item:
            for t in range(query_starts[s], query_starts[s + 1]):
                first_slots[t] = num_slots
                num_slots += num_splits
    items = np.empty((max_items, 5), np.int32)
    costs = np.empty(max_items, np.int64)
    tokens = np.empty(max_item_tokens, np.int32)
    num_items = end = 0
    members = np.empty(num_seqs, np.int32)  # sequences that are dealt split by split
    num_members = 0
    max_splits = 0
    for s in range(num_seqs):
        first, last = query_starts[s], query_starts[s + 1]
        if last - first < tokens_per_item:
            members[num_members] = s
            num_members += 1
            max_splits = max(max_splits, (lengths[s].max() + split_size - 1) // split_size)
            continue
        for h in range(num_heads):
            length = lengths[s, h * length_step]
            for t in range(first, last, tokens_per_item):
                stop = min(t + tokens_per_item, last)
                _put(items[num_items], h, -1, s, end, end + stop - t)
                costs[num_items] = (stop - t) * (length - (last - stop))
                num_items += 1
                for token in range(t, stop):
                    tokens[end] = token
                    end += 1
    next_member = np.empty(num_seqs, np.int32)
    heads = np.empty(num_seqs, np.int32)
    tails = np.empty(num_seqs, np.int32)
    sizes = np.empty(num_seqs, np.int32)
    for h in range(num_heads):
        for split in range(max_splits):
            start = split * split_size
            index = (split + 1) * blocks_a_split - 1
            num_groups = 0
            for m in range(num_members):
                s = members[m]
                num_new = query_starts[s + 1] - query_starts[s]
                length = lengths[s, h * length_step]
                if length <= start:
                    continue
                group = -1
                # Shared only if whole and seen by all of the sequence's tokens.
                is_whole = len(owner) > 0 and length - num_new + 1 >= start + split_size
                if is_whole:
                    block = tables[s, h * table_step, index]
                    group = owner[block]
                    if group >= 0:
                        other = heads[group]
                        for i in range(split * blocks_a_split, index + 1):
                            if tables[other, h * table_step, i] != tables[s, h * table_step, i]:
                                group = -1
                                break
                if group < 0:
                    group = num_groups
                    num_groups += 1
                    heads[group] = s
                    sizes[group] = 0
                    if is_whole:
                        owner[tables[s, h * table_step, index]] = group
                else:
                    next_member[tails[group]] = s
                tails[group] = s
                next_member[s] = -1
                sizes[group] += num_new
            for group in range(num_groups):
                s = heads[group]
                first_of_group = end
                while s >= 0:
                    for t in range(query_starts[s], query_starts[s + 1]):
                        tokens[end] = t
                        end += 1
                    if len(owner) > 0 and index < tables.shape[2]:
                        owner[tables[s, h * table_step, index]] = -1
                    s = next_member[s]
                size = sizes[group]
                num_parts = (size + tokens_per_item - 1) // tokens_per_item
                for i in range(num_parts):
                    a, b = size * i // num_parts, size * (i + 1) // num_parts
                    _put(items[num_items], h, split, heads[group], first_of_group + a, first_of_group + b)
                    costs[num_items] = (b - a) * min(split_size, lengths[heads[group], h * length_step] - start)
                    num_items += 1
    return items[:num_items], costs[:num_items], tokens[:end].copy(), first_slots, num_slots
