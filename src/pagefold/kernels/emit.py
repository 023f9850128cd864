"""Vector code in LLVM's own language: what the tiles of weights and of attention are both written with.

Numba offers no vector types. The functions made with this are compiled once for a machine, apart from the kernels that
use them (see ``object_code.py``), which call them by address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "F32",
    "F32_P",
    "FLOAT_BYTES",
    "I8",
    "I8_P",
    "I32",
    "I64",
    "I64_P",
    "IS_WIDE",
    "LINE_BYTES",
    "MAX_LANES",
    "Emitter",
    "call_tile",
    "column_tile",
    "entry",
    "fetch",
    "in_tiles",
    "max_rows",
    "new_function",
    "rows_on",
]

IS_WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))
MAX_LANES = 16 if IS_WIDE else 8
"""float32 numbers a vector register. 8 also where registers are narrower: LLVM splits the vectors."""

NUM_REGISTERS = 32 if IS_WIDE else 16
_MAX_ROWS, _TABLE = 14, 16

F32, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
F32_P, I64_P, I8_P = F32.as_pointer(), I64.as_pointer(), I8.as_pointer()
FLOAT_BYTES, LINE_BYTES = 4, 64
_FETCH_READ, _FETCH_SECOND_LEVEL, _FETCH_DATA = 0, 2, 1


@intrinsic
def call_tile(typing, address, arguments):
    """Call the function at ``address`` with integers, a tuple of them."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        kinds = signature.args[1].types
        assert all(isinstance(kind, types.Integer) for kind in kinds), "a tile is called with integers"
        given = cgutils.unpack_tuple(builder, args[1], len(kinds))
        given = [context.cast(builder, one, kind, types.intp) for one, kind in zip(given, kinds, strict=True)]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(kinds))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(types.intp, arguments), generate


@intrinsic
def fetch(typing, address):
    """Fetch the cache line at ``address`` ahead."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [I8_P, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        where = builder.inttoptr(args[0], I8_P)
        builder.call(function, [where, I32(_FETCH_READ), I32(_FETCH_SECOND_LEVEL), I32(_FETCH_DATA)])
        return _context.get_dummy_value()

    return types.void(types.intp), generate


def max_rows(num_vectors: int) -> int:
    """Return how many rows have room in the registers: their accumulators, a row of the panel, and one broadcast."""
    return min(_MAX_ROWS, (NUM_REGISTERS - num_vectors - 1) // num_vectors)


class Emitter:
    """Vector code in one function that is being built."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes
        self.vector = ir.VectorType(F32, lanes)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{lanes}f32")
        kind = ir.FunctionType(ir.VoidType(), [I8_P, I32, I32, I32])
        self._fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")

    def at(self, pointer: ir.Value, index: ir.Value | int) -> ir.Value:
        """Return the address of a number so many on."""
        return self.builder.gep(pointer, [I64(index) if isinstance(index, int) else index])

    def load(self, pointer: ir.Value, offset: int = 0) -> ir.Value:
        """Load a vector."""
        where = self.builder.bitcast(self.at(pointer, offset), self.vector.as_pointer())
        return self.builder.load(where, align=FLOAT_BYTES)

    def load_int8(self, pointer: ir.Value) -> ir.Value:
        """Load int8 numbers as float32."""
        kind = ir.VectorType(I8, self.lanes)
        small = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=1)
        return self.builder.sitofp(self.builder.sext(small, ir.VectorType(I32, self.lanes)), self.vector)

    def store(self, value: ir.Value, pointer: ir.Value, offset: int) -> None:
        """Store a vector."""
        where = self.builder.bitcast(self.at(pointer, offset), self.vector.as_pointer())
        self.builder.store(value, where, align=FLOAT_BYTES)

    def broadcast(self, scalar: ir.Value) -> ir.Value:
        """Return a vector of one number."""
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, scalar, I32(0))
        return self.builder.shuffle_vector(
            first, nothing, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        )

    def fetch(self, pointer: ir.Value) -> None:
        """Fetch a cache line ahead."""
        where = self.builder.bitcast(pointer, I8_P)
        self.builder.call(self._fetch, [where, I32(_FETCH_READ), I32(_FETCH_SECOND_LEVEL), I32(_FETCH_DATA)])

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
            factor = self.broadcast(self.builder.load(self.at(row, k), align=FLOAT_BYTES))
            for v, weights in enumerate(panel):
                place = acc[r * len(panel) + v]
                self.builder.store(self.fma(factor, weights, self.builder.load(place)), place)

    @property
    def can_look_up(self) -> bool:
        """Whether :meth:`look_up` can be used: with vectors of 16, of a processor that has them."""
        return IS_WIDE and self.lanes == _TABLE

    def look_up(self, table: ir.Value, places: ir.Value) -> ir.Value:
        """Return the numbers of a table of 16 at ``places``, int32, of which the lowest four bits count."""
        kind = ir.FunctionType(self.vector, [self.vector, ir.VectorType(I32, _TABLE)])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        return self.builder.call(function, [table, places])

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """``a * b + c``."""
        return self.builder.call(self._fma, [a, b, c])


