"""What attention does where K and V are codes, beside the tiles that load them (see ``tiles.py``).

Scales are applied beside the tiles: with ``k = code * scale + zero`` a score is ``(q . code) * scale + sum(q) * zero``,
and the sum of weighted values is that of codes weighted by ``weight * scale``, plus the sum of ``weight * zero``, in
each number. Where they are rotated, queries are rotated before the first pass and outputs rotated back after the last;
where K has a basis, queries are brought into the one that belongs to it. What was taken off V is added to sums, each
constant by the weights of its entries; what was taken off K is added to scores as far as it differs between entries.
"""

from __future__ import annotations

import numpy as np

from pagefold.kernels.compiled import FAST, part, part_with
from pagefold.runner.attention.kernel_slab import (
    HAS_BASIS,
    KEY_FORMAT,
    KEY_SCALES,
    KEYS,
    ROTATION,
    VALUE_FORMAT,
    VALUE_SCALES,
    VALUES,
    CodedBlocks,
    SealedBlocks,
)
from pagefold.runner.attention.tiles import (
    BFLOAT16,
    E4M3_SCALED,
    FLOAT16,
    FLOAT32,
    INT2,
    INT4,
    INT4_SYMMETRIC,
    INT8,
    PAIRS,
    TWO_WIDTHS,
)
from pagefold.runner.codecs.constants import RANGE
from pagefold.runner.codecs.kernel import encode, from_bfloat16, hadamard, into_basis

__all__ = [
    "add_centres",
    "add_shifts",
    "bring_query",
    "code_bytes",
    "num_scales",
    "raise_tops",
    "rotate_back",
    "row_codes",
    "scale_scores",
    "scale_weights",
    "write_codes",
]

# Where a format is one of several, these are in a tuple: Numba makes a set on the heap, each time that it is asked.


@part()
def code_bytes(form):
    """Return the bytes of a code, or of all codes that share a byte or a word."""
    if form in (FLOAT32, PAIRS):
        return 4
    return 2 if form in (FLOAT16, BFLOAT16) else 1


@part()
def row_codes(form, head_dim):
    """Return how many codes a vector has, or bytes that several share."""
    if form == INT2:
        return head_dim // 4
    return head_dim // 2 if form in (INT4, INT4_SYMMETRIC) else head_dim


@part()
def num_scales(form):
    """Return how many numbers of a vector, or of a channel, are beside its codes: a scale, and a zero point."""
    if form in (INT4, INT2):
        return 2
    return 1 if form in (INT8, E4M3_SCALED, TWO_WIDTHS, INT4_SYMMETRIC) else 0


