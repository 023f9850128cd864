"""Attention over blocks, the kernel: what one member of the team does with the dealt work. float32.

An item's query rows are its tokens times the query heads of one KV head, so K and V are read once for a group, for a
tile of tokens, and for all sequences that share the split. Three passes over a split: scores (a matrix tile over panels
of K), softmax over each row, the weighted sum (a matrix tile over V). Slots that hold no entry are never read into a
result.

Where K and V are encoded, tiles load codes (see ``attention_tiles.py``), and scales are applied beside them: with
``k = code * scale + zero`` a score is ``(q . code) * scale + sum(q) * zero``, and the sum of weighted values is that of
codes weighted by ``weight * scale``, plus the sum of ``weight * zero``, in each number. Where they are rotated, queries
are rotated before the first pass and outputs rotated back after the last; where K has a basis, queries are brought into
the one that belongs to it. What was taken off V is added to the sums, each constant by the weights of its entries; what
was taken off K is added to scores as far as it differs between entries.

Where blocks are sealed (``sealed_slab.py``) K's scales are those of a block's channels: queries are multiplied by them,
block by block, before the first pass. A row sees the sealed blocks before its own like any others, and its own block in
16 bit, which is folded into what it has of its last split.
"""

from __future__ import annotations

import numpy as np

from pagefold.runner.attention.kernel_slab import (
    HAS_BASIS,
    KEY_FORMAT,
    KEY_SCALES,
    KEYS,
    ROTATION,
    VALUE_FORMAT,
    VALUE_SCALES,
    VALUES,
)
from pagefold.runner.attention.work import AttentionWork
from pagefold.runner.codecs.constants import RANGE
from pagefold.runner.codecs.kernel import (
    encode,
    encode_int2,
    from_bfloat16,
    from_float16,
    hadamard,
    into_basis,
    to_float16,
)
from pagefold.runner.kernels.attention_tiles import (
    BFLOAT16,
    E4M3_SCALED,
    FLOAT16,
    FLOAT32,
    INT2,
    INT4,
    INT4_SYMMETRIC,
    INT8,
    TWO_WIDTHS,
)
from pagefold.runner.kernels.compiled import part
from pagefold.runner.kernels.emit import call_tile, fetch
from pagefold.runner.kernels.exponential import exp2_row
from pagefold.runner.kernels.team import claim, finish, wait

__all__ = ["AttentionWork", "attend", "merge", "seal", "write"]

_FLOAT_BYTES, _LINE_BYTES = 4, 64
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
def _code_bytes(form):
    """Return the bytes of a code, or of all codes that share a byte."""
    if form == FLOAT32:
        return 4
    return 2 if form in {FLOAT16, BFLOAT16} else 1


@part()
def _row_codes(form, head_dim):
    """Return how many codes a vector has, or bytes that several share."""
    if form == INT2:
        return head_dim // 4
    return head_dim // 2 if form in {INT4, INT4_SYMMETRIC} else head_dim


@part()
def _num_scales(form):
    if form in {INT4, INT2}:
        return 2
    return 1 if form in {INT8, E4M3_SCALED, TWO_WIDTHS, INT4_SYMMETRIC} else 0


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


@part()
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
        block = work.tables[s, h if work.tables.shape[1] > 1 else 0, index]
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


