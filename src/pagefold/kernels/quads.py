"""int8: products of four numbers, summed in integers; weights and rows of 8 bit, with a scale for each group of k.

A word is a quad: four numbers of a row, or of a column. Both are cut along k into *groups* of :data:`GROUP` numbers. A
group is first turned: multiplied by Hadamard's matrix over 8, so that each number becomes a sum of all 64, some of them
with the other sign, over 8. An outlier is shared out among all. Then they are rounded symmetrically to -127 .. 127, by
the largest of the group. The matrix over 8 is orthonormal and symmetric: a product of two turned groups is that of the
groups, and a group that is turned twice comes back. A last group may be shorter: it is not turned.

Turning is six stages of butterflies in float32, on any processor in this order::

    x[i] = x[i] / 8
    for stride in 1, 2, 4, 8, 16, 32:
        x[i], x[i + stride] = x[i] + x[i + stride], x[i] - x[i + stride]        for each i without that bit

An output is a chain over groups, in their order, whatever the number of rows::

    acc = acc + sum(x * w) * (scale of x's group * scale of w's group)

where the sum is exact, the product of scales is rounded, and the rest is a fused multiply-add.

``vpdpbusd`` multiplies bytes without a sign by bytes with one: a row's numbers are kept 128 higher, and a sum begins
with what that adds, so many times below zero. A processor that lacks it widens to 16 bits (``vpmaddwd``): the same
integers. (``vpmaddubsw`` would be one instruction less; it saturates.)

A panel has its groups one after another: words ``[GROUP / 4, W]``, scales float32 ``[W]``, and the sums of their
columns, int16 ``[W]``, that a row's 128 is multiplied with. A row has its words, and then its scales. A row that has
infinity or NaN in a group gives NaN everywhere; so does one with a group whose sums are beyond float32's largest, which
takes numbers above 4e37 (an eighth is taken first: behind the sums it would take 5e36). Columns are treated likewise.

Scales by groups of both: as in LLM.int8()'s vector-wise quantization (Dettmers et al., 2022, section 2), cut along k.
Turning both sides by Hadamard's matrix: as in QuaRot (Ashkboos et al., 2024, section 4), which turns whole rows. Here
it is done group by group, and to every product alike.
"""

from __future__ import annotations

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
    I8,
    I8_P,
    I32,
    I64,
    IS_WIDE,
    LINE_BYTES,
    MAX_LANES,
    NUM_REGISTERS,
    entry,
    in_tiles,
    new_function,
)
from pagefold.kernels.formats import PANEL_VECTORS, PANEL_WIDTH, FormatTiles, convert, num_panels
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.words import I32_P, WORD_BYTES, WordEmitter

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GROUP", "Quads", "int8_quads"]

GROUP = 64
"""Numbers that share a scale, and are turned together: a power of four, so that its root divides without rounding.

At most 256: the sum of a column's group must have room in 16 bits.
"""
_PANELS_AT_ONCE = 16
"""Panels that are packed together: what is rounded is there twice for a while."""
_STRIDES = (1, 2, 4, 8, 16, 32)
_SHARE = 0.125  # Hadamard's matrix of 64 has rows of length 8
_QUAD = 4
_MOST = 127
_ABOVE = 128
_SHORT_BYTES = 2
_BEGIN_BYTES = FLOAT_BYTES + _SHORT_BYTES  # a column's scale, and the sum of its numbers
_GROUP_WORDS = GROUP // _QUAD
_GROUP_BYTES = (GROUP + _BEGIN_BYTES) * PANEL_WIDTH
_SMALLEST = float(np.finfo(np.float32).tiny)
_ROUND = 1.5 * 2**23
"""Added to a small number, it leaves the nearest integer in the lowest bits."""
_SIZE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
"""Bits of float32: all but the sign, infinity, and a NaN."""


