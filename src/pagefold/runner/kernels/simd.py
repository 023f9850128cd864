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
from typing import TYPE_CHECKING, Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pagefold.runner.kernels.object_code import addresses_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "MAX_LANES",
    "PANEL_VECTORS",
    "AttentionTiles",
    "WeightTiles",
    "attention_tiles",
    "call_tile",
    "weight_tiles",
]

_IS_WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))
MAX_LANES = 16 if _IS_WIDE else 8
"""float32 numbers a vector register. 8 also where registers are narrower: LLVM splits the vectors."""

_NUM_REGISTERS = 32 if _IS_WIDE else 16
PANEL_VECTORS = 2
"""Vectors a row of a weight panel."""

_MAX_ROWS = 14

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32_P, _I64_P, _I8_P = _F32.as_pointer(), _I64.as_pointer(), _I8.as_pointer()
_FLOAT_BYTES = 4
_FETCH_READ, _FETCH_ALL_LEVELS, _FETCH_DATA = 0, 3, 1


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


class AttentionTiles(NamedTuple):
    """Addresses of products with blocks of the KV cache, and how wide they are. Arguments as above.

    Attributes:
        scores: (x, ldx, w0, w1, ldw, y, ldy, num_k, num_rows, next0, next1):
            ``y[num_rows, 2 * lanes] = x[num_rows, num_k] @ [w0 | w1]``: two panels of one vector, each where it lies.
        values: (x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy, num_rows):
            ``y[num_rows, vectors * lanes] = x[num_rows, num_k] @ the rows of several blocks``, from column ``offset``
            on. ``blocks`` is where ``num_blocks`` addresses are; each block has ``block_size`` rows, of which the last
            block gives only what is left of ``num_k``: the rest is never read.
        lanes: numbers of a vector: so many entries of a block, and so many numbers of a head, are handled at once.
        vectors: of a head's numbers that are summed at once.
    """

    scores: int
    values: int
    lanes: int
    vectors: int


@cache
def weight_tiles() -> WeightTiles:
    """Return the tiles for weights, compiled."""

    def build() -> ir.Module:
        module = ir.Module()
        _add_panel(module)
        _add_panel_int8(module)
        return module

    return WeightTiles(**addresses_in("weights", build, WeightTiles._fields))


def attention_tiles(block_size: int, head_dim: int) -> AttentionTiles:
    """Return tiles as wide as divides such a block and head, compiled.

    Needs a ``block_size`` that 4 divides, and a ``head_dim`` too.
    """
    widths = (lanes for lanes in (16, 8, 4) if lanes <= MAX_LANES)
    lanes = next(lanes for lanes in widths if block_size % lanes == head_dim % lanes == 0)
    vectors = next(vectors for vectors in (4 if _IS_WIDE else 2, 2, 1) if head_dim % (lanes * vectors) == 0)
    return _attention_tiles(lanes, vectors)


@cache
def _attention_tiles(lanes: int, vectors: int) -> AttentionTiles:
    def build() -> ir.Module:
        module = ir.Module()
        _add_scores(module, lanes)
        _add_values(module, lanes, vectors)
        return module

    found = addresses_in(f"attention-{lanes}x{vectors}", build, ("scores", "values"))
    return AttentionTiles(**found, lanes=lanes, vectors=vectors)


