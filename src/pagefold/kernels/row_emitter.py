"""RowEmitter: vector code on rows of numbers, in vectors of :data:`LANES` on every processor.

No order of operations is left to a compiler: a narrower register takes two of them for one vector, and the same numbers
come out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import FLOAT_BYTES, I32, I64
from pagefold.kernels.pairs import SHORT_BYTES, rounded_to_shorts
from pagefold.kernels.words import WordEmitter

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BIT", "EXP2_MIN", "LANES", "Piece", "RowEmitter", "rounded"]

LANES = 16
"""Numbers of a vector, also where registers have fewer: LLVM splits it, and no number is computed otherwise."""

BIT = ir.IntType(1)
EXP2_MIN = -126.0  # below, a float32 power of two is no normal number: 2^-126 is 0 here
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


def rounded(number: float) -> float:
    """Return a number as float32 has it."""
    return float(np.float32(number))


class Piece(NamedTuple):
    """A vector's worth of a row, as values of the function that is being built.

    Attributes:
        first: of its numbers.
        mask: which lanes have one; None where all do.
    """

    first: ir.Value
    mask: ir.Value | None


class RowEmitter(WordEmitter):
    """Vector code on rows."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        super().__init__(builder, LANES)
        self._bits = ir.VectorType(BIT, LANES)
        pointer = self.vector.as_pointer()
        kind = ir.FunctionType(self.vector, [pointer, I32, self._bits, self.vector])
        self._masked_load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer, I32, self._bits])
        self._masked_store = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")

    def over(self, num: ir.Value, body: Callable[[Piece], None]) -> None:
        """Emit ``body`` for a row of ``num`` numbers, piece by piece; the last one may be a part of a vector."""
        builder = self.builder
        whole, left = builder.sdiv(num, I64(LANES)), builder.srem(num, I64(LANES))
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            body(Piece(builder.mul(loop.index, I64(LANES)), None))
        with builder.if_then(builder.icmp_signed("!=", left, I64(0))):
            lanes = ir.Constant(self.words, list(range(LANES)))
            mask = builder.icmp_signed("<", lanes, self.broadcast_word(builder.trunc(left, I32)))
            body(Piece(builder.mul(whole, I64(LANES)), mask))

    def read(self, row: ir.Value, piece: Piece, otherwise: float = 0.0) -> ir.Value:
        """Load a piece; lanes that have no number get another one."""
        if piece.mask is None:
            return self.load(self.at(row, piece.first))
        where = self.builder.bitcast(self.at(row, piece.first), self.vector.as_pointer())
        return self.builder.call(self._masked_load, [where, I32(FLOAT_BYTES), piece.mask, self.all_floats(otherwise)])

    def write(self, value: ir.Value, row: ir.Value, piece: Piece) -> None:
        """Store a piece."""
        if piece.mask is None:
            self.store(value, self.at(row, piece.first), 0)
            return
        where = self.builder.bitcast(self.at(row, piece.first), self.vector.as_pointer())
        self.builder.call(self._masked_store, [value, where, I32(FLOAT_BYTES), piece.mask])

    def write_shorts(self, value: ir.Value, row: ir.Value, piece: Piece) -> None:
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
        total: ir.Value = self.all_floats(rounded(factors[-1]))
        for factor in factors[-2::-1]:
            total = self.exact_fma(x, total, self.all_floats(rounded(factor)))
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
        x = self.smaller(self.all_floats(rounded(_TANH_MAX)), number)
        x = self.larger(self.all_floats(rounded(-_TANH_MAX)), x)
        square = builder.fmul(x, x)
        above = builder.fmul(x, self.polynomial(square, _TANH_ABOVE))
        return builder.fdiv(above, self.polynomial(square, _TANH_BELOW))
