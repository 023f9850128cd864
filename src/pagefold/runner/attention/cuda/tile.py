"""One tile of entries into a running softmax: what the Triton kernels of attention do again and again.

A tile's K and V are loaded, as numbers or as codes, and multiplied. Softmax is online (Milakov and Gimelshein, 2018),
in powers of two; sums are float32. Where a block lies is an offset of 64 bits: a slab of 80 GB has more than 2^31
elements. Slots that nobody wrote hold anything, also NaN: a weight of zero would not save us from it, so what is not
visible is not loaded.
"""

import triton
import triton.language as tl

from pagefold.runner.attention.cuda.codes import (
    PLAIN,
    hadamard,
    has_scales,
    has_zeros,
    load_codes,
    load_scales,
    scale_numbers,
)
from pagefold.runner.attention.cuda.encode import RANGE

__all__ = ["INTERPRETED", "attend_own", "attend_tile", "centres_of", "finished", "parts_of"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, on tensors of a CPU."""

_UP = tl.constexpr(INTERPRETED)


@triton.jit
def _multiply(a, b):
    """``a @ b``, summed in float32; of float32 without rounding to TF32."""
    if _UP:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _tanh(x):
    """Return tanh: 1 - 2 / (e^2x + 1), right also where the power overflows."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def parts_of(
    slab,
    places,  # int32 [num_cells, 4] (with a codec only)
    cell,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Return where a cell's parts are in block 0: K, V, and the scales of each."""
    if FORMAT == PLAIN:
        keys = slab + cell * (2 * BLOCK_SIZE * HEAD_DIM)
        return keys, keys + BLOCK_SIZE * HEAD_DIM, keys, keys
    else:  # noqa: RET505 - Triton compiles one of two branches, not what follows a return
        place = places + 4 * cell
        keys = slab + tl.multiple_of(tl.load(place), ALIGNMENT)
        values = slab + tl.multiple_of(tl.load(place + 1), ALIGNMENT)
        key_scales = slab + tl.multiple_of(tl.load(place + 2), ALIGNMENT)
        return keys, values, key_scales, slab + tl.multiple_of(tl.load(place + 3), ALIGNMENT)


@triton.jit
def centres_of(key_centres, value_centres, cell, num_ranges, HEAD_DIM: tl.constexpr):
    """Return where a cell's centres are."""
    return key_centres + cell * (1 + num_ranges) * HEAD_DIM, value_centres + cell * 2 * HEAD_DIM


@triton.jit
def _add_centres(
    scores,  # [ROWS, TILE]
    query,
    entries,  # [TILE], from ``start`` on
    start,
    centres,  # see centres_of
    num_ranges,
    scale,
    HEAD_DIM: tl.constexpr,
):
    """Add to scores what queries make of what was taken off K; all entries of a tile are of one range."""
    dims = tl.arange(0, query.shape[1])
    key_centres, _ = centres
    at = key_centres + (1 + tl.minimum(start // RANGE, num_ranges - 1)) * HEAD_DIM
    centre = tl.load(at + dims, mask=dims < HEAD_DIM, other=0.0)
    shift = tl.sum(query.to(tl.float32) * centre[None, :], 1) * scale
    scores = scores + shift[:, None]
    if start == 0:  # a sequence's first entry has its own
        centre = tl.load(key_centres + dims, mask=dims < HEAD_DIM, other=0.0)
        first_shift = tl.sum(query.to(tl.float32) * centre[None, :], 1) * scale
        scores = scores + tl.where((entries == 0)[None, :], (first_shift - shift)[:, None], 0.0)
    return scores


@triton.jit
def _weigh(scores, acc, top, total):
    """Return the weights of these scores, and what there was, faded by what the largest score has grown."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet has no largest score: its weights are to be 0, not NaN.
    zero = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - zero[:, None])
    fade = tl.exp2(top - zero)
    return weights, acc * fade[:, None], new_top, total * fade + tl.sum(weights, 1)


@triton.jit
def attend_tile(
    query,  # [ROWS, DIMS]
    acc,  # float32 [ROWS, DIMS]: the weighted sum of V so far
    top,  # float32 [ROWS]: the largest score so far
    total,  # float32 [ROWS]: the sum of weights so far
    start,  # the tile's first entry
    low,  # entries before it are not loaded (masked only)
    end,  # nor those from here on (masked only)
    visible,  # int32 [ROWS]: a row sees the entries before it (masked only)
    window,  # and of these the last so many (with HAS_WINDOW only)
    parts,  # of the cell, in block 0: see parts_of
    centres,  # of the cell (with HAS_CENTRES only): see centres_of
    num_ranges,
    table,  # of the sequence and head
    block_stride,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    HAS_CENTRES: tl.constexpr,
    SEALS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Take the TILE entries from ``start`` on into the running softmax; return it."""
    dims = tl.arange(0, DIMS)
    entries = start + tl.arange(0, TILE)
    is_entry = entries >= 0
    if IS_MASKED:
        is_entry = entries < end
        if HAS_WINDOW:
            is_entry = is_entry & (entries >= low)
        blocks = tl.load(table + entries // BLOCK_SIZE, mask=is_entry, other=0)
    else:
        blocks = tl.load(table + entries // BLOCK_SIZE)
    blocks_at = blocks.to(tl.int64) * block_stride
    slots = entries % BLOCK_SIZE
    scales_at = (blocks_at + 2 * slots) // 2
    keys_at, values_at, key_scales_at, value_scales_at = parts
    IS_CUT: tl.constexpr = IS_MASKED or DIMS != HEAD_DIM
    is_number = is_entry[None, :] if DIMS == HEAD_DIM else is_entry[None, :] & (dims < HEAD_DIM)[:, None]
    rows = (blocks_at + slots * KEY_ROW)[None, :]
    keys = load_codes(keys_at, rows, dims[:, None], is_number, KEY_FORMAT, HEAD_DIM, IS_CUT)
    is_value = is_entry[:, None] if DIMS == HEAD_DIM else is_entry[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (blocks_at + slots * VALUE_ROW)[:, None]
    values = load_codes(values_at, rows, dims[None, :], is_value, VALUE_FORMAT, HEAD_DIM, IS_CUT)
    # A scale is a score's, or a weight's: there are fewer of these. But for formats with zero points, for scales of
    # channels, and for float16, whose range is too small for a weight times a scale.
    if SEALS:
        at = (blocks_at // 2)[None, :] + dims[:, None]  # halved before the sum: so it is seen what lies side by side
        key_scales = load_scales(key_scales_at, at, is_number, IS_CUT)
        zeros = load_scales(key_scales_at, at + HEAD_DIM, is_number, IS_CUT)
        keys = scale_numbers(keys, key_scales, zeros, KEY_FORMAT)
    elif has_scales(KEY_FORMAT):
        key_scales = load_scales(key_scales_at, scales_at, is_entry, IS_MASKED)
        if has_zeros(KEY_FORMAT):
            zeros = load_scales(key_scales_at, scales_at + BLOCK_SIZE, is_entry, IS_MASKED)
            keys = scale_numbers(keys, key_scales[None, :], zeros[None, :], KEY_FORMAT)
    scores = _multiply(query, keys.to(query.dtype)) * scale
    if has_scales(KEY_FORMAT) and not has_zeros(KEY_FORMAT):
        scores = scores * key_scales[None, :]
    if HAS_CENTRES:
        scores = _add_centres(scores, query, entries, start, centres, num_ranges, scale, HEAD_DIM)
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores)
    if IS_MASKED:
        is_seen = (entries[None, :] < visible[:, None]) & is_entry[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (entries[None, :] >= visible[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    weights, acc, top, total = _weigh(scores, acc, top, total)
    if HAS_CENTRES:  # noqa: SIM102 - this is known when it compiles, the other is not
        if start == 0:
            _, value_centres = centres
            own = tl.sum(tl.where((entries == 0)[None, :], weights, 0.0), 1)
            acc = acc + own[:, None] * tl.load(value_centres + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
    if has_scales(VALUE_FORMAT):
        value_scales = load_scales(value_scales_at, scales_at, is_entry, IS_MASKED)
        if has_zeros(VALUE_FORMAT):
            zeros = load_scales(value_scales_at, scales_at + BLOCK_SIZE, is_entry, IS_MASKED)
            values = scale_numbers(values, value_scales[:, None], zeros[:, None], VALUE_FORMAT)
        elif query.dtype == tl.float16:
            values = scale_numbers(values, value_scales[:, None], 0.0, VALUE_FORMAT)
        else:
            weights = weights * value_scales[None, :]
    acc = acc + _multiply(weights.to(query.dtype), values.to(query.dtype))
    return acc, top, total


@triton.jit
def attend_own(
    query,  # [ROWS, DIMS]
    acc,  # float32 [ROWS, DIMS]: as for attend_tile
    top,  # float32 [ROWS]
    total,  # float32 [ROWS]
    start,  # the tile's first entry
    end,  # entries from here on are not loaded
    begins,  # int32 [ROWS]: a row sees the entries from here on,
    visible,  # int32 [ROWS]: and before this
    own,  # float16: where the K of ``start`` is
    slot_stride,  # from an entry's K or V to the next one's
    value_offset,  # from an entry's K to its V
    centres,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Take TILE entries of rows' own blocks, which are not sealed to them, into the running softmax; return it."""
    dims = tl.arange(0, DIMS)
    entries = start + tl.arange(0, TILE)
    is_entry = entries < end
    at = own + (entries - start) * slot_stride
    keys = tl.load(at[None, :] + dims[:, None], mask=is_entry[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
    mask = is_entry[:, None] & (dims < HEAD_DIM)[None, :]
    values = tl.load(at[:, None] + value_offset + dims[None, :], mask=mask, other=0.0)
    scores = _multiply(query, keys.to(query.dtype)) * scale
    scores = _add_centres(scores, query, entries, start, centres, 1, scale, HEAD_DIM)
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores)
    is_seen = (entries[None, :] >= begins[:, None]) & (entries[None, :] < visible[:, None]) & is_entry[None, :]
    weights, acc, top, total = _weigh(tl.where(is_seen, scores, float("-inf")), acc, top, total)
    return acc + _multiply(weights.to(query.dtype), values.to(query.dtype)), top, total


@triton.jit
def finished(
    acc,
    total,
    centres,  # of the cell (with HAS_CENTRES only)
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROTATION: tl.constexpr,
    HAS_CENTRES: tl.constexpr,
):
    """Return outputs, ``[ROWS, DIMS]``, of weighted sums; zeros where a row has seen nothing."""
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if HAS_CENTRES:
        _, value_centres = centres
        dims = tl.arange(0, DIMS)
        centre = tl.load(value_centres + HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        out = out + tl.where(total > 0.0, 1.0, 0.0)[:, None] * centre[None, :]
    return hadamard(out, ROTATION) if ROTATION else out