@intrinsic
def call_tile(typing, address, arguments):
    """Call the function at ``address`` with integers, a tuple of them."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        kinds = signature.args[1].types
        assert all(isinstance(kind, types.Integer) for kind in kinds), "a tile is called with integers"
        given = cgutils.unpack_tuple(builder, args[1], len(kinds))
        given = [context.cast(builder, one, kind, types.intp) for one, kind in zip(given, kinds, strict=True)]
        kind = ir.FunctionType(ir.VoidType(), [_I64] * len(kinds))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(types.intp, arguments), generate


def _max_rows(num_vectors: int) -> int:
    """Return how many rows have room in the registers: their accumulators, a row of the panel, and one broadcast."""
    return min(_MAX_ROWS, (_NUM_REGISTERS - num_vectors - 1) // num_vectors)


class _Emitter:
    """Vector code in one function that is being built."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes
        self.vector = ir.VectorType(_F32, lanes)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{lanes}f32")
        kind = ir.FunctionType(ir.VoidType(), [_I8_P, _I32, _I32, _I32])
        self._fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")

    def at(self, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
        return self.builder.gep(pointer, [_I64(index) if isinstance(index, int) else index])

    def load(self, pointer: ir.Value, offset: int = 0) -> ir.Value:
        where = self.builder.bitcast(self.at(pointer, offset), self.vector.as_pointer())
        return self.builder.load(where, align=_FLOAT_BYTES)

    def load_int8(self, pointer: ir.Value) -> ir.Value:
        """Load int8 numbers as float32."""
        kind = ir.VectorType(_I8, self.lanes)
        small = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=1)
        return self.builder.sitofp(self.builder.sext(small, ir.VectorType(_I32, self.lanes)), self.vector)

    def store(self, value: ir.Value, pointer: ir.Value, offset: int) -> None:
        where = self.builder.bitcast(self.at(pointer, offset), self.vector.as_pointer())
        self.builder.store(value, where, align=_FLOAT_BYTES)

    def broadcast(self, scalar: ir.Value) -> ir.Value:
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, scalar, _I32(0))
        return self.builder.shuffle_vector(
            first, nothing, ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        )

    def fetch(self, pointer: ir.Value) -> None:
        where = self.builder.bitcast(pointer, _I8_P)
        self.builder.call(self._fetch, [where, _I32(_FETCH_READ), _I32(_FETCH_ALL_LEVELS), _I32(_FETCH_DATA)])

    def accumulators(self, num: int) -> list[ir.Value]:
        """Return places for vectors, zeroed. LLVM makes registers of them."""
        places = [cgutils.alloca_once(self.builder, self.vector) for _ in range(num)]
        for place in places:
            self.builder.store(ir.Constant(self.vector, [0.0] * self.lanes), place)
        return places

    def multiply_add(
        self, rows: Sequence[ir.Value], k: ir.Value, panel: Sequence[ir.Value], acc: list[ir.Value]
    ) -> None:
        """``acc[r][v] += rows[r][k] * panel[v]``."""
        for r, row in enumerate(rows):
            factor = self.broadcast(self.builder.load(self.at(row, k), align=_FLOAT_BYTES))
            for v, weights in enumerate(panel):
                place = acc[r * len(panel) + v]
                self.builder.store(self.fma(factor, weights, self.builder.load(place)), place)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """``a * b + c``."""
        return self.builder.call(self._fma, [a, b, c])


def _function(module: ir.Module, name: str, kinds: list[ir.Type]) -> tuple[ir.Function, bool]:
    """Return the module's function of that name, and whether it is new."""
    known = module.globals.get(name)
    if known is not None:
        return known, False
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function, True


