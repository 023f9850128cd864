"""Matrix tiles over blocks of the KV cache, one pair for each format of codes: scores, and the sum of weighted values.

They are built as those of weights are (see ``kernels/formats.py``): the accumulators of some rows stay in registers
while the tile walks along a block. What is different is how a vector of K or V comes into a register: codes are loaded
as they lie in the block and become float32 there, so nothing is expanded in memory, and fewer bytes are read. Scales
are not applied here: a slot's scale is the same for a whole vector, so that of K multiplies one score, and that of V
one weight.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import (
    F32_P,
    I8,
    I8_P,
    I32,
    I64,
    I64_P,
    IS_WIDE,
    MAX_LANES,
    Emitter,
    column_tile,
    entry,
    in_tiles,
    max_rows,
    new_function,
    rows_on,
)
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.pairs import bfloat16_pairs, flushing
from pagefold.kernels.rows import row_tiles
from pagefold.kernels.words import I32_P
from pagefold.runner.attention.pair_tiles import Width, pair_block_tile, pair_column_tile
from pagefold.runner.codecs.levels import levels_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = [
    "BFLOAT16",
    "E4M3",
    "E4M3_SCALED",
    "E5M2",
    "FLOAT16",
    "FLOAT32",
    "INT2",
    "INT4",
    "INT4_SYMMETRIC",
    "INT8",
    "NUM_FORMATS",
    "PAIRS",
    "TWO_WIDTHS",
    "AttentionTiles",
    "attention_tiles",
]

FLOAT32, FLOAT16, BFLOAT16, INT8, INT4, E4M3, E5M2, E4M3_SCALED, TWO_WIDTHS, INT4_SYMMETRIC, INT2, PAIRS = range(12)
"""Numbers of the formats that kernels know, as ``runner/codecs`` has them. A byte of ``INT4`` holds two codes, of a
vector's first and second half; so does one of ``INT4_SYMMETRIC``, whose codes stand for levels (``codecs/levels.py``).
A byte of ``INT2`` holds four, of its quarters. ``TWO_WIDTHS``, which only K has, is ``INT8`` for a vector's first
numbers and ``INT4_SYMMETRIC`` for the others. ``PAIRS`` is bfloat16 that is multiplied
as such: see ``pair_tiles.py``."""

NUM_FORMATS = 12

_CODE_BITS = {FLOAT16: 16, BFLOAT16: 16, INT8: 8, INT4: 4, INT4_SYMMETRIC: 4, INT2: 2, E4M3: 8, E5M2: 8, E4M3_SCALED: 8}
_UNROLLED = 4  # rows of a panel at once: narrow codes of several rows share a cache line, which is fetched once
_UNROLLED_PAIRS = 2  # of ``TWO_WIDTHS``, whose rows of pairs may be no multiple of 4
_F16, _I16 = ir.HalfType(), ir.IntType(16)
_E4M3_TO_HALF = 256.0  # float16's exponents begin 8 lower
_E4M3_NAN = 0x7F


class AttentionTiles(NamedTuple):
    """Addresses of products with blocks of the KV cache, and how wide they are. Arguments are integers.

    Attributes:
        scores: int64 ``[NUM_FORMATS]``, each (x, ldx, w0, w1, ldw, y, ldy, num_k, num_rows, next0, next1):
            ``y[num_rows, 2 * lanes] = x[num_rows, num_k] @ [w0 | w1]``: two panels of one vector, each where it lies,
            whose rows are ``ldw`` apart, in bytes (of float32 in numbers). Of ``INT2`` there is an x for each of the
            two, since scales of channels are in it: (x0, x1, ldx, w0, ...).
        values: int64 ``[NUM_FORMATS]``, each (x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy,
            num_rows, ahead): ``y[num_rows, vectors * lanes] = x[num_rows, num_k] @ the rows of several blocks``, from
            ``offset`` on, which is in bytes, as ``ldw`` is (of float32 in numbers). ``blocks`` is where ``num_blocks``
            addresses are; each block has ``block_size`` rows, of which the last block gives only what is left of
            ``num_k``: the rest is never read. Of ``INT4`` y is as many columns from half of ``ldy`` on too, of ``INT2``
            from each quarter of it. ``ahead`` is where as many addresses are: what lies there as rows lie in blocks is
            fetched meanwhile.
        rows: (x, x_distance, num_k, num_rows, out, out_distance): turns float32 rows into rows of pairs, which may lie
            where they were; x of ``PAIRS`` are such rows, ``ldx`` in words. 0 if they are not among the formats.
        weights: turns scores into weights (see :class:`~pagefold.kernels.rows.RowTiles`).
        lanes: numbers of a vector: so many entries of a block, and so many numbers of a head, are handled at once.
        vectors: of a head's numbers, or of the bytes of its codes, that are summed at once.
    """

    scores: NDArray[np.int64]
    values: NDArray[np.int64]
    rows: int
    weights: int
    lanes: int
    vectors: int


def attention_tiles(block_size: int, head_dim: int, formats: Iterable[int] = (FLOAT32,)) -> AttentionTiles:
    """Return tiles as wide as divides such a block and head, compiled for these formats; others are 0.

    Needs a ``block_size`` that 4 divides, and a ``head_dim`` too, or for ``INT4`` and ``INT4_SYMMETRIC`` half of it,
    for ``INT2`` a quarter.
    """
    wanted = frozenset(formats)
    columns = head_dim // max(map(_vectors_a_load, wanted))
    most = 1 if INT2 in wanted else 4 if IS_WIDE else 2
    widths = (lanes for lanes in (16, 8, 4) if lanes <= MAX_LANES)
    lanes = next(lanes for lanes in widths if block_size % lanes == columns % lanes == 0)
    vectors = next(vectors for vectors in (4, 2, 1) if vectors <= most and columns % (lanes * vectors) == 0)
    found = {number: _tiles_of(number, lanes, vectors) for number in wanted}
    addresses = [found.get(number, {"scores": 0, "values": 0}) for number in range(NUM_FORMATS)]
    return AttentionTiles(
        scores=np.array([one["scores"] for one in addresses]),
        values=np.array([one["values"] for one in addresses]),
        rows=bfloat16_pairs().tiles().rows if PAIRS in wanted else 0,
        weights=row_tiles().weights,
        lanes=lanes,
        vectors=vectors,
    )


@cache
def _tiles_of(number: int, lanes: int, vectors: int) -> dict[str, int]:
    def build() -> ir.Module:
        module = ir.Module()
        _add_scores(module, number, lanes)
        if number != TWO_WIDTHS:
            _add_values(module, number, lanes, vectors)
        return module

    name = f"attention-{number}-{lanes}x{vectors}"
    if number == PAIRS:
        name += f"-{int(bfloat16_pairs().is_native)}"
    names = ("scores",) if number == TWO_WIDTHS else ("scores", "values")
    return {"values": 0} | addresses_in(name, build, names)


def _load_codes(emit: Emitter, number: int, pointer: ir.Value) -> list[ir.Value]:
    """Load one vector of codes as float32; of ``INT4`` and ``INT2`` one for each code of a byte, the lowest first."""
    builder, lanes = emit.builder, emit.lanes
    small = _I16 if _CODE_BITS[number] == 16 else I8
    kind = ir.VectorType(small, lanes)
    codes = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)
    wide, half = ir.VectorType(I32, lanes), ir.VectorType(_I16, lanes)

    def of(vector: ir.VectorType, value: int) -> ir.Constant:
        return ir.Constant(vector, [value] * lanes)

    def from_half(bits: ir.Value) -> ir.Value:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(_F16, lanes)), emit.vector)

    if number == FLOAT16:
        return [from_half(codes)]
    if number == BFLOAT16:
        return [builder.bitcast(builder.shl(builder.zext(codes, wide), of(wide, 16)), emit.vector)]
    if number == INT8:
        return [builder.sitofp(builder.sext(codes, wide), emit.vector)]
    if number in {INT4, INT4_SYMMETRIC, INT2}:
        every = builder.zext(codes, wide)
        shifts = range(0, 8, _CODE_BITS[number])
        return [_lowest_code(emit, number, builder.lshr(every, of(wide, shift))) for shift in shifts]
    bits = builder.zext(codes, half)
    if number == E5M2:  # the upper half of a float16
        return [from_half(builder.shl(bits, of(half, 8)))]
    size, sign = builder.and_(bits, of(half, 0x7F)), builder.and_(bits, of(half, 0x80))
    as_half = builder.or_(builder.shl(size, of(half, 7)), builder.shl(sign, of(half, 8)))
    number_of = builder.fmul(from_half(as_half), ir.Constant(emit.vector, [_E4M3_TO_HALF] * lanes))
    is_nan = builder.icmp_unsigned("==", size, of(half, _E4M3_NAN))
    return [builder.select(is_nan, ir.Constant(emit.vector, [float("nan")] * lanes), number_of)]


def _lowest_code(emit: Emitter, number: int, bits: ir.Value) -> ir.Value:
    """Return what the lowest code of int32 bits stands for: a whole number, or a level of ``codecs/levels.py``.

    Levels come from a table where the processor has one in a register; else they are computed, and every step of that
    is exact: the same bits.
    """
    if number == INT4_SYMMETRIC and emit.can_look_up:
        return emit.look_up(ir.Constant(emit.vector, levels_of(torch.arange(16.0)).tolist()), bits)
    largest = ir.Constant(ir.VectorType(I32, emit.lanes), [2 ** _CODE_BITS[number] - 1] * emit.lanes)
    code = emit.builder.sitofp(emit.builder.and_(bits, largest), emit.vector)
    if number != INT4_SYMMETRIC:
        return code
    middle, one, cubes = (ir.Constant(emit.vector, [value] * emit.lanes) for value in (7.5, 1.0, 1 / 128))
    found = emit.builder.fsub(code, middle)
    square = emit.builder.fmul(found, found)
    return emit.builder.fmul(found, emit.fma(square, cubes, one))


def _vectors_a_load(number: int) -> int:
    return {INT4: 2, INT4_SYMMETRIC: 2, INT2: 4}.get(number, 1)


class _Run(NamedTuple):
    """Rows of a panel that hold codes of one kind.

    Attributes:
        number: the kind.
        unrolled: rows at once, which divides how many there are.
        begin, end: the rows.
        parts: what to add to a row's index to have those of the numbers that it holds.
    """

    number: int
    unrolled: int
    begin: ir.Value
    end: ir.Value
    parts: tuple[ir.Value, ...]


def _runs(builder: ir.IRBuilder, number: int, num_k: ir.Value) -> list[_Run]:
    """Return of what a panel of K consists, of vectors of ``num_k`` numbers."""
    none = I64(0)
    if number != TWO_WIDTHS:
        num_parts = _vectors_a_load(number)
        share = builder.sdiv(num_k, I64(num_parts))
        parts = tuple(builder.mul(share, I64(part)) for part in range(num_parts))
        return [_Run(number, _UNROLLED, none, share, parts)]
    # as in ``kv/codec.py``: 3 of 16, up to a multiple of 4
    wide = builder.mul(I64(4), builder.sdiv(builder.add(builder.mul(I64(3), num_k), I64(63)), I64(64)))
    pairs = builder.sdiv(builder.sub(num_k, wide), I64(2))
    return [
        _Run(INT8, _UNROLLED, none, wide, (none,)),
        _Run(INT4_SYMMETRIC, _UNROLLED_PAIRS, wide, builder.add(wide, pairs), (none, pairs)),
    ]


def _code_column_tile(module: ir.Module, number: int, mr: int, lanes: int, *, fetches: bool) -> ir.Function:
    """``y[mr, 2 * lanes] = x[mr, k] @ [w0 | w1]`` of codes, whose rows are ``ldw`` bytes apart.

    (x0, x1, ldx, w0, w1, ldw, y, ldy, k, next0, next1): x0 is multiplied with w0, and x1, which is x0 but for ``INT2``,
    with w1. A row of ``INT4`` is of two rows of codes, one of ``INT2`` of four: see :func:`_runs`.
    """
    name = f"pagefold_code_columns_{mr}_{int(fetches)}"
    kinds = [F32_P, F32_P, I64, I8_P, I8_P, I64, F32_P, I64, I64, I8_P, I8_P]
    function, is_new = new_function(module, name, kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, other_x, ldx, w0, w1, ldw, y, ldy, num_k, next0, next1 = function.args
    emit = Emitter(builder, lanes)
    acc = emit.accumulators(2 * mr)
    rows, other_rows = ([emit.at(one, builder.mul(ldx, I64(r))) for r in range(mr)] for one in (x, other_x))
    for kind, unrolled, begin, end, parts in _runs(builder, number, num_k):
        with cgutils.for_range_slice(builder, begin, end, I64(unrolled), intp=I64) as (first, _):
            for step in range(unrolled):
                k = builder.add(first, I64(step))
                offset = builder.mul(k, ldw)
                left, right = (_load_codes(emit, kind, emit.at(w, offset)) for w in (w0, w1))
                if fetches and step % (16 // _CODE_BITS[kind]) == 0:
                    emit.fetch(emit.at(next0, offset))
                    emit.fetch(emit.at(next1, offset))
                for part, panel in enumerate(zip(left, right, strict=True)):
                    at = builder.add(k, parts[part])
                    if number == INT2:
                        emit.multiply_add(rows, at, panel[:1], acc[0::2])
                        emit.multiply_add(other_rows, at, panel[1:], acc[1::2])
                    else:
                        emit.multiply_add(rows, at, panel, acc)
    for r in range(mr):
        out = emit.at(y, builder.mul(ldy, I64(r)))
        for v in range(2):
            emit.store(builder.load(acc[2 * r + v]), out, v * lanes)
    builder.ret_void()
    return function


def _code_block_tile(module: ir.Module, number: int, mr: int, width: Width, *, fetches: bool) -> ir.Function:
    """``y[mr, nv * lanes] = x[mr, :] @ rows of several blocks`` of codes; arguments as of :func:`_block_tile`.

    ``offset`` and ``ldw`` are in bytes. Of ``INT4`` columns from ``ldy / 2`` on are summed too, of ``INT2`` from each
    quarter of ``ldy``.
    """
    lanes, nv = width
    name = f"pagefold_code_blocks_{mr}_{int(fetches)}"
    kinds = [F32_P, I64, I64_P, I64, I64, I64, I64, I64, F32_P, I64, I64_P]
    function, is_new = new_function(module, name, kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy, ahead = function.args
    emit = Emitter(builder, lanes)
    parts = _vectors_a_load(number)
    num_bytes = lanes * _CODE_BITS[number] * parts // 8
    acc = emit.accumulators(nv * parts * mr)
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_blocks, intp=I64) as outer:
        first = builder.mul(outer.index, block_size)
        base, following = (
            emit.at(builder.inttoptr(builder.load(emit.at(one, outer.index)), I8_P), offset) for one in (blocks, ahead)
        )
        left = builder.sub(num_k, first)
        length = builder.select(builder.icmp_signed("<", left, block_size), left, block_size)
        with cgutils.for_range(builder, length, intp=I64) as inner:
            at = builder.mul(inner.index, ldw)
            loaded = []
            for v in range(nv):
                place = builder.add(at, I64(v * num_bytes))
                loaded.append(_load_codes(emit, number, emit.at(base, place)))
                if fetches:
                    emit.fetch(emit.at(following, place))
            panel = [loaded[v][part] for part in range(parts) for v in range(nv)]
            emit.multiply_add(rows, builder.add(first, inner.index), panel, acc)
    share = builder.sdiv(ldy, I64(parts))
    for r in range(mr):
        for part in range(parts):
            out = emit.at(y, builder.add(builder.mul(ldy, I64(r)), builder.mul(share, I64(part))))
            for v in range(nv):
                emit.store(builder.load(acc[(parts * r + part) * nv + v]), out, v * lanes)
    builder.ret_void()
    return function


def _block_tile(module: ir.Module, mr: int, width: Width, *, fetches: bool) -> ir.Function:
    """``y[mr, nv * lanes] = x[mr, :] @ rows of several blocks``, one block behind the other.

    (x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy, ahead): ``blocks[b] + offset`` is the first
    number of block b's rows, which are ``ldw`` apart; all blocks have ``block_size`` of them but the last, which has
    what is left of ``num_k``. What lies so behind ``ahead[b]`` is fetched.
    """
    lanes, nv = width
    name = f"pagefold_blocks_{mr}_{lanes}_{nv}_{int(fetches)}"
    kinds = [F32_P, I64, I64_P, I64, I64, I64, I64, I64, F32_P, I64, I64_P]
    function, is_new = new_function(module, name, kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy, ahead = function.args
    emit = Emitter(builder, lanes)
    acc = emit.accumulators(nv * mr)
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_blocks, intp=I64) as outer:
        first = builder.mul(outer.index, block_size)
        base, following = (
            emit.at(builder.inttoptr(builder.load(emit.at(one, outer.index)), F32_P), offset) for one in (blocks, ahead)
        )
        left = builder.sub(num_k, first)
        length = builder.select(builder.icmp_signed("<", left, block_size), left, block_size)
        with cgutils.for_range(builder, length, intp=I64) as inner:
            at = builder.mul(inner.index, ldw)
            panel = [emit.load(emit.at(base, at), v * lanes) for v in range(nv)]
            if fetches:
                for v in range(nv):
                    emit.fetch(emit.at(emit.at(following, at), v * lanes))
            emit.multiply_add(rows, builder.add(first, inner.index), panel, acc)
    for r in range(mr):
        out = emit.at(y, builder.mul(ldy, I64(r)))
        for v in range(nv):
            emit.store(builder.load(acc[nv * r + v]), out, v * lanes)
    builder.ret_void()
    return function


def _add_scores(module: ir.Module, number: int, lanes: int) -> None:
    builder, args = entry(module, "scores", 12 if number == INT2 else 11)
    x, *others, ldx, w0, w1, ldw, y, ldy, num_k, num_rows, next0, next1 = args
    other_x = builder.inttoptr(others[0] if others else x, F32_P)
    kind = F32_P if number == FLOAT32 else I8_P
    x, y = builder.inttoptr(x, I32_P if number == PAIRS else F32_P), builder.inttoptr(y, F32_P)
    w0, w1, next0, next1 = (builder.inttoptr(a, kind) for a in (w0, w1, next0, next1))

    def call(tile: ir.Function, first: ir.Value) -> None:
        at_x, at_y = rows_on(builder, x, ldx, first), rows_on(builder, y, ldy, first)
        if number == PAIRS:
            builder.call(tile, [at_x, ldx, w0, w1, ldw, at_y, ldy, builder.ashr(num_k, I64(1)), next0, next1])
        elif number == FLOAT32:
            builder.call(tile, [at_x, ldx, w0, w1, ldw, at_y, ldy, num_k, I64(0), next0, next1])
        else:
            at_other = rows_on(builder, other_x, ldx, first)
            builder.call(tile, [at_x, at_other, ldx, w0, w1, ldw, at_y, ldy, num_k, next0, next1])

    def tile(mr: int, fetches: bool) -> ir.Function:
        if number == FLOAT32:
            return column_tile(module, mr, lanes, fetches=fetches)
        if number == PAIRS:
            return pair_column_tile(module, mr, lanes, fetches=fetches, is_native=bfloat16_pairs().is_native)
        return _code_column_tile(module, number, mr, lanes, fetches=fetches)

    with flushing(builder, is_native=number != PAIRS or bfloat16_pairs().is_native):
        in_tiles(tile, builder, num_rows, max_rows(2), call)
    builder.ret_void()


def _add_values(module: ir.Module, number: int, lanes: int, vectors: int) -> None:
    builder, args = entry(module, "values", 12)
    x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy, num_rows, ahead = args
    x, y = builder.inttoptr(x, I32_P if number == PAIRS else F32_P), builder.inttoptr(y, F32_P)
    blocks, ahead = (builder.inttoptr(one, I64_P) for one in (blocks, ahead))

    def call(tile: ir.Function, first: ir.Value) -> None:
        at_x, at_y = rows_on(builder, x, ldx, first), rows_on(builder, y, ldy, first)
        builder.call(tile, [at_x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, at_y, ldy, ahead])

    def tile(mr: int, fetches: bool) -> ir.Function:
        width = Width(lanes, vectors)
        if number == FLOAT32:
            return _block_tile(module, mr, width, fetches=fetches)
        if number == PAIRS:
            return pair_block_tile(module, mr, width, fetches=fetches, is_native=bfloat16_pairs().is_native)
        return _code_block_tile(module, number, mr, width, fetches=fetches)

    with flushing(builder, is_native=number != PAIRS or bfloat16_pairs().is_native):
        in_tiles(tile, builder, num_rows, max_rows(vectors * _vectors_a_load(number)), call)
    builder.ret_void()