class _QuadEmitter(WordEmitter):
    """Vector code on quads.

    Args:
        builder: of the function.
        lanes: of a vector.
        is_native: whether to use the processor's instruction.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int, *, is_native: bool) -> None:
        super().__init__(builder, lanes)
        self._is_native = is_native
        bits = lanes * 32
        self._shorts = ir.VectorType(ir.IntType(16), 2 * lanes)
        if is_native:
            bytes_ = ir.VectorType(I8, _QUAD * lanes)
            self._bytes = bytes_
            name, kinds = f"llvm.x86.avx512.vpdpbusd.{bits}", [self.words, bytes_, bytes_]
        elif bits == 512:
            name, kinds = "llvm.x86.avx512.pmaddw.d.512", [self._shorts, self._shorts]
        else:
            name, kinds = "llvm.x86.avx2.pmadd.wd", [self._shorts, self._shorts]
        self._multiply = cgutils.get_or_insert_function(builder.module, ir.FunctionType(self.words, kinds), name)

    def factors(self, word: ir.Value) -> list[ir.Value]:
        """Return what a quad of a row is multiplied as: vectors of the quad, or of its halves in 16 bits."""
        if self._is_native:
            return [self.broadcast_word(word)]
        low = self.builder.and_(word, I32(0x00FF00FF))
        high = self.builder.and_(self.builder.lshr(word, I32(8)), I32(0x00FF00FF))
        return [self.broadcast_word(low), self.broadcast_word(high)]

    def widen(self, words: ir.Value) -> list[ir.Value]:
        """Return quads of columns as they are multiplied: as they are, or their halves in 16 bits."""
        if self._is_native:
            return [words]
        shorts = self.builder.bitcast(words, self._shorts)
        by = ir.Constant(self._shorts, [8] * 2 * self.lanes)
        return [self.builder.ashr(self.builder.shl(shorts, by), by), self.builder.ashr(shorts, by)]

    def sum_quads(self, x: list[ir.Value], w: list[ir.Value], acc: ir.Value) -> ir.Value:
        """Add the products of two quads to ``acc``, a lane."""
        if self._is_native:
            quads = [self.builder.bitcast(one, self._bytes) for one in (x[0], w[0])]
            return self.builder.call(self._multiply, [acc, *quads])
        for half_x, half_w in zip(x, w, strict=True):
            halves = [self.builder.bitcast(half_x, self._shorts), half_w]
            acc = self.builder.add(acc, self.builder.call(self._multiply, halves))
        return acc


@dataclass(frozen=True, slots=True)
class Quads:
    """Weights and rows of int8: a :class:`~pagefold.kernels.formats.ProductFormat`.

    Attributes:
        is_native: whether by the processor's instruction; what comes out is the same.
    """

    is_native: bool
    name: str = "w8a8_int8"

    @property
    def arithmetic(self) -> str:
        """What decides the bits of a product, the same with and without the instruction."""
        return f"int8 by int8 in groups of {GROUP} turned by Hadamard's matrix"

    @property
    def means(self) -> str:
        """What computes in it on this processor."""
        if self.is_native:
            return "vpdpbusd"
        return "vpmaddwd in 16 bits: the same integers as by vpdpbusd, which this processor lacks, and slower"

    def row_bytes(self, num_k: int) -> int:
        """Return the bytes of a row: words, then scales."""
        return _padded(num_k) + _num_groups(num_k) * FLOAT_BYTES

    def panel_bytes(self, num_k: int) -> int:
        """Return the bytes of a panel."""
        return (_padded(num_k) + _num_groups(num_k) * _BEGIN_BYTES) * PANEL_WIDTH

    def pack(self, matrix: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        """Pack a matrix ``[N, K]``: its columns are turned and rounded as rows are, by the same code."""
        num, num_k = matrix.shape
        assert into.shape == (num_panels(num), self.panel_bytes(num_k))
        for first in range(0, len(into), _PANELS_AT_ONCE):
            piece = into[first : first + _PANELS_AT_ONCE]
            columns = matrix[first * PANEL_WIDTH : (first + len(piece)) * PANEL_WIDTH]
            rounded = np.zeros((len(piece) * PANEL_WIDTH, self.row_bytes(num_k)), np.uint8)
            rounded[: len(columns)] = convert(self, np.ascontiguousarray(columns))
            rounded[len(columns) :, : _padded(num_k)] = _ABOVE
            _pack(rounded, num_k, piece)

    def tiles(self) -> FormatTiles:
        """Return what computes in int8."""
        return _tiles(self.is_native)


def int8_quads() -> Quads:
    """Return the format for this processor: by its instruction, if it has one."""
    return Quads(is_native=bool(IS_WIDE and llvm.get_host_cpu_features().get("avx512vnni")))


def _pack(rounded: NDArray[np.uint8], num_k: int, into: NDArray[np.uint8]) -> None:
    """Put columns that were rounded as rows into panels; what is beyond N has numbers that are zero."""
    words = (rounded[:, : _padded(num_k)] ^ np.uint8(_ABOVE)).view(np.uint32)
    words = words.reshape(len(into), PANEL_WIDTH, -1).transpose(0, 2, 1)
    scales = rounded[:, _padded(num_k) :].view(np.float32).reshape(len(into), PANEL_WIDTH, -1)
    for group in range(_num_groups(num_k)):
        quads = np.ascontiguousarray(words[:, group * _GROUP_WORDS : (group + 1) * _GROUP_WORDS])
        numbers = quads.view(np.int8).reshape(len(into), -1, PANEL_WIDTH, _QUAD)
        sums = numbers.sum((1, 3), dtype=np.int16)
        parts = quads.reshape(len(into), -1), np.ascontiguousarray(scales[:, :, group]), sums
        panel = np.concatenate([one.view(np.uint8) for one in parts], axis=1)
        into[:, group * _GROUP_BYTES : group * _GROUP_BYTES + panel.shape[1]] = panel


def _padded(num_k: int) -> int:
    return -(-num_k // _QUAD) * _QUAD


def _num_groups(num_k: int) -> int:
    return -(-num_k // GROUP)


@cache
def _tiles(is_native: bool) -> FormatTiles:
    def build() -> ir.Module:
        module = ir.Module()
        _add_rows(module)
        _add_product(module, is_native=is_native)
        _add_column(module)
        return module

    return FormatTiles(**addresses_in(f"quads-{int(is_native)}", build, FormatTiles._fields))


def _max_rows() -> int:
    """Return how many rows have room in the registers: integers and floats of each, a word of a panel, a broadcast."""
    return (NUM_REGISTERS - PANEL_VECTORS - 1) // (2 * PANEL_VECTORS)


def _tile(module: ir.Module, mr: int, *, fetches: bool, is_native: bool) -> ir.Function:
    """``y[mr, W] (+)= x[mr, K] @ panel[K, W]``.

    (x, scales, ldx, panel, num_words, y, ldy, adds, following): ``ldx`` in words, ``num_words`` of a row.
    """
    kinds = [I32_P, F32_P, I64, I8_P, I64, F32_P, I64, I64, I8_P]
    function, is_new = new_function(module, f"pagefold_quads_{mr}_{int(fetches)}", kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, scales, ldx, panel, num_words, y, ldy, adds, following = function.args
    emit = _QuadEmitter(builder, MAX_LANES, is_native=is_native)
    acc = emit.accumulators(PANEL_VECTORS * mr)
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    factors = [emit.at(scales, builder.mul(ldx, I64(r))) for r in range(mr)]

    def sum_group(group: ir.Value, length: ir.Value) -> None:
        first = builder.mul(group, I64(_GROUP_WORDS))
        offset = builder.mul(group, I64(_GROUP_BYTES))
        here = builder.bitcast(builder.gep(panel, [offset]), I32_P)
        behind = builder.gep(following, [offset]) if fetches else None
        sums = _accumulated(emit, [emit.at(row, first) for row in rows], here, length, behind)
        begins = emit.at(here, builder.mul(length, I64(PANEL_WIDTH)))
        _scale(emit, sums, [emit.at(factor, group) for factor in factors], begins, acc)

    num_whole = builder.sdiv(num_words, I64(_GROUP_WORDS))
    with cgutils.for_range(builder, num_whole, intp=I64) as groups:
        sum_group(groups.index, I64(_GROUP_WORDS))
    left = builder.srem(num_words, I64(_GROUP_WORDS))
    with builder.if_then(builder.icmp_signed("!=", left, I64(0))):
        sum_group(num_whole, left)
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


def _accumulated(
    emit: _QuadEmitter,
    rows: list[ir.Value],
    panel: ir.Value,
    length: ir.Value,
    following: ir.Value | None,
) -> list[ir.Value]:
    """Emit the integer sums of a group of ``length`` words, and return their places, a row and a vector."""
    builder = emit.builder
    begins = builder.bitcast(
        emit.at(builder.gep(panel, [builder.mul(length, I64(PANEL_WIDTH))]), PANEL_WIDTH), ir.IntType(16).as_pointer()
    )
    sums = []
    shorts = ir.VectorType(ir.IntType(16), emit.lanes)
    for v in range(PANEL_VECTORS):
        where = builder.bitcast(emit.at(begins, v * emit.lanes), shorts.as_pointer())
        total = builder.sext(builder.load(where, align=_SHORT_BYTES), emit.words)
        sums.append(builder.mul(total, emit.all_words(-_ABOVE)))
    places = [cgutils.alloca_once(builder, emit.words) for _ in range(len(rows) * PANEL_VECTORS)]
    for index, place in enumerate(places):
        builder.store(sums[index % PANEL_VECTORS], place)
    if following is not None:
        behind = builder.gep(following, [builder.mul(length, I64(PANEL_WIDTH * WORD_BYTES))])
        for line in range(0, _BEGIN_BYTES * PANEL_WIDTH, LINE_BYTES):
            emit.fetch(emit.at(behind, line))
    with cgutils.for_range(builder, length, intp=I64) as loop:
        offset = builder.mul(loop.index, I64(PANEL_WIDTH))
        columns = [emit.widen(emit.load_words(emit.at(panel, offset), v * emit.lanes)) for v in range(PANEL_VECTORS)]
        if following is not None:
            for v in range(PANEL_VECTORS):
                emit.fetch(
                    builder.gep(following, [builder.mul(builder.add(offset, I64(v * emit.lanes)), I64(WORD_BYTES))])
                )
        for r, row in enumerate(rows):
            quad = emit.factors(builder.load(emit.at(row, loop.index), align=WORD_BYTES))
            for v, column in enumerate(columns):
                place = places[r * PANEL_VECTORS + v]
                builder.store(emit.sum_quads(quad, column, builder.load(place)), place)
    return places


def _scale(
    emit: _QuadEmitter,
    sums: list[ir.Value],
    factors: list[ir.Value],
    scales: ir.Value,
    acc: list[ir.Value],
) -> None:
    """Emit: the sums of a group, scaled, are added to the accumulators."""
    builder = emit.builder
    columns = [emit.load(builder.bitcast(scales, F32_P), v * emit.lanes) for v in range(PANEL_VECTORS)]
    for r, factor in enumerate(factors):
        own = emit.broadcast(builder.load(factor, align=FLOAT_BYTES))
        for v, column in enumerate(columns):
            index = r * PANEL_VECTORS + v
            total = builder.sitofp(builder.load(sums[index]), emit.vector)
            builder.store(emit.exact_fma(total, builder.fmul(own, column), builder.load(acc[index])), acc[index])


def _add_product(module: ir.Module, *, is_native: bool) -> None:
    builder, args = entry(module, "product", 9)
    x, x_distance, panel, num_k, num_rows, y, y_distance, adds, following = args
    panel, following = (builder.inttoptr(a, I8_P) for a in (panel, following))
    x, y = builder.inttoptr(x, I32_P), builder.inttoptr(y, F32_P)
    ldx, ldy = builder.sdiv(x_distance, I64(WORD_BYTES)), builder.sdiv(y_distance, I64(FLOAT_BYTES))
    num_words = _words_of(builder, num_k)

    def call(tile: ir.Function, row: ir.Value) -> None:
        at_x = builder.gep(x, [builder.mul(ldx, row)])
        scales = builder.bitcast(builder.gep(at_x, [num_words]), F32_P)
        at_y = builder.gep(y, [builder.mul(ldy, row)])
        builder.call(tile, [at_x, scales, ldx, panel, num_words, at_y, ldy, adds, following])

    def tile(mr: int, fetches: bool) -> ir.Function:
        return _tile(module, mr, fetches=fetches, is_native=is_native)

    in_tiles(tile, builder, num_rows, _max_rows(), call)
    builder.ret_void()


def _words_of(builder: ir.IRBuilder, num_k: ir.Value) -> ir.Value:
    return builder.sdiv(builder.add(num_k, I64(_QUAD - 1)), I64(_QUAD))


def _add_rows(module: ir.Module) -> None:
    """Rows of float32, turned and rounded group by group; what a last word lacks is nothing."""
    builder, (x, distance, num_k, num_rows, out, out_distance) = entry(module, "rows", 6)
    emit = WordEmitter(builder, MAX_LANES)
    num_words = _words_of(builder, num_k)
    x, out = builder.inttoptr(x, F32_P), builder.inttoptr(out, I32_P)
    ldx, ldout = builder.sdiv(distance, I64(FLOAT_BYTES)), builder.sdiv(out_distance, I64(WORD_BYTES))
    num_whole, left = builder.sdiv(num_k, I64(GROUP)), builder.srem(num_k, I64(GROUP))
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        row = builder.gep(x, [builder.mul(ldx, rows.index)])
        into = builder.gep(out, [builder.mul(ldout, rows.index)])
        numbers = builder.bitcast(into, I8_P)
        scales = builder.bitcast(builder.gep(into, [num_words]), F32_P)
        with cgutils.for_range(builder, num_whole, intp=I64) as groups:
            first = builder.mul(groups.index, I64(GROUP))
            place = emit.at(scales, groups.index)
            _round_whole_group(emit, emit.at(row, first), emit.at(numbers, first), place)
        with builder.if_then(builder.icmp_signed("!=", left, I64(0))):
            # A last word's lack is nothing; what it has is written over it.
            builder.store(I32(0x80808080), emit.at(into, builder.sub(num_words, I64(1))))
            first = builder.mul(num_whole, I64(GROUP))
            place = emit.at(scales, num_whole)
            _round_short_group(emit, emit.at(row, first), left, emit.at(numbers, first), place)
    builder.ret_void()


def _round_whole_group(emit: WordEmitter, x: ir.Value, out: ir.Value, scale: ir.Value) -> None:
    """Emit: a whole group of a row turned, and rounded to bytes 128 higher, and its scale; all of it in registers."""
    builder = emit.builder
    vectors = _turned(emit, _load_group(emit, x))
    sizes = [builder.and_(emit.as_words(one), emit.all_words(_SIZE)) for one in vectors]
    while len(sizes) > 1:
        sizes = [_larger(builder, *pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)]
    inverses = emit.broadcast(_store_scale(builder, _largest_lane(emit, sizes[0]), scale))
    for index, one in enumerate(vectors):
        _store_rounded(emit, one, inverses, emit.at(out, index * emit.lanes))


def _round_short_group(emit: WordEmitter, x: ir.Value, length: ir.Value, out: ir.Value, scale: ir.Value) -> None:
    """Emit: a last group, which is not whole, rounded to bytes 128 higher as it is, and its scale."""
    builder = emit.builder
    whole = builder.sdiv(length, I64(emit.lanes))
    done = builder.mul(whole, I64(emit.lanes))
    most_words = cgutils.alloca_once(builder, emit.words)
    most = cgutils.alloca_once(builder, I32)
    builder.store(emit.all_words(0), most_words)
    words = builder.bitcast(x, I32_P)
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        bits = emit.load_words(emit.at(words, builder.mul(loop.index, I64(emit.lanes))))
        sizes = builder.and_(bits, emit.all_words(_SIZE))
        builder.store(_larger(builder, sizes, builder.load(most_words)), most_words)
    builder.store(_largest_lane(emit, builder.load(most_words)), most)
    with cgutils.for_range_slice(builder, done, length, I64(1), intp=I64) as (k, _):
        size = builder.and_(builder.load(emit.at(words, k)), I32(_SIZE))
        builder.store(_larger(builder, size, builder.load(most)), most)
    inverse = _store_scale(builder, builder.load(most), scale)
    inverses = emit.broadcast(inverse)
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        at = builder.mul(loop.index, I64(emit.lanes))
        _store_rounded(emit, emit.load(emit.at(x, at)), inverses, emit.at(out, at))
    with cgutils.for_range_slice(builder, done, length, I64(1), intp=I64) as (k, _):
        shifted = builder.fadd(builder.fmul(builder.load(emit.at(x, k)), inverse), ir.Constant(F32, _ROUND + _ABOVE))
        builder.store(builder.trunc(builder.bitcast(shifted, I32), I8), emit.at(out, k))


def _load_group(emit: WordEmitter, x: ir.Value) -> list[ir.Value]:
    """Load the vectors of a whole group."""
    return [emit.load(x, at) for at in range(0, GROUP, emit.lanes)]


def _turned(emit: WordEmitter, vectors: list[ir.Value]) -> list[ir.Value]:
    """Return a whole group times Hadamard's matrix over 8: butterflies between lanes, then between vectors."""
    builder = emit.builder
    vectors = [builder.fmul(one, emit.all_floats(_SHARE)) for one in vectors]
    for stride in _STRIDES:
        if stride < emit.lanes:
            vectors = [_turned_within(emit, one, stride) for one in vectors]
            continue
        distance, before = stride // emit.lanes, vectors
        vectors = [
            builder.fsub(before[index - distance], one)
            if index & distance
            else builder.fadd(one, before[index + distance])
            for index, one in enumerate(before)
        ]
    return vectors