def _in_tiles(
    tile: Callable[[int, bool], ir.Function], builder: ir.IRBuilder, num_rows: ir.Value, mr: int, call: Any
) -> None:
    """Emit: tiles of ``mr`` rows, then smaller ones for what is left; the first of all fetches ahead.

    Few sizes, so that there is little to compile: of each at most one is needed behind the full tiles.
    """
    zero, full = _I64(0), _I64(mr)
    with builder.if_then(builder.icmp_signed(">=", num_rows, full)):
        call(tile(mr, True), zero)
    count = builder.sdiv(num_rows, full)
    with cgutils.for_range_slice(builder, _I64(1), count, _I64(1), intp=_I64) as (index, _):
        call(tile(mr, False), builder.mul(index, full))
    done = builder.mul(count, full)
    for size in sorted({-(-mr // 2), 4, 3, 2, 1} - {mr}, reverse=True):
        fits = builder.icmp_signed(">=", builder.sub(num_rows, done), _I64(size))
        with builder.if_then(fits), builder.if_else(builder.icmp_signed("==", done, zero)) as (first, later):
            with first:
                call(tile(size, True), done)
            with later:
                call(tile(size, False), done)
        done = builder.add(done, builder.select(fits, _I64(size), zero))


def _column_tile(module: ir.Module, mr: int, lanes: int, *, fetches: bool) -> ir.Function:
    """``y[mr, 2 * lanes] (+)= x[mr, k] @ [w0 | w1]``; the two halves have places of their own, and rows ``ldw`` apart.

    (x, ldx, w0, w1, ldw, y, ldy, k, adds, next0, next1): with ``adds`` the sums are added to y.
    """
    name = f"pagefold_columns_{mr}_{lanes}_{int(fetches)}"
    kinds = [_F32_P, _I64, _F32_P, _F32_P, _I64, _F32_P, _I64, _I64, _I64, _F32_P, _F32_P]
    function, is_new = _function(module, name, kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, w0, w1, ldw, y, ldy, num_k, adds, next0, next1 = function.args
    emit = _Emitter(builder, lanes)
    acc = emit.accumulators(2 * mr)
    outs = [emit.at(y, builder.mul(ldy, _I64(r))) for r in range(mr)]
    rows = [emit.at(x, builder.mul(ldx, _I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_k, intp=_I64) as loop:
        offset = builder.mul(loop.index, ldw)
        panel = [emit.load(emit.at(w0, offset)), emit.load(emit.at(w1, offset))]
        if fetches:
            emit.fetch(emit.at(next0, offset))
            emit.fetch(emit.at(next1, offset))
        emit.multiply_add(rows, loop.index, panel, acc)
    with builder.if_then(builder.icmp_signed("!=", adds, _I64(0))):
        for r in range(mr):
            for v in range(2):
                place = acc[2 * r + v]
                builder.store(builder.fadd(builder.load(place), emit.load(outs[r], v * lanes)), place)
    for r in range(mr):
        for v in range(2):
            emit.store(builder.load(acc[2 * r + v]), outs[r], v * lanes)
    builder.ret_void()
    return function


def _int8_tile(module: ir.Module, mr: int, lanes: int, *, fetches: bool) -> ir.Function:
    """``y[mr, 2 * lanes] (+)= (x[mr, k] @ panel[k, 2 * lanes]) * scales[2 * lanes]``, of an int8 panel.

    (x, ldx, panel, scales, y, ldy, k, adds, following)
    """
    name = f"pagefold_int8_{mr}_{lanes}_{int(fetches)}"
    kinds = [_F32_P, _I64, _I8_P, _F32_P, _F32_P, _I64, _I64, _I64, _I8_P]
    function, is_new = _function(module, name, kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, weights, scales, y, ldy, num_k, adds, following = function.args
    emit = _Emitter(builder, lanes)
    acc = emit.accumulators(2 * mr)
    rows = [emit.at(x, builder.mul(ldx, _I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_k, intp=_I64) as loop:
        offset = builder.mul(loop.index, _I64(2 * lanes))
        start = emit.at(weights, offset)
        panel = [emit.load_int8(start), emit.load_int8(emit.at(start, lanes))]
        if fetches:
            emit.fetch(emit.at(following, offset))
        emit.multiply_add(rows, loop.index, panel, acc)
    factors = [emit.load(scales, v * lanes) for v in range(2)]
    must_add = builder.icmp_signed("!=", adds, _I64(0))
    for r in range(mr):
        out = emit.at(y, builder.mul(ldy, _I64(r)))
        for v in range(2):
            place = acc[2 * r + v]
            with builder.if_else(must_add) as (then, other):
                with then:
                    emit.store(emit.fma(builder.load(place), factors[v], emit.load(out, v * lanes)), out, v * lanes)
                with other:
                    emit.store(builder.fmul(builder.load(place), factors[v]), out, v * lanes)
    builder.ret_void()
    return function


def _block_tile(module: ir.Module, mr: int, lanes: int, nv: int) -> ir.Function:
    """``y[mr, nv * lanes] = x[mr, :] @ rows of several blocks``, one block behind the other.

    (x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy): ``blocks[b] + offset`` is the first number of
    block b's rows, which are ``ldw`` apart; all blocks have ``block_size`` of them but the last, which has what is left
    of ``num_k``.
    """
    name = f"pagefold_blocks_{mr}_{lanes}_{nv}"
    kinds = [_F32_P, _I64, _I64_P, _I64, _I64, _I64, _I64, _I64, _F32_P, _I64]
    function, is_new = _function(module, name, kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy = function.args
    emit = _Emitter(builder, lanes)
    acc = emit.accumulators(nv * mr)
    rows = [emit.at(x, builder.mul(ldx, _I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_blocks, intp=_I64) as outer:
        first = builder.mul(outer.index, block_size)
        base = emit.at(builder.inttoptr(builder.load(emit.at(blocks, outer.index)), _F32_P), offset)
        left = builder.sub(num_k, first)
        length = builder.select(builder.icmp_signed("<", left, block_size), left, block_size)
        with cgutils.for_range(builder, length, intp=_I64) as inner:
            start = emit.at(base, builder.mul(inner.index, ldw))
            panel = [emit.load(start, v * lanes) for v in range(nv)]
            emit.multiply_add(rows, builder.add(first, inner.index), panel, acc)
    for r in range(mr):
        out = emit.at(y, builder.mul(ldy, _I64(r)))
        for v in range(nv):
            emit.store(builder.load(acc[nv * r + v]), out, v * lanes)
    builder.ret_void()
    return function


def _entry(module: ir.Module, name: str, num_arguments: int) -> tuple[ir.IRBuilder, Sequence[ir.Value]]:
    """Begin a function of integers that is called by address."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * num_arguments), name)
    return ir.IRBuilder(function.append_basic_block("entry")), function.args


def _rows_on(builder: ir.IRBuilder, pointer: ir.Value, distance: ir.Value, rows: ir.Value) -> ir.Value:
    return builder.gep(pointer, [builder.mul(distance, rows)])


def _add_panel(module: ir.Module) -> None:
    builder, args = _entry(module, "panel", 9)
    x, ldx, panel, y, ldy, num_k, num_rows, adds, following = args
    x, panel, y, following = (builder.inttoptr(a, _F32_P) for a in (x, panel, y, following))
    half = [builder.gep(p, [_I64(MAX_LANES)]) for p in (panel, following)]
    right = [panel, half[0], _I64(PANEL_VECTORS * MAX_LANES)]

    def call(tile: ir.Function, first: ir.Value) -> None:
        at_x, at_y = _rows_on(builder, x, ldx, first), _rows_on(builder, y, ldy, first)
        builder.call(tile, [at_x, ldx, *right, at_y, ldy, num_k, adds, following, half[1]])

    def tile(mr: int, fetches: bool) -> ir.Function:
        return _column_tile(module, mr, MAX_LANES, fetches=fetches)

    _in_tiles(tile, builder, num_rows, _max_rows(PANEL_VECTORS), call)
    builder.ret_void()


def _add_panel_int8(module: ir.Module) -> None:
    builder, args = _entry(module, "panel_int8", 10)
    x, ldx, panel, scales, y, ldy, num_k, num_rows, adds, following = args
    x, scales, y = (builder.inttoptr(a, _F32_P) for a in (x, scales, y))
    panel, following = (builder.inttoptr(a, _I8_P) for a in (panel, following))

    def call(tile: ir.Function, first: ir.Value) -> None:
        at_x, at_y = _rows_on(builder, x, ldx, first), _rows_on(builder, y, ldy, first)
        builder.call(tile, [at_x, ldx, panel, scales, at_y, ldy, num_k, adds, following])

    def tile(mr: int, fetches: bool) -> ir.Function:
        return _int8_tile(module, mr, MAX_LANES, fetches=fetches)

    _in_tiles(tile, builder, num_rows, _max_rows(PANEL_VECTORS), call)
    builder.ret_void()


def _add_scores(module: ir.Module, lanes: int) -> None:
    builder, args = _entry(module, "scores", 11)
    x, ldx, w0, w1, ldw, y, ldy, num_k, num_rows, next0, next1 = args
    x, w0, w1, y, next0, next1 = (builder.inttoptr(a, _F32_P) for a in (x, w0, w1, y, next0, next1))

    def call(tile: ir.Function, first: ir.Value) -> None:
        at_x, at_y = _rows_on(builder, x, ldx, first), _rows_on(builder, y, ldy, first)
        builder.call(tile, [at_x, ldx, w0, w1, ldw, at_y, ldy, num_k, _I64(0), next0, next1])

    def tile(mr: int, fetches: bool) -> ir.Function:
        return _column_tile(module, mr, lanes, fetches=fetches)

    _in_tiles(tile, builder, num_rows, _max_rows(PANEL_VECTORS), call)
    builder.ret_void()


def _add_values(module: ir.Module, lanes: int, vectors: int) -> None:
    builder, args = _entry(module, "values", 11)
    x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy, num_rows = args
    x, y = (builder.inttoptr(a, _F32_P) for a in (x, y))
    blocks = builder.inttoptr(blocks, _I64_P)

    def call(tile: ir.Function, first: ir.Value) -> None:
        at_x, at_y = _rows_on(builder, x, ldx, first), _rows_on(builder, y, ldy, first)
        builder.call(tile, [at_x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, at_y, ldy])

    def tile(mr: int, _fetches: bool) -> ir.Function:
        return _block_tile(module, mr, lanes, vectors)

    _in_tiles(tile, builder, num_rows, _max_rows(vectors), call)
    builder.ret_void()
