"""Attention over blocks, the kernel: what one member of the team does with the dealt work. float32.

An item's query rows are its tokens times the query heads of one KV head, so K and V are read once for a group, for a
tile of tokens, and for all sequences that share the split. Three passes over a split: scores (a matrix tile over panels
of K), softmax over each row, the weighted sum (a matrix tile over V). Slots that hold no entry are never read into a
result.
"""

from __future__ import annotations

import numpy as np

from pagefold.runner.attention.work import AttentionWork
from pagefold.runner.kernels.compiled import part
from pagefold.runner.kernels.exponential import exp2_row
from pagefold.runner.kernels.simd import call_tile
from pagefold.runner.kernels.team import claim, finish, wait

__all__ = ["AttentionWork", "attend", "merge"]

_FLOAT_BYTES = 4
_NOTHING = np.float32(-1e30)  # the score of no entry at all: finite, so that no difference of two is NaN
_TOKENS_A_MERGE = 4


@part()
def _fold(top, total, acc, other_top, other_total, other):
    """Fold a later split's partial result into ``acc``; return the new (top, total). Scores are powers of two."""
    new_top = max(top, other_top)
    ours, theirs = np.exp2(top - new_top), np.exp2(other_top - new_top)
    for d in range(len(acc)):
        acc[d] = acc[d] * ours + other[d] * theirs
    return new_top, total * ours + other_total * theirs