def _turned_within(emit: WordEmitter, vector: ir.Value, stride: int) -> ir.Value:
    """Return a vector behind a stage of butterflies between its lanes.

    A number times 1 or -1 is exact, so a multiply-add is the sum or the difference with the partner, rounded once.
    """
    lanes = range(emit.lanes)
    partners = ir.Constant(emit.words, [lane ^ stride for lane in lanes])
    signs = ir.Constant(emit.vector, [-1.0 if lane & stride else 1.0 for lane in lanes])
    partner = emit.builder.shuffle_vector(vector, ir.Constant(emit.vector, ir.Undefined), partners)
    return emit.exact_fma(vector, signs, partner)


def _larger(builder: ir.IRBuilder, bits: ir.Value, others: ir.Value) -> ir.Value:
    """Return the larger of words, lane by lane.

    They are bits of float32 without the sign: infinity is above all numbers there, and NaN above infinity.
    """
    return builder.select(builder.icmp_unsigned(">", bits, others), bits, others)


def _largest_lane(emit: WordEmitter, words: ir.Value) -> ir.Value:
    """Return the largest word of a vector."""
    kind = ir.FunctionType(I32, [emit.words])
    name = f"llvm.vector.reduce.umax.v{emit.lanes}i32"
    return emit.builder.call(cgutils.get_or_insert_function(emit.builder.module, kind, name), [words])


