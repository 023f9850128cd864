"""What attention does where chunks are packed (see ``packed.py``): it marks what is kept, packs it, and attends to it.

A token's marks are its own bytes: no two members of the team write the same.
"""

from __future__ import annotations

import numpy as np

from pagefold.kernels.compiled import part, part_with
from pagefold.kernels.emit import fetch
from pagefold.kernels.team import claim, finish, wait
from pagefold.runner.attention.coded_blocks import code_bytes, num_scales, raise_tops
from pagefold.runner.attention.fold import NOTHING
from pagefold.runner.attention.kernel_slab import (
    KEY_FORMAT,
    KEY_SCALES,
    KEYS,
    VALUE_FORMAT,
    VALUE_SCALES,
    VALUES,
    PackedBlocks,
    PackedCodes,
)
from pagefold.runner.attention.split import attend_found
from pagefold.runner.attention.tiles import FLOAT32, PAIRS
from pagefold.runner.attention.work import end_seen

__all__ = ["attend_kept", "mark", "pack"]


@part(forceinline=True)
def _mark_place(slab, work, layer, slot, h):
    """Return which byte of a block has the mark of a slot, for a layer and KV head."""
    num_kv_heads = work.cells.shape[2]
    place = work.cells[0, layer, 0] // num_kv_heads
    return slab.mark_begin + (place * slab.block_size + slot) * ((num_kv_heads + 7) // 8) + h // 8


@part_with(PackedBlocks)
def mark(slab, work, layer, t, scores, thresholds, num_sinks):
    """Note of which KV heads the entry of token ``t`` is kept: where its score is not below the threshold.

    Args:
        scores: of the KV heads; there may be other numbers behind them.
        thresholds: of each mask, layer and KV head.
        num_sinks: so many first entries of a sequence are kept whatever their scores.
    """
    s = work.seq_of[t]
    mask = work.mask_of[s]
    if mask < 0:  # nothing of it is packed
        return
    entry = end_seen(work, 0, t) - 1
    block = work.tables[s, 0, entry // slab.block_size - work.first_blocks[s]]
    for h in range(thresholds.shape[2]):
        at = _mark_place(slab, work, layer, entry % slab.block_size, h)
        if h % 8 == 0:
            slab.codes[block, at] = 0
        if entry < num_sinks or scores[h] >= thresholds[mask, layer, h]:
            slab.codes[block, at] |= 1 << h % 8


@part()
def _copy_entry(slab, cell, block, slot, into_cell, into_block, into_slot):
    """Copy K and V of an entry from one cell to another, of the same format. They are the same bytes there."""
    head_dim, block_size = slab.head_dim, slab.block_size
    parts, into = slab.cells[cell], slab.cells[into_cell]
    if parts[KEY_FORMAT] == PAIRS:
        keys, values = slab.halves[block, parts[KEYS] // 2 :], slab.halves[block, parts[VALUES] // 2 :]
        into_keys = slab.halves[into_block, into[KEYS] // 2 :]
        into_values = slab.halves[into_block, into[VALUES] // 2 :]
        first, into_first = slot // 2 * 2 * head_dim + slot % 2, into_slot // 2 * 2 * head_dim + into_slot % 2
        for d in range(head_dim):
            into_keys[(d // 2 * block_size + into_slot) * 2 + d % 2] = keys[(d // 2 * block_size + slot) * 2 + d % 2]
            into_values[into_first + 2 * d] = values[first + 2 * d]
        return
    if parts[KEY_FORMAT] == FLOAT32:
        numbers, into_numbers = slab.floats[block], slab.floats[into_block]
        key, value = parts[KEYS] // 4 + slot, parts[VALUES] // 4 + slot * head_dim
        into_key, into_value = into[KEYS] // 4 + into_slot, into[VALUES] // 4 + into_slot * head_dim
        for d in range(head_dim):
            into_numbers[into_key + d * block_size] = numbers[key + d * block_size]
            into_numbers[into_value + d] = numbers[value + d]
        return
    _copy_codes(slab, parts, block, slot, into, into_block, into_slot)


@part_with(PackedCodes)
def _copy_codes(slab, parts, block, slot, into, into_block, into_slot):
    """Copy the codes of an entry, and their scales; ``parts`` and ``into`` are rows of ``slab.cells``."""
    codes, into_codes = slab.codes[block], slab.codes[into_block]
    block_size, size = slab.block_size, code_bytes(parts[KEY_FORMAT])
    for unit in range((parts[VALUES] - parts[KEYS]) // (block_size * size)):
        key, into_key = parts[KEYS] + unit * block_size * size, into[KEYS] + unit * block_size * size
        for i in range(size):
            into_codes[into_key + into_slot * size + i] = codes[key + slot * size + i]
    row_bytes = (parts[KEY_SCALES] - parts[VALUES]) // block_size
    for i in range(row_bytes):
        into_codes[into[VALUES] + into_slot * row_bytes + i] = codes[parts[VALUES] + slot * row_bytes + i]
    halves, into_halves = slab.halves[block], slab.halves[into_block]
    for form, begin in ((KEY_FORMAT, KEY_SCALES), (VALUE_FORMAT, VALUE_SCALES)):
        for number in range(num_scales(parts[form])):
            at, into_at = parts[begin] // 2 + number * block_size, into[begin] // 2 + number * block_size
            into_halves[into_at + into_slot] = halves[at + slot]


@part_with(PackedBlocks)
def pack(sync, phase, work, slab, layer):
    """Pack a layer's part of the chunks that the step packs. All heads of a chunk are one claim: they lie in a row."""
    kept, block_size, split_size = work.kept, slab.block_size, work.split_size
    num_packs = len(kept.packs) if work.keeps.packs else 0
    while num_packs > 0:
        at = claim(sync, phase)
        if at >= num_packs:
            break
        s, number, chunk = kept.packs[at, 0], kept.packs[at, 1], kept.packs[at, 2]
        unit = kept.num_units[at]
        for h in range(work.cells.shape[2]):
            cell, count = work.cells[0, layer, h], 0
            for entry in range(number * split_size, (number + 1) * split_size):
                block = work.tables[s, 0, entry // block_size - work.first_blocks[s]]
                slot = entry % block_size
                if slab.codes[block, _mark_place(slab, work, layer, slot, h)] >> h % 8 & 1:
                    into = unit + count // block_size
                    into_block = kept.blocks[chunk, into // kept.block_units]
                    into_cell = into % kept.block_units
                    _copy_entry(slab, cell, block, slot, into_cell, into_block, count % block_size)
                    count += 1
            kept.units[chunk, layer, h], kept.counts[chunk, layer, h] = unit, count
            unit += (count + block_size - 1) // block_size
        kept.num_units[at] = unit
        finish(sync, phase)
    if num_packs > 0:
        wait(sync, phase, num_packs)


@part_with(PackedBlocks)
def attend_kept(tiles, work, slab, layer, s, k, h, query, room, acc, scoring):
    """Attend to what KV head ``h`` has kept of chunk ``k`` of sequence ``s``: all rows of ``query`` see all of it.

    Leaves what :func:`~pagefold.runner.attention.split.attend_split` does; of nothing a score that nothing is below.
    """
    kept, num_rows = work.kept, len(query)
    chunk = kept.chunk_ids[s, k]
    count, first = kept.counts[chunk, layer, h], kept.units[chunk, layer, h]
    for row in range(num_rows):
        room.limits[row], room.hidden[row] = count, 0
    if count == 0:
        acc[:num_rows] = np.float32(0.0)
        room.tops[:num_rows], room.totals[:num_rows] = NOTHING, np.float32(0.0)
        return
    cell = work.cells[0, layer, h]
    parts = slab.cells[cell]
    is_encoded = num_scales(parts[KEY_FORMAT]) + num_scales(parts[VALUE_FORMAT]) > 0
    for b in range((count + slab.block_size - 1) // slab.block_size):
        unit = first + b
        block = np.int64(kept.blocks[chunk, unit // kept.block_units])
        keys = slab.cells[unit % kept.block_units, KEYS]
        room.blocks[b] = slab.codes.ctypes.data + block * slab.codes.shape[1] + keys
        if is_encoded:
            fetch(room.blocks[b] + parts[KEY_SCALES] - parts[KEYS])
    begin = k * work.split_size // slab.block_size  # what is taken off K goes by chunk
    attend_found(tiles, slab, cell, kept.blocks[chunk], begin, count, query, room, acc, scoring.softcap, 0)
    if len(scoring.sinks) > 0:  # as of what is seen whole
        raise_tops(slab, cell, num_rows, room, scoring.softcap)
