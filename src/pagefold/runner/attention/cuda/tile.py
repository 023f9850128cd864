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
from pagefold.runner.attention.cuda.groups import Cell, Softmax

__all__ = ["INTERPRETED", "attend_own", "attend_tile", "cell_of", "finished", "nothing_seen", "weight_of_sinks"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, on tensors of a CPU."""

_UP = tl.constexpr(INTERPRETED)
_LOG2E = tl.constexpr(1.4426950408889634)


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
def cell_of(
    blocks,  # Blocks
    cell_id,  # int64
    table,  # pointer to int32 [W]: the sequence's blocks
    SHAPE: tl.constexpr,
    CELL_FORMAT: tl.constexpr,
):
    """Return the Cell of that id and table."""
    if CELL_FORMAT.KEY_FORMAT == PLAIN:
        key = blocks.data + cell_id * (2 * SHAPE.BLOCK_SIZE * SHAPE.HEAD_DIM)
        value = key + SHAPE.BLOCK_SIZE * SHAPE.HEAD_DIM
        key_scales, value_scales = key, key
    else:
        ALIGNMENT: tl.constexpr = CELL_FORMAT.ALIGNMENT
        place = blocks.places + 4 * cell_id
        key = blocks.data + tl.multiple_of(tl.load(place), ALIGNMENT)
        value = blocks.data + tl.multiple_of(tl.load(place + 1), ALIGNMENT)
        key_scales = blocks.data + tl.multiple_of(tl.load(place + 2), ALIGNMENT)
        value_scales = blocks.data + tl.multiple_of(tl.load(place + 3), ALIGNMENT)
    return Cell(
        key=key,
        value=value,
        key_scales=key_scales,
        value_scales=value_scales,
        block_stride=blocks.block_stride,
        table=table,
        key_centres=blocks.key_centres + cell_id * (1 + blocks.num_ranges) * SHAPE.HEAD_DIM,
        value_centres=blocks.value_centres + cell_id * 2 * SHAPE.HEAD_DIM,
        num_ranges=blocks.num_ranges,
    )


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Return the Softmax of rows that have seen nothing yet."""
    return Softmax(
        acc=tl.zeros([ROWS, DIMS], tl.float32),
        top=tl.full([ROWS], float("-inf"), tl.float32),
        total=tl.zeros([ROWS], tl.float32),
    )


@triton.jit
def _add_centres(
    scores,  # [ROWS, TILE]
    query,
    entries,  # [TILE], from ``start`` on
    start,
    key_centres,  # of a Cell
    num_ranges,
    scale,
    HEAD_DIM: tl.constexpr,
):
    """Add to scores what queries make of what was taken off K; all entries of a tile are of one range."""
    dims = tl.arange(0, query.shape[1])
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
def _weigh(scores, softmax):
    """Return the weights of these scores, and the Softmax with all but their V, faded by what its top has grown."""
    new_top = tl.maximum(softmax.top, tl.max(scores, 1))
    # A row that has seen nothing yet has no largest score: its weights are to be 0, not NaN.
    zero = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - zero[:, None])
    fade = tl.exp2(softmax.top - zero)
    acc = softmax.acc * fade[:, None]
    return weights, Softmax(acc=acc, top=new_top, total=softmax.total * fade + tl.sum(weights, 1))


