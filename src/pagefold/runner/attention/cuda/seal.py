"""Where blocks are sealed when they are full: write K and V of a step in 16 bit, and seal the blocks that it fills.

Of a block a step computes all slots from some one on. Those before lie in the residual of the block's sequence, from
earlier steps; so it is in a row's first block alone, and a row that begins inside a block ends in it (see
``sealed_slab.py``). Hence where attention finds a token's own block in 16 bit: in its sequence's residual, if the row
begins inside that block or has but one token; else in what this leaves of the step's own K and V.
"""

import triton
import triton.language as tl

from pagefold.runner.attention.cuda.codes import store_int2
from pagefold.runner.attention.cuda.entries import table_of
from pagefold.runner.attention.cuda.groups import PER_STEP

__all__ = ["residual_of", "sealed_before", "write_sealed"]

_MOST = tl.constexpr(65504.0)


@triton.jit
def sealed_before(entry, BLOCK_SIZE: tl.constexpr):
    """Return where the block of an entry begins: the entries before that are sealed to it."""
    return tl.maximum(entry, 0) // BLOCK_SIZE * BLOCK_SIZE


@triton.jit
def residual_of(residuals, cell, residual_id, num_residuals, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return where a residual has the K of a cell, ``[slot][channel]``; behind it is the V."""
    return residuals + (cell * num_residuals + residual_id) * (2 * BLOCK_SIZE * HEAD_DIM)


@triton.jit
def _to_residual(numbers):
    """See ``sealed_slab.to_residual``."""
    halves = tl.minimum(tl.maximum(numbers, -_MOST), _MOST)
    return tl.where(numbers != numbers, numbers, halves).to(tl.float16)  # noqa: PLR0124 - NaN


@triton.jit(do_not_specialize=PER_STEP)
def write_sealed(
    # vectors: K and V of the step
    key,  # [T, Hkv, D]
    value,  # [T, Hkv, D]
    # the slab
    slab,
    # where entries lie
    seq_of,  # int32 [T]
    query_starts,  # int32 [S + 1]
    tables,  # int32 [S, Hkv, W]
    lengths,  # int32 [S, Hkv]
    first_blocks,  # int32 [S]: which of its blocks a table begins with
    cells,  # int32 [S, L, Hkv]
    # what there is of cells
    places,  # int32 [num_cells, 4]: where parts of a cell begin: codes of K and of V, scales of K and of V
    key_centres,  # float32 [num_cells, 2, D]
    # residuals
    residuals,  # float16 [num_cells, R, 2, BLOCK_SIZE, D]
    residual_ids,  # int32 [S]
    recent,  # float16 [T, Hkv, 2, D] (with HAS_RECENT only): the step's K, centred, and V
    # which layer, and how many
    layer,
    num_residuals,
    # strides: of vectors, of the slab, of where entries lie
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    block_stride,
    table_stride_s,
    table_stride_h,
    length_stride_s,
    length_stride_h,
    cell_stride_s,
    # constants
    SHAPE: tl.constexpr,
    HAS_RECENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Write what a step computes of one block and head, if this token is the first of that. Grid: (T, Hkv)."""
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    token = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(seq_of + token)
    length = tl.load(lengths + seq * length_stride_s + head * length_stride_h)
    entry = length - (tl.load(query_starts + seq + 1) - token)
    is_first = (entry % BLOCK_SIZE == 0) | (token == tl.load(query_starts + seq))
    if is_first & (entry >= 0):  # a row that only fills up a batch has no entries
        begin = sealed_before(entry, BLOCK_SIZE)
        slots = tl.arange(0, BLOCK_SIZE)
        entries = begin + slots
        dims = tl.arange(0, SHAPE.DIMS)
        is_number = (dims < HEAD_DIM)[None, :]
        is_new = ((entries >= entry) & (entries < length))[:, None] & is_number
        is_old = (entries < entry)[:, None] & is_number
        cell = tl.load(cells + seq * cell_stride_s + layer * SHAPE.NUM_KV_HEADS + head).to(tl.int64)
        rows = (token + entries - entry).to(tl.int64)

        residual = residual_of(residuals, cell, tl.load(residual_ids + seq), num_residuals, BLOCK_SIZE, HEAD_DIM)
        key_at = residual + slots[:, None] * HEAD_DIM + dims[None, :]
        value_at = key_at + BLOCK_SIZE * HEAD_DIM
        centres_at = key_centres + (cell * 2 + tl.minimum(entries, 1))[:, None] * HEAD_DIM + dims[None, :]
        keys = tl.load(key + rows[:, None] * key_stride_t + head * key_stride_h + dims[None, :], mask=is_new, other=0.0)
        keys = _to_residual(keys.to(tl.float32) - tl.load(centres_at, mask=is_new, other=0.0))
        at = value + rows[:, None] * value_stride_t + head * value_stride_h + dims[None, :]
        values = _to_residual(tl.load(at, mask=is_new, other=0.0).to(tl.float32))
        if HAS_RECENT:
            to = recent + ((rows * SHAPE.NUM_KV_HEADS + head) * (2 * HEAD_DIM))[:, None] + dims[None, :]
            tl.store(to, keys, mask=is_new)
            tl.store(to + HEAD_DIM, values, mask=is_new)
        if begin + BLOCK_SIZE >= length:  # the row's last block
            tl.store(key_at, keys, mask=is_new)
            tl.store(value_at, values, mask=is_new)
        if begin + BLOCK_SIZE <= length:
            all_keys = tl.where(is_new, keys, tl.load(key_at, mask=is_old, other=0.0)).to(tl.float32)
            all_values = tl.where(is_new, values, tl.load(value_at, mask=is_old, other=0.0)).to(tl.float32)
            table = table_of(tables, first_blocks, seq, head, table_stride_s, table_stride_h, HAS_WINDOW)
            block = slab + tl.load(table + begin // BLOCK_SIZE).to(tl.int64) * block_stride
            place = places + 4 * cell
            store_int2(block + tl.load(place), block + tl.load(place + 2), all_keys, 0, HEAD_DIM)
            store_int2(block + tl.load(place + 1), block + tl.load(place + 3), all_values, 1, HEAD_DIM)
