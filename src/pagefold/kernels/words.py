"""Vectors of 32-bit words: what tiles of numbers shorter than float32 are made of, two or four of them a word.

One word of a row is broadcast; one word of a column a lane is multiplied with it, number by number, and summed.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import I32, I64, Emitter

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["I32_P", "WORD_BYTES", "Pass", "WordEmitter", "in_passes"]

WORD_BYTES = 4
I32_P = I32.as_pointer()


class WordEmitter(Emitter):
    """Vector code on words, in one function that is being built."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        super().__init__(builder, lanes)
        self.words = ir.VectorType(I32, lanes)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self._exact = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{lanes}f32")

    def all_words(self, value: int) -> ir.Constant:
        """Return a vector of one constant word."""
        return ir.Constant(self.words, [value] * self.lanes)

    def load_words(self, pointer: ir.Value, offset: int = 0) -> ir.Value:
        """Load a vector of words."""
        where = self.builder.bitcast(self.at(pointer, offset), self.words.as_pointer())
        return self.builder.load(where, align=WORD_BYTES)

    def broadcast_word(self, word: ir.Value) -> ir.Value:
        """Return a vector of one word."""
        nothing = ir.Constant(self.words, ir.Undefined)
        first = self.builder.insert_element(nothing, word, I32(0))
        return self.builder.shuffle_vector(first, nothing, self.all_words(0))

    def all_floats(self, value: float) -> ir.Constant:
        """Return a vector of one constant number."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def as_floats(self, words: ir.Value) -> ir.Value:
        """Return the float32 numbers that have these bits."""
        return self.builder.bitcast(words, self.vector)

    def exact_fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """``a * b + c``, rounded once whatever the processor."""
        return self.builder.call(self._exact, [a, b, c])

    def as_words(self, floats: ir.Value) -> ir.Value:
        """Return the bits of float32 numbers."""
        return self.builder.bitcast(floats, self.words)


class Pass(NamedTuple):
    """Some steps of a panel, as values of the function that is being built.

    Attributes:
        first: the first of them.
        num_steps: how many.
        is_last: whether no pass follows.
    """

    first: ir.Value
    num_steps: ir.Value
    is_last: ir.Value


@contextmanager
def in_passes(builder: ir.IRBuilder, num_steps: ir.Value, most: int) -> Iterator[Pass]:
    """Emit a loop over a panel, in passes as even as can be and of ``most`` steps at most; of no steps no pass.

    Short sums, added up, round less than a long one.
    """
    num_passes = builder.sdiv(builder.add(num_steps, I64(most - 1)), I64(most))
    divisor = builder.select(builder.icmp_signed(">", num_passes, I64(0)), num_passes, I64(1))
    length = builder.sdiv(builder.sub(builder.add(num_steps, num_passes), I64(1)), divisor)
    with cgutils.for_range(builder, num_passes, intp=I64) as loop:
        first = builder.mul(loop.index, length)
        left = builder.sub(num_steps, first)
        is_last = builder.icmp_signed("<=", left, length)
        yield Pass(first, builder.select(is_last, left, length), is_last)
