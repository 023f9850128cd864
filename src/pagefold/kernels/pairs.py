"""bfloat16: products of pairs of numbers, summed in float32.

A word is a pair: numbers 2k and 2k + 1 of a row, or of a column. A panel is words ``[ceil(K / 2), W]``, and the partner
that an odd K lacks is zero. An output is a chain in the order of k, whatever the number of rows::

    acc = acc + x[2k + 1] * w[2k + 1]      each a fused multiply-add: rounded once,
    acc = acc + x[2k] * w[2k]              numbers too small to be normal taken and given back as zero

or the sum of such chains, of :data:`MAX_STEPS` words at most. That is what ``vdpbf16ps`` computes (Intel, "Architecture
Instruction Set Extensions", says in which order; that the products are not rounded was found by trying). A processor
that lacks it computes the same with two multiply-adds, to the bit: it is told to take small numbers for zero, too.
The instruction is tried before it is trusted: see :func:`bfloat16_pairs`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import (
    F32,
    F32_P,
    FLOAT_BYTES,
    I8_P,
    I32,
    I64,
    IS_WIDE,
    MAX_LANES,
    entry,
    in_tiles,
    max_rows,
    new_function,
    rows_on,
)
from pagefold.kernels.formats import PANEL_VECTORS, PANEL_WIDTH, FormatTiles, multiply, num_panels, pack
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.words import I32_P, WORD_BYTES, WordEmitter, in_passes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = [
    "MAX_STEPS",
    "SHORT_BYTES",
    "PairEmitter",
    "Pairs",
    "bfloat16_pairs",
    "flushing",
    "round_to_bfloat16",
    "rounded_to_shorts",
]

MAX_STEPS = 256
"""Words of a chain: longer sums are cut, and added up."""
_PANELS_AT_ONCE = 16
"""Panels that are packed together: rounding takes several times what it rounds."""
SHORT_BYTES = 2
_HIGH = 16
_FLUSH = 0x8040  # of the control register: small results are zero, and small numbers are taken for it
_QUIET = 0x0040
"""The bit of a bfloat16 number that makes any NaN a quiet one."""


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """bfloat16 as LLVM calls it: llvmlite does not know it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class PairEmitter(WordEmitter):
    """Vector code on pairs.

    Args:
        builder: of the function.
        lanes: of a vector.
        is_native: whether to use the processor's instruction.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int, *, is_native: bool) -> None:
        super().__init__(builder, lanes)
        self._is_native = is_native
        if is_native:
            self._shorts = ir.VectorType(_BFloat(), 2 * lanes)
            kind = ir.FunctionType(self.vector, [self.vector, self._shorts, self._shorts])
            name = f"llvm.x86.avx512bf16.dpbf16ps.{lanes * 32}"
            self._dot = cgutils.get_or_insert_function(builder.module, kind, name)

    def sum_pairs(self, x: ir.Value, w: ir.Value, acc: ir.Value) -> ir.Value:
        """Add the products of two pairs to ``acc``, a lane."""
        if self._is_native:
            shorts = [self.builder.bitcast(one, self._shorts) for one in (x, w)]
            return self.builder.call(self._dot, [acc, *shorts])
        for part in (self.odd, self.even):
            acc = self.exact_fma(part(x), part(w), acc)
        return acc

    def odd(self, words: ir.Value) -> ir.Value:
        """Return the second numbers of pairs as float32."""
        return self.as_floats(self.builder.and_(words, self.all_words(0xFFFF0000)))

    def even(self, words: ir.Value) -> ir.Value:
        """Return the first numbers of pairs as float32."""
        return self.as_floats(self.builder.shl(words, self.all_words(_HIGH)))


@dataclass(frozen=True, slots=True)
class Pairs:
    """bfloat16 weights and rows: a :class:`~pagefold.kernels.formats.ProductFormat`.

    Attributes:
        is_native: whether by the processor's instruction; what comes out is the same.
    """

    is_native: bool
    name: str = "bfloat16"

    @property
    def arithmetic(self) -> str:
        """What decides the bits of a product, the same with and without the instruction."""
        return f"bfloat16 in chains of {MAX_STEPS} pairs"

    @property
    def means(self) -> str:
        """What computes in it on this processor."""
        if self.is_native:
            return "vdpbf16ps"
        return "two multiply-adds a pair: the same bits as vdpbf16ps, which this processor lacks, and slower"

    def row_bytes(self, num_k: int) -> int:
        """Return the bytes of a row: whole words."""
        return _num_words(num_k) * WORD_BYTES

    def panel_bytes(self, num_k: int) -> int:
        """Return the bytes of a panel."""
        return _num_words(num_k) * WORD_BYTES * PANEL_WIDTH

    def pack(self, matrix: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        """Pack a matrix ``[N, K]``, rounded to nearest."""
        num, num_k = matrix.shape
        words = _num_words(num_k)
        assert into.shape == (num_panels(num), self.panel_bytes(num_k))
        panels = into.view(np.uint32).reshape(len(into), words, PANEL_WIDTH)
        for first in range(0, len(into), _PANELS_AT_ONCE):
            piece = panels[first : first + _PANELS_AT_ONCE]
            rows = matrix[first * PANEL_WIDTH : (first + len(piece)) * PANEL_WIDTH]
            pairs = np.zeros((len(piece) * PANEL_WIDTH, 2 * words), np.uint16)
            pairs[: len(rows), :num_k] = round_to_bfloat16(rows)
            piece[:] = pairs.view(np.uint32).reshape(len(piece), PANEL_WIDTH, words).transpose(0, 2, 1)

    def tiles(self) -> FormatTiles:
        """Return what computes in bfloat16."""
        return _tiles(self.is_native)


def round_to_bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of float32 numbers rounded to the nearest bfloat16, ties to even; a NaN stays one."""
    bits = numbers.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> _HIGH) & 1))) >> _HIGH).astype(np.uint16)
    is_nan = np.isnan(numbers)
    return np.where(is_nan, (bits >> _HIGH).astype(np.uint16) | np.uint16(_QUIET), rounded) if is_nan.any() else rounded


