"""The Triton kernels of attention over blocks: write K and V, decode in splits, merge these, and ragged prefill.

All take the general signature of :mod:`pagefold.runner.attention.inputs`: what differs by head or sequence has a
stride, which is 0 where it does not. A slab has the layout of rows: ``[block][cell][K or V][slot][head_dim]``, so that
a token's K of one head lies in one piece, whatever tile it is read in.

- *Decode* (split-KV, as Flash-Decoding does it, Dao, Haziza, Massa and Sizov, 2023): one program a sequence, KV head
  and split; all query heads of a group are rows of one product, so K and V are read once. Each split leaves its sum and
  the logarithm of its weight, and ``merge_splits`` puts them together.
- *Prefill* (FlashAttention-2, Dao, 2023): one program a tile of query rows (tokens times the heads of a group) and KV
  head. Tiles that all rows see are not masked.

What they do with a tile of entries is in ``tile.py``; codes are read as ``codes.py`` says.

Triton's interpreter runs the same code on a CPU (``TRITON_INTERPRET=1``, set before Triton is imported). Two things are
different there: ``tl.dot`` of bfloat16 gives nonsense, so its operands become float32; and a loop's bounds must be
Python's numbers, which Triton 3.6 does not make of a tensor beside NumPy 2.4.
"""

import triton
import triton.language as tl

from pagefold.runner.attention.cuda.seal import residual_of, sealed_before
from pagefold.runner.attention.cuda.tile import INTERPRETED, attend_own, attend_tile, centres_of, finished, parts_of

__all__ = ["decode", "merge_splits", "prefill", "write_kv"]

if INTERPRETED:

    def _bound(number):
        """Return a loop's bound as Python's number."""
        return number if isinstance(number, int) else int(number.handle.data.item())

else:

    @triton.jit
    def _bound(number):
        return number


