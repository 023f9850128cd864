"""Attention over blocks, the kernel: what one member of the team does with the dealt work. float32, or pairs.

An item's query rows are its tokens times the query heads of one KV head, so K and V are read once for a group, for a
tile of tokens, and for all sequences that share the split. Three passes over a split: scores (a matrix tile over panels
of K), softmax over each row, the weighted sum (a matrix tile over V). A row's weights of entries before and behind
those that it sees are 0. So finite numbers that its tile reads for other rows change no bit of its sum; and what no row
of the tile sees is read into no result: slots that hold no entry, and blocks that were given back.

A V that is NaN or infinite makes NaN of every row of its tile, since 0 times it is NaN: also of tokens before it, which
do not see it. Those are of the same sequence, as only what all tokens see is read for several. The runner tells of the
sequence (see ``Decoder.states``); it ends, and none of its blocks is used again.

What codes need besides is in ``coded_blocks.py``, and what sealed blocks do in ``sealed_blocks.py``: parts that are
compiled for slabs of these kinds only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagefold.kernels.bits import to_bfloat16
from pagefold.kernels.compiled import part
from pagefold.kernels.team import claim, finish, wait
from pagefold.runner.attention.coded_blocks import (
    raise_tops,
    rotate_back,
    write_codes,
)
from pagefold.runner.attention.fold import NOTHING, fold
from pagefold.runner.attention.kept_chunks import attend_kept, pack
from pagefold.runner.attention.kernel_slab import KEY_FORMAT, KEYS, VALUES
from pagefold.runner.attention.sealed_blocks import attend_own_blocks, seal, write_unsealed
from pagefold.runner.attention.split import Item, attend_split, bring_queries
from pagefold.runner.attention.tiles import FLOAT32, INT2, PAIRS
from pagefold.runner.attention.work import ALL_SPLITS, APART, end_seen, first_seen, num_apart

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NO_SINKS", "Scoring", "attend", "merge", "pack", "seal", "write"]

_TOKENS_A_MERGE = 4

NO_SINKS = np.zeros(0, np.float32)
"""The sinks of heads that have none."""


class Scoring(NamedTuple):
    """How queries and keys make scores.

    Attributes:
        scale: what queries are multiplied with: with ``softcap`` it leads to tanh's argument, else to powers of two.
        softcap: in powers of two; 0 for none.
        sinks: ``[H]``: the score of each query head's sink, in powers of two; :data:`NO_SINKS` for none.
    """

    scale: np.float32
    softcap: np.float32
    sinks: NDArray[np.float32] = NO_SINKS


@part()
def write(slab, work, layer, t, h, key, value, scratch):
    """Write K and V, ``[D]``, of token ``t`` and KV head ``h`` into the token's block. ``scratch`` is the member's."""
    head_dim, block_size = slab.head_dim, slab.block_size
    s = work.seq_of[t]
    entry = end_seen(work, h, t) - 1
    block = work.tables[s, h if work.tables.shape[1] > 1 else 0, entry // block_size - work.first_blocks[s]]
    cell = work.cells[s if work.cells.shape[0] > 1 else 0, layer, h]
    slot = entry % block_size
    parts = slab.cells[cell]
    if parts[KEY_FORMAT] == FLOAT32:
        keys, values = slab.floats[block, parts[KEYS] // 4 :], slab.floats[block, parts[VALUES] // 4 :]
        for d in range(head_dim):
            keys[d * block_size + slot] = key[d]
            values[slot * head_dim + d] = value[d]
        return
    if parts[KEY_FORMAT] == PAIRS:
        keys, values = slab.halves[block, parts[KEYS] // 2 :], slab.halves[block, parts[VALUES] // 2 :]
        first = slot // 2 * 2 * head_dim + slot % 2
        for d in range(head_dim):
            keys[(d // 2 * block_size + slot) * 2 + d % 2] = to_bfloat16(key[d])
            values[first + 2 * d] = to_bfloat16(value[d])
        return
    write_codes(slab, cell, block, entry, key, value, scratch)
    write_unsealed(slab, work, cell, s, h, entry, key, value)


@part()
def _look_ahead(work, slab, layer, index, ahead):
    """Note where the first keys are that item ``index`` will read; return of how many blocks."""
    if index >= len(work.items):
        return 0
    one = work.items[index]
    h, split, s, t = one[0], one[1], one[2], work.tokens[one[3]]
    if split <= APART:
        return 0
    block_size, limit = slab.block_size, end_seen(work, h, t)
    begin = max(split * work.split_size, first_seen(work.keeps, work.mask_of[s], limit - 1))
    end = min(limit, (begin // work.split_size + 1) * work.split_size)
    first = begin // block_size
    table = work.tables[s, h if work.tables.shape[1] > 1 else 0]
    keys = slab.codes.ctypes.data + slab.cells[work.cells[s if work.cells.shape[0] > 1 else 0, layer, h], KEYS]
    num = max(0, (end + block_size - 1) // block_size - first)
    for b in range(num):
        ahead[b] = keys + np.int64(table[first + b - work.first_blocks[s]]) * slab.codes.shape[1]
    return num


@part(forceinline=True)
def _limit_rows(scratch, num_rows, start, num_entries, block_size):
    """Set what rows see of ``num_entries`` from ``start`` on; return how many of these come before it, in whole blocks.

    Those are not counted in what is set. Nobody sees any of ``num_entries`` if all of them are returned.
    """
    limits, hidden = scratch.limits, scratch.hidden
    num_skipped = num_entries
    for row in range(num_rows):
        limits[row] = max(0, min(num_entries, scratch.ends[row] - start))
        hidden[row] = max(0, min(limits[row], scratch.begins[row] - start))
        if hidden[row] < limits[row]:
            num_skipped = min(num_skipped, hidden[row])
    if num_skipped == num_entries:
        return num_entries
    num_skipped -= num_skipped % block_size
    if num_skipped > 0:
        for row in range(num_rows):
            sees = hidden[row] < limits[row]
            limits[row] = limits[row] - num_skipped if sees else 0
            hidden[row] = hidden[row] - num_skipped if sees else 0
    return num_skipped


@part()
def _attend_sinks(tiles, work, turned, slab, cell, s, split, item, scoring, scratch, acc):
    """Attend to those of a split of sequence ``s`` that are sink tokens of an item's rows: any row has some.

    Leaves what :func:`attend_split` does, and in ``scratch`` the turned queries, and where each row's window begins.
    """
    num_rows, split_size = (item.end - item.first) * item.group, work.split_size
    bring_queries(tiles, work, turned, slab, cell, item, scoring.scale, scratch)
    num_seen = 0  # by any: others may not have been written
    for row in range(num_rows):
        num_sinks = min(work.keeps.num_sinks, scratch.begins[row])
        scratch.limits[row] = max(0, min(split_size, num_sinks - split * split_size))
        scratch.hidden[row] = 0
        num_seen = max(num_seen, scratch.limits[row])
    first = split * split_size // slab.block_size
    table = work.sink_tables[s, item.kv_head if work.sink_tables.shape[1] > 1 else 0, first:]
    query = scratch.query[:num_rows]
    attend_split(tiles, slab, cell, table, first, num_seen, query, scratch, acc, scoring.softcap, 0)
    raise_tops(slab, cell, num_rows, scratch, scoring.softcap)


@part(forceinline=True)
def _keep(partial, acc, top, total):
    """Keep a partial result, ``[D + 2]``, until it is merged."""
    for d in range(len(acc)):
        partial[d] = acc[d]
    partial[len(acc)] = top
    partial[len(acc) + 1] = total


@part()
def attend(tiles, sync, phase, num_members, work, query, turned, slab, layer, scoring, scratch, partials, out):
    """Do items of ``work`` until none is left.

    Keys are fetched of the item that the member will probably claim next: each of the others claims one meanwhile.

    Args:
        tiles: :class:`AttentionTiles`.
        num_members: of the team.
        work: :class:`~pagefold.runner.attention.work.GroupWork`, of the layer's group.
        query: ``[T, H, D]``, or wider: rows are ``query.shape[1]`` heads apart.
        turned: the same, as queries look at sink tokens; of no tokens where none are kept.
        slab: :class:`~pagefold.runner.attention.kernel_slab.KernelSlab`.
        scoring: :class:`Scoring`.
        scratch: this member's :class:`Scratch`.
        partials: ``[num_slots, H, D + 2]``.
        out: ``[T, H, D]``.
    """
    head_dim, num_heads = out.shape[2], out.shape[1]
    num_kv_heads = work.cells.shape[2]
    group = num_heads // num_kv_heads
    block_size = slab.block_size
    split_size = work.split_size
    table_step = int(work.tables.shape[1] > 1)
    cell_step = int(work.cells.shape[0] > 1)
    softcap = scoring.softcap
    num_items = len(work.items)
    while True:
        index = claim(sync, phase)
        if index >= num_items:
            break
        num_ahead = _look_ahead(work, slab, layer, index + num_members, scratch.ahead)
        one = work.items[index]
        h, split, s, first, end = one[0], one[1], one[2], one[3], one[4]
        item = Item(h, first, end, group)
        num_rows = (end - first) * group
        q, acc, state = scratch.query[:num_rows], scratch.acc[:num_rows], scratch.state[:num_rows]
        tops, totals = scratch.tops[:num_rows], scratch.totals[:num_rows]
        state_tops, state_totals = scratch.state_tops, scratch.state_totals
        cell = work.cells[s * cell_step, layer, h]
        is_sealed = slab.cells[cell, KEY_FORMAT] == INT2
        if split <= APART:
            nth = APART - split
            if work.keeps.packs:
                bring_queries(tiles, work, query, slab, cell, item, scoring.scale, scratch)
                attend_kept(tiles, work, slab, layer, s, nth, h, q, scratch, acc, scoring)
            else:
                _attend_sinks(tiles, work, turned, slab, cell, s, nth, item, scoring, scratch, acc)
            for row in range(num_rows):
                t = work.tokens[first + row // group]
                part = partials[work.first_slots[t] - 1 - nth, h * group + row % group]
                _keep(part, acc[row], tops[row], totals[row])
            finish(sync, phase)
            continue
        begin, longest = bring_queries(tiles, work, query, slab, cell, item, scoring.scale, scratch)
        table = work.tables[s, h * table_step]
        first_split, end_split = split, split + 1
        if split == ALL_SPLITS:
            first_split, end_split = begin // split_size, (longest + split_size - 1) // split_size
        for k in range(first_split, end_split):
            start = k * split_size
            num_entries = min(split_size, ((longest - 1) // block_size * block_size if is_sealed else longest) - start)
            num_skipped = _limit_rows(scratch, num_rows, start, num_entries, block_size)
            into = acc if k > first_split else state
            if num_skipped < num_entries:
                first_block = (start + num_skipped) // block_size
                blocks = table[first_block - work.first_blocks[s] :]
                num_read = num_entries - num_skipped
                attend_split(tiles, slab, cell, blocks, first_block, num_read, q, scratch, into, softcap, num_ahead)
                num_ahead = 0
            else:  # all that is to be seen of the split is a row's own block
                into[:], tops[:], totals[:] = np.float32(0.0), NOTHING, np.float32(0.0)
            if is_sealed:
                attend_own_blocks(tiles, work, slab, cell, item, k, scratch, q, into, softcap)
            if len(scoring.sinks) > 0 or work.keeps.num_sinks > 0:
                raise_tops(slab, cell, num_rows, scratch, softcap)
            for row in range(num_rows):
                if k == first_split:
                    state_tops[row], state_totals[row] = tops[row], totals[row]
                elif start <= scratch.begins[row]:  # the row begins here, or later
                    state[row] = acc[row]
                    state_tops[row], state_totals[row] = tops[row], totals[row]
                else:
                    state_tops[row], state_totals[row] = fold(
                        state_tops[row], state_totals[row], state[row], tops[row], totals[row], acc[row]
                    )
        if split == ALL_SPLITS and work.keeps.packs:  # as many for all tokens of the item
            for k in range(num_apart(work.keeps, work.mask_of[s], longest - 1, split_size)):
                attend_kept(tiles, work, slab, layer, s, k, h, q, scratch, acc, scoring)
                for row in range(num_rows):
                    state_tops[row], state_totals[row] = fold(
                        state_tops[row], state_totals[row], state[row], tops[row], totals[row], acc[row]
                    )
        if split == ALL_SPLITS and work.keeps.num_sinks > 0:
            for k in range(num_apart(work.keeps, work.mask_of[s], longest - 1, split_size)):
                _attend_sinks(tiles, work, turned, slab, cell, s, k, item, scoring, scratch, acc)
                for row in range(num_rows):
                    if scratch.limits[row] > 0:
                        state_tops[row], state_totals[row] = fold(
                            state_tops[row], state_totals[row], state[row], tops[row], totals[row], acc[row]
                        )
        for i in range(first, end):
            t = work.tokens[i]
            slot = work.first_slots[t]
            nth = split - scratch.begins[(i - first) * group] // split_size  # of the splits that the token sees
            for g in range(group):
                row = (i - first) * group + g
                if slot < 0:
                    weight = _weight(state_tops[row], state_totals[row], scoring.sinks, h * group + g)
                    for d in range(head_dim):
                        out[t, h * group + g, d] = state[row, d] * weight
                    rotate_back(slab, cell, out[t, h * group + g], scratch)
                elif nth >= 0:  # else only other tokens of its sequence see anything of the split
                    _keep(partials[slot + nth, h * group + g], state[row], state_tops[row], state_totals[row])
        finish(sync, phase)
    wait(sync, phase, num_items)


@part(forceinline=True)
def _weight(top, total, sinks, head):
    """Return by what a token's folded sum is multiplied in the end; a sink has its share of the total then, once."""
    if len(sinks) > 0:
        total += np.exp2(sinks[head] - top)
    return np.float32(1.0) / total