@part()
def _attend_split(
    tiles, blocks, block_size, head_dim, num_entries, query, limits, scores, powers, acc, tops, totals, softcap
):
    """Attend to one split: ``query`` [R, D], of which row r sees the first ``limits[r]`` of ``num_entries`` entries.

    Leaves the sum of weighted values in ``acc`` [R, D], the largest score in ``tops``, the weights' sum in ``totals``.
    """
    num_rows, width, lanes = len(limits), scores.shape[1], tiles.lanes
    columns_a_block = block_size // lanes
    num_columns = (num_entries + lanes - 1) // lanes
    for c in range(0, num_columns, 2):
        d = min(c + 1, num_columns - 1)  # an odd one's partner is itself: nobody reads those scores
        e = min(c + 2, num_columns - 1)
        f = min(c + 3, num_columns - 1)
        w0 = blocks[c // columns_a_block] + (c % columns_a_block) * lanes * _FLOAT_BYTES
        w1 = blocks[d // columns_a_block] + (d % columns_a_block) * lanes * _FLOAT_BYTES
        n0 = blocks[e // columns_a_block] + (e % columns_a_block) * lanes * _FLOAT_BYTES
        n1 = blocks[f // columns_a_block] + (f % columns_a_block) * lanes * _FLOAT_BYTES
        call_tile(tiles.scores, (
            query.ctypes.data, head_dim, w0, w1, block_size,
            scores.ctypes.data + c * lanes * _FLOAT_BYTES, width, head_dim, num_rows, n0, n1,
        ))  # fmt: skip
    for r in range(num_rows):
        tops[r], totals[r] = exp2_row(scores[r], limits[r], num_entries, softcap, powers, _NOTHING)
    step = lanes * tiles.vectors
    num_blocks = (num_entries + block_size - 1) // block_size
    for d in range(0, head_dim, step):
        call_tile(tiles.values, (
            scores.ctypes.data, width, blocks.ctypes.data, num_blocks, block_size, num_entries,
            head_dim * block_size + d, head_dim, acc.ctypes.data + d * _FLOAT_BYTES, head_dim, num_rows,
        ))  # fmt: skip


@part()
def attend(tiles, sync, phase, work, query, slab, layer, scale, softcap, scratch, partials, out):
    """Do items of ``work`` until none is left.

    Args:
        tiles: :class:`AttentionTiles`.
        query: ``[T, H, D]``, or wider: rows are ``query.shape[1]`` heads apart.
        slab: ``[num_blocks, num_cells, 2, block_size * head_dim]``.
        scale: factor of the scores; with ``softcap`` it leads to tanh's argument, else to powers of two.
        scratch: this member's :class:`Scratch`.
        partials: ``[num_slots, H, D + 2]``.
        out: ``[T, H, D]``.
    """
    head_dim, num_heads = out.shape[2], out.shape[1]
    num_kv_heads = work.cells.shape[2]
    group = num_heads // num_kv_heads
    block_size = slab.shape[3] // head_dim
    split_size = work.split_size
    blocks_a_split = split_size // block_size
    table_step, length_step = int(work.tables.shape[1] > 1), int(work.lengths.shape[1] > 1)
    cell_step = int(work.cells.shape[0] > 1)
    num_items = len(work.items)
    base = slab.ctypes.data
    cell_bytes = 2 * slab.shape[3] * _FLOAT_BYTES
    block_bytes = slab.shape[1] * cell_bytes
    scores, powers, blocks = scratch.scores, scratch.powers, scratch.blocks
    while True:
        item = claim(sync, phase)
        if item >= num_items:
            break
        one = work.items[item]
        h, split, s, first, end = one[0], one[1], one[2], one[3], one[4]
        num_rows = (end - first) * group
        q, acc, state = scratch.query[:num_rows], scratch.acc[:num_rows], scratch.state[:num_rows]
        limits, tops, totals = scratch.limits[:num_rows], scratch.tops[:num_rows], scratch.totals[:num_rows]
        state_tops, state_totals = scratch.state_tops, scratch.state_totals
        longest = 0
        for i in range(first, end):
            t = work.tokens[i]
            owner = work.seq_of[t]
            limit = work.lengths[owner, h * length_step] - (work.query_starts[owner + 1] - 1 - t)
            longest = max(longest, limit)
            for g in range(group):
                row = (i - first) * group + g
                scratch.ends[row] = limit
                for d in range(head_dim):
                    q[row, d] = query[t, h * group + g, d] * scale
        cell = work.cells[s * cell_step, layer, h]
        first_split, end_split = (0, (longest + split_size - 1) // split_size) if split < 0 else (split, split + 1)
        for k in range(first_split, end_split):
            start = k * split_size
            num_entries = min(split_size, longest - start)
            for b in range((num_entries + block_size - 1) // block_size):
                block = np.int64(work.tables[s, h * table_step, k * blocks_a_split + b])
                blocks[b] = base + block * block_bytes + cell * cell_bytes
            for row in range(num_rows):
                limits[row] = max(0, min(num_entries, scratch.ends[row] - start))
            into = acc if k > first_split else state
            _attend_split(
                tiles, blocks, block_size, head_dim, num_entries, q, limits, scores, powers, into, tops,
                totals, softcap,
            )  # fmt: skip
            for row in range(num_rows):
                if k == first_split:
                    state_tops[row], state_totals[row] = tops[row], totals[row]
                else:
                    state_tops[row], state_totals[row] = _fold(
                        state_tops[row], state_totals[row], state[row], tops[row], totals[row], acc[row]
                    )
        for i in range(first, end):
            t = work.tokens[i]
            slot = work.first_slots[t]
            for g in range(group):
                row = (i - first) * group + g
                if slot < 0:
                    weight = np.float32(1.0) / state_totals[row]
                    for d in range(head_dim):
                        out[t, h * group + g, d] = state[row, d] * weight
                else:
                    part = partials[slot + split, h * group + g]
                    for d in range(head_dim):
                        part[d] = state[row, d]
                    part[head_dim] = state_tops[row]
                    part[head_dim + 1] = state_totals[row]
        finish(sync, phase)
    wait(sync, phase, num_items)


@part()
def merge(sync, phase, work, partials, out):
    """Put the splits of each token together, in order. ``partials`` is folded in place."""
    num_tokens, num_heads, head_dim = out.shape
    group = num_heads // work.cells.shape[2]
    length_step = int(work.lengths.shape[1] > 1)
    num_chunks = (num_tokens + _TOKENS_A_MERGE - 1) // _TOKENS_A_MERGE
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        for t in range(chunk * _TOKENS_A_MERGE, min((chunk + 1) * _TOKENS_A_MERGE, num_tokens)):
            slot = work.first_slots[t]
            if slot < 0:
                continue
            s = work.seq_of[t]
            for head in range(num_heads):
                limit = work.lengths[s, head // group * length_step] - (work.query_starts[s + 1] - 1 - t)
                state = partials[slot, head]
                top, total = state[head_dim], state[head_dim + 1]
                for k in range(1, (limit + work.split_size - 1) // work.split_size):
                    part = partials[slot + k, head]
                    top, total = _fold(
                        top, total, state[:head_dim], part[head_dim], part[head_dim + 1], part[:head_dim]
                    )
                weight = np.float32(1.0) / total
                for d in range(head_dim):
                    out[t, head, d] = state[d] * weight
        finish(sync, phase)
    wait(sync, phase, num_chunks)
