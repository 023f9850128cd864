"""What is done with rows of numbers between products: RMS norms, SiLU, and the weights of attention.

It is written in vectors of :data:`LANES` numbers on every processor, without leave to change the order of operations.
So what comes out is the same to the bit wherever it is computed: a sum over a row is a chain in each lane, in the order
of the row, and then the lanes are added, the halves of what is left on each other.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import F32, F32_P, FLOAT_BYTES, I8, I8_P, I32, I64, entry, rows_on
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.pairs import SHORT_BYTES, rounded_to_shorts
from pagefold.kernels.words import I32_P, WORD_BYTES, WordEmitter

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LANES", "LOG2E", "RowTiles", "row_tiles"]

LANES = 16
"""Numbers of a vector, also where registers have fewer: LLVM splits it, and no number is computed otherwise."""

LOG2E = 1.4426950408889634
"""A power of e is the power of two whose exponent is so many times larger."""

_EXP2_MIN = -126.0  # below, a float32 power of two is no normal number: 2^-126 is 0 here
_EXP2 = (1.0, 0.6931472, 0.24022651, 0.05550411, 0.009618129, 0.0013333558, 0.00015403530)
"""2^f on [-.5, .5] by its Taylor series to f^6: within 1.3e-7 of the truth, less than rounding leaves."""
_TO_WHOLE, _BIAS, _MANTISSA_BITS = 1.5 * 2**23, 127, 23
_TANH_MAX = 7.9  # beyond, tanh is within 3e-7 of 1
_TANH_ABOVE = (
    *(4.89352455891786e-3, 6.37261928875436e-4, 1.48572235717979e-5, 5.12229709037114e-8),
    *(-8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16),
)
_TANH_BELOW = (4.89352518554385e-3, 2.26843463243900e-3, 1.18534705686654e-4, 1.19825839466702e-6)
"""tanh on [-7.9, 7.9] as the quotient of two polynomials, x^1 to x^13 over x^0 to x^6 (Eigen's): within 3.5e-7 of the
truth, relatively, also near 0, where a form in powers of two loses it."""
_NOTHING = -1e30
_BIT = ir.IntType(1)


class RowTiles(NamedTuple):
    """Addresses of what is done with rows. Arguments are integers: addresses, distances in bytes, bits of float32.

    Attributes:
        norm: (x, x_distance, weight, num, epsilon, num_rows, out, out_distance): RMS norms of rows of ``num`` numbers,
            times ``weight``; ``epsilon`` is bits. ``out`` may be x.
        silu: (gate, gate_distance, up, up_distance, num, num_rows): ``gate = gate / (1 + exp(-gate)) * up``.
        weights: (scores, distance, hidden, limits, num_rows, num_entries, softcap, tops, totals, to_pairs): turns
            scores into weights ``2^(score - top)`` in place, and writes the largest score of each row and the sum of
            its weights. ``hidden`` and ``limits`` are int32: of a row's entries, those from the one to the other count;
            others of ``num_entries`` get weight 0, whatever was there. ``softcap`` is bits: where it is not 0, scores
            first become ``softcap * tanh(score)``. Of no entries the top is -1e30 and the sum 0. With ``to_pairs`` that
            is not 0 weights become bfloat16, as many as make whole words, at the beginning of their rows.
    """

    norm: int
    silu: int
    weights: int


@cache
def row_tiles() -> RowTiles:
    """Return what is done with rows, compiled for this processor."""

    def build() -> ir.Module:
        module = ir.Module()
        _add_norm(module)
        _add_silu(module)
        _add_weights(module)
        return module

    return RowTiles(**addresses_in("rows", build, RowTiles._fields))


class _Piece(NamedTuple):
    """A vector's worth of a row, as values of the function that is being built.

    Attributes:
        first: of its numbers.
        mask: which lanes have one; None where all do.
    """

    first: ir.Value
    mask: ir.Value | None


class _RowEmitter(WordEmitter):
    """Vector code on rows."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        super().__init__(builder, LANES)
        self._bits = ir.VectorType(_BIT, LANES)
        pointer = self.vector.as_pointer()
        kind = ir.FunctionType(self.vector, [pointer, I32, self._bits, self.vector])
        self._masked_load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer, I32, self._bits])
        self._masked_store = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")

    def over(self, num: ir.Value, body: Callable[[_Piece], None]) -> None:
        """Emit ``body`` for a row of ``num`` numbers, piece by piece; the last one may be a part of a vector."""
        builder = self.builder
        whole, left = builder.sdiv(num, I64(LANES)), builder.srem(num, I64(LANES))
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            body(_Piece(builder.mul(loop.index, I64(LANES)), None))
        with builder.if_then(builder.icmp_signed("!=", left, I64(0))):
            lanes = ir.Constant(self.words, list(range(LANES)))
            mask = builder.icmp_signed("<", lanes, self.broadcast_word(builder.trunc(left, I32)))
            body(_Piece(builder.mul(whole, I64(LANES)), mask))

    def read(self, row: ir.Value, piece: _Piece, otherwise: float = 0.0) -> ir.Value:
        """Load a piece; lanes that have no number get another one."""
        if piece.mask is None:
            return self.load(self.at(row, piece.first))
        where = self.builder.bitcast(self.at(row, piece.first), self.vector.as_pointer())
        return self.builder.call(self._masked_load, [where, I32(FLOAT_BYTES), piece.mask, self.all_floats(otherwise)])

    def write(self, value: ir.Value, row: ir.Value, piece: _Piece) -> None:
        """Store a piece."""
        if piece.mask is None:
            self.store(value, self.at(row, piece.first), 0)
            return
        where = self.builder.bitcast(self.at(row, piece.first), self.vector.as_pointer())
        self.builder.call(self._masked_store, [value, where, I32(FLOAT_BYTES), piece.mask])

    def write_shorts(self, value: ir.Value, row: ir.Value, piece: _Piece) -> None:
        """Store a piece as bfloat16."""
        shorts = rounded_to_shorts(self, value)
        where = self.builder.bitcast(self.at(row, piece.first), shorts.type.as_pointer())
        if piece.mask is None:
            self.builder.store(shorts, where, align=SHORT_BYTES)
            return
        kind = ir.FunctionType(ir.VoidType(), [shorts.type, shorts.type.as_pointer(), I32, self._bits])
        name = f"llvm.masked.store.v{LANES}i16.p0"
        store = cgutils.get_or_insert_function(self.builder.module, kind, name)
        self.builder.call(store, [shorts, where, I32(SHORT_BYTES), piece.mask])

    def place(self, value: float) -> ir.Value:
        """Return a place for a vector, of one number in all lanes. LLVM makes a register of it."""
        place = cgutils.alloca_once(self.builder, self.vector)
        self.builder.store(self.all_floats(value), place)
        return place

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the larger of two, a lane; ``b`` where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def smaller(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the smaller of two, a lane; ``b`` where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def across(self, vector: ir.Value, both: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Return one number of all lanes: the halves of what is left are put together."""
        nothing = ir.Constant(self.vector, ir.Undefined)
        for half in (8, 4, 2, 1):
            order = [(lane + half) % LANES for lane in range(LANES)]
            turned = self.builder.shuffle_vector(vector, nothing, ir.Constant(self.words, order))
            vector = both(vector, turned)
        return self.builder.extract_element(vector, I32(0))

    def polynomial(self, x: ir.Value, factors: tuple[float, ...]) -> ir.Value:
        """Return a polynomial by Horner's rule; ``factors`` begin with that of 1."""
        total: ir.Value = self.all_floats(_float32(factors[-1]))
        for factor in factors[-2::-1]:
            total = self.exact_fma(x, total, self.all_floats(_float32(factor)))
        return total

    def exp2(self, exponent: ir.Value) -> ir.Value:
        """Return powers of two, of exponents in [-126, 126]: a polynomial for the fraction, bits for the whole."""
        builder = self.builder
        shifted = builder.fadd(exponent, self.all_floats(_TO_WHOLE))  # the lowest bits are the nearest whole number
        fraction = builder.fsub(exponent, builder.fsub(shifted, self.all_floats(_TO_WHOLE)))
        whole = builder.add(self.as_words(shifted), self.all_words(_BIAS))
        power = self.as_floats(builder.shl(whole, self.all_words(_MANTISSA_BITS)))
        return builder.fmul(self.polynomial(fraction, _EXP2), power)

    def tanh(self, number: ir.Value) -> ir.Value:
        """Return hyperbolic tangents."""
        builder = self.builder
        x = self.smaller(self.all_floats(_float32(_TANH_MAX)), number)
        x = self.larger(self.all_floats(_float32(-_TANH_MAX)), x)
        square = builder.fmul(x, x)
        above = builder.fmul(x, self.polynomial(square, _TANH_ABOVE))
        return builder.fdiv(above, self.polynomial(square, _TANH_BELOW))


def _float32(number: float) -> float:
    return float(np.float32(number))


def _number_of(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Return the float32 of an argument."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


def _floats_apart(builder: ir.IRBuilder, distance: ir.Value) -> ir.Value:
    return builder.sdiv(distance, I64(FLOAT_BYTES))


def _add_norm(module: ir.Module) -> None:
    builder, args = entry(module, "norm", 8)
    x, x_distance, weight, num, epsilon, num_rows, out, out_distance = args
    x, weight, out = (builder.inttoptr(one, F32_P) for one in (x, weight, out))
    emit = _RowEmitter(builder)
    size = builder.sitofp(num, F32)
    sqrt = cgutils.get_or_insert_function(module, ir.FunctionType(F32, [F32]), "llvm.sqrt.f32")
    sums = emit.place(0.0)
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        row = rows_on(builder, x, _floats_apart(builder, x_distance), rows.index)
        into = rows_on(builder, out, _floats_apart(builder, out_distance), rows.index)
        builder.store(emit.all_floats(0.0), sums)

        def add(piece: _Piece, row: ir.Value = row) -> None:
            number = emit.read(row, piece)
            builder.store(emit.exact_fma(number, number, builder.load(sums)), sums)

        emit.over(num, add)
        mean = builder.fdiv(emit.across(builder.load(sums), builder.fadd), size)
        root = builder.call(sqrt, [builder.fadd(mean, _number_of(builder, epsilon))])
        factor = emit.broadcast(builder.fdiv(F32(1.0), root))

        def scale(piece: _Piece, row: ir.Value = row, into: ir.Value = into, factor: ir.Value = factor) -> None:
            scaled = builder.fmul(emit.read(row, piece), factor)
            emit.write(builder.fmul(scaled, emit.read(weight, piece)), into, piece)

        emit.over(num, scale)
    builder.ret_void()


def _add_silu(module: ir.Module) -> None:
    builder, args = entry(module, "silu", 6)
    gate, gate_distance, up, up_distance, num, num_rows = args
    gate, up = (builder.inttoptr(one, F32_P) for one in (gate, up))
    emit = _RowEmitter(builder)
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        gates = rows_on(builder, gate, _floats_apart(builder, gate_distance), rows.index)
        ups = rows_on(builder, up, _floats_apart(builder, up_distance), rows.index)

        def multiply(piece: _Piece, gates: ir.Value = gates, ups: ir.Value = ups) -> None:
            number = emit.read(gates, piece)
            exponent = builder.fmul(number, emit.all_floats(_float32(-LOG2E)))
            exponent = emit.larger(emit.all_floats(_EXP2_MIN), emit.smaller(emit.all_floats(-_EXP2_MIN), exponent))
            below = builder.fadd(emit.all_floats(1.0), emit.exp2(exponent))
            emit.write(builder.fdiv(builder.fmul(emit.read(ups, piece), number), below), gates, piece)

        emit.over(num, multiply)
    builder.ret_void()


def _add_weights(module: ir.Module) -> None:
    builder, args = entry(module, "weights", 10)
    scores, distance, hidden, limits, num_rows, num_entries, softcap, tops, totals, to_pairs = args
    scores, tops, totals = (builder.inttoptr(one, F32_P) for one in (scores, tops, totals))
    hidden, limits = (builder.inttoptr(one, I32_P) for one in (hidden, limits))
    emit = _RowEmitter(builder)
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

            def cap_scores(piece: _Piece, row: ir.Value = row) -> None:
                emit.write(builder.fmul(cap, emit.tanh(emit.read(row, piece))), row, piece)

            emit.over(num, cap_scores)
        builder.store(emit.all_floats(_NOTHING), top)

        def look(piece: _Piece, row: ir.Value = row) -> None:
            builder.store(emit.larger(emit.read(row, piece, _NOTHING), builder.load(top)), top)

        emit.over(num, look)
        largest = emit.across(builder.load(top), emit.larger)
        builder.store(largest, emit.at(tops, rows.index))
        above = emit.broadcast(largest)
        builder.store(emit.all_floats(0.0), total)

        def weigh(piece: _Piece, write: Callable[[ir.Value, ir.Value, _Piece], None], into: ir.Value) -> None:
            below = builder.fsub(emit.read(row, piece), above)
            weight = emit.exp2(emit.larger(emit.all_floats(_EXP2_MIN), below))
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
    kind = ir.FunctionType(ir.VoidType(), [I8_P, I8, I64, _BIT])
    fill = cgutils.get_or_insert_function(builder.module, kind, "llvm.memset.p0.i64")
    for begin, length in ((I64(0), row.first), (row.end, builder.sub(num, row.end))):
        with builder.if_then(builder.icmp_signed(">", length, I64(0))):
            where = builder.bitcast(builder.gep(row.start, [begin]), I8_P)
            builder.call(fill, [where, I8(0), builder.mul(length, I64(num_bytes)), _BIT(0)])
