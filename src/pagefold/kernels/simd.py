"""Matrix tiles as vector code: the one place that speaks LLVM.

A tile is ``mr`` rows of a product. Its ``mr * nv`` accumulators stay in vector registers while it walks all of K::

    for k:                                     one row of the panel, nv vectors, is loaded once for all mr rows
        for r in mr, v in nv:
            acc[r][v] += x[r][k] * w[k][v]     a broadcast and a fused multiply-add

A right-hand side lies in *panels*: ``[K, nv * lanes]``, contiguous, so that a panel is one stream of memory. Blocks of
the KV cache are such panels too: K of a block is ``[head_dim, block_size]`` and V is ``[block_size, head_dim]``.

**Every output is a chain of multiply-adds in the order of k, whatever mr is**, or the sum of such chains where its
caller cuts K into pieces. So a row's result never depends on which rows it was computed with: the decoder's batch
invariance rests on this. Pieces are cut because one long chain rounds more: over 1,536 numbers some eight times more
than what libraries do, who sum in many lanes.

While the first rows go through a panel, the next panel is fetched into the cache: a product of few rows, which is bound
by memory, overlaps with the reading of its weights.

Numba offers no vector types, hence LLVM's own language. The functions made here are compiled once for a machine, apart
from the kernels that use them (see ``object_code.py``), which call them by address: what is under every product is
optimised once, not once in every kernel, and a kernel is the same whatever the width of a vector or a block.

The plan (registers for accumulators, panels, fetching ahead) is that of Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication" (2008), without the packing of x: there are few rows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import (
    F32_P,
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
from pagefold.kernels.object_code import addresses_in

__all__ = ["PANEL_VECTORS", "WeightTiles", "weight_tiles"]

PANEL_VECTORS = 2
"""Vectors a row of a weight panel."""


class WeightTiles(NamedTuple):
    """Addresses of products with a panel of weights, ``PANEL_VECTORS * MAX_LANES`` columns wide.

    Arguments are integers: addresses in bytes; ``ld*``, rows apart, in numbers; ``following`` is what to fetch
    meanwhile; with ``adds`` other than 0 they add to y.

    Attributes:
        panel: (x, ldx, panel, y, ldy, num_k, num_rows, adds, following):
            ``y[num_rows, W] (+)= x[num_rows, num_k] @ panel[num_k, W]``.
        panel_int8: (x, ldx, panel, scales, y, ldy, num_k, num_rows, adds, following): the same of an int8 panel, whose
            columns have scales.
    """

    panel: int
    panel_int8: int


@cache
def weight_tiles() -> WeightTiles:
    """Return the tiles for weights, compiled."""

    def build() -> ir.Module:
        module = ir.Module()
        _add_panel(module)
        _add_panel_int8(module)
        return module

    return WeightTiles(**addresses_in("weights", build, WeightTiles._fields))


def _int8_tile(module: ir.Module, mr: int, lanes: int, *, fetches: bool) -> ir.Function:
    """``y[mr, 2 * lanes] (+)= (x[mr, k] @ panel[k, 2 * lanes]) * scales[2 * lanes]``, of an int8 panel.

    (x, ldx, panel, scales, y, ldy, k, adds, following)
    """
    name = f"pagefold_int8_{mr}_{lanes}_{int(fetches)}"
    kinds = [F32_P, I64, I8_P, F32_P, F32_P, I64, I64, I64, I8_P]
    function, is_new = new_function(module, name, kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, weights, scales, y, ldy, num_k, adds, following = function.args
    emit = Emitter(builder, lanes)
    acc = emit.accumulators(2 * mr)
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_k, intp=I64) as loop:
        offset = builder.mul(loop.index, I64(2 * lanes))
        start = emit.at(weights, offset)
        panel = [emit.load_int8(start), emit.load_int8(emit.at(start, lanes))]
        if fetches:
            emit.fetch(emit.at(following, offset))
        emit.multiply_add(rows, loop.index, panel, acc)
    factors = [emit.load(scales, v * lanes) for v in range(2)]
    must_add = builder.icmp_signed("!=", adds, I64(0))
    for r in range(mr):
        out = emit.at(y, builder.mul(ldy, I64(r)))
        for v in range(2):
            place = acc[2 * r + v]
            with builder.if_else(must_add) as (then, other):
                with then:
                    emit.store(emit.fma(builder.load(place), factors[v], emit.load(out, v * lanes)), out, v * lanes)
                with other:
                    emit.store(builder.fmul(builder.load(place), factors[v]), out, v * lanes)
    builder.ret_void()
    return function


def _add_panel(module: ir.Module) -> None:
    builder, args = entry(module, "panel", 9)
    x, ldx, panel, y, ldy, num_k, num_rows, adds, following = args
    x, panel, y, following = (builder.inttoptr(a, F32_P) for a in (x, panel, y, following))
    half = [builder.gep(p, [I64(MAX_LANES)]) for p in (panel, following)]
    right = [panel, half[0], I64(PANEL_VECTORS * MAX_LANES)]

    def call(tile: ir.Function, first: ir.Value) -> None:
        at_x, at_y = rows_on(builder, x, ldx, first), rows_on(builder, y, ldy, first)
        builder.call(tile, [at_x, ldx, *right, at_y, ldy, num_k, adds, following, half[1]])

    def tile(mr: int, fetches: bool) -> ir.Function:
        return column_tile(module, mr, MAX_LANES, fetches=fetches)

    in_tiles(tile, builder, num_rows, max_rows(PANEL_VECTORS), call)
    builder.ret_void()


def _add_panel_int8(module: ir.Module) -> None:
    builder, args = entry(module, "panel_int8", 10)
    x, ldx, panel, scales, y, ldy, num_k, num_rows, adds, following = args
    x, scales, y = (builder.inttoptr(a, F32_P) for a in (x, scales, y))
    panel, following = (builder.inttoptr(a, I8_P) for a in (panel, following))

    def call(tile: ir.Function, first: ir.Value) -> None:
        at_x, at_y = rows_on(builder, x, ldx, first), rows_on(builder, y, ldy, first)
        builder.call(tile, [at_x, ldx, panel, scales, at_y, ldy, num_k, adds, following])

    def tile(mr: int, fetches: bool) -> ir.Function:
        return _int8_tile(module, mr, MAX_LANES, fetches=fetches)

    in_tiles(tile, builder, num_rows, max_rows(PANEL_VECTORS), call)
    builder.ret_void()
