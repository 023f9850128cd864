"""float32: products of numbers as they are, weights in float32 or rounded to int8.

A panel of float32 is ``[K, W]``. One of int8 is ``[K, W]`` and then float32 scales ``[W]``: a column is its numbers
times its scale, and half the reading of bfloat16. Rows stay as they are in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import (
    F32,
    F32_P,
    FLOAT_BYTES,
    I8_P,
    I64,
    MAX_LANES,
    Emitter,
    column_tile,
    entry,
    in_tiles,
    max_rows,
    new_function,
    rows_on,
)
from pagefold.kernels.formats import PANEL_VECTORS, PANEL_WIDTH, FormatTiles, num_panels
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.words import in_passes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MAX_STEPS", "Floats", "Int8Weights"]

MAX_STEPS = 288
"""Rows of a panel that a chain goes through: longer sums are cut, and added up."""
_PANELS_AT_ONCE = 16
"""Panels of int8 that are packed together: rounding takes several times what it rounds."""
_INT8_MOST = 127
_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class Floats:
    """float32 weights and rows: a :class:`~pagefold.kernels.formats.ProductFormat`."""

    name: str = "float32"

    @property
    def arithmetic(self) -> str:
        """What decides the bits of a product."""
        return f"float32 in chains of {MAX_STEPS}"

    @property
    def means(self) -> str:
        """What computes in it on this processor."""
        return "multiply-adds"

    def row_bytes(self, num_k: int) -> int:
        """Return the bytes of a row."""
        return num_k * FLOAT_BYTES

    def panel_bytes(self, num_k: int) -> int:
        """Return the bytes of a panel."""
        return num_k * FLOAT_BYTES * PANEL_WIDTH

    def pack(self, matrix: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        """Pack a matrix ``[N, K]``."""
        assert into.shape == (num_panels(len(matrix)), self.panel_bytes(matrix.shape[1]))
        _pack(matrix, into.view(np.float32))

    def tiles(self) -> FormatTiles:
        """Return what computes in float32."""
        return _tiles(is_int8=False)


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """int8 weights, with a scale a column, and float32 rows: a :class:`~pagefold.kernels.formats.ProductFormat`."""

    name: str = "int8"

    @property
    def arithmetic(self) -> str:
        """What decides the bits of a product."""
        return f"int8 by columns, float32 in chains of {MAX_STEPS}"

    @property
    def means(self) -> str:
        """What computes with them on this processor."""
        return "multiply-adds, of weights that are made float32 in registers"

    def row_bytes(self, num_k: int) -> int:
        """Return the bytes of a row."""
        return num_k * FLOAT_BYTES

    def panel_bytes(self, num_k: int) -> int:
        """Return the bytes of a panel: numbers, then scales."""
        return (num_k + FLOAT_BYTES) * PANEL_WIDTH

    def pack(self, matrix: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        """Pack a matrix ``[N, K]``, each column symmetrically rounded by its largest number."""
        num, num_k = matrix.shape
        assert into.shape == (num_panels(num), self.panel_bytes(num_k))
        for first in range(0, len(into), _PANELS_AT_ONCE):
            piece = into[first : first + _PANELS_AT_ONCE]
            columns = matrix[first * PANEL_WIDTH : (first + len(piece)) * PANEL_WIDTH]
            scales = np.maximum(np.abs(columns).max(1) / np.float32(_INT8_MOST), _TINY)
            _pack(np.rint(columns / scales[:, None]).astype(np.int8), piece[:, : num_k * PANEL_WIDTH].view(np.int8))
            _pack(scales[:, None], piece[:, num_k * PANEL_WIDTH :].view(np.float32))

    def tiles(self) -> FormatTiles:
        """Return what computes with them."""
        return _tiles(is_int8=True)


def _pack(matrix: NDArray[np.float32] | NDArray[np.int8], into: NDArray[np.float32] | NDArray[np.int8]) -> None:
    """Put numbers ``[N, K]`` into panels ``[panels, K * W]``; what is beyond N is zero."""
    num, num_k = matrix.shape
    panels = into.reshape(len(into), num_k, PANEL_WIDTH)
    whole = num // PANEL_WIDTH
    panels[:whole] = matrix[: whole * PANEL_WIDTH].reshape(whole, PANEL_WIDTH, num_k).transpose(0, 2, 1)
    if num % PANEL_WIDTH:
        panels[whole] = 0
        panels[whole, :, : num % PANEL_WIDTH] = matrix[whole * PANEL_WIDTH :].T


@cache
def _tiles(*, is_int8: bool) -> FormatTiles:
    def build() -> ir.Module:
        module = ir.Module()
        _add_product(module, is_int8=is_int8)
        _add_column(module, is_int8=is_int8)
        return module

    return FormatTiles(rows=0, **addresses_in("int8-weights" if is_int8 else "floats", build, FormatTiles._fields[1:]))


def _int8_tile(module: ir.Module, mr: int, *, fetches: bool) -> ir.Function:
    """``y[mr, W] (+)= (x[mr, k] @ panel[k, W]) * scales[W]``.

    (x, ldx, panel, scales, y, ldy, k, adds, following)
    """
    kinds = [F32_P, I64, I8_P, F32_P, F32_P, I64, I64, I64, I8_P]
    function, is_new = new_function(module, f"pagefold_int8_{mr}_{int(fetches)}", kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, weights, scales, y, ldy, num_k, adds, following = function.args
    emit = Emitter(builder, MAX_LANES)
    acc = emit.accumulators(2 * mr)
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_k, intp=I64) as loop:
        offset = builder.mul(loop.index, I64(PANEL_WIDTH))
        start = emit.at(weights, offset)
        panel = [emit.load_int8(start), emit.load_int8(emit.at(start, MAX_LANES))]
        if fetches:
            emit.fetch(emit.at(following, offset))
        emit.multiply_add(rows, loop.index, panel, acc)
    factors = [emit.load(scales, v * MAX_LANES) for v in range(2)]
    must_add = builder.icmp_signed("!=", adds, I64(0))
    for r in range(mr):
        out = emit.at(y, builder.mul(ldy, I64(r)))
        for v in range(2):
            at, total = v * MAX_LANES, builder.load(acc[2 * r + v])
            with builder.if_else(must_add) as (then, other):
                with then:
                    emit.store(emit.fma(total, factors[v], emit.load(out, at)), out, at)
                with other:
                    emit.store(builder.fmul(total, factors[v]), out, at)
    builder.ret_void()
    return function


def _add_product(module: ir.Module, *, is_int8: bool) -> None:
    builder, args = entry(module, "product", 9)
    x, x_distance, panel, num_k, num_rows, y, y_distance, adds, following = args
    x, y = (builder.inttoptr(a, F32_P) for a in (x, y))
    ldx, ldy = (builder.sdiv(distance, I64(FLOAT_BYTES)) for distance in (x_distance, y_distance))
    panel, following = (builder.inttoptr(a, I8_P if is_int8 else F32_P) for a in (panel, following))
    scales = builder.gep(panel, [builder.mul(num_k, I64(PANEL_WIDTH))])

    with in_passes(builder, num_k, MAX_STEPS) as one:
        here = builder.gep(panel, [builder.mul(one.first, I64(PANEL_WIDTH))])
        behind = builder.gep(here, [builder.mul(one.num_steps, I64(PANEL_WIDTH))])
        behind = builder.select(one.is_last, following, behind)
        must_add = builder.or_(adds, one.first)

        def call(tile: ir.Function, row: ir.Value) -> None:
            at_x = builder.gep(rows_on(builder, x, ldx, row), [one.first])
            at_y = rows_on(builder, y, ldy, row)
            if is_int8:
                arguments = [here, builder.bitcast(scales, F32_P), at_y, ldy, one.num_steps, must_add, behind]
            else:
                half = [builder.gep(pointer, [I64(MAX_LANES)]) for pointer in (here, behind)]
                right = [here, half[0], I64(PANEL_WIDTH)]
                arguments = [*right, at_y, ldy, one.num_steps, must_add, behind, half[1]]
            builder.call(tile, [at_x, ldx, *arguments])

        def tile(mr: int, fetches: bool) -> ir.Function:
            if is_int8:
                return _int8_tile(module, mr, fetches=fetches)
            return column_tile(module, mr, MAX_LANES, fetches=fetches)

        in_tiles(tile, builder, num_rows, max_rows(PANEL_VECTORS), call)
    builder.ret_void()


def _add_column(module: ir.Module, *, is_int8: bool) -> None:
    builder, (panel, column, num_k, out) = entry(module, "column", 4)
    panel, out = builder.inttoptr(panel, I8_P if is_int8 else F32_P), builder.inttoptr(out, F32_P)
    scales = builder.bitcast(builder.gep(panel, [builder.mul(num_k, I64(PANEL_WIDTH))]), F32_P)
    with cgutils.for_range(builder, num_k, intp=I64) as loop:
        at = builder.add(builder.mul(loop.index, I64(PANEL_WIDTH)), column)
        number = builder.load(builder.gep(panel, [at]))
        if is_int8:
            scale = builder.load(builder.gep(scales, [column]), align=FLOAT_BYTES)
            number = builder.fmul(builder.sitofp(number, F32), scale)
        builder.store(number, builder.gep(out, [loop.index]))
    builder.ret_void()