@part_with(CodedBlocks)
def write_codes(slab, cell, block, entry, key, value, scratch):
    """Encode K and V, ``[D]``, of a sequence's ``entry`` into its slot."""
    head_dim, block_size = slab.head_dim, slab.block_size
    slot, parts = entry % block_size, slab.cells[cell]
    key_format, value_format, rotation = parts[KEY_FORMAT], parts[VALUE_FORMAT], parts[ROTATION]
    views = slab.codes[block], slab.halves[block], slab.floats[block]
    room = scratch.vector
    place = 0 if entry == 0 else 1 + min(entry // RANGE, slab.centres.shape[1] - 2)
    for d in range(head_dim):
        room[d] = key[d] - slab.centres[cell, place, d]
    if parts[HAS_BASIS]:
        into_basis(room, slab.bases[cell, 0], scratch.spare)
    elif rotation:
        hadamard(room, rotation, scratch.spare)
    size = code_bytes(key_format)
    begin, step = parts[KEYS] + slot * size, block_size * size
    encode(views, key_format, room, begin, step, parts[KEY_SCALES] + 2 * slot, block_size)
    for d in range(head_dim):
        room[d] = value[d] - slab.value_centres[cell, min(entry, 1), d]
    if rotation:
        hadamard(room, rotation, scratch.spare)
    size = code_bytes(value_format)
    row_bytes = row_codes(value_format, head_dim) * size
    begin = parts[VALUES] + slot * row_bytes
    encode(views, value_format, room, begin, size, parts[VALUE_SCALES] + 2 * slot, block_size)


@part_with(CodedBlocks, SealedBlocks)
def bring_query(slab, cell, query, row, scratch):
    """Bring a query ``[D]`` to where K is, in place; what centres come to with it is kept in ``scratch``."""
    shift = first_shift = np.float32(0.0)
    for d in range(len(query)):
        first_shift += query[d] * slab.centres[cell, 0, d]
        shift += query[d] * slab.centres[cell, 1, d]
    scratch.shifts[row], scratch.first_shifts[row] = shift, first_shift
    rotation = slab.cells[cell, ROTATION]
    if slab.cells[cell, HAS_BASIS]:
        into_basis(query, slab.bases[cell, 1], scratch.spare)
    elif rotation:
        hadamard(query, rotation, scratch.spare)


@part_with(CodedBlocks)
def rotate_back(slab, cell, vector, scratch):
    """Rotate an output ``[D]`` back, in place, where V is rotated."""
    rotation = slab.cells[cell, ROTATION]
    if rotation:
        hadamard(vector, rotation, scratch.spare)


@part()
def _read_scales(slab, offset, num_numbers, num_entries, room):
    """Read the scales of a split's entries, and their zero points.

    Args:
        offset: how far behind the keys of a cell they are, in bytes: in all cells as far.
        num_numbers: of an entry: a scale, and a zero point.
        room: its ``blocks`` say where the keys are.
    """
    block_size, start_of_all = slab.block_size, slab.codes.ctypes.data
    scales, zeros = room.scales, room.zeros
    all_halves = slab.halves.reshape(slab.halves.size)
    for b in range((num_entries + block_size - 1) // block_size):
        halves = all_halves[(room.blocks[b] + offset - start_of_all) // 2 :]
        start = b * block_size
        for e in range(min(block_size, num_entries - start)):
            scales[start + e] = from_bfloat16(halves[e])
            if num_numbers > 1:
                zeros[start + e] = from_bfloat16(halves[block_size + e])


@part_with(CodedBlocks)
def scale_scores(slab, cell, first, num_entries, query, room):
    """Make scores of products with codes, in ``room.scores``; arguments as of ``attend_found``."""
    form = slab.cells[cell, KEY_FORMAT]
    if num_scales(form):
        offset = slab.cells[cell, KEY_SCALES] - slab.cells[cell, KEYS]
        _read_scales(slab, offset, num_scales(form), num_entries, room)
        for r in range(len(query)):
            _scale_row(room.scores[r], room.scales, room.zeros, form, query[r], num_entries)
            _add_drifts(room.scores[r], slab.drifts[cell], query[r], first * slab.block_size, num_entries)


@part_with(CodedBlocks, SealedBlocks)
def add_shifts(slab, cell, first, num_rows, num_entries, room, softcap):
    """Add to scores what centres of K come to, as far as softmax sees it."""
    if num_scales(slab.cells[cell, KEY_FORMAT]):
        for r in range(num_rows):
            if first == 0:  # the first entry has a centre of its own
                room.scores[r, 0] += room.first_shifts[r] - room.shifts[r]
            if softcap != 0.0:  # tanh sees a shift, as softmax does not
                for e in range(num_entries):
                    room.scores[r, e] += room.shifts[r]


@part_with(CodedBlocks, SealedBlocks)
def raise_tops(slab, cell, num_rows, room, softcap):
    """Add to the largest scores of a split what centres of K come to, where all scores are lower by it.

    A sink's score is none of a key, and is not lower.
    """
    if num_scales(slab.cells[cell, KEY_FORMAT]) and softcap == 0.0:
        for r in range(num_rows):
            room.tops[r] += room.shifts[r]


@part_with(CodedBlocks, SealedBlocks)
def scale_weights(slab, cell, num_rows, num_entries, room):
    """Make weights of codes of weights of values, in ``room.scores``; what zero points come to is kept in ``room``."""
    form = slab.cells[cell, VALUE_FORMAT]
    if num_scales(form):
        offset = slab.cells[cell, VALUE_SCALES] - slab.cells[cell, KEYS]
        _read_scales(slab, offset, num_scales(form), num_entries, room)
        for r in range(num_rows):
            room.first_weights[r] = room.scores[r, 0]
            hidden = room.hidden[r]
            num_seen = np.int32(room.limits[r] - hidden)
            room.sums[r] = _scale_weights_of_row(
                room.scores[r, hidden:], room.scales[hidden:], room.zeros[hidden:], form, num_seen
            )


@part_with(CodedBlocks, SealedBlocks)
def add_centres(slab, cell, first, room, acc):
    """Add to sums of values ``[R, D]`` what zero points and centres of V come to."""
    if slab.cells[cell, VALUE_FORMAT] not in (INT4, INT4_SYMMETRIC, INT2):
        return
    first_centre, centre = slab.rotated_centres[cell, 0], slab.rotated_centres[cell, 1]
    for r in range(len(acc)):
        first_weight = room.first_weights[r] if first == 0 else np.float32(0.0)
        other_weights = room.totals[r] - first_weight
        for d in range(acc.shape[1]):
            acc[r, d] += room.sums[r] + first_weight * first_centre[d] + other_weights * centre[d]


@part(fastmath=FAST)
def _scale_row(scores, scales, zeros, form, query, num_entries):
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


@part(fastmath=FAST)
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


@part(fastmath=FAST)
def _scale_weights_of_row(weights, scales, zeros, form, num_seen):
    """Make weights of codes of weights of values, in place; return what the zero points come to."""
    total = np.float32(0.0)
    if form in (INT4, INT2):
        for e in range(num_seen):
            total += weights[e] * zeros[e]
    for e in range(num_seen):
        weights[e] *= scales[e]
    return total