@part()
def write(slab, work, layer, t, h, key, value, scratch):
    """Write K and V, ``[D]``, of token ``t`` and KV head ``h`` into the token's block. ``scratch`` is the member's."""
    head_dim, block_size = slab.head_dim, slab.block_size
    s = work.seq_of[t]
    entry = work.lengths[s, h if work.lengths.shape[1] > 1 else 0] - (work.query_starts[s + 1] - t)
    block = work.tables[s, h if work.tables.shape[1] > 1 else 0, entry // block_size]
    cell = work.cells[s if work.cells.shape[0] > 1 else 0, layer, h]
    slot = entry % block_size
    parts = slab.cells[cell]
    key_format, value_format, rotation = parts[KEY_FORMAT], parts[VALUE_FORMAT], parts[ROTATION]
    if key_format == FLOAT32:
        keys, values = slab.floats[block, parts[KEYS] // 4 :], slab.floats[block, parts[VALUES] // 4 :]
        for d in range(head_dim):
            keys[d * block_size + slot] = key[d]
            values[slot * head_dim + d] = value[d]
        return
    views = slab.codes[block], slab.halves[block], slab.floats[block]
    room = scratch.vector
    place = 0 if entry == 0 else 1 + min(entry // RANGE, slab.centres.shape[1] - 2)
    for d in range(head_dim):
        room[d] = key[d] - slab.centres[cell, place, d]
    if key_format == INT2:
        unsealed = _unsealed(slab, work, cell, s, h, entry // block_size)
        for d in range(2 * head_dim):
            at = d * block_size + slot if d < head_dim else (block_size + slot - 1) * head_dim + d
            unsealed[at] = to_float16(room[d] if d < head_dim else value[d - head_dim])
        return
    if parts[HAS_BASIS]:
        into_basis(room, slab.bases[cell, 0], scratch.spare)
    elif rotation:
        hadamard(room, rotation, scratch.spare)
    size = _code_bytes(key_format)
    begin, step = parts[KEYS] + slot * size, block_size * size
    encode(views, key_format, room, begin, step, parts[KEY_SCALES] + 2 * slot, block_size)
    for d in range(head_dim):
        room[d] = value[d] - slab.value_centres[cell, min(entry, 1), d]
    if rotation:
        hadamard(room, rotation, scratch.spare)
    size = _code_bytes(value_format)
    row_bytes = _row_codes(value_format, head_dim) * size
    begin = parts[VALUES] + slot * row_bytes
    encode(views, value_format, room, begin, size, parts[VALUE_SCALES] + 2 * slot, block_size)


@part()
def _read_scales(slab, table, first, begin, num_scales, num_entries, scales, zeros):
    """Read the scales of a split's entries, and their zero points; ``begin`` is where a block has them, in bytes."""
    block_size = slab.block_size
    for b in range((num_entries + block_size - 1) // block_size):
        halves = slab.halves[table[first + b], begin // 2 :]
        start = b * block_size
        for e in range(min(block_size, num_entries - start)):
            scales[start + e] = from_bfloat16(halves[e])
            if num_scales > 1:
                zeros[start + e] = from_bfloat16(halves[block_size + e])


@part()
def _attend_split(tiles, slab, cell, table, first, num_entries, query, room, acc, softcap):
    """Attend to one split: ``query`` [R, D], of which row r sees the first ``room.limits[r]`` of ``num_entries``.

    Leaves the sum of weighted values in ``acc`` [R, D], the largest score in ``room.tops``, the weights' sum in
    ``room.totals``. ``table[first]`` is the split's first block.
    """
    num_rows, lanes = len(query), tiles.lanes
    block_size, head_dim = slab.block_size, slab.head_dim
    scores, blocks, limits = room.scores, room.blocks, room.limits
    width = scores.shape[1]
    parts = slab.cells[cell]
    key_format, value_format = parts[KEY_FORMAT], parts[VALUE_FORMAT]
    num_blocks = (num_entries + block_size - 1) // block_size
    base = slab.codes.ctypes.data + parts[KEYS]
    is_encoded = _num_scales(key_format) + _num_scales(value_format) > 0
    for b in range(num_blocks):
        blocks[b] = base + np.int64(table[first + b]) * slab.codes.shape[1]
        if is_encoded:
            fetch(blocks[b] + parts[KEY_SCALES] - parts[KEYS])
    columns_a_block = block_size // lanes
    num_columns = (num_entries + lanes - 1) // lanes
    if key_format == INT2:
        _score_channels(tiles, slab, parts, table, first, num_columns, query, room)
        num_columns = 0
    column_bytes = lanes * _code_bytes(key_format)
    panel_step = block_size if key_format == FLOAT32 else block_size * _code_bytes(key_format)
    for c in range(0, num_columns, 2):
        d = min(c + 1, num_columns - 1)  # an odd one's partner is itself: nobody reads those scores
        e = min(c + 2, num_columns - 1)
        f = min(c + 3, num_columns - 1)
        if value_format != FLOAT32:  # narrow rows end before the processor has noticed that they are a stream
            for at in range(parts[VALUES] - parts[KEYS], parts[KEY_SCALES] - parts[KEYS], _LINE_BYTES):
                fetch(blocks[c // columns_a_block] + at)
                fetch(blocks[d // columns_a_block] + at)
        w0 = blocks[c // columns_a_block] + (c % columns_a_block) * column_bytes
        w1 = blocks[d // columns_a_block] + (d % columns_a_block) * column_bytes
        n0 = blocks[e // columns_a_block] + (e % columns_a_block) * column_bytes
        n1 = blocks[f // columns_a_block] + (f % columns_a_block) * column_bytes
        call_tile(tiles.scores[key_format], (
            query.ctypes.data, head_dim, w0, w1, panel_step,
            scores.ctypes.data + c * lanes * _FLOAT_BYTES, width, head_dim, num_rows, n0, n1,
        ))  # fmt: skip
    num_scales = _num_scales(key_format)
    if num_scales:
        if key_format != INT2:
            _read_scales(slab, table, first, parts[KEY_SCALES], num_scales, num_entries, room.scales, room.zeros)
        for r in range(num_rows):
            if key_format != INT2:
                _scale_scores(scores[r], room.scales, room.zeros, key_format, query[r], num_entries)
                _add_drifts(scores[r], slab.drifts[cell], query[r], first * block_size, num_entries)
            if first == 0:  # the first entry has a centre of its own
                scores[r, 0] += room.first_shifts[r] - room.shifts[r]
            if softcap != 0.0:  # tanh sees a shift, as softmax does not
                for e in range(num_entries):
                    scores[r, e] += room.shifts[r]
    for r in range(num_rows):
        room.tops[r], room.totals[r] = exp2_row(scores[r], limits[r], num_entries, softcap, room.powers, _NOTHING)
    num_scales = _num_scales(value_format)
    if num_scales:
        _read_scales(slab, table, first, parts[VALUE_SCALES], num_scales, num_entries, room.scales, room.zeros)
        for r in range(num_rows):
            room.first_weights[r] = scores[r, 0]
            room.sums[r] = _scale_weights(scores[r], room.scales, room.zeros, value_format, limits[r])
    step = lanes * tiles.vectors
    num_columns = _row_codes(value_format, head_dim)
    size = _code_bytes(value_format)
    row_step = head_dim if value_format == FLOAT32 else num_columns * size
    offset = parts[VALUES] - parts[KEYS]
    for d in range(0, num_columns, step):
        at = offset // _FLOAT_BYTES + d if value_format == FLOAT32 else offset + d * size
        call_tile(tiles.values[value_format], (
            scores.ctypes.data, width, blocks.ctypes.data, num_blocks, block_size, num_entries,
            at, row_step, acc.ctypes.data + d * _FLOAT_BYTES, head_dim, num_rows,
        ))  # fmt: skip
    if value_format in {INT4, INT4_SYMMETRIC, INT2}:  # with zero points or centres
        first_centre, centre = slab.rotated_centres[cell, 0], slab.rotated_centres[cell, 1]
        for r in range(num_rows):
            first_weight = room.first_weights[r] if first == 0 else np.float32(0.0)
            other_weights = room.totals[r] - first_weight
            for d in range(head_dim):
                acc[r, d] += room.sums[r] + first_weight * first_centre[d] + other_weights * centre[d]


_FAST = {"reassoc", "contract", "nsz"}


@part()
def _score_channels(tiles, slab, parts, table, first, num_columns, query, room):
    """Scores of a split whose K has scales for each channel of a block: queries are multiplied with them first."""
    block_size, head_dim, lanes = slab.block_size, slab.head_dim, tiles.lanes
    num_rows, scores, blocks = len(query), room.scores, room.blocks
    columns_a_block = block_size // lanes
    here, there = -1, -1  # the blocks whose scales are in the two sets of queries
    for c in range(0, num_columns, 2):
        d = min(c + 1, num_columns - 1)  # an odd one's partner is itself: nobody reads those scores
        b, other = c // columns_a_block, d // columns_a_block
        if b != here:
            _scale_queries(slab, table[first + b], parts[KEY_SCALES], query, room, 0)
            here = b
        side = 0
        if other != b:
            side = 1
            if other != there:
                _scale_queries(slab, table[first + other], parts[KEY_SCALES], query, room, 1)
                there = other
        for at in range(parts[VALUES] - parts[KEYS], parts[KEY_SCALES] - parts[KEYS], _LINE_BYTES):
            fetch(blocks[b] + at)
            fetch(blocks[other] + at)
        e, f = min(c + 2, num_columns - 1), min(c + 3, num_columns - 1)
        call_tile(tiles.scores[INT2], (
            room.scaled[0].ctypes.data, room.scaled[side].ctypes.data, head_dim,
            blocks[b] + c % columns_a_block * lanes, blocks[other] + d % columns_a_block * lanes, block_size,
            scores.ctypes.data + c * lanes * _FLOAT_BYTES, scores.shape[1], head_dim, num_rows,
            blocks[e // columns_a_block] + e % columns_a_block * lanes,
            blocks[f // columns_a_block] + f % columns_a_block * lanes,
        ))  # fmt: skip
        for r in range(num_rows):
            for i in range(c * lanes, (c + 1) * lanes):
                scores[r, i] += room.constants[0, r]
            for i in range((c + 1) * lanes, (d + 1) * lanes):
                scores[r, i] += room.constants[side, r]


@part(fastmath=_FAST)
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
def _attend_unsealed(tiles, unsealed, slab, is_first, ends, query, room, row, into, softcap):
    """Attend to the rows' own block, in 16 bit, and fold it into ``into``, ``room.tops`` and ``room.totals``.

    Args:
        unsealed: the block.
        is_first: whether it is the sequence's first.
        ends: int32 ``[n]``: entries of the block that each row sees, ascending.
        query: float32 ``[n, D]``.
        room: the member's scratch.
        row: which of its rows is the first.
        into: float32 ``[n, D]``.
    """
    num_rows, num_entries = len(query), ends[-1]
    block_size, head_dim, lanes = slab.block_size, slab.head_dim, tiles.lanes
    scores, own = room.scores, room.own
    base, width = unsealed.ctypes.data, scores.shape[1]
    num_columns = (num_entries + lanes - 1) // lanes
    for c in range(0, num_columns, 2):
        w0, w1 = base + 2 * lanes * c, base + 2 * lanes * min(c + 1, num_columns - 1)
        call_tile(tiles.scores[FLOAT16], (
            query.ctypes.data, head_dim, w0, w1, 2 * block_size, scores.ctypes.data + c * lanes * _FLOAT_BYTES, width,
            head_dim, num_rows, w0, w1,
        ))  # fmt: skip
    for r in range(num_rows):
        if is_first:
            scores[r, 0] += room.first_shifts[row + r] - room.shifts[row + r]
        if softcap != 0.0:
            for e in range(num_entries):
                scores[r, e] += room.shifts[row + r]
        room.constants[0, r], room.constants[1, r] = exp2_row(
            scores[r], ends[r], num_entries, softcap, room.powers, _NOTHING
        )
    room.blocks[0] = base
    for d in range(0, head_dim, lanes * tiles.vectors):
        call_tile(tiles.values[FLOAT16], (
            scores.ctypes.data, width, room.blocks.ctypes.data, 1, block_size, num_entries,
            2 * (block_size * head_dim + d), 2 * head_dim, own.ctypes.data + d * _FLOAT_BYTES, head_dim, num_rows,
        ))  # fmt: skip
    for r in range(num_rows):
        room.tops[row + r], room.totals[row + r] = _fold(
            room.tops[row + r], room.totals[row + r], into[r], room.constants[0, r], room.constants[1, r], own[r]
        )


@part(fastmath=_FAST)
def _scale_scores(scores, scales, zeros, form, query, num_entries):
    """Turn products with codes into scores, in place."""
    if form == INT4:
        total = np.float32(0.0)
        for d in range(len(query)):
            total += query[d]
        for e in range(num_entries):
            scores[e] = scores[e] * scales[e] + total * zeros[e]
    else:
        for e in range(num_entries):
            scores[e] *= scales[e]


@part(fastmath=_FAST)
def _add_drifts(scores, drifts, query, start, num_entries):
    """Add to scores what the centre of their range comes to beside the first range's; ``start`` is the first entry."""
    last = len(drifts) - 1
    begin = 0
    while begin < num_entries:
        place = min((start + begin) // RANGE, last)
        end = num_entries if place == last else min(num_entries, (place + 1) * RANGE - start)
        if place > 0:
            drift = np.float32(0.0)
            for d in range(len(query)):
                drift += query[d] * drifts[place, d]
            for e in range(begin, end):
                scores[e] += drift
        begin = end


@part(fastmath=_FAST)
def _scale_weights(weights, scales, zeros, form, num_seen):
    """Make weights of codes of weights of values, in place; return what the zero points come to."""
    total = np.float32(0.0)
    if form in {INT4, INT2}:
        for e in range(num_seen):
            total += weights[e] * zeros[e]
    for e in range(num_seen):
        weights[e] *= scales[e]
    return total


@part()
def _attend_own_blocks(tiles, work, slab, cell, h, split, first, end, group, scratch, query, into, softcap):
    """Attend to the own blocks of an item's tokens, of those whose last split this is; arguments as in ``attend``."""
    block_size = slab.block_size
    length_step = int(work.lengths.shape[1] > 1)
    i = first
    while i < end:
        t = work.tokens[i]
        s = work.seq_of[t]
        position = work.lengths[s, h * length_step] - (work.query_starts[s + 1] - t)
        index = position // block_size
        if position // work.split_size != split:
            i += 1
            continue
        num = 1  # tokens of the sequence in that block
        while (
            i + num < end
            and work.tokens[i + num] == t + num
            and t + num < work.query_starts[s + 1]
            and (position + num) // block_size == index
        ):
            num += 1
        row = (i - first) * group
        rows = slice(row, row + num * group)
        for r in range(num * group):
            scratch.limits[row + r] = position + r // group + 1 - index * block_size
        unsealed = _unsealed(slab, work, cell, s, h, index)
        _attend_unsealed(
            tiles, unsealed, slab, index == 0, scratch.limits[rows], query[rows], scratch, row, into[rows], softcap
        )  # fmt: skip
        i += num


@part()
def attend(tiles, sync, phase, work, query, slab, layer, scale, softcap, scratch, partials, out):
    """Do items of ``work`` until none is left.

    Args:
        tiles: :class:`AttentionTiles`.
        query: ``[T, H, D]``, or wider: rows are ``query.shape[1]`` heads apart.
        slab: :class:`~pagefold.runner.attention.kernel_slab.KernelSlab`.
        scale: factor of the scores; with ``softcap`` it leads to tanh's argument, else to powers of two.
        scratch: this member's :class:`Scratch`.
        partials: ``[num_slots, H, D + 2]``.
        out: ``[T, H, D]``.
    """
    head_dim, num_heads = out.shape[2], out.shape[1]
    num_kv_heads = work.cells.shape[2]
    group = num_heads // num_kv_heads
    block_size = slab.block_size
    split_size = work.split_size
    blocks_a_split = split_size // block_size
    table_step, length_step = int(work.tables.shape[1] > 1), int(work.lengths.shape[1] > 1)
    cell_step = int(work.cells.shape[0] > 1)
    num_items = len(work.items)
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
        cell = work.cells[s * cell_step, layer, h]
        rotation = slab.cells[cell, ROTATION]
        is_sealed = slab.cells[cell, KEY_FORMAT] == INT2
        for i in range(first, end):
            t = work.tokens[i]
            owner = work.seq_of[t]
            limit = work.lengths[owner, h * length_step] - (work.query_starts[owner + 1] - 1 - t)
            longest = max(longest, limit)
            for g in range(group):
                row = (i - first) * group + g
                scratch.ends[row] = (limit - 1) // block_size * block_size if is_sealed else limit
                shift = first_shift = np.float32(0.0)
                for d in range(head_dim):
                    q[row, d] = query[t, h * group + g, d] * scale
                    first_shift += q[row, d] * slab.centres[cell, 0, d]
                    shift += q[row, d] * slab.centres[cell, 1, d]
                scratch.shifts[row], scratch.first_shifts[row] = shift, first_shift
                if slab.cells[cell, HAS_BASIS]:
                    into_basis(q[row], slab.bases[cell, 1], scratch.spare)
                elif rotation:
                    hadamard(q[row], rotation, scratch.spare)
        first_split, end_split = (0, (longest + split_size - 1) // split_size) if split < 0 else (split, split + 1)
        for k in range(first_split, end_split):
            start = k * split_size
            num_entries = min(split_size, ((longest - 1) // block_size * block_size if is_sealed else longest) - start)
            for row in range(num_rows):
                limits[row] = max(0, min(num_entries, scratch.ends[row] - start))
            into = acc if k > first_split else state
            table = work.tables[s, h * table_step]
            if num_entries > 0:
                _attend_split(tiles, slab, cell, table, k * blocks_a_split, num_entries, q, scratch, into, softcap)
            else:  # all that is to be seen of the split is a row's own block
                into[:], tops[:], totals[:] = np.float32(0.0), _NOTHING, np.float32(0.0)
            if is_sealed:
                _attend_own_blocks(tiles, work, slab, cell, h, k, first, end, group, scratch, q, into, softcap)
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
                    if rotation:
                        hadamard(out[t, h * group + g], rotation, scratch.spare)
                else:
                    part = partials[slot + split, h * group + g]
                    for d in range(head_dim):
                        part[d] = state[row, d]
                    part[head_dim] = state_tops[row]
                    part[head_dim + 1] = state_totals[row]
        finish(sync, phase)
    wait(sync, phase, num_items)


@part()
def merge(sync, phase, work, slab, layer, scratch, partials, out):
    """Put the splits of each token together, in order. ``partials`` is folded in place."""
    num_tokens, num_heads, head_dim = out.shape
    group = num_heads // work.cells.shape[2]
    length_step = int(work.lengths.shape[1] > 1)
    rotation = slab.cells[work.cells[0, layer, 0], ROTATION]  # a layer's cells have one codec
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
                if rotation:
                    hadamard(out[t, head], rotation, scratch.spare)
        finish(sync, phase)
    wait(sync, phase, num_chunks)