def _num_words(num_k: int) -> int:
    return -(-num_k // 2)


@cache
def _tiles(is_native: bool) -> FormatTiles:
    def build() -> ir.Module:
        module = ir.Module()
        _add_rows(module)
        _add_product(module, is_native=is_native)
        _add_column(module)
        return module

    return FormatTiles(**addresses_in(f"pairs-{int(is_native)}", build, FormatTiles._fields))


def _tile(module: ir.Module, mr: int, *, fetches: bool, is_native: bool) -> ir.Function:
    """``y[mr, W] (+)= x[mr, K] @ panel[K, W]``.

    (x, ldx, panel, y, ldy, num_words, adds, following): ``ld*`` in words and numbers.
    """
    kinds = [I32_P, I64, I32_P, F32_P, I64, I64, I64, I32_P]
    function, is_new = new_function(module, f"pagefold_pairs_{mr}_{int(fetches)}", kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, panel, y, ldy, num_words, adds, following = function.args
    emit = PairEmitter(builder, MAX_LANES, is_native=is_native)
    acc = emit.accumulators(PANEL_VECTORS * mr)
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_words, intp=I64) as loop:
        offset = builder.mul(loop.index, I64(PANEL_WIDTH))
        start = emit.at(panel, offset)
        weights = [emit.load_words(start, v * MAX_LANES) for v in range(PANEL_VECTORS)]
        if fetches:
            for v in range(PANEL_VECTORS):
                emit.fetch(emit.at(emit.at(following, offset), v * MAX_LANES))
        for r, row in enumerate(rows):
            pair = emit.broadcast_word(builder.load(emit.at(row, loop.index), align=WORD_BYTES))
            for v, column in enumerate(weights):
                place = acc[r * PANEL_VECTORS + v]
                builder.store(emit.sum_pairs(pair, column, builder.load(place)), place)
    outs = [emit.at(y, builder.mul(ldy, I64(r))) for r in range(mr)]
    with builder.if_then(builder.icmp_signed("!=", adds, I64(0))):
        for r in range(mr):
            for v in range(PANEL_VECTORS):
                place = acc[r * PANEL_VECTORS + v]
                builder.store(builder.fadd(builder.load(place), emit.load(outs[r], v * MAX_LANES)), place)
    for r in range(mr):
        for v in range(PANEL_VECTORS):
            emit.store(builder.load(acc[r * PANEL_VECTORS + v]), outs[r], v * MAX_LANES)
    builder.ret_void()
    return function


def _add_product(module: ir.Module, *, is_native: bool) -> None:
    builder, args = entry(module, "product", 9)
    x, x_distance, panel, num_k, num_rows, y, y_distance, adds, following = args
    x, panel, following = (builder.inttoptr(a, I32_P) for a in (x, panel, following))
    y = builder.inttoptr(y, F32_P)
    ldx, ldy = builder.sdiv(x_distance, I64(WORD_BYTES)), builder.sdiv(y_distance, I64(FLOAT_BYTES))
    num_words = _words_of(builder, num_k)
    # The instruction flushes by itself, but what adds passes up does not.
    with flushing(builder, is_native=False), in_passes(builder, num_words, MAX_STEPS) as one:
        here = builder.gep(panel, [builder.mul(one.first, I64(PANEL_WIDTH))])
        behind = builder.gep(here, [builder.mul(one.num_steps, I64(PANEL_WIDTH))])
        behind = builder.select(one.is_last, following, behind)
        must_add = builder.or_(adds, one.first)

        def call(tile: ir.Function, row: ir.Value) -> None:
            at_x = builder.gep(rows_on(builder, x, ldx, row), [one.first])
            at_y = rows_on(builder, y, ldy, row)
            builder.call(tile, [at_x, ldx, here, at_y, ldy, one.num_steps, must_add, behind])

        def tile(mr: int, fetches: bool) -> ir.Function:
            return _tile(module, mr, fetches=fetches, is_native=is_native)

        in_tiles(tile, builder, num_rows, max_rows(PANEL_VECTORS), call)
    builder.ret_void()


def _words_of(builder: ir.IRBuilder, num_k: ir.Value) -> ir.Value:
    return builder.ashr(builder.add(num_k, I64(1)), I64(1))


@contextmanager
def flushing(builder: ir.IRBuilder, *, is_native: bool) -> Iterator[None]:
    """Emit code that takes small numbers for zero, as the instruction does by itself."""
    if is_native:
        yield
        return
    before, now = builder.alloca(I32), builder.alloca(I32)
    _mode(builder, "st", before)
    builder.store(builder.or_(builder.load(before), I32(_FLUSH)), now)
    _mode(builder, "ld", now)
    yield
    _mode(builder, "ld", before)


def _mode(builder: ir.IRBuilder, what: str, place: ir.Value) -> None:
    """Emit: the control register is stored at ``place``, or loaded from there."""
    kind = ir.FunctionType(ir.VoidType(), [I8_P])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{what}mxcsr")
    builder.call(function, [builder.bitcast(place, I8_P)])


def _add_rows(module: ir.Module) -> None:
    """Rows of float32, rounded to nearest; the partner that an odd one lacks is zero."""
    builder, (x, distance, num_k, num_rows, out, out_distance) = entry(module, "rows", 6)
    short = ir.IntType(16)
    emit = WordEmitter(builder, MAX_LANES)
    x, out = builder.inttoptr(x, F32_P), builder.inttoptr(out, short.as_pointer())
    ldx = builder.sdiv(distance, I64(FLOAT_BYTES))
    whole = builder.sdiv(num_k, I64(MAX_LANES))
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        row = rows_on(builder, x, ldx, rows.index)
        into = rows_on(builder, out, builder.sdiv(out_distance, I64(SHORT_BYTES)), rows.index)
        with cgutils.for_range(builder, whole, intp=I64) as loop:
            first = builder.mul(loop.index, I64(MAX_LANES))
            shorts = rounded_to_shorts(emit, emit.load(emit.at(row, first)))
            where = builder.bitcast(emit.at(into, first), shorts.type.as_pointer())
            builder.store(shorts, where, align=SHORT_BYTES)
        done = builder.mul(whole, I64(MAX_LANES))
        with cgutils.for_range_slice(builder, done, num_k, I64(1), intp=I64) as (k, _):
            rounded = _rounded(builder, builder.bitcast(builder.load(emit.at(row, k)), I32), I32)
            builder.store(builder.trunc(rounded, short), emit.at(into, k))
        with builder.if_then(builder.trunc(num_k, ir.IntType(1))):
            builder.store(short(0), emit.at(into, num_k))
    builder.ret_void()


def rounded_to_shorts(emit: WordEmitter, numbers: ir.Value) -> ir.Value:
    """Return a vector of float32 rounded to bfloat16, to nearest, as 16-bit words."""
    rounded = _rounded(emit.builder, emit.as_words(numbers), emit.all_words)
    return emit.builder.trunc(rounded, ir.VectorType(ir.IntType(16), emit.lanes))


def _rounded(builder: ir.IRBuilder, bits: ir.Value, constant: object) -> ir.Value:
    """Return the bits of float32 rounded to bfloat16, as words; ``constant`` makes constants of their kind."""
    assert callable(constant)
    last = builder.and_(builder.lshr(bits, constant(_HIGH)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(last, constant(0x7FFF))), constant(_HIGH))
    size = builder.and_(bits, constant(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", size, constant(0x7F800000))
    return builder.select(is_nan, builder.or_(builder.lshr(bits, constant(_HIGH)), constant(_QUIET)), rounded)


def _add_column(module: ir.Module) -> None:
    builder, (panel, column, num_k, out) = entry(module, "column", 4)
    short = ir.IntType(16)
    panel, out = builder.inttoptr(panel, short.as_pointer()), builder.inttoptr(out, F32_P)
    with cgutils.for_range(builder, num_k, intp=I64) as loop:
        word = builder.add(builder.mul(builder.ashr(loop.index, I64(1)), I64(PANEL_WIDTH)), column)
        at = builder.add(builder.shl(word, I64(1)), builder.and_(loop.index, I64(1)))
        bits = builder.shl(builder.zext(builder.load(builder.gep(panel, [at])), I32), I32(_HIGH))
        builder.store(builder.bitcast(bits, F32), builder.gep(out, [loop.index]))
    builder.ret_void()


@cache
def bfloat16_pairs() -> Pairs:
    """Return the format for this processor: by its instruction, if it has one that computes what is said above."""
    if not (IS_WIDE and llvm.get_host_cpu_features().get("avx512bf16")):
        return Pairs(is_native=False)
    random = np.random.default_rng(0)
    is_native = True
    # What products differ in by far shows the order of sums; what is small throughout, what becomes of it.
    for num_k, exponents in ((64, (-70, 60)), (1030, (-66, -60))):
        x, w = (
            (random.standard_normal((num, num_k)) * 2.0 ** random.integers(*exponents, num_k)).astype(np.float32)
            for num in (4, PANEL_WIDTH)
        )
        tried, expected = (multiply(one, x, pack(one, w)) for one in (Pairs(is_native=True), Pairs(is_native=False)))
        is_native &= np.array_equal(tried.view(np.uint32), expected.view(np.uint32))
    return Pairs(is_native=is_native)
