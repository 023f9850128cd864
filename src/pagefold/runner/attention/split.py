"""One split of attention: scores, softmax and the weighted sum of some query rows over entries that lie side by side.

See ``kernel.py``, which says of what a token's splits are, and what becomes of their results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagefold.kernels.bits import bits_of
from pagefold.kernels.compiled import part
from pagefold.kernels.emit import FLOAT_BYTES, LINE_BYTES, call_tile, fetch
from pagefold.runner.attention.coded_blocks import (
    add_centres,
    add_shifts,
    bring_query,
    code_bytes,
    num_scales,
    row_codes,
    scale_scores,
    scale_weights,
)
from pagefold.runner.attention.kernel_slab import KEY_FORMAT, KEY_SCALES, KEYS, VALUE_FORMAT, VALUES
from pagefold.runner.attention.sealed_blocks import score_channels
from pagefold.runner.attention.tiles import FLOAT32, INT2, PAIRS
from pagefold.runner.attention.work import end_seen, first_seen

__all__ = ["Item", "attend_found", "attend_split", "bring_queries"]


class Item(NamedTuple):
    """The query rows of a piece of work: some tokens, times the query heads of one KV head.

    Attributes:
        kv_head: which one.
        first, end: where its tokens are in the work's.
        group: query heads a KV head.
    """

    kv_head: int
    first: int
    end: int
    group: int


@part()
def _into_pairs(tiles, rows, num_numbers, num_rows):
    """Round the first numbers of float32 rows to bfloat16, where they are: into the first half of each row."""
    distance = rows.shape[1] * FLOAT_BYTES
    call_tile(tiles.rows, (rows.ctypes.data, distance, num_numbers, num_rows, rows.ctypes.data, distance))


@part()
def attend_split(tiles, slab, cell, table, first, num_entries, query, room, acc, softcap, num_ahead):
    """Attend to ``num_entries`` of a split: ``query`` [R, D], whose row r sees ``[room.hidden[r], room.limits[r])``.

    Leaves the sum of weighted values in ``acc`` [R, D], the largest score in ``room.tops``, the weights' sum in
    ``room.totals``. ``table[0]`` is the first block that is read, which is the sequence's block ``first``. While V is
    summed, ``num_ahead`` of the blocks of ``room.ahead`` are fetched.
    """
    parts = slab.cells[cell]
    base = slab.codes.ctypes.data + parts[KEYS]
    is_encoded = num_scales(parts[KEY_FORMAT]) + num_scales(parts[VALUE_FORMAT]) > 0
    for b in range((num_entries + slab.block_size - 1) // slab.block_size):
        room.blocks[b] = base + np.int64(table[b]) * slab.codes.shape[1]
        if is_encoded:
            fetch(room.blocks[b] + parts[KEY_SCALES] - parts[KEYS])
    attend_found(tiles, slab, cell, table, first, num_entries, query, room, acc, softcap, num_ahead)


@part()
def attend_found(tiles, slab, cell, table, first, num_entries, query, room, acc, softcap, num_ahead):
    """Do the same where ``room.blocks`` has the addresses of the blocks' keys, of whichever cells they are."""
    num_rows, lanes = len(query), tiles.lanes
    block_size, head_dim = slab.block_size, slab.head_dim
    scores, blocks, limits, hidden = room.scores, room.blocks, room.limits, room.hidden
    width = scores.shape[1]
    parts = slab.cells[cell]
    key_format, value_format = parts[KEY_FORMAT], parts[VALUE_FORMAT]
    num_blocks = (num_entries + block_size - 1) // block_size
    columns_a_block = block_size // lanes
    num_columns = (num_entries + lanes - 1) // lanes
    if key_format == INT2:
        score_channels(tiles, slab, parts, table, num_columns, query, room)
        num_columns = 0
    column_bytes = lanes * code_bytes(key_format)
    panel_step = block_size if key_format == FLOAT32 else block_size * code_bytes(key_format)
    for c in range(0, num_columns, 2):
        d = min(c + 1, num_columns - 1)  # an odd one's partner is itself: nobody reads those scores
        e = min(c + 2, num_columns - 1)
        f = min(c + 3, num_columns - 1)
        if value_format != FLOAT32:  # narrow rows end before the processor has noticed that they are a stream
            for at in range(parts[VALUES] - parts[KEYS], parts[KEY_SCALES] - parts[KEYS], LINE_BYTES):
                fetch(blocks[c // columns_a_block] + at)
                fetch(blocks[d // columns_a_block] + at)
        w0 = blocks[c // columns_a_block] + (c % columns_a_block) * column_bytes
        w1 = blocks[d // columns_a_block] + (d % columns_a_block) * column_bytes
        n0 = blocks[e // columns_a_block] + (e % columns_a_block) * column_bytes
        n1 = blocks[f // columns_a_block] + (f % columns_a_block) * column_bytes
        call_tile(tiles.scores[key_format], (
            query.ctypes.data, head_dim, w0, w1, panel_step,
            scores.ctypes.data + c * lanes * FLOAT_BYTES, width, head_dim, num_rows, n0, n1,
        ))  # fmt: skip
    scale_scores(slab, cell, first, num_entries, query, room)
    add_shifts(slab, cell, first, num_rows, num_entries, room, softcap)
    call_tile(tiles.weights, (
        scores.ctypes.data, width * FLOAT_BYTES, hidden.ctypes.data, limits.ctypes.data, num_rows, num_entries,
        bits_of(softcap), room.tops.ctypes.data, room.totals.ctypes.data, int(value_format == PAIRS),
    ))  # fmt: skip
    scale_weights(slab, cell, num_rows, num_entries, room)
    ahead, offset = room.ahead, parts[VALUES] - parts[KEYS]
    for b in range(num_blocks):  # rows of values are found there, too
        ahead[b] = ahead[b] - offset if b < num_ahead else blocks[b]
    step = lanes * tiles.vectors
    num_columns = row_codes(value_format, head_dim)
    size = code_bytes(value_format)
    row_step = head_dim if value_format == FLOAT32 else num_columns * size
    for d in range(0, num_columns, step):
        at = offset // FLOAT_BYTES + d if value_format == FLOAT32 else offset + d * size
        call_tile(tiles.values[value_format], (
            scores.ctypes.data, width, blocks.ctypes.data, num_blocks, block_size, num_entries,
            at, row_step, acc.ctypes.data + d * FLOAT_BYTES, head_dim, num_rows, ahead.ctypes.data,
        ))  # fmt: skip
    add_centres(slab, cell, first, room, acc)


@part(forceinline=True)
def bring_queries(tiles, work, query, slab, cell, item, scale, scratch):
    """Take an item's queries, scaled, into ``scratch``, and what each row sees; return the (first, end) of all that."""
    head_dim, block_size = slab.head_dim, slab.block_size
    is_sealed = slab.cells[cell, KEY_FORMAT] == INT2
    begin, end = 2**31 - 1, 0
    for i in range(item.first, item.end):
        t = work.tokens[i]
        limit = end_seen(work, item.kv_head, t)
        seen_from = first_seen(work.keeps, work.mask_of[work.seq_of[t]], limit - 1)
        begin, end = min(begin, seen_from), max(end, limit)
        for g in range(item.group):
            row = (i - item.first) * item.group + g
            scratch.begins[row] = seen_from
            scratch.ends[row] = (limit - 1) // block_size * block_size if is_sealed else limit
            for d in range(head_dim):
                scratch.query[row, d] = query[t, item.kv_head * item.group + g, d] * scale
            bring_query(slab, cell, scratch.query[row], row, scratch)
    if slab.cells[cell, KEY_FORMAT] == PAIRS:
        _into_pairs(tiles, scratch.query, head_dim, (item.end - item.first) * item.group)
    return begin, end