def new_function(module: ir.Module, name: str, kinds: list[ir.Type]) -> tuple[ir.Function, bool]:
    """Return the module's function of that name, and whether it is new."""
    known = module.globals.get(name)
    if known is not None:
        return known, False
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function, True


def in_tiles(
    tile: Callable[[int, bool], ir.Function], builder: ir.IRBuilder, num_rows: ir.Value, mr: int, call: Any
) -> None:
    """Emit: tiles of ``mr`` rows, then smaller ones for what is left; the first of all fetches ahead.

    Few sizes, so that there is little to compile: of each at most one is needed behind the full tiles.
    """
    zero, full = I64(0), I64(mr)
    with builder.if_then(builder.icmp_signed(">=", num_rows, full)):
        call(tile(mr, True), zero)
    count = builder.sdiv(num_rows, full)
    with cgutils.for_range_slice(builder, I64(1), count, I64(1), intp=I64) as (index, _):
        call(tile(mr, False), builder.mul(index, full))
    done = builder.mul(count, full)
    for size in sorted({-(-mr // 2), 4, 3, 2, 1} - {mr}, reverse=True):
        fits = builder.icmp_signed(">=", builder.sub(num_rows, done), I64(size))
        with builder.if_then(fits), builder.if_else(builder.icmp_signed("==", done, zero)) as (first, later):
            with first:
                call(tile(size, True), done)
            with later:
                call(tile(size, False), done)
        done = builder.add(done, builder.select(fits, I64(size), zero))


def entry(module: ir.Module, name: str, num_arguments: int) -> tuple[ir.IRBuilder, Sequence[ir.Value]]:
    """Begin a function of integers that is called by address."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * num_arguments), name)
    return ir.IRBuilder(function.append_basic_block("entry")), function.args


def rows_on(builder: ir.IRBuilder, pointer: ir.Value, distance: ir.Value, rows: ir.Value) -> ir.Value:
    """Return the address of a row: rows are ``distance`` numbers apart."""
    return builder.gep(pointer, [builder.mul(distance, rows)])


def column_tile(module: ir.Module, mr: int, lanes: int, *, fetches: bool) -> ir.Function:
    """``y[mr, 2 * lanes] (+)= x[mr, k] @ [w0 | w1]``; the two halves have places of their own, and rows ``ldw`` apart.

    (x, ldx, w0, w1, ldw, y, ldy, k, adds, next0, next1): with ``adds`` the sums are added to y.
    """
    name = f"pagefold_columns_{mr}_{lanes}_{int(fetches)}"
    kinds = [F32_P, I64, F32_P, F32_P, I64, F32_P, I64, I64, I64, F32_P, F32_P]
    function, is_new = new_function(module, name, kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, w0, w1, ldw, y, ldy, num_k, adds, next0, next1 = function.args
    emit = Emitter(builder, lanes)
    acc = emit.accumulators(2 * mr)
    outs = [emit.at(y, builder.mul(ldy, I64(r))) for r in range(mr)]
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_k, intp=I64) as loop:
        offset = builder.mul(loop.index, ldw)
        panel = [emit.load(emit.at(w0, offset)), emit.load(emit.at(w1, offset))]
        if fetches:
            emit.fetch(emit.at(next0, offset))
            emit.fetch(emit.at(next1, offset))
        emit.multiply_add(rows, loop.index, panel, acc)
    with builder.if_then(builder.icmp_signed("!=", adds, I64(0))):
        for r in range(mr):
            for v in range(2):
                place = acc[2 * r + v]
                builder.store(builder.fadd(builder.load(place), emit.load(outs[r], v * lanes)), place)
    for r in range(mr):
        for v in range(2):
            emit.store(builder.load(acc[2 * r + v]), outs[r], v * lanes)
    builder.ret_void()
    return function
