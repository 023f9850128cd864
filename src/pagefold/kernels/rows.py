"""What is done with rows of numbers between products: RMS norms, SiLU and GELU, softcaps, and the weights of attention.

It is written in vectors of :data:`LANES` numbers on every processor, without leave to change the order of operations.
So what comes out is the same to the bit wherever it is computed: a sum over a row is a chain in each lane, in the order
of the row, and then the lanes are added, the halves of what is left on each other.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import F32, F32_P, FLOAT_BYTES, I8, I8_P, I32, I64, entry, rows_on
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.pairs import SHORT_BYTES
from pagefold.kernels.row_emitter import BIT, EXP2_MIN, LANES, Piece, RowEmitter, rounded
from pagefold.kernels.words import I32_P, WORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LANES", "LOG2E", "RowTiles", "row_tiles"]

LOG2E = 1.4426950408889634
"""A power of e is the power of two whose exponent is so many times larger."""

_GELU = -2 * math.sqrt(2 / math.pi) * LOG2E
"""GELU in its form with tanh is ``x / (1 + 2^(x (g + .044715 g x^2)))``: so no digits are lost where it is near 0."""
_GELU_CUBED = 0.044715
_NOTHING = -1e30


class RowTiles(NamedTuple):
    """Addresses of what is done with rows. Arguments are integers: addresses, distances in bytes, bits of float32.

    Attributes:
        norm: (x, x_distance, weight, num, epsilon, num_rows, out, out_distance): RMS norms of rows of ``num`` numbers,
            times ``weight``; ``epsilon`` is bits. ``out`` may be x.
        silu: (gate, gate_distance, up, up_distance, num, num_rows): ``gate = gate / (1 + exp(-gate)) * up``.
        gelu: likewise, by GELU in its form with tanh: ``gate = gate * (1 + tanh(s * (gate + c * gate^3))) / 2 * up``,
            where s is the root of 2 / pi, and c is .044715.
        cap: (x, x_distance, num, num_rows, softcap): ``x = softcap * tanh(x / softcap)``; ``softcap`` is bits.
        weights: (scores, distance, hidden, limits, num_rows, num_entries, softcap, tops, totals, to_pairs): turns
            scores into weights ``2^(score - top)`` in place, and writes the largest score of each row and the sum of
            its weights. ``hidden`` and ``limits`` are int32: of a row's entries, those from the one to the other count;
            others of ``num_entries`` get weight 0, whatever was there. ``softcap`` is bits: where it is not 0, scores
            first become ``softcap * tanh(score)``. Of no entries the top is -1e30 and the sum 0. With ``to_pairs`` that
            is not 0 weights become bfloat16, as many as make whole words, at the beginning of their rows.
    """

    norm: int
    silu: int
    gelu: int
    cap: int
    weights: int


@cache
def row_tiles() -> RowTiles:
    """Return what is done with rows, compiled for this processor."""

    def build() -> ir.Module:
        module = ir.Module()
        _add_norm(module)
        _add_gated(module, "silu", _silu_exponent)
        _add_gated(module, "gelu", _gelu_exponent)
        _add_cap(module)
        _add_weights(module)
        return module

    return RowTiles(**addresses_in("rows", build, RowTiles._fields))


def _number_of(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Return the float32 of an argument."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


def _floats_apart(builder: ir.IRBuilder, distance: ir.Value) -> ir.Value:
    return builder.sdiv(distance, I64(FLOAT_BYTES))


def _add_norm(module: ir.Module) -> None:
    builder, args = entry(module, "norm", 8)
    x, x_distance, weight, num, epsilon, num_rows, out, out_distance = args
    x, weight, out = (builder.inttoptr(one, F32_P) for one in (x, weight, out))
    emit = RowEmitter(builder)
    size = builder.sitofp(num, F32)
    sqrt = cgutils.get_or_insert_function(module, ir.FunctionType(F32, [F32]), "llvm.sqrt.f32")
    sums = emit.place(0.0)
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        row = rows_on(builder, x, _floats_apart(builder, x_distance), rows.index)
        into = rows_on(builder, out, _floats_apart(builder, out_distance), rows.index)
        builder.store(emit.all_floats(0.0), sums)

        def add(piece: Piece, row: ir.Value = row) -> None:
            number = emit.read(row, piece)
            builder.store(emit.exact_fma(number, number, builder.load(sums)), sums)

        emit.over(num, add)
        mean = builder.fdiv(emit.across(builder.load(sums), builder.fadd), size)
        root = builder.call(sqrt, [builder.fadd(mean, _number_of(builder, epsilon))])
        factor = emit.broadcast(builder.fdiv(F32(1.0), root))

        def scale(piece: Piece, row: ir.Value = row, into: ir.Value = into, factor: ir.Value = factor) -> None:
            scaled = builder.fmul(emit.read(row, piece), factor)
            emit.write(builder.fmul(scaled, emit.read(weight, piece)), into, piece)

        emit.over(num, scale)
    builder.ret_void()


def _silu_exponent(emit: RowEmitter, x: ir.Value) -> ir.Value:
    return emit.builder.fmul(x, emit.all_floats(rounded(-LOG2E)))


def _gelu_exponent(emit: RowEmitter, x: ir.Value) -> ir.Value:
    square = emit.builder.fmul(x, x)
    factor = emit.exact_fma(square, emit.all_floats(rounded(_GELU * _GELU_CUBED)), emit.all_floats(rounded(_GELU)))
    return emit.builder.fmul(x, factor)


def _add_gated(module: ir.Module, name: str, exponent_of: Callable[[RowEmitter, ir.Value], ir.Value]) -> None:
    """Emit: ``gate = gate / (1 + 2^exponent_of(gate)) * up``."""
    builder, args = entry(module, name, 6)
    gate, gate_distance, up, up_distance, num, num_rows = args
    gate, up = (builder.inttoptr(one, F32_P) for one in (gate, up))
    emit = RowEmitter(builder)
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        gates = rows_on(builder, gate, _floats_apart(builder, gate_distance), rows.index)
        ups = rows_on(builder, up, _floats_apart(builder, up_distance), rows.index)

        def multiply(piece: Piece, gates: ir.Value = gates, ups: ir.Value = ups) -> None:
            number = emit.read(gates, piece)
            exponent = exponent_of(emit, number)
            exponent = emit.larger(emit.all_floats(EXP2_MIN), emit.smaller(emit.all_floats(-EXP2_MIN), exponent))
            below = builder.fadd(emit.all_floats(1.0), emit.exp2(exponent))
            emit.write(builder.fdiv(builder.fmul(emit.read(ups, piece), number), below), gates, piece)

        emit.over(num, multiply)
    builder.ret_void()


def _add_cap(module: ir.Module) -> None:
    builder, args = entry(module, "cap", 5)
    x, x_distance, num, num_rows, softcap = args
    emit = RowEmitter(builder)
    cap = emit.broadcast(_number_of(builder, softcap))
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        row = rows_on(builder, builder.inttoptr(x, F32_P), _floats_apart(builder, x_distance), rows.index)

        def lower(piece: Piece, row: ir.Value = row) -> None:
            below = emit.tanh(builder.fdiv(emit.read(row, piece), cap))
            emit.write(builder.fmul(cap, below), row, piece)

        emit.over(num, lower)
    builder.ret_void()


def _add_weights(module: ir.Module) -> None:
    builder, args = entry(module, "weights", 10)
    scores, distance, hidden, limits, num_rows, num_entries, softcap, tops, totals, to_pairs = args
    scores, tops, totals = (builder.inttoptr(one, F32_P) for one in (scores, tops, totals))
    hidden, limits = (builder.inttoptr(one, I32_P) for one in (hidden, limits))
    emit = RowEmitter(builder)
    cap = emit.broadcast(_number_of(builder, softcap))
    has_cap = builder.icmp_signed("!=", softcap, I64(0))
    is_short = builder.icmp_signed("!=", to_pairs, I64(0))
    top, total = emit.place(_NOTHING), emit.place(0.0)
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        first, end = (
            builder.sext(builder.load(emit.at(one, rows.index), align=WORD_BYTES), I64) for one in (hidden, limits)
        )
        whole_row = rows_on(builder, scores, _floats_apart(builder, distance), rows.index)
        row, num = emit.at(whole_row, first), builder.sub(end, first)
        with builder.if_then(has_cap):

            def cap_scores(piece: Piece, row: ir.Value = row) -> None:
                emit.write(builder.fmul(cap, emit.tanh(emit.read(row, piece))), row, piece)

            emit.over(num, cap_scores)
        builder.store(emit.all_floats(_NOTHING), top)

        def look(piece: Piece, row: ir.Value = row) -> None:
            builder.store(emit.larger(emit.read(row, piece, _NOTHING), builder.load(top)), top)

        emit.over(num, look)
        largest = emit.across(builder.load(top), emit.larger)
        builder.store(largest, emit.at(tops, rows.index))
        above = emit.broadcast(largest)
        builder.store(emit.all_floats(0.0), total)

        def weigh(piece: Piece, write: Callable[[ir.Value, ir.Value, Piece], None], into: ir.Value) -> None:
            below = builder.fsub(emit.read(row, piece), above)
            weight = emit.exp2(emit.larger(emit.all_floats(EXP2_MIN), below))
            if piece.mask is not None:
                weight = builder.select(piece.mask, weight, emit.all_floats(0.0))
            builder.store(builder.fadd(builder.load(total), weight), total)
            write(weight, into, piece)

        with builder.if_else(is_short) as (then, other):
            with then:
                shorts = builder.bitcast(whole_row, ir.IntType(16).as_pointer())
                emit.over(num, lambda piece: weigh(piece, emit.write_shorts, emit.at(shorts, first)))
                even = builder.and_(builder.add(num_entries, I64(1)), I64(-2))
                _clear(builder, _Row(shorts, first, end), even, SHORT_BYTES)
            with other:
                emit.over(num, lambda piece: weigh(piece, emit.write, row))
                _clear(builder, _Row(whole_row, first, end), num_entries, FLOAT_BYTES)
        builder.store(emit.across(builder.load(total), builder.fadd), emit.at(totals, rows.index))
    builder.ret_void()


class _Row(NamedTuple):
    """A row of scores, as values of the function that is being built.

    Attributes:
        start: the address of its first number.
        first, end: the entries that count.
    """

    start: ir.Value
    first: ir.Value
    end: ir.Value


def _clear(builder: ir.IRBuilder, row: _Row, num: ir.Value, num_bytes: int) -> None:
    """Emit: zeros before the entries that count and behind them, of ``num`` of ``num_bytes`` each."""
    kind = ir.FunctionType(ir.VoidType(), [I8_P, I8, I64, BIT])
    fill = cgutils.get_or_insert_function(builder.module, kind, "llvm.memset.p0.i64")
    for begin, length in ((I64(0), row.first), (row.end, builder.sub(num, row.end))):
        with builder.if_then(builder.icmp_signed(">", length, I64(0))):
            where = builder.bitcast(builder.gep(row.start, [begin]), I8_P)
            builder.call(fill, [where, I8(0), builder.mul(length, I64(num_bytes)), BIT(0)])