@triton.jit(do_not_specialize=["layer", "table_stride_s", "length_stride_s", "cell_stride_s"])
def write_kv(
    key,  # [T, Hkv, D]
    value,  # [T, Hkv, D]
    slab,
    query_starts,  # int32 [S + 1]
    seq_of,  # int32 [T]
    tables,  # int32 [S, Hkv, W]
    lengths,  # int32 [S, Hkv]
    cells,  # int32 [S, L, Hkv]
    layer,
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
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write the K and V of one token, all heads, where they belong. Grid: (T,)."""
    token = tl.program_id(0)
    seq = tl.load(seq_of + token)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    is_head = heads < NUM_KV_HEADS
    after = tl.load(query_starts + seq + 1) - token  # entries from this token's on
    length = tl.load(lengths + seq * length_stride_s + heads * length_stride_h, mask=is_head, other=0)
    entries = length - after
    is_head = is_head & (entries >= 0)  # a row that only fills up a batch has no entries
    entries = tl.maximum(entries, 0)
    at = tables + seq.to(tl.int64) * table_stride_s + heads * table_stride_h + entries // BLOCK_SIZE
    blocks = tl.load(at, mask=is_head, other=0)
    cell = tl.load(cells + seq * cell_stride_s + layer * NUM_KV_HEADS + heads, mask=is_head, other=0)
    places = blocks.to(tl.int64) * block_stride + cell.to(tl.int64) * (2 * BLOCK_SIZE * HEAD_DIM)
    places += (entries % BLOCK_SIZE) * HEAD_DIM
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    row = token.to(tl.int64)
    keys = tl.load(key + row * key_stride_t + heads[:, None] * key_stride_h + dims[None, :], mask=mask)
    values = tl.load(value + row * value_stride_t + heads[:, None] * value_stride_h + dims[None, :], mask=mask)
    to = slab + places[:, None] + dims[None, :]
    tl.store(to, keys, mask=mask)
    tl.store(to + BLOCK_SIZE * HEAD_DIM, values, mask=mask)


@triton.jit(
    do_not_specialize=[
        "layer",
        "num_residuals",
        "table_stride_s",
        "length_stride_s",
        "cell_stride_s",
        "window",
        "num_splits",
    ]
)
def decode(
    query,  # [T, H, D]
    out,  # [T, H, D], contiguous
    sums,  # float32 [rows, H, splits, D]
    weights,  # float32 [rows, H, splits]
    slab,
    rows,  # int32: the sequences with one token
    query_starts,  # int32 [S + 1]
    tables,  # int32 [S, Hkv, W]
    lengths,  # int32 [S, Hkv]
    cells,  # int32 [S, L, Hkv]
    places,  # int32 [num_cells, 4] (this and the centres with a codec only: see blocks.py)
    key_centres,  # float32 [num_cells, 1 + R, D]
    value_centres,  # float32 [num_cells, 2, D]
    residuals,  # float16 [num_cells, R, 2, BLOCK_SIZE, D] (this and the next with SEALS only)
    residual_ids,  # int32 [S]
    layer,
    num_ranges,
    num_residuals,
    query_stride_t,
    query_stride_h,
    block_stride,
    table_stride_s,
    table_stride_h,
    length_stride_s,
    length_stride_h,
    cell_stride_s,
    scale,
    softcap,
    window,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    ROTATION: tl.constexpr,
    HAS_CENTRES: tl.constexpr,
    SEALS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend from one sequence's only token to one split of its entries. Grid: (Hkv, rows, splits).

    A sequence's tiles are dealt evenly to the splits, MIN_TILES a split at least: a short one has fewer splits. Its own
    block, where that is not sealed yet, is the first one's.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    seq = tl.load(rows + row)
    token = tl.load(query_starts + seq).to(tl.int64)
    length = tl.load(lengths + seq * length_stride_s + head * length_stride_h)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(length - window, 0)
    stored = length
    if SEALS:
        stored = sealed_before(length - 1, BLOCK_SIZE)
    first_tile = low // TILE
    num_tiles = (stored + TILE - 1) // TILE - first_tile
    tiles_a_split = tl.maximum((num_tiles + num_splits - 1) // num_splits, MIN_TILES)
    start = (first_tile + split * tiles_a_split) * TILE
    end = tl.minimum(start + tiles_a_split * TILE, stored)

    members = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    is_member = members < GROUP
    mask = is_member[:, None] & (dims < HEAD_DIM)[None, :]
    query_heads = head * GROUP + members
    at = query + token * query_stride_t + query_heads[:, None] * query_stride_h + dims[None, :]
    queries = tl.load(at, mask=mask, other=0.0)
    cell = tl.load(cells + seq * cell_stride_s + layer * NUM_KV_HEADS + head).to(tl.int64)
    parts = parts_of(slab, places, cell, KEY_FORMAT, HEAD_DIM, BLOCK_SIZE, ALIGNMENT)
    centres = centres_of(key_centres, value_centres, cell, num_ranges, HEAD_DIM)
    table = tables + seq.to(tl.int64) * table_stride_s + head * table_stride_h
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    visible = tl.zeros([ROWS], tl.int32) + stored
    for tile_start in range(_bound(start), _bound(end), TILE):
        acc, top, total = attend_tile(
            queries,
            acc,
            top,
            total,
            tile_start,
            low,
            end,
            visible,
            window,
            parts,
            centres,
            num_ranges,
            table,
            block_stride,
            scale,
            softcap,
            HEAD_DIM,
            DIMS,
            BLOCK_SIZE,
            TILE,
            KEY_FORMAT,
            VALUE_FORMAT,
            KEY_ROW,
            VALUE_ROW,
            HAS_CENTRES,
            SEALS,
            True,
            HAS_WINDOW,
            HAS_SOFTCAP,
        )
    is_part = start < end
    if SEALS:  # noqa: SIM102 - this is known when it compiles, the other is not
        if (split == 0) & (length > 0):
            is_part = True
            residual = residual_of(residuals, cell, tl.load(residual_ids + seq), num_residuals, BLOCK_SIZE, HEAD_DIM)
            ends = tl.zeros([ROWS], tl.int32) + length
            for tile_start in tl.range(_bound(stored), _bound(length), TILE, num_stages=1):
                acc, top, total = attend_own(
                    queries,
                    acc,
                    top,
                    total,
                    tile_start,
                    length,
                    visible,
                    ends,
                    residual + (tile_start - stored) * HEAD_DIM,
                    HEAD_DIM,
                    BLOCK_SIZE * HEAD_DIM,
                    centres,
                    scale,
                    softcap,
                    HEAD_DIM,
                    DIMS,
                    TILE,
                    HAS_SOFTCAP,
                )
    acc = finished(acc, total, centres, HEAD_DIM, DIMS, ROTATION, HAS_CENTRES)
    if IS_SPLIT:
        place = (row.to(tl.int64) * NUM_KV_HEADS * GROUP + query_heads) * num_splits + split
        log = top + tl.log2(tl.where(total == 0.0, 1.0, total))  # of an empty split minus infinity; NaN stays NaN
        tl.store(weights + place, log, mask=is_member)
        if is_part:
            tl.store(sums + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
    else:
        to = out + (token * NUM_KV_HEADS * GROUP + query_heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    out,  # [T, H, D], contiguous
    sums,  # float32 [rows, H, splits, D]
    weights,  # float32 [rows, H, splits]
    rows,  # int32: the sequences with one token
    query_starts,  # int32 [S + 1]
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Put the splits of one token and head together. Grid: (H, rows)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(query_starts + tl.load(rows + row)).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    place = (row.to(tl.int64) * NUM_HEADS + head) * num_splits + splits
    logs = tl.load(weights + place, mask=splits < num_splits, other=float("-inf"))
    is_part = logs > float("-inf")  # of the others the sum was not written
    top = tl.max(logs, 0)
    shares = tl.exp2(logs - tl.where(top > float("-inf"), top, 0.0))
    mask = is_part[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(sums + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(shares, 0)
    merged = tl.sum(parts * shares[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    to = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(to, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(
    do_not_specialize=["layer", "num_residuals", "table_stride_s", "length_stride_s", "cell_stride_s", "window"]
)
def prefill(
    query,  # [T, H, D]
    out,  # [T, H, D], contiguous
    slab,
    tiles,  # int32 [N, 2]: sequence and first token of each tile of queries
    query_starts,  # int32 [S + 1]
    tables,  # int32 [S, Hkv, W]
    lengths,  # int32 [S, Hkv]
    cells,  # int32 [S, L, Hkv]
    places,  # int32 [num_cells, 4] (this and the centres with a codec only: see blocks.py)
    key_centres,  # float32 [num_cells, 1 + R, D]
    value_centres,  # float32 [num_cells, 2, D]
    residuals,  # float16 [num_cells, R, 2, BLOCK_SIZE, D] (this and the next with SEALS only)
    residual_ids,  # int32 [S]
    recent,  # float16 [T, Hkv, 2, D] (with SEALS only): the step's K, centred, and V
    layer,
    num_ranges,
    num_residuals,
    query_stride_t,
    query_stride_h,
    block_stride,
    table_stride_s,
    table_stride_h,
    length_stride_s,
    length_stride_h,
    cell_stride_s,
    scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KEY_FORMAT: tl.constexpr,
    VALUE_FORMAT: tl.constexpr,
    KEY_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    ROTATION: tl.constexpr,
    HAS_CENTRES: tl.constexpr,
    SEALS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attend from ``ROWS // GROUP`` tokens of one sequence, causally. Grid: (tiles, Hkv)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    stop = tl.load(query_starts + seq + 1)
    length = tl.load(lengths + seq * length_stride_s + head * length_stride_h)
    last = tl.minimum(first + ROWS // GROUP, stop) - 1
    least_visible = length - (stop - 1 - first)
    most_visible = length - (stop - 1 - last)

    members = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    tokens = first + members // GROUP
    is_row = tokens <= last
    visible = tl.where(is_row, length - (stop - 1 - tokens), most_visible)
    query_heads = head * GROUP + members % GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tokens.to(tl.int64)
    at = query + (rows * query_stride_t + query_heads * query_stride_h)[:, None] + dims[None, :]
    queries = tl.load(at, mask=mask, other=0.0)
    cell = tl.load(cells + seq * cell_stride_s + layer * NUM_KV_HEADS + head).to(tl.int64)
    parts = parts_of(slab, places, cell, KEY_FORMAT, HEAD_DIM, BLOCK_SIZE, ALIGNMENT)
    centres = centres_of(key_centres, value_centres, cell, num_ranges, HEAD_DIM)
    table = tables + seq.to(tl.int64) * table_stride_s + head * table_stride_h
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    low = 0
    stored, least_stored, most_stored = visible, least_visible, most_visible
    if SEALS:
        stored = sealed_before(visible - 1, BLOCK_SIZE)
        least_stored = sealed_before(least_visible - 1, BLOCK_SIZE)
        most_stored = sealed_before(most_visible - 1, BLOCK_SIZE)
    masked_from = least_stored // TILE * TILE
    if HAS_WINDOW:
        low = tl.maximum(least_visible - window, 0)
        masked_from = low // TILE * TILE
    else:
        for tile_start in range(0, _bound(masked_from), TILE):
            acc, top, total = attend_tile(
                queries,
                acc,
                top,
                total,
                tile_start,
                low,
                most_stored,
                stored,
                window,
                parts,
                centres,
                num_ranges,
                table,
                block_stride,
                scale,
                softcap,
                HEAD_DIM,
                DIMS,
                BLOCK_SIZE,
                TILE,
                KEY_FORMAT,
                VALUE_FORMAT,
                KEY_ROW,
                VALUE_ROW,
                HAS_CENTRES,
                SEALS,
                False,
                False,
                HAS_SOFTCAP,
            )
    for tile_start in range(_bound(masked_from), _bound(most_stored), TILE):
        acc, top, total = attend_tile(
            queries,
            acc,
            top,
            total,
            tile_start,
            low,
            most_stored,
            stored,
            window,
            parts,
            centres,
            num_ranges,
            table,
            block_stride,
            scale,
            softcap,
            HEAD_DIM,
            DIMS,
            BLOCK_SIZE,
            TILE,
            KEY_FORMAT,
            VALUE_FORMAT,
            KEY_ROW,
            VALUE_ROW,
            HAS_CENTRES,
            SEALS,
            True,
            HAS_WINDOW,
            HAS_SOFTCAP,
        )
    if SEALS:
        begin = length - (stop - tl.load(query_starts + seq))  # the row's first entry
        if begin > least_stored:  # inside a block: the row ends in it
            own = residual_of(residuals, cell, tl.load(residual_ids + seq), num_residuals, BLOCK_SIZE, HEAD_DIM)
            slot_stride = HEAD_DIM
            value_offset = BLOCK_SIZE * HEAD_DIM
        else:
            token = (stop - (length - least_stored)).to(tl.int64)
            own = recent + (token * NUM_KV_HEADS + head) * (2 * HEAD_DIM)
            slot_stride = NUM_KV_HEADS * 2 * HEAD_DIM
            value_offset = HEAD_DIM
        for tile_start in tl.range(_bound(least_stored), _bound(most_visible), TILE, num_stages=1):
            acc, top, total = attend_own(
                queries,
                acc,
                top,
                total,
                tile_start,
                most_visible,
                stored,
                visible,
                own + (tile_start - least_stored) * slot_stride,
                slot_stride,
                value_offset,
                centres,
                scale,
                softcap,
                HEAD_DIM,
                DIMS,
                TILE,
                HAS_SOFTCAP,
            )
    acc = finished(acc, total, centres, HEAD_DIM, DIMS, ROTATION, HAS_CENTRES)
    to = out + ((rows * NUM_KV_HEADS * GROUP + query_heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
