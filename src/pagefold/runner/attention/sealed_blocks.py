"""What attention does where blocks are sealed (see ``sealed_slab.py``).

K's scales are those of a block's channels: queries are multiplied by them, block by block, before the first pass. A row
sees the sealed blocks before its own like any others, and its own block in 16 bit, which is folded into what it has of
its last split.
"""

from __future__ import annotations

import numpy as np

from pagefold.kernels.bits import bits_of
from pagefold.kernels.compiled import FAST, part, part_with
from pagefold.kernels.emit import FLOAT_BYTES, LINE_BYTES, call_tile, fetch
from pagefold.kernels.team import claim, finish, wait
from pagefold.runner.attention.fold import fold
from pagefold.runner.attention.kernel_slab import KEY_SCALES, KEYS, VALUE_SCALES, VALUES, SealedBlocks
from pagefold.runner.attention.tiles import FLOAT16, INT2
from pagefold.runner.codecs.kernel import encode_int2, from_bfloat16, from_float16, to_float16

__all__ = ["attend_own_blocks", "score_channels", "seal", "write_unsealed"]


@part()
def _unsealed(slab, work, cell, s, h, index):
    """Return where sequence ``s`` has its block ``index`` in 16 bit, of those that the step writes or goes on with.

    The last one is in its residual, those before are the step's own: it has begun them itself.
    """
    length = work.lengths[s, h if work.lengths.shape[1] > 1 else 0]
    if index == (length - 1) // slab.block_size:
        return slab.residuals[cell, work.residual_ids[s]]
    first = (length - (work.query_starts[s + 1] - work.query_starts[s])) // slab.block_size
    return slab.opened[work.first_opened[s] + index - first, h]


