"""Dealing out attention: what is one piece of work, what of it is shared, and what is put together at the end.

A sequence's entries are cut into *splits* of fixed length at fixed entries (``split_size``), whichever of them it still
has. A token's result is the left fold, in order, of the partial results of the splits that it sees anything of. So it
is the same, to the bit, whoever else is in the batch, however a prompt was cut into chunks, whatever came out of the
cache and whatever was given back; and dealing is free to do what is fast:

- a long prompt's tokens are dealt in tiles, each of which walks all its splits and folds as it goes;
- the splits of a token that is alone (decoding) are dealt one by one, so that a few long sequences keep all cores busy;
- a split that lies in the same blocks for several sequences, all of whose tokens see all of it, is dealt once for all
  of them: K and V are read once.

Each cache group of a step is dealt once, for all of its layers.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagefold.kernels.compiled import part, specialised
from pagefold.kernels.kept import kernel
from pagefold.runner.attention.kept_work import KeptWork, kept_work, masks_of
from pagefold.runner.attention.work import ALL_SPLITS, APART, AttentionWork, Keeps, first_seen, num_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from pagefold.runner.attention.inputs import AttentionInputs, GroupInputs

__all__ = ["WorkDealer"]

_ROWS = 42
"""Query rows (tokens times the heads of a group) of one item: whole register tiles, and scores that stay in cache."""

_MIN_SPLIT = 256

_NOTHING = np.zeros(0, np.int32)
_NO_SEALS = np.zeros((0, 3), np.int32)


class _Dealt(NamedTuple):
    """What is dealt of one group; see :class:`GroupWork`."""

    items: NDArray[np.int32]
    tokens: NDArray[np.int32]
    first_slots: NDArray[np.int32]
    num_slots: int


class WorkDealer:
    """Deals out attention over blocks of one shape.

    Args:
        num_blocks: of the slab.
        block_size: entries a block.
        group: query heads a KV head.
        seals: whether blocks are sealed when they are full.
        chunk_size: of chunks that are packed, which splits are then; 0 where none are.
    """

    def __init__(
        self, num_blocks: int, block_size: int, group: int, *, seals: bool = False, chunk_size: int = 0
    ) -> None:
        self._seals = seals
        self.split_size = chunk_size or block_size * max(1, _MIN_SPLIT // block_size)
        self.tokens_per_item = max(1, _ROWS // group)
        self._block_size = block_size
        self._kernel: Callable[..., Any] | None = None
        self._owner = np.full(num_blocks, -1, np.int32)  # which item reads a split that ends in this block

    def deal(self, inputs: AttentionInputs) -> AttentionWork:
        """Return the work of a step."""
        groups = inputs.groups
        cells = _broadcast_as_one(inputs.cells, 0)
        tables, lengths = _tables_of(groups), _lengths_of(groups)
        first_blocks = _stacked([group.firsts // np.int32(self._block_size) for group in groups])
        keeps = [Keeps.of(group.keeps) for group in groups]
        assert all(one.window == self.split_size for one in keeps if one.packs), "a chunk that is packed is a split"
        assert len(cells) == 1 or not any(one.packs for one in keeps), "chunks are shared, and cells are not"
        kept, mask_of = kept_work(inputs), masks_of(inputs)
        dealt = [
            self._deal_group(inputs, (*of_group, mask_of), kept, is_shared=len(cells) == 1)
            for of_group in zip(tables, first_blocks, lengths, keeps, strict=True)
        ]
        num_tokens = accumulate((len(one.tokens) for one in dealt), initial=0)
        for one, begin in zip(dealt, num_tokens, strict=False):
            if begin:
                one.items[:, 3:] += begin
        return AttentionWork(
            query_starts=inputs.query_starts,
            seq_of=np.repeat(np.arange(inputs.num_seqs, dtype=np.int32), np.diff(inputs.query_starts)),
            cells=cells,
            group_of_layer=np.array(inputs.group_of_layer, np.int32),
            tables=tables,
            first_blocks=first_blocks,
            lengths=lengths,
            sink_tables=_sink_tables_of(groups),
            keeps=np.array(keeps, np.int32),
            item_starts=np.array([*accumulate((len(one.items) for one in dealt), initial=0)], np.int32),
            items=_joined([one.items for one in dealt]),
            tokens=_joined([one.tokens for one in dealt]),
            first_slots=_stacked([one.first_slots for one in dealt]),
            num_slots=max(one.num_slots for one in dealt),
            split_size=self.split_size,
            mask_of=mask_of,
            chunk_ids=kept.chunk_ids,
            kept_counts=kept.counts,
            kept_units=kept.units,
            kept_blocks=kept.blocks,
            packs=kept.packs,
            num_packed_units=kept.num_units,
            block_units=kept.block_units,
            **self._unsealed(inputs),
        )

    def _deal_group(
        self, inputs: AttentionInputs, of_group: tuple[Any, ...], kept: KeptWork, *, is_shared: bool
    ) -> _Dealt:
        """Deal out a group, of which this is what :func:`_deal` takes; tables may be shared if heads' cells are."""
        arguments = (
            inputs.query_starts,
            *of_group,
            kept.chunk_ids,
            kept.counts,
            self._owner if is_shared else self._owner[:0],
            self._block_size,
            self.split_size,
            self.tokens_per_item,
        )
        if self._kernel is None:
            self._kernel = specialised(_deal, arguments)
        items, costs, tokens, first_slots, num_slots = self._kernel(*arguments)
        items = items[np.argsort(-costs, kind="stable")]
        tables, _, lengths, _, _ = of_group
        num_kv_heads = inputs.cells.shape[2]
        if lengths.shape[1] == tables.shape[1] == 1 and num_kv_heads > 1:  # what is dealt for one head serves all
            items = np.repeat(items, num_kv_heads, axis=0)
            items[:, 0] = np.tile(np.arange(num_kv_heads, dtype=np.int32), len(items) // num_kv_heads)
        return _Dealt(items, tokens, first_slots, num_slots)

    def _unsealed(self, inputs: AttentionInputs) -> dict[str, Any]:
        """Return the fields of the work that are about sealing: a sequence fills the same blocks in all groups."""
        if not self._seals:
            return {"residual_ids": _NOTHING, "first_opened": _NOTHING, "num_opened": 0, "seals": _NO_SEALS}
        lengths, *others = [group.lengths for group in inputs.groups]
        assert all(np.array_equal(own, lengths) for own in others), "groups that are filled apart are not sealed"
        assert inputs.residual_ids is not None, "blocks are sealed, and nobody said where the unsealed ones are"
        size, num_new = self._block_size, np.diff(inputs.query_starts)[:, None]
        first = (lengths - num_new) // size  # [S, Hkv]: the block that each begins in
        num_opened = ((lengths - 1) // size - first).max(1)
        begins_inside = (lengths - num_new) % size > 0
        assert not num_opened[begins_inside.any(1)].any(), "a row begins inside a block and ends beyond it"
        num_full = (lengths // size - first).ravel()
        rows = np.repeat(np.arange(len(num_full)), num_full)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
        num_heads = lengths.shape[1]
        seals = np.stack((rows // num_heads, rows % num_heads, first.ravel()[rows] + nth), 1).astype(np.int32)
        return {
            "residual_ids": inputs.residual_ids,
            "first_opened": (np.cumsum(num_opened) - num_opened).astype(np.int32),
            "num_opened": int(num_opened.sum()),
            "seals": seals,
        }


def _broadcast_as_one(array: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    """Return ``array`` with ``axis`` of length 1 where it is broadcast, contiguous."""
    if array.strides[axis] == 0 and array.shape[axis] > 1:
        array = array[:, :1] if axis else array[:1]
    return np.ascontiguousarray(array)


def _tables_of(groups: tuple[GroupInputs, ...]) -> NDArray[np.int32]:
    """Return the tables of all groups, ``[G, S, Hkv or 1, max_blocks]``: filled up to the widest."""
    return _filled_up([_broadcast_as_one(group.tables, 1) for group in groups])


def _sink_tables_of(groups: tuple[GroupInputs, ...]) -> NDArray[np.int32]:
    """Return the first blocks of each sequence in all groups, ``[G, S, Hkv or 1, blocks]``."""
    nothing = np.zeros((len(groups[0].tables), 1, 0), np.int32)
    tables = (group.sink_tables if group.keeps.num_sinks else nothing for group in groups)
    return _filled_up([_broadcast_as_one(table, 1) for table in tables])


def _filled_up(tables: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return tables of all groups in one."""
    if len(tables) == 1:
        return tables[0][None]
    num_seqs = tables[0].shape[0]
    num_heads, width = (max(table.shape[axis] for table in tables) for axis in (1, 2))
    stacked = np.zeros((len(tables), num_seqs, num_heads, width), np.int32)
    for into, table in zip(stacked, tables, strict=True):
        into[:, :, : table.shape[2]] = table  # broadcast to all heads, where some group's have their own
    return stacked


def _lengths_of(groups: tuple[GroupInputs, ...]) -> NDArray[np.int32]:
    """Return the lengths of all groups, ``[G, S, Hkv or 1]``."""
    lengths = [_broadcast_as_one(group.lengths, 1) for group in groups]
    return _stacked(lengths if len(lengths) == 1 else np.broadcast_arrays(*lengths))


def _stacked(arrays: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return arrays of all groups behind one another, ``[G, ...]``."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def _joined(arrays: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return arrays of all groups in one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


@part()
def _put(item, head, split, seq, first, end):
    item[0], item[1], item[2], item[3], item[4] = head, split, seq, first, end


@part()
def _deal_kept(
    query_starts, lengths, keeps, mask_of, chunk_ids, num_chunks, members, split_size, tokens_per_item,
    num_heads, items, costs, tokens, num_items, end,
):  # fmt: skip
    """Deal what was kept of chunks to sequences that are dealt split by split, each chunk once for all that have it.

    Return the numbers of items and of their tokens then.
    """
    first_of = np.full(num_chunks, -1, np.int32)  # of the sequences that have a chunk, the first
    last_of, next_of = np.empty(num_chunks, np.int32), np.empty(len(query_starts), np.int32)
    for h in range(num_heads):
        head = h if lengths.shape[1] > 1 else 0
        for k in range(chunk_ids.shape[1]):
            for s in members:
                if num_apart(keeps, mask_of[s], lengths[s, head] - 1, split_size) > k:
                    chunk = chunk_ids[s, k]
                    if first_of[chunk] < 0:
                        first_of[chunk] = s
                    else:
                        next_of[last_of[chunk]] = s
                    last_of[chunk] = s
                    next_of[s] = -1
            for s in members:
                if num_apart(keeps, mask_of[s], lengths[s, head] - 1, split_size) <= k:
                    continue
                chunk = chunk_ids[s, k]
                if first_of[chunk] != s:
                    continue
                first_of[chunk] = -1
                first, other = end, s
                while other >= 0:
                    last = query_starts[other + 1]
                    for t in range(query_starts[other], last):
                        if num_apart(keeps, mask_of[other], lengths[other, head] - (last - t), split_size) > k:
                            tokens[end] = t
                            end += 1
                    other = next_of[other]
                num_parts = (end - first + tokens_per_item - 1) // tokens_per_item
                for i in range(num_parts):
                    a, b = (end - first) * i // num_parts, (end - first) * (i + 1) // num_parts
                    _put(items[num_items], h, APART - k, s, first + a, first + b)
                    costs[num_items] = (b - a) * split_size // 2
                    num_items += 1
    return num_items, end


@kernel()
def _deal(
    query_starts,
    tables,
    first_blocks,
    lengths,
    keeps,
    mask_of,
    chunk_ids,
    counts,
    owner,
    block_size,
    split_size,
    tokens_per_item,
):
    """Return (items, their costs, tokens, first_slots, num_slots); see :class:`AttentionWork`."""
    num_seqs, num_heads = len(query_starts) - 1, max(tables.shape[1], lengths.shape[1])
    table_step, length_step = int(tables.shape[1] > 1), int(lengths.shape[1] > 1)
    num_tokens = query_starts[num_seqs]
    most_apart = chunk_ids.shape[1] if keeps.packs else (keeps.num_sinks + split_size - 1) // split_size
    blocks_a_split = split_size // block_size
    first_slots = np.full(num_tokens, -1, np.int32)
    num_slots = 0
    max_items = max_item_tokens = 0
    for s in range(num_seqs):
        num_new = query_starts[s + 1] - query_starts[s]
        num_splits = 0
        for h in range(lengths.shape[1]):
            first_split = first_seen(keeps, mask_of[s], lengths[s, h] - num_new) // split_size
            num_splits = max(num_splits, (lengths[s, h] + split_size - 1) // split_size - first_split)
        max_items += num_heads * (num_splits + num_new + most_apart)
        max_item_tokens += num_heads * ((num_splits + most_apart) * min(num_new, tokens_per_item) + num_new)
        if num_new < tokens_per_item:
            for t in range(query_starts[s], query_starts[s + 1]):
                num_slots += most_apart
                first_slots[t] = num_slots
                num_slots += num_splits
    items = np.empty((max_items, 5), np.int32)
    costs = np.empty(max_items, np.int64)
    tokens = np.empty(max_item_tokens, np.int32)
    num_items = end = 0
    members = np.empty(num_seqs, np.int32)  # sequences that are dealt split by split
    num_members = 0
    max_splits = 0
    least_split = 2**31 - 1  # that any of them sees
    for s in range(num_seqs):
        first, last = query_starts[s], query_starts[s + 1]
        if last - first < tokens_per_item:
            members[num_members] = s
            num_members += 1
            max_splits = max(max_splits, (lengths[s].max() + split_size - 1) // split_size)
            first_split = first_seen(keeps, mask_of[s], lengths[s].min() - (last - first)) // split_size
            least_split = min(least_split, first_split)
            continue
        for h in range(num_heads):
            length = lengths[s, h * length_step]
            t = first
            while t < last:
                entry = length - (last - t)
                stop = min(t + tokens_per_item, last)
                seen_from = first_seen(keeps, mask_of[s], entry)
                if keeps.packs and mask_of[s] >= 0:  # all tokens of an item see as many chunks whole
                    stop = min(stop, t + split_size - entry % split_size)
                _put(items[num_items], h, ALL_SPLITS, s, end, end + stop - t)
                costs[num_items] = (stop - t) * (length - (last - stop) - seen_from)
                if keeps.packs:
                    costs[num_items] += (stop - t) * seen_from // 2
                num_items += 1
                for token in range(t, stop):
                    tokens[end] = token
                    end += 1
                t = stop
    for m in range(num_members if keeps.num_sinks > 0 else 0):
        s = members[m]
        first, last = query_starts[s], query_starts[s + 1]
        for h in range(num_heads):
            for k in range(num_apart(keeps, mask_of[s], lengths[s, h * length_step] - 1, split_size)):
                _put(items[num_items], h, APART - k, s, end, end + last - first)
                costs[num_items] = (last - first) * min(split_size, keeps.num_sinks - k * split_size)
                num_items += 1
                for token in range(first, last):
                    tokens[end] = token
                    end += 1
    next_member = np.empty(num_seqs, np.int32)
    heads = np.empty(num_seqs, np.int32)
    tails = np.empty(num_seqs, np.int32)
    sizes = np.empty(num_seqs, np.int32)
    if keeps.packs:
        num_items, end = _deal_kept(
            query_starts, lengths, keeps, mask_of, chunk_ids, len(counts), members[:num_members], split_size,
            tokens_per_item, num_heads, items, costs, tokens, num_items, end,
        )  # fmt: skip
    for h in range(num_heads):
        for split in range(least_split, max_splits):
            start = split * split_size
            index = (split + 1) * blocks_a_split - 1
            num_groups = 0
            for m in range(num_members):
                s = members[m]
                num_new = query_starts[s + 1] - query_starts[s]
                length = lengths[s, h * length_step]
                if length <= start or first_seen(keeps, mask_of[s], length - num_new) >= start + split_size:
                    continue
                group = -1
                # Shared only if all of the sequence's tokens see all of it.
                is_whole = (
                    len(owner) > 0
                    and length - num_new + 1 >= start + split_size
                    and first_seen(keeps, mask_of[s], length - 1) <= start
                )
                if is_whole:
                    block = tables[s, h * table_step, index - first_blocks[s]]
                    group = owner[block]
                    if group >= 0:
                        other = heads[group]
                        for i in range(split * blocks_a_split, index + 1):
                            theirs = tables[other, h * table_step, i - first_blocks[other]]
                            if theirs != tables[s, h * table_step, i - first_blocks[s]]:
                                group = -1
                                break
                if group < 0:
                    group = num_groups
                    num_groups += 1
                    heads[group] = s
                    sizes[group] = 0
                    if is_whole:
                        owner[tables[s, h * table_step, index - first_blocks[s]]] = group
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
                    if len(owner) > 0 and index - first_blocks[s] < tables.shape[2]:
                        owner[tables[s, h * table_step, index - first_blocks[s]]] = -1
                    s = next_member[s]
                size = sizes[group]
                num_parts = (size + tokens_per_item - 1) // tokens_per_item
                for i in range(num_parts):
                    a, b = size * i // num_parts, size * (i + 1) // num_parts
                    _put(items[num_items], h, split, heads[group], first_of_group + a, first_of_group + b)
                    costs[num_items] = (b - a) * min(split_size, lengths[heads[group], h * length_step] - start)
                    num_items += 1
    return items[:num_items], costs[:num_items], tokens[:end].copy(), first_slots, num_slots