@part()
def merge(sync, phase, work, slab, layer, sinks, scratch, partials, out):
    """Put the splits that each token sees together, in order. ``partials`` is folded in place."""
    num_tokens, num_heads, head_dim = out.shape
    group = num_heads // work.cells.shape[2]
    cell = work.cells[0, layer, 0]  # a layer's cells have one codec
    num_chunks = (num_tokens + _TOKENS_A_MERGE - 1) // _TOKENS_A_MERGE
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        for t in range(chunk * _TOKENS_A_MERGE, min((chunk + 1) * _TOKENS_A_MERGE, num_tokens)):
            slot = work.first_slots[t]
            if slot < 0:
                continue
            for head in range(num_heads):
                limit, mask = end_seen(work, head // group, t), work.mask_of[work.seq_of[t]]
                state = partials[slot, head]
                top, total = state[head_dim], state[head_dim + 1]
                first_split = first_seen(work.keeps, mask, limit - 1) // work.split_size
                for k in range(1, (limit + work.split_size - 1) // work.split_size - first_split):
                    part = partials[slot + k, head]
                    top, total = fold(top, total, state[:head_dim], part[head_dim], part[head_dim + 1], part[:head_dim])
                if work.keeps.num_sinks > 0 or work.keeps.packs:
                    for k in range(num_apart(work.keeps, mask, limit - 1, work.split_size)):
                        part = partials[slot - 1 - k, head]
                        other_top, other_total = part[head_dim], part[head_dim + 1]
                        top, total = fold(top, total, state[:head_dim], other_top, other_total, part[:head_dim])
                weight = _weight(top, total, sinks, head)
                for d in range(head_dim):
                    out[t, head, d] = state[d] * weight
                rotate_back(slab, cell, out[t, head], scratch)
        finish(sync, phase)
    wait(sync, phase, num_chunks)