@triton.jit
def attend_tile(
    softmax,  # Softmax
    query,  # [ROWS, DIMS]
    start,  # the tile's first entry
    sight,  # Sight (masked only)
    cell,  # Cell
    scoring,  # Scoring
    SHAPE: tl.constexpr,
    CELL_FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Take the TILE entries from ``start`` on into the running softmax; return it."""
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    DIMS: tl.constexpr = SHAPE.DIMS
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    KEY_FORMAT: tl.constexpr = CELL_FORMAT.KEY_FORMAT
    VALUE_FORMAT: tl.constexpr = CELL_FORMAT.VALUE_FORMAT
    dims = tl.arange(0, DIMS)
    entries = start + tl.arange(0, TILE)
    is_entry = entries >= 0
    if IS_MASKED:
        is_entry = entries < sight.end
        if HAS_WINDOW:
            is_entry = is_entry & (entries >= sight.low)
        blocks = tl.load(cell.table + entries // BLOCK_SIZE, mask=is_entry, other=0)
    else:
        blocks = tl.load(cell.table + entries // BLOCK_SIZE)
    blocks_at = blocks.to(tl.int64) * cell.block_stride
    slots = entries % BLOCK_SIZE
    scales_at = (blocks_at + 2 * slots) // 2
    IS_CUT: tl.constexpr = IS_MASKED or DIMS != HEAD_DIM
    is_number = is_entry[None, :] if DIMS == HEAD_DIM else is_entry[None, :] & (dims < HEAD_DIM)[:, None]
    rows = (blocks_at + slots * CELL_FORMAT.KEY_ROW)[None, :]
    keys = load_codes(cell.key, rows, dims[:, None], is_number, KEY_FORMAT, HEAD_DIM, IS_CUT)
    is_value = is_entry[:, None] if DIMS == HEAD_DIM else is_entry[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (blocks_at + slots * CELL_FORMAT.VALUE_ROW)[:, None]
    values = load_codes(cell.value, rows, dims[None, :], is_value, VALUE_FORMAT, HEAD_DIM, IS_CUT)
    # A scale is a score's, or a weight's: there are fewer of these. But for formats with zero points, for scales of
    # channels, and for float16, whose range is too small for a weight times a scale.
    if CELL_FORMAT.SEALS:
        at = (blocks_at // 2)[None, :] + dims[:, None]  # halved before the sum: so it is seen what lies side by side
        key_scales = load_scales(cell.key_scales, at, is_number, IS_CUT)
        zeros = load_scales(cell.key_scales, at + HEAD_DIM, is_number, IS_CUT)
        keys = scale_numbers(keys, key_scales, zeros, KEY_FORMAT)
    elif has_scales(KEY_FORMAT):
        key_scales = load_scales(cell.key_scales, scales_at, is_entry, IS_MASKED)
        if has_zeros(KEY_FORMAT):
            zeros = load_scales(cell.key_scales, scales_at + BLOCK_SIZE, is_entry, IS_MASKED)
            keys = scale_numbers(keys, key_scales[None, :], zeros[None, :], KEY_FORMAT)
    scores = _multiply(query, keys.to(query.dtype)) * scoring.scale
    if has_scales(KEY_FORMAT) and not has_zeros(KEY_FORMAT):
        scores = scores * key_scales[None, :]
    if CELL_FORMAT.HAS_CENTRES:
        scores = _add_centres(scores, query, entries, start, cell.key_centres, cell.num_ranges, scoring.scale, HEAD_DIM)
    if HAS_SOFTCAP:
        scores = scoring.softcap * _tanh(scores)
    if IS_MASKED:
        is_seen = (entries[None, :] < sight.visible[:, None]) & is_entry[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (entries[None, :] >= sight.begins[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    weights, softmax = _weigh(scores, softmax)
    acc = softmax.acc
    if CELL_FORMAT.HAS_CENTRES:  # noqa: SIM102 - this is known when it compiles, the other is not
        if start == 0:
            own = tl.sum(tl.where((entries == 0)[None, :], weights, 0.0), 1)
            acc = acc + own[:, None] * tl.load(cell.value_centres + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
    if has_scales(VALUE_FORMAT):
        value_scales = load_scales(cell.value_scales, scales_at, is_entry, IS_MASKED)
        if has_zeros(VALUE_FORMAT):
            zeros = load_scales(cell.value_scales, scales_at + BLOCK_SIZE, is_entry, IS_MASKED)
            values = scale_numbers(values, value_scales[:, None], zeros[:, None], VALUE_FORMAT)
        elif query.dtype == tl.float16:
            values = scale_numbers(values, value_scales[:, None], 0.0, VALUE_FORMAT)
        else:
            weights = weights * value_scales[None, :]
    acc = acc + _multiply(weights.to(query.dtype), values.to(query.dtype))
    return Softmax(acc=acc, top=softmax.top, total=softmax.total)


@triton.jit
def attend_own(
    softmax,  # Softmax
    query,  # [ROWS, DIMS]
    start,  # the tile's first entry
    unsealed,  # Unsealed
    cell,  # Cell
    scoring,  # Scoring
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Take TILE entries of rows' own blocks into the running softmax; return it."""
    dims = tl.arange(0, SHAPE.DIMS)
    is_dim = dims < SHAPE.HEAD_DIM
    entries = start + tl.arange(0, TILE)
    is_entry = entries < unsealed.end
    at = unsealed.at + (start - unsealed.first) * unsealed.slot_stride + (entries - start) * unsealed.slot_stride
    keys = tl.load(at[None, :] + dims[:, None], mask=is_entry[None, :] & is_dim[:, None], other=0.0)
    mask = is_entry[:, None] & is_dim[None, :]
    values = tl.load(at[:, None] + unsealed.value_offset + dims[None, :], mask=mask, other=0.0)
    scores = _multiply(query, keys.to(query.dtype)) * scoring.scale
    scores = _add_centres(scores, query, entries, start, cell.key_centres, 1, scoring.scale, SHAPE.HEAD_DIM)
    if HAS_SOFTCAP:
        scores = scoring.softcap * _tanh(scores)
    is_seen = (entries[None, :] >= unsealed.begins[:, None]) & (entries[None, :] < unsealed.visible[:, None])
    weights, softmax = _weigh(tl.where(is_seen & is_entry[None, :], scores, float("-inf")), softmax)
    acc = softmax.acc + _multiply(weights.to(query.dtype), values.to(query.dtype))
    return Softmax(acc=acc, top=softmax.top, total=softmax.total)


@triton.jit
def weight_of_sinks(sinks, heads, top, mask):
    """Return the weights of sinks, float32, beside others whose scores are at most ``top``, in powers of two."""
    scores = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32) * _LOG2E
    return tl.where(top > float("-inf"), tl.exp2(scores - top), 0.0)


@triton.jit
def finished(
    softmax,  # Softmax
    of_sinks,  # float32 [ROWS]: the weights of sinks, where rows have them
    cell,  # Cell
    SHAPE: tl.constexpr,
    CELL_FORMAT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Return the outputs of a Softmax, float32 ``[ROWS, DIMS]``; zeros where a row has seen nothing."""
    total = softmax.total
    whole = total + of_sinks if HAS_SINKS else total
    out = softmax.acc / tl.where(whole > 0.0, whole, 1.0)[:, None]
    if CELL_FORMAT.HAS_CENTRES:
        dims = tl.arange(0, SHAPE.DIMS)
        centre = tl.load(cell.value_centres + SHAPE.HEAD_DIM + dims, mask=dims < SHAPE.HEAD_DIM, other=0.0)
        share = tl.where(total > 0.0, total / whole if HAS_SINKS else 1.0, 0.0)
        out = out + share[:, None] * centre[None, :]
    return hadamard(out, CELL_FORMAT.ROTATION) if CELL_FORMAT.ROTATION else out
