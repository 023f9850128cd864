"""Low-rank updates of a product: a row times a narrow matrix, and what comes out times a wide one (LoRA).

``y += B (s * (A x))`` with A ``[r, K]`` and B ``[N, r]`` (Hu et al., "LoRA: Low-Rank Adaptation of Large Language
Models", 2021, section 4.1). The two halves are *shrink* and *expand*, as in Punica (Chen et al., 2023, section 4). Both
matrices lie transposed, ``[K, r]`` and ``[r, N]``, so a vector has neighbours of what comes out. Several matrices that
are multiplied with the same row lie side by side, as one.

Weights are float32, bfloat16 or float16, as their file has them; what is summed is float32. Every number is one chain
of multiply-adds, in the order of k or of r, of a row alone: it does not depend on what else is computed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import F32_P, FLOAT_BYTES, I32, I64, entry
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.pairs import SHORT_BYTES
from pagefold.kernels.row_emitter import BIT, LANES, Piece, RowEmitter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "WEIGHT_DTYPES", "LowRankTiles", "low_rank_tiles"]

FLOAT32, BFLOAT16, FLOAT16 = range(3)
WEIGHT_DTYPES = ("F32", "BF16", "F16")
"""What weights may be, by these numbers, as safetensors spells it."""

_SHORT = ir.IntType(16)
_HALF_OF_WORD = 16
_SHRUNK, _EXPANDED = (3, 2), (4, 2)
"""So many pieces at once: q, k and v of rank 16 are three, gate and up two."""


class LowRankTiles(NamedTuple):
    """Addresses of both halves. Arguments are integers: addresses, numbers of numbers, and the dtype of weights.

    Attributes:
        shrink: (x, weights, scales, num_k, num_low, dtype, low): ``low = scales * (x @ weights)``, of float32 x
            ``[num_k]`` and scales and low ``[num_low]``, and weights ``[num_k, num_low]``.
        expand: (low, weights, num_low, distance, dtype, y, num): ``y += low @ weights``, of float32 low ``[num_low]``
            and y ``[num]``, and weights ``[num_low, num]``, whose rows are ``distance`` numbers apart.
    """

    shrink: int
    expand: int


@cache
def low_rank_tiles() -> LowRankTiles:
    """Return both halves, compiled for this processor."""

    def build() -> ir.Module:
        module = ir.Module()
        _add_shrink(module)
        _add_expand(module)
        return module

    return LowRankTiles(**addresses_in("low_rank", build, LowRankTiles._fields))


class _Weights:
    """A matrix of one dtype, in one function that is being built.

    Args:
        emit: of the function.
        address: of the first number, an integer.
        dtype: one of this module's.
    """

    def __init__(self, emit: RowEmitter, address: ir.Value, dtype: int) -> None:
        self._emit = emit
        self._dtype = dtype
        kind = F32_P if dtype == FLOAT32 else _SHORT.as_pointer()
        self._first = emit.builder.inttoptr(address, kind)

    def read(self, offset: ir.Value, piece: Piece) -> ir.Value:
        """Load a piece of the row that begins at ``offset``, as float32."""
        emit, builder = self._emit, self._emit.builder
        row = emit.at(self._first, offset)
        if self._dtype == FLOAT32:
            return emit.read(row, piece)
        shorts = self._shorts(emit.at(row, piece.first), piece)
        if self._dtype == FLOAT16:
            return builder.fpext(builder.bitcast(shorts, ir.VectorType(ir.HalfType(), LANES)), emit.vector)
        words = builder.zext(shorts, emit.words)
        return emit.as_floats(builder.shl(words, emit.all_words(_HALF_OF_WORD)))

    def _shorts(self, pointer: ir.Value, piece: Piece) -> ir.Value:
        builder, kind = self._emit.builder, ir.VectorType(_SHORT, LANES)
        where = builder.bitcast(pointer, kind.as_pointer())
        if piece.mask is None:
            return builder.load(where, align=SHORT_BYTES)
        form = ir.FunctionType(kind, [kind.as_pointer(), I32, ir.VectorType(BIT, LANES), kind])
        load = cgutils.get_or_insert_function(builder.module, form, f"llvm.masked.load.v{LANES}i16.p0")
        return builder.call(load, [where, I32(SHORT_BYTES), piece.mask, ir.Constant(kind, [0] * LANES)])


def _of_each_dtype(emit: RowEmitter, dtype: ir.Value, address: ir.Value, body: Callable[[_Weights], None]) -> None:
    """Emit ``body`` for weights of each dtype, of which one runs."""
    for one in (FLOAT32, BFLOAT16, FLOAT16):
        with emit.builder.if_then(emit.builder.icmp_signed("==", dtype, I64(one))):
            body(_Weights(emit, address, one))


def _in_groups(
    emit: RowEmitter, num: ir.Value, sizes: tuple[int, ...], body: Callable[[Sequence[Piece]], None]
) -> None:
    """Emit ``body`` for a row of ``num`` numbers: for as many pieces at once as ``sizes`` say, then for single ones.

    Each piece is a chain of its own, of which a processor computes several in the time of one.
    """
    builder, done = emit.builder, I64(0)
    for size in sizes:
        step = I64(size * LANES)
        count = builder.sdiv(builder.sub(num, done), step)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            first = builder.add(done, builder.mul(loop.index, step))
            body([Piece(builder.add(first, I64(LANES * at)), None) for at in range(size)])
        done = builder.add(done, builder.mul(count, step))
    emit.over(builder.sub(num, done), lambda piece: body([Piece(builder.add(done, piece.first), piece.mask)]))


class _Product(NamedTuple):
    """A row times a matrix, as values of the function that is being built.

    Attributes:
        row: the address of its first number.
        num_k: how many it has.
        distance: numbers between rows of the matrix.
    """

    row: ir.Value
    num_k: ir.Value
    distance: ir.Value

    def sums(self, emit: RowEmitter, weights: _Weights, pieces: Sequence[Piece]) -> list[ir.Value]:
        """Emit the chains of some pieces, side by side; return what they come to."""
        builder = emit.builder
        totals = [emit.place(0.0) for _ in pieces]
        with cgutils.for_range(builder, self.num_k, intp=I64) as loop:
            number = emit.broadcast(builder.load(emit.at(self.row, loop.index), align=FLOAT_BYTES))
            offset = builder.mul(loop.index, self.distance)
            for piece, total in zip(pieces, totals, strict=True):
                summed = emit.exact_fma(number, weights.read(offset, piece), builder.load(total))
                builder.store(summed, total)
        return [builder.load(total) for total in totals]


def _add_shrink(module: ir.Module) -> None:
    builder, args = entry(module, "shrink", 7)
    x, address, scales, num_k, num_low, dtype, low = args
    x, scales, low = (builder.inttoptr(one, F32_P) for one in (x, scales, low))
    emit = RowEmitter(builder)
    product = _Product(x, num_k, num_low)

    def shrink(weights: _Weights) -> None:
        def columns(pieces: Sequence[Piece]) -> None:
            for piece, total in zip(pieces, product.sums(emit, weights, pieces), strict=True):
                emit.write(builder.fmul(total, emit.read(scales, piece)), low, piece)

        _in_groups(emit, num_low, _SHRUNK, columns)

    _of_each_dtype(emit, dtype, address, shrink)
    builder.ret_void()


def _add_expand(module: ir.Module) -> None:
    builder, args = entry(module, "expand", 7)
    low, address, num_low, distance, dtype, y, num = args
    low, y = (builder.inttoptr(one, F32_P) for one in (low, y))
    emit = RowEmitter(builder)
    product = _Product(low, num_low, distance)

    def expand(weights: _Weights) -> None:
        def columns(pieces: Sequence[Piece]) -> None:
            for piece, total in zip(pieces, product.sums(emit, weights, pieces), strict=True):
                emit.write(builder.fadd(emit.read(y, piece), total), y, piece)

        _in_groups(emit, num, _EXPANDED, columns)

    _of_each_dtype(emit, dtype, address, expand)
    builder.ret_void()