def _store_scale(builder: ir.IRBuilder, largest: ir.Value, place: ir.Value) -> ir.Value:
    """Emit: the scale of a group is stored, by the bits of its largest number. Return the scale's inverse."""
    largest = builder.select(builder.icmp_unsigned(">=", largest, I32(_INFINITY)), I32(_NAN), largest)
    scale = builder.fdiv(builder.bitcast(largest, F32), ir.Constant(F32, float(_MOST)))
    smallest = ir.Constant(F32, _SMALLEST)
    scale = builder.select(builder.fcmp_ordered("<", scale, smallest), smallest, scale)
    builder.store(scale, place, align=FLOAT_BYTES)
    return builder.fdiv(ir.Constant(F32, 1.0), scale)


def _store_rounded(emit: WordEmitter, numbers: ir.Value, inverses: ir.Value, out: ir.Value) -> None:
    """Emit: a vector is stored as bytes 128 higher."""
    builder = emit.builder
    shifted = builder.fadd(builder.fmul(numbers, inverses), emit.all_floats(_ROUND + _ABOVE))
    small = builder.trunc(emit.as_words(shifted), ir.VectorType(I8, emit.lanes))
    builder.store(small, builder.bitcast(out, small.type.as_pointer()), align=1)


def _add_column(module: ir.Module) -> None:
    """A column of a panel: its numbers scaled, and whole groups of them turned back by turning them again."""
    builder, (panel, column, num_k, out) = entry(module, "column", 4)
    panel, out = builder.inttoptr(panel, I8_P), builder.inttoptr(out, F32_P)
    with cgutils.for_range(builder, num_k, intp=I64) as loop:
        group, within = builder.sdiv(loop.index, I64(GROUP)), builder.srem(loop.index, I64(GROUP))
        left = builder.sub(num_k, builder.mul(group, I64(GROUP)))
        padded = builder.and_(builder.add(left, I64(_QUAD - 1)), I64(-_QUAD))
        length = builder.select(builder.icmp_signed("<", padded, I64(GROUP)), padded, I64(GROUP))
        here = builder.gep(panel, [builder.mul(group, I64(_GROUP_BYTES))])
        scales = builder.bitcast(builder.gep(here, [builder.mul(length, I64(PANEL_WIDTH))]), F32_P)
        word = builder.add(builder.mul(builder.sdiv(within, I64(_QUAD)), I64(PANEL_WIDTH)), column)
        at = builder.add(builder.mul(word, I64(_QUAD)), builder.srem(within, I64(_QUAD)))
        number = builder.sitofp(builder.load(builder.gep(here, [at])), F32)
        scaled = builder.fmul(number, builder.load(builder.gep(scales, [column]), align=FLOAT_BYTES))
        builder.store(scaled, builder.gep(out, [loop.index]))
    emit = WordEmitter(builder, MAX_LANES)
    with cgutils.for_range(builder, builder.sdiv(num_k, I64(GROUP)), intp=I64) as groups:
        here = emit.at(out, builder.mul(groups.index, I64(GROUP)))
        for index, one in enumerate(_turned(emit, _load_group(emit, here))):
            emit.store(one, here, index * emit.lanes)
    builder.ret_void()
