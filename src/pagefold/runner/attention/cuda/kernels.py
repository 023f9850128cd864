"""The Triton kernels of attention over blocks: write K and V, decode in splits, merge these, and ragged prefill.

All take the general signature of :mod:`pagefold.runner.attention.inputs`: what differs by head or sequence has a
stride, which is 0 where it does not. A slab has the layout of rows: ``[block][cell][K or V][slot][head_dim]``, so that
a token's K of one head lies in one piece, whatever tile it is read in.

- *Decode* (split-KV, as Flash-Decoding does it, Dao, Haziza, Massa and Sizov, 2023): one program a sequence, KV head
  and split; all query heads of a group are rows of one product, so K and V are read once. Each split leaves its sum and
  the logarithm of its weight, and ``merge_splits`` puts them together.
- *Prefill* (FlashAttention-2, Dao, 2023): one program a tile of query rows (tokens times the heads of a group) and KV
  head. Tiles that all rows see are not masked.

What they do with a tile of entries is in ``tile.py``; codes are read as ``codes.py`` says. What kernels are given comes
in groups, in one order; of constants, ``SHAPE`` is a ``Shape`` of ``groups.py``, and ``CELL_FORMAT`` one of
``blocks.py``.

Triton's interpreter runs the same code on a CPU (``TRITON_INTERPRET=1``, set before Triton is imported). Two things are
different there: ``tl.dot`` of bfloat16 gives nonsense, so its operands become float32; and a loop's bounds must be
Python's numbers, which Triton 3.6 does not make of a tensor beside NumPy 2.4.
"""

import triton
import triton.language as tl

from pagefold.runner.attention.cuda.entries import first_seen, table_of
from pagefold.runner.attention.cuda.groups import PER_STEP, Blocks, Scoring, Sight, Unsealed
from pagefold.runner.attention.cuda.seal import residual_of, sealed_before
from pagefold.runner.attention.cuda.tile import (
    INTERPRETED,
    attend_own,
    attend_tile,
    cell_of,
    finished,
    nothing_seen,
    weight_of_sinks,
)

__all__ = ["decode", "merge_splits", "prefill", "write_kv"]

if INTERPRETED:

    def _bound(number):
        """Return a loop's bound as Python's number."""
        return number if isinstance(number, int) else int(number.handle.data.item())

else:

    @triton.jit
    def _bound(number):
        return number