@part_with(SealedBlocks)
def write_unsealed(slab, work, cell, s, h, entry, key, value):
    """Write K, centred, and V, ``[D]``, of an entry of sequence ``s`` into its block in 16 bit."""
    head_dim, block_size = slab.head_dim, slab.block_size
    slot = entry % block_size
    into = _unsealed(slab, work, cell, s, h, entry // block_size)
    for d in range(head_dim):
        into[d * block_size + slot] = to_float16(key[d] - slab.centres[cell, min(entry, 1), d])
        into[(block_size + slot) * head_dim + d] = to_float16(value[d])


@part_with(SealedBlocks)
def seal(sync, phase, work, slab, layer, scratch):
    """Encode the blocks that are full now, from their 16 bit."""
    head_dim, block_size = slab.head_dim, slab.block_size
    num_seals = len(work.seals)
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_seals:
            break
        s, h, index = work.seals[chunk, 0], work.seals[chunk, 1], work.seals[chunk, 2]
        cell = work.cells[s if work.cells.shape[0] > 1 else 0, layer, h]
        block = work.tables[s, h if work.tables.shape[1] > 1 else 0, index - work.first_blocks[s]]
        parts, unsealed = slab.cells[cell], _unsealed(slab, work, cell, s, h, index)
        quarter = head_dim // 4
        for i in range(head_dim + block_size):  # K's channels, and then V's tokens: each has a scale
            slot = i - head_dim
            if i < head_dim:
                size, first, count, period, first_code = block_size, i * block_size, head_dim, block_size, i // quarter
                begin, scale_at = parts[KEYS] + i % quarter * block_size, parts[KEY_SCALES] + 2 * i
            else:
                size, first, count, period, first_code = head_dim, block_size * head_dim, block_size, quarter, 0
                first += slot * head_dim
                begin, scale_at = parts[VALUES] + slot * quarter, parts[VALUE_SCALES] + 2 * slot
            vector = scratch.zeros[:size]
            for e in range(size):
                vector[e] = from_float16(unsealed[first + e])
            views = slab.codes[block], slab.halves[block]
            encode_int2(views, vector, begin, period, first_code, scale_at, scale_at + 2 * count)
        finish(sync, phase)
    wait(sync, phase, num_seals)


@part_with(SealedBlocks)
def score_channels(tiles, slab, parts, table, num_columns, query, room):
    """Scores of a split whose K has scales for each channel of a block: queries are multiplied with them first."""
    block_size, head_dim, lanes = slab.block_size, slab.head_dim, tiles.lanes
    num_rows, scores, blocks = len(query), room.scores, room.blocks
    columns_a_block = block_size // lanes
    here, there = -1, -1  # the blocks whose scales are in the two sets of queries
    for c in range(0, num_columns, 2):
        d = min(c + 1, num_columns - 1)  # an odd one's partner is itself: nobody reads those scores
        b, other = c // columns_a_block, d // columns_a_block
        if b != here:
            _scale_queries(slab, table[b], parts[KEY_SCALES], query, room, 0)
            here = b
        side = 0
        if other != b:
            side = 1
            if other != there:
                _scale_queries(slab, table[other], parts[KEY_SCALES], query, room, 1)
                there = other
        for at in range(parts[VALUES] - parts[KEYS], parts[KEY_SCALES] - parts[KEYS], LINE_BYTES):
            fetch(blocks[b] + at)
            fetch(blocks[other] + at)
        e, f = min(c + 2, num_columns - 1), min(c + 3, num_columns - 1)
        call_tile(tiles.scores[INT2], (
            room.scaled[0].ctypes.data, room.scaled[side].ctypes.data, head_dim,
            blocks[b] + c % columns_a_block * lanes, blocks[other] + d % columns_a_block * lanes, block_size,
            scores.ctypes.data + c * lanes * FLOAT_BYTES, scores.shape[1], head_dim, num_rows,
            blocks[e // columns_a_block] + e % columns_a_block * lanes,
            blocks[f // columns_a_block] + f % columns_a_block * lanes,
        ))  # fmt: skip
        for r in range(num_rows):
            for i in range(c * lanes, (c + 1) * lanes):
                scores[r, i] += room.constants[0, r]
            for i in range((c + 1) * lanes, (d + 1) * lanes):
                scores[r, i] += room.constants[side, r]


@part(fastmath=FAST)
def _scale_queries(slab, block, begin, query, room, side):
    """Multiply queries with the scales of a block's channels, and with its zero points, which give a constant."""
    head_dim = slab.head_dim
    halves = slab.halves[block, begin // 2 :]
    scales, zeros = room.vector, room.spare
    for d in range(head_dim):
        scales[d] = from_bfloat16(halves[d])
        zeros[d] = from_bfloat16(halves[head_dim + d])
    for r in range(len(query)):
        total = np.float32(0.0)
        for d in range(head_dim):
            room.scaled[side, r, d] = query[r, d] * scales[d]
            total += query[r, d] * zeros[d]
        room.constants[side, r] = total


@part()
def _attend_unsealed(tiles, unsealed, slab, is_first, query, room, row, into, softcap):
    """Attend to the rows' own block, in 16 bit, and fold it into ``into``, ``room.tops`` and ``room.totals``.

    Args:
        unsealed: the block.
        is_first: whether it is the sequence's first.
        query: float32 ``[n, D]``.
        room: the member's scratch, with what each row sees of the block: ``hidden`` and ``limits``, which ascend.
        row: which of its rows is the first.
        into: float32 ``[n, D]``.
    """
    num_rows = len(query)
    num_entries = room.limits[row + num_rows - 1]
    block_size, head_dim, lanes = slab.block_size, slab.head_dim, tiles.lanes
    scores, own = room.scores, room.own
    base, width = unsealed.ctypes.data, scores.shape[1]
    num_columns = (num_entries + lanes - 1) // lanes
    for c in range(0, num_columns, 2):
        w0, w1 = base + 2 * lanes * c, base + 2 * lanes * min(c + 1, num_columns - 1)
        call_tile(tiles.scores[FLOAT16], (
            query.ctypes.data, head_dim, w0, w1, 2 * block_size, scores.ctypes.data + c * lanes * FLOAT_BYTES, width,
            head_dim, num_rows, w0, w1,
        ))  # fmt: skip
    for r in range(num_rows):
        if is_first:
            scores[r, 0] += room.first_shifts[row + r] - room.shifts[row + r]
        if softcap != 0.0:
            for e in range(num_entries):
                scores[r, e] += room.shifts[row + r]
    call_tile(tiles.weights, (
        scores.ctypes.data, width * FLOAT_BYTES, room.hidden[row:].ctypes.data, room.limits[row:].ctypes.data,
        num_rows, num_entries, bits_of(softcap), room.constants[0].ctypes.data, room.constants[1].ctypes.data, 0,
    ))  # fmt: skip
    room.blocks[0] = base
    for d in range(0, head_dim, lanes * tiles.vectors):
        call_tile(tiles.values[FLOAT16], (
            scores.ctypes.data, width, room.blocks.ctypes.data, 1, block_size, num_entries,
            2 * (block_size * head_dim + d), 2 * head_dim, own.ctypes.data + d * FLOAT_BYTES, head_dim, num_rows,
            room.blocks.ctypes.data,
        ))  # fmt: skip
    for r in range(num_rows):
        room.tops[row + r], room.totals[row + r] = fold(
            room.tops[row + r], room.totals[row + r], into[r], room.constants[0, r], room.constants[1, r], own[r]
        )


@part_with(SealedBlocks)
def attend_own_blocks(tiles, work, slab, cell, item, split, scratch, query, into, softcap):
    """Attend to the own blocks of an item's tokens, of those whose last split this is; arguments as in ``attend``."""
    block_size = slab.block_size
    h, first, end, group = item.kv_head, item.first, item.end, item.group
    length_step = int(work.lengths.shape[1] > 1)
    i = first
    while i < end:
        t = work.tokens[i]
        s = work.seq_of[t]
        entry = work.lengths[s, h * length_step] - (work.query_starts[s + 1] - t)
        index = entry // block_size
        if entry // work.split_size != split:
            i += 1
            continue
        num = 1  # tokens of the sequence in that block
        while (
            i + num < end
            and work.tokens[i + num] == t + num
            and t + num < work.query_starts[s + 1]
            and (entry + num) // block_size == index
        ):
            num += 1
        row = (i - first) * group
        rows = slice(row, row + num * group)
        for r in range(num * group):
            scratch.limits[row + r] = entry + r // group + 1 - index * block_size
            scratch.hidden[row + r] = max(0, scratch.begins[row + r] - index * block_size)
        unsealed = _unsealed(slab, work, cell, s, h, index)
        _attend_unsealed(
            tiles, unsealed, slab, index == 0, query[rows], scratch, row, into[rows], softcap
        )  # fmt: skip
        i += num
