"""Triton kernels beside attention where K and V are codes: encode a step's K and V, bring its queries to where K is.

A program takes ROWS tokens of one head. Their cell is that of the first one, so ROWS is 1 where sequences differ in it.
Both are compiled without fused multiply-adds: see ``codes.py``.
"""

import triton
import triton.language as tl

from pagefold.runner.attention.cuda.codes import hadamard, store_codes
from pagefold.runner.attention.cuda.entries import table_of
from pagefold.runner.attention.cuda.groups import PER_STEP
from pagefold.runner.codecs import constants

__all__ = ["RANGE", "bring_queries", "write_codes"]

RANGE = tl.constexpr(constants.RANGE)


@triton.jit
def _into_basis(
    vectors_at,  # pointers [ROWS]: at each vector's first number
    centres_at,  # pointers [ROWS], float32: at what is taken off it (with HAS_CENTRES only)
    is_row,
    basis,  # float32 [D, D]
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_CENTRES: tl.constexpr,
):
    """Return ``[ROWS, DIMS]``: the sum of ``vector[j] * basis[j]``, j in order; see ``codecs/basis.py``."""
    dims = tl.arange(0, DIMS)
    total = tl.zeros([is_row.shape[0], DIMS], tl.float32)
    for j in range(HEAD_DIM):
        column = tl.load(vectors_at + j, mask=is_row, other=0.0).to(tl.float32)
        if HAS_CENTRES:
            column -= tl.load(centres_at + j, mask=is_row, other=0.0)
        row = tl.load(basis + j * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        total += column[:, None] * row[None, :]
    return total


@triton.jit(do_not_specialize=PER_STEP)
def write_codes(
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
    key_centres,  # float32 [num_cells, 1 + R, D]
    value_centres,  # float32 [num_cells, 2, D]
    bases,  # float32 [num_cells, D, D]: of K
    # which layer, and how many
    layer,
    num_tokens,
    num_ranges,
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
    CELL_FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Encode the K and V of ROWS tokens and one head where they belong. Grid: (tokens / ROWS, Hkv)."""
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    DIMS: tl.constexpr = SHAPE.DIMS
    ROTATION: tl.constexpr = CELL_FORMAT.ROTATION
    HAS_CENTRES: tl.constexpr = CELL_FORMAT.HAS_CENTRES
    head = tl.program_id(1)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = tokens < num_tokens
    seqs = tl.load(seq_of + tokens, mask=is_row, other=0)
    after = tl.load(query_starts + seqs + 1) - tokens  # entries from each token's on
    entries = tl.load(lengths + seqs * length_stride_s + head * length_stride_h) - after
    is_row = is_row & (entries >= 0)  # a row that only fills up a batch has no entries
    entries = tl.maximum(entries, 0)
    table = table_of(tables, first_blocks, seqs, head, table_stride_s, table_stride_h, HAS_WINDOW)
    blocks_at = tl.load(table + entries // SHAPE.BLOCK_SIZE, mask=is_row, other=0).to(tl.int64) * block_stride
    slots = entries % SHAPE.BLOCK_SIZE
    first_seq = tl.load(seq_of + tl.program_id(0) * ROWS)
    cell = tl.load(cells + first_seq * cell_stride_s + layer * SHAPE.NUM_KV_HEADS + head).to(tl.int64)
    dims = tl.arange(0, DIMS)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tokens.to(tl.int64)

    vectors_at = key + rows * key_stride_t + head * key_stride_h
    ranges = 1 + tl.minimum(entries // RANGE, num_ranges - 1)
    centres_at = key_centres + (cell * (1 + num_ranges) + tl.where(entries == 0, 0, ranges)) * HEAD_DIM
    if CELL_FORMAT.HAS_BASIS:
        numbers = _into_basis(
            vectors_at, centres_at, is_row, bases + cell * HEAD_DIM * HEAD_DIM, HEAD_DIM, DIMS, HAS_CENTRES
        )
    else:
        numbers = tl.load(vectors_at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_CENTRES:
            numbers -= tl.load(centres_at[:, None] + dims[None, :], mask=mask, other=0.0)
        if ROTATION:
            numbers = hadamard(numbers, ROTATION)
    place = places + 4 * cell
    store_codes(
        slab + tl.load(place),
        slab + tl.load(place + 2),
        blocks_at + slots * CELL_FORMAT.KEY_ROW,
        blocks_at + slots * 2,
        numbers,
        is_row,
        CELL_FORMAT.KEY_FORMAT,
        HEAD_DIM,
        SHAPE.BLOCK_SIZE,
    )

    vectors_at = value + rows * value_stride_t + head * value_stride_h
    numbers = tl.load(vectors_at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_CENTRES:
        centres_at = value_centres + (cell * 2 + tl.minimum(entries, 1)) * HEAD_DIM
        numbers -= tl.load(centres_at[:, None] + dims[None, :], mask=mask, other=0.0)
    if ROTATION:
        numbers = hadamard(numbers, ROTATION)
    store_codes(
        slab + tl.load(place + 1),
        slab + tl.load(place + 3),
        blocks_at + slots * CELL_FORMAT.VALUE_ROW,
        blocks_at + slots * 2,
        numbers,
        is_row,
        CELL_FORMAT.VALUE_FORMAT,
        HEAD_DIM,
        SHAPE.BLOCK_SIZE,
    )


@triton.jit(do_not_specialize=PER_STEP)
def bring_queries(
    # vectors: queries of the step, and where they are brought
    query,  # [T, H, D]
    out,  # [T, H, D], contiguous
    # where entries lie
    seq_of,  # int32 [T]
    cells,  # int32 [S, L, Hkv]
    # what there is of cells
    bases,  # float32 [num_cells, D, D]: of queries
    # which layer, and how many
    layer,
    num_tokens,
    # strides: of vectors, of where entries lie
    query_stride_t,
    query_stride_h,
    cell_stride_s,
    # constants
    SHAPE: tl.constexpr,
    CELL_FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Bring the queries of ROWS tokens and one head into their basis, or rotate them. Grid: (tokens / ROWS, H)."""
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    DIMS: tl.constexpr = SHAPE.DIMS
    ROTATION: tl.constexpr = CELL_FORMAT.ROTATION
    head = tl.program_id(1)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = tokens < num_tokens
    rows = tokens.to(tl.int64)
    dims = tl.arange(0, DIMS)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    vectors_at = query + rows * query_stride_t + head * query_stride_h
    if CELL_FORMAT.HAS_BASIS:
        first_seq = tl.load(seq_of + tl.program_id(0) * ROWS)
        at = cells + first_seq * cell_stride_s + layer * SHAPE.NUM_KV_HEADS + head // SHAPE.GROUP
        cell = tl.load(at).to(tl.int64)
        basis = bases + cell * HEAD_DIM * HEAD_DIM
        numbers = _into_basis(vectors_at, vectors_at, is_row, basis, HEAD_DIM, DIMS, False)
    else:
        numbers = tl.load(vectors_at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        numbers = hadamard(numbers, ROTATION)
    to = out + (rows * SHAPE.NUM_KV_HEADS * SHAPE.GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to, numbers.to(out.dtype.element_ty), mask=mask)