@triton.jit(do_not_specialize=PER_STEP)
def write_kv(
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
    # which layer, and how many
    layer,
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
    HEADS: tl.constexpr,  # NUM_KV_HEADS, filled up to a power of two
    HAS_WINDOW: tl.constexpr,
):
    """Write the K and V of one token, all heads, where they belong. Grid: (T,)."""
    token = tl.program_id(0)
    seq = tl.load(seq_of + token)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, SHAPE.DIMS)
    is_head = heads < SHAPE.NUM_KV_HEADS
    after = tl.load(query_starts + seq + 1) - token  # entries from this token's on
    length = tl.load(lengths + seq * length_stride_s + heads * length_stride_h, mask=is_head, other=0)
    entries = length - after
    is_head = is_head & (entries >= 0)  # a row that only fills up a batch has no entries
    entries = tl.maximum(entries, 0)
    table = table_of(tables, first_blocks, seq, heads, table_stride_s, table_stride_h, HAS_WINDOW)
    blocks = tl.load(table + entries // SHAPE.BLOCK_SIZE, mask=is_head, other=0)
    cell = tl.load(cells + seq * cell_stride_s + layer * SHAPE.NUM_KV_HEADS + heads, mask=is_head, other=0)
    places = blocks.to(tl.int64) * block_stride + cell.to(tl.int64) * (2 * SHAPE.BLOCK_SIZE * SHAPE.HEAD_DIM)
    places += (entries % SHAPE.BLOCK_SIZE) * SHAPE.HEAD_DIM
    mask = is_head[:, None] & (dims < SHAPE.HEAD_DIM)[None, :]
    row = token.to(tl.int64)
    keys = tl.load(key + row * key_stride_t + heads[:, None] * key_stride_h + dims[None, :], mask=mask)
    values = tl.load(value + row * value_stride_t + heads[:, None] * value_stride_h + dims[None, :], mask=mask)
    to = slab + places[:, None] + dims[None, :]
    tl.store(to, keys, mask=mask)
    tl.store(to + SHAPE.BLOCK_SIZE * SHAPE.HEAD_DIM, values, mask=mask)


@triton.jit(do_not_specialize=PER_STEP)
def decode(
    # vectors: queries of the step, and its outputs
    query,  # [T, H, D]
    out,  # [T, H, D], contiguous
    # splits
    sums,  # float32 [rows, H, splits, D]
    weights,  # float32 [rows, H, splits]
    # the slab
    slab,
    # where entries lie
    rows,  # int32: the sequences with one token
    query_starts,  # int32 [S + 1]
    tables,  # int32 [S, Hkv, W]
    lengths,  # int32 [S, Hkv]
    first_blocks,  # int32 [S]: which of its blocks a table begins with
    cells,  # int32 [S, L, Hkv]
    # what there is of cells, with a codec only
    places,  # int32 [num_cells, 4]: see blocks.py
    key_centres,  # float32 [num_cells, 1 + R, D]
    value_centres,  # float32 [num_cells, 2, D]
    # residuals, where blocks are sealed only
    residuals,  # float16 [num_cells, R, 2, BLOCK_SIZE, D]
    residual_ids,  # int32 [S]
    # which layer, and how many
    layer,
    num_ranges,
    num_residuals,
    # strides: of vectors, of the slab, of where entries lie
    query_stride_t,
    query_stride_h,
    block_stride,
    table_stride_s,
    table_stride_h,
    length_stride_s,
    length_stride_h,
    cell_stride_s,
    # what makes scores
    scale,
    softcap,
    window,
    # sinks, where heads have them
    sinks,  # [H]
    # how many splits there are
    num_splits,
    # constants
    SHAPE: tl.constexpr,
    CELL_FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Attend from one sequence's only token to one split of its entries. Grid: (Hkv, rows, splits).

    A sequence's tiles are dealt evenly to the splits, MIN_TILES a split at least: a short one has fewer splits. Its own
    block, where that is not sealed yet, is the first one's.
    """
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    NUM_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS * SHAPE.GROUP
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    seq = tl.load(rows + row)
    token = tl.load(query_starts + seq).to(tl.int64)
    length = tl.load(lengths + seq * length_stride_s + head * length_stride_h)
    low = 0
    if HAS_WINDOW:
        low = first_seen(tl.maximum(length - 1, 0), window, IS_CHUNKED)
    stored = length
    if CELL_FORMAT.SEALS:
        stored = sealed_before(length - 1, BLOCK_SIZE)
    first_tile = low // TILE
    num_tiles = (stored + TILE - 1) // TILE - first_tile
    tiles_a_split = tl.maximum((num_tiles + num_splits - 1) // num_splits, MIN_TILES)
    start = (first_tile + split * tiles_a_split) * TILE
    end = tl.minimum(start + tiles_a_split * TILE, stored)

    members = tl.arange(0, ROWS)
    dims = tl.arange(0, SHAPE.DIMS)
    is_member = members < SHAPE.GROUP
    mask = is_member[:, None] & (dims < HEAD_DIM)[None, :]
    query_heads = head * SHAPE.GROUP + members
    at = query + token * query_stride_t + query_heads[:, None] * query_stride_h + dims[None, :]
    queries = tl.load(at, mask=mask, other=0.0)
    cell_id = tl.load(cells + seq * cell_stride_s + layer * SHAPE.NUM_KV_HEADS + head).to(tl.int64)
    table = table_of(tables, first_blocks, seq, head, table_stride_s, table_stride_h, HAS_WINDOW)
    blocks = Blocks(
        data=slab,
        block_stride=block_stride,
        places=places,
        key_centres=key_centres,
        value_centres=value_centres,
        num_ranges=num_ranges,
    )
    cell = cell_of(blocks, cell_id, table, SHAPE, CELL_FORMAT)
    zeros = tl.zeros([ROWS], tl.int32)
    sight = Sight(low=low, end=end, visible=zeros + stored, begins=zeros + low)
    scoring = Scoring(scale=scale, softcap=softcap)
    softmax = nothing_seen(ROWS, SHAPE.DIMS)
    for tile_start in range(_bound(start), _bound(end), TILE):
        softmax = attend_tile(
            softmax, queries, tile_start, sight, cell, scoring, SHAPE, CELL_FORMAT, TILE, True, HAS_WINDOW, HAS_SOFTCAP
        )
    is_part = start < end
    if CELL_FORMAT.SEALS:  # noqa: SIM102 - this is known when it compiles, the other is not
        if (split == 0) & (length > 0):
            is_part = True
            residual_id = tl.load(residual_ids + seq)
            unsealed = Unsealed(
                at=residual_of(residuals, cell_id, residual_id, num_residuals, BLOCK_SIZE, HEAD_DIM),
                first=stored,
                end=length,
                begins=tl.maximum(sight.visible, sight.begins) if HAS_WINDOW else sight.visible,
                visible=zeros + length,
                slot_stride=HEAD_DIM,
                value_offset=BLOCK_SIZE * HEAD_DIM,
            )
            for tile_start in tl.range(_bound(stored), _bound(length), TILE, num_stages=1):
                softmax = attend_own(softmax, queries, tile_start, unsealed, cell, scoring, SHAPE, TILE, HAS_SOFTCAP)
    of_sinks = softmax.total
    IS_LAST: tl.constexpr = HAS_SINKS and not IS_SPLIT  # of splits, whoever merges them
    if IS_LAST:
        of_sinks = weight_of_sinks(sinks, query_heads, softmax.top, is_member)
    acc = finished(softmax, of_sinks, cell, SHAPE, CELL_FORMAT, IS_LAST)
    if IS_SPLIT:
        place = (row.to(tl.int64) * NUM_HEADS + query_heads) * num_splits + split
        total = tl.where(softmax.total == 0.0, 1.0, softmax.total)
        log = softmax.top + tl.log2(total)  # of an empty split minus infinity; NaN stays NaN
        tl.store(weights + place, log, mask=is_member)
        if is_part:
            tl.store(sums + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
    else:
        to = out + (token * NUM_HEADS + query_heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=PER_STEP)
def merge_splits(
    # vectors: outputs of the step
    out,  # [T, H, D], contiguous
    # splits
    sums,  # float32 [rows, H, splits, D]
    weights,  # float32 [rows, H, splits]
    # where entries lie
    rows,  # int32: the sequences with one token
    query_starts,  # int32 [S + 1]
    # sinks, where heads have them
    sinks,  # [H]
    # how many
    num_splits,
    # constants
    SHAPE: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, filled up to a power of two
    HAS_SINKS: tl.constexpr,
):
    """Put the splits of one token and head together. Grid: (H, rows)."""
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    NUM_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS * SHAPE.GROUP
    head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(query_starts + tl.load(rows + row)).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, SHAPE.DIMS)
    place = (row.to(tl.int64) * NUM_HEADS + head) * num_splits + splits
    logs = tl.load(weights + place, mask=splits < num_splits, other=float("-inf"))
    is_part = logs > float("-inf")  # of the others the sum was not written
    top = tl.max(logs, 0)
    shares = tl.exp2(logs - tl.where(top > float("-inf"), top, 0.0))
    mask = is_part[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(sums + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += weight_of_sinks(sinks, head, top, head < NUM_HEADS)
    merged = tl.sum(parts * shares[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    to = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(to, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=PER_STEP)
def prefill(
    # vectors: queries of the step, and its outputs
    query,  # [T, H, D]
    out,  # [T, H, D], contiguous
    # the slab
    slab,
    # where entries lie
    tiles,  # int32 [N, 2]: sequence and first token of each tile of queries
    query_starts,  # int32 [S + 1]
    tables,  # int32 [S, Hkv, W]
    lengths,  # int32 [S, Hkv]
    first_blocks,  # int32 [S]: which of its blocks a table begins with
    cells,  # int32 [S, L, Hkv]
    # what there is of cells, with a codec only
    places,  # int32 [num_cells, 4]: see blocks.py
    key_centres,  # float32 [num_cells, 1 + R, D]
    value_centres,  # float32 [num_cells, 2, D]
    # residuals, where blocks are sealed only
    residuals,  # float16 [num_cells, R, 2, BLOCK_SIZE, D]
    residual_ids,  # int32 [S]
    recent,  # float16 [T, Hkv, 2, D]: the step's K, centred, and V
    # which layer, and how many
    layer,
    num_ranges,
    num_residuals,
    # strides: of vectors, of the slab, of where entries lie
    query_stride_t,
    query_stride_h,
    block_stride,
    table_stride_s,
    table_stride_h,
    length_stride_s,
    length_stride_h,
    cell_stride_s,
    # what makes scores
    scale,
    softcap,
    window,
    # sinks, where heads have them
    sinks,  # [H]
    # constants
    SHAPE: tl.constexpr,
    CELL_FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Attend from ``ROWS // SHAPE.GROUP`` tokens of one sequence, causally. Grid: (tiles, Hkv)."""
    HEAD_DIM: tl.constexpr = SHAPE.HEAD_DIM
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    NUM_KV_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    stop = tl.load(query_starts + seq + 1)
    length = tl.load(lengths + seq * length_stride_s + head * length_stride_h)
    last = tl.minimum(first + ROWS // SHAPE.GROUP, stop) - 1
    least_visible = length - (stop - 1 - first)
    most_visible = length - (stop - 1 - last)

    members = tl.arange(0, ROWS)
    dims = tl.arange(0, SHAPE.DIMS)
    tokens = first + members // SHAPE.GROUP
    is_row = tokens <= last
    visible = tl.where(is_row, length - (stop - 1 - tokens), most_visible)
    query_heads = head * SHAPE.GROUP + members % SHAPE.GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tokens.to(tl.int64)
    at = query + (rows * query_stride_t + query_heads * query_stride_h)[:, None] + dims[None, :]
    queries = tl.load(at, mask=mask, other=0.0)
    cell_id = tl.load(cells + seq * cell_stride_s + layer * NUM_KV_HEADS + head).to(tl.int64)
    table = table_of(tables, first_blocks, seq, head, table_stride_s, table_stride_h, HAS_WINDOW)
    blocks = Blocks(
        data=slab,
        block_stride=block_stride,
        places=places,
        key_centres=key_centres,
        value_centres=value_centres,
        num_ranges=num_ranges,
    )
    cell = cell_of(blocks, cell_id, table, SHAPE, CELL_FORMAT)
    low = 0
    stored, least_stored, most_stored = visible, least_visible, most_visible
    begins = visible
    if CELL_FORMAT.SEALS:
        stored = sealed_before(visible - 1, BLOCK_SIZE)
        least_stored = sealed_before(least_visible - 1, BLOCK_SIZE)
        most_stored = sealed_before(most_visible - 1, BLOCK_SIZE)
    whole_from = 0
    masked_from = least_stored // TILE * TILE  # rows see all of the tiles between these two
    if HAS_WINDOW:
        low = first_seen(least_visible - 1, window, IS_CHUNKED)
        begins = first_seen(visible - 1, window, IS_CHUNKED)
        first_tile = low // TILE * TILE
        masked_from = tl.maximum(masked_from, first_tile)
        whole_from = (first_seen(most_visible - 1, window, IS_CHUNKED) + TILE - 1) // TILE * TILE
        whole_from = tl.minimum(whole_from, masked_from)
    sight = Sight(low=low, end=most_stored, visible=stored, begins=begins)
    scoring = Scoring(scale=scale, softcap=softcap)
    softmax = nothing_seen(ROWS, SHAPE.DIMS)
    if HAS_WINDOW:
        for tile_start in range(_bound(first_tile), _bound(whole_from), TILE):
            softmax = attend_tile(
                softmax, queries, tile_start, sight, cell, scoring, SHAPE, CELL_FORMAT, TILE, True, True, HAS_SOFTCAP
            )
    for tile_start in range(_bound(whole_from), _bound(masked_from), TILE):
        softmax = attend_tile(
            softmax, queries, tile_start, sight, cell, scoring, SHAPE, CELL_FORMAT, TILE, False, False, HAS_SOFTCAP
        )
    for tile_start in range(_bound(masked_from), _bound(most_stored), TILE):
        softmax = attend_tile(
            softmax, queries, tile_start, sight, cell, scoring, SHAPE, CELL_FORMAT, TILE, True, HAS_WINDOW, HAS_SOFTCAP
        )
    if CELL_FORMAT.SEALS:
        begin = length - (stop - tl.load(query_starts + seq))  # the row's first entry
        if begin > least_stored:  # inside a block: the row ends in it
            own = residual_of(residuals, cell_id, tl.load(residual_ids + seq), num_residuals, BLOCK_SIZE, HEAD_DIM)
            slot_stride = HEAD_DIM
            value_offset = BLOCK_SIZE * HEAD_DIM
        else:
            token = (stop - (length - least_stored)).to(tl.int64)
            own = recent + (token * NUM_KV_HEADS + head) * (2 * HEAD_DIM)
            slot_stride = NUM_KV_HEADS * 2 * HEAD_DIM
            value_offset = HEAD_DIM
        unsealed = Unsealed(
            at=own,
            first=least_stored,
            end=most_visible,
            begins=tl.maximum(stored, begins) if HAS_WINDOW else stored,
            visible=visible,
            slot_stride=slot_stride,
            value_offset=value_offset,
        )
        for tile_start in tl.range(_bound(least_stored), _bound(most_visible), TILE, num_stages=1):
            softmax = attend_own(softmax, queries, tile_start, unsealed, cell, scoring, SHAPE, TILE, HAS_SOFTCAP)
    of_sinks = softmax.total
    if HAS_SINKS:
        of_sinks = weight_of_sinks(sinks, query_heads, softmax.top, is_row)
    acc = finished(softmax, of_sinks, cell, SHAPE, CELL_FORMAT, HAS_SINKS)
    to = out + ((rows * NUM_KV_HEADS * SHAPE.GROUP + query_heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
