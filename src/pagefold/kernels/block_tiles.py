"""What computes with blocks of one kind: products of rows with a panel, and columns that are read back.

A tile is some rows of a product, whose sums stay in registers. It takes codes from the panel itself, and makes bytes of
them in registers: this is all that there is to do for few rows, which are bound by reading the panel, and for kinds
whose bytes are had for next to nothing. Of others, a stretch of the panel becomes bytes and float32 scales on the
stack, in the first-level cache, once for many rows; tiles take them from there, and sums of rows wait on the stack from
stretch to stretch. The same numbers are multiplied and added in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.block_codes import BlockEmitter, GroupScales, Place, parts_of, stored_scales
from pagefold.kernels.block_kinds import GROUP, KINDS, BlockKind
from pagefold.kernels.block_rows import GROUP_BYTES, SCALE_AT, TOTAL_AT, rows_to_groups
from pagefold.kernels.emit import (
    F32,
    F32_P,
    FLOAT_BYTES,
    I8,
    I8_P,
    I32,
    I64,
    LINE_BYTES,
    MAX_LANES,
    NUM_REGISTERS,
    entry,
    new_function,
    rows_on,
)
from pagefold.kernels.formats import PANEL_VECTORS, PANEL_WIDTH, FormatTiles
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.words import WORD_BYTES, in_passes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["block_module", "block_tiles"]

_HALF_BYTES = 2
_CODE_BYTES = GROUP * PANEL_WIDTH
_NUM_WORDS = GROUP // WORD_BYTES
_STRETCH_BYTES = 16384
_STRETCH_GROUPS = _STRETCH_BYTES // _CODE_BYTES
"""Groups that lie on the stack as bytes: with the rows that meet them they stay in the first-level cache."""
_ROWS_AT_ONCE = 252
"""Rows whose sums wait on the stack."""
_MAX_ROWS = (NUM_REGISTERS - PANEL_VECTORS - 1) // (2 * PANEL_VECTORS)
"""Rows that have room in the registers: integers and floats of each, a quad of the columns, a broadcast."""
_MOST_FEW = 2 * _MAX_ROWS
"""Rows for which a stretch is not made bytes on the stack."""
_VECTORS = [Place(PANEL_WIDTH, v * MAX_LANES) for v in range(PANEL_VECTORS)]


@cache
def block_tiles(kind: str, *, is_native: bool) -> FormatTiles:
    """Return what computes with blocks of a kind, by its name, compiled for this processor."""

    def build() -> ir.Module:
        return block_module(KINDS[kind], is_native=is_native)

    addresses = addresses_in(f"blocks-{kind}-{int(is_native)}", build, FormatTiles._fields[1:])
    return FormatTiles(rows=rows_to_groups(), **addresses)


def block_module(kind: BlockKind, *, is_native: bool) -> ir.Module:
    """Return the module of a kind: ``product`` and ``column`` of :class:`~pagefold.kernels.formats.FormatTiles`."""
    code = _Code(kind, is_native=is_native)
    code.add_product()
    code.add_column()
    return code.module


class _Walk(NamedTuple):
    """A group as a tile meets it, as values of the function that is being built.

    Attributes:
        rows: addresses of the group in each row.
        quads: of each vector of columns: emits codes.
        scales: emits those of each vector, once sums are there: before, they would take registers.
    """

    rows: list[ir.Value]
    quads: list[Callable[[int], ir.Value]]
    scales: Callable[[], list[GroupScales]]


class _Code:
    """The code of one kind.

    Args:
        kind: of the blocks.
        is_native: whether by the processor's instruction.

    Attributes:
        module: that it is in.
    """

    def __init__(self, kind: BlockKind, *, is_native: bool) -> None:
        self.module = ir.Module()
        self._kind, self._is_native = kind, is_native
        self._head_bytes = (kind.halves * _HALF_BYTES + kind.head_words * WORD_BYTES) * PANEL_WIDTH
        self._group_bytes = kind.group_words * WORD_BYTES * PANEL_WIDTH
        self._block_bytes = kind.block_bytes * PANEL_WIDTH
        self._scale_bytes = stored_scales(kind) * PANEL_WIDTH * FLOAT_BYTES
        # Bytes of 8 bits are there; four bits are had by a shift and a mask, which the tile without the instruction
        # does beside its loads.
        self._has_stretches = kind.bits in {5, 6} or (kind.bits == 4 and is_native)

    def add_product(self) -> None:
        """Add ``product``."""
        builder, args = entry(self.module, "product", 9)
        x, x_distance, panel, num_k, num_rows, y, y_distance, adds, following = args
        x, panel, following = (builder.inttoptr(a, I8_P) for a in (x, panel, following))
        y, ldy = builder.inttoptr(y, F32_P), builder.sdiv(y_distance, I64(FLOAT_BYTES))
        num_blocks = builder.sdiv(num_k, I64(self._kind.numbers))
        arguments = [x, x_distance, panel, num_blocks, num_rows, y, ldy, adds, following]
        if not self._has_stretches:
            self._in_tiles_of_panel(builder, *arguments)
        else:
            with builder.if_else(builder.icmp_signed("<=", num_rows, I64(_MOST_FEW))) as (few, many):
                with few:
                    self._in_tiles_of_panel(builder, *arguments)
                with many:
                    builder.call(self._many_rows(), arguments)
        builder.ret_void()

    def _in_tiles_of_panel(
        self, builder: ir.IRBuilder, x: ir.Value, ldx: ir.Value, panel: ir.Value, num_blocks: ir.Value,
        num_rows: ir.Value, y: ir.Value, ldy: ir.Value, adds: ir.Value, following: ir.Value,
    ) -> None:  # fmt: skip
        """Emit: tiles of rows as even as can be; the first fetches ahead."""
        with in_passes(builder, num_rows, _MAX_ROWS) as one:
            at_x, at_y = rows_on(builder, x, ldx, one.first), rows_on(builder, y, ldy, one.first)
            is_first = builder.icmp_signed("==", one.first, I64(0))
            behind = builder.select(is_first, following, panel)
            for mr in range(1, _MAX_ROWS + 1):
                with builder.if_then(builder.icmp_signed("==", one.num_steps, I64(mr))):
                    builder.call(self._panel_tile(mr), [at_x, ldx, panel, num_blocks, at_y, ldy, adds, behind])

    def _panel_tile(self, mr: int) -> ir.Function:
        """``y[mr, W] (+)= x[mr, K] @ panel[K, W]``, of codes that become bytes in registers.

        (x, ldx, panel, num_blocks, y, ldy, adds, following): ``ldx`` in bytes.
        """
        kinds = [I8_P, I64, I8_P, I64, F32_P, I64, I64, I8_P]
        function, is_new = new_function(self.module, f"pagefold_panel_{mr}", kinds)
        if not is_new:
            return function
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        x, ldx, panel, num_blocks, y, ldy, adds, following = function.args
        emit = self._emitter(builder)
        acc = emit.accumulators(PANEL_VECTORS * mr)
        rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
        kind, stored = self._kind, cgutils.alloca_once(builder, I8, size=self._kind.groups * self._scale_bytes)
        with cgutils.for_range(builder, num_blocks, intp=I64) as blocks:
            offset = builder.mul(blocks.index, I64(self._block_bytes))
            here, behind = emit.at(panel, offset), emit.at(following, offset)
            of_rows = [emit.at(row, builder.mul(blocks.index, I64(kind.groups * GROUP_BYTES))) for row in rows]
            _fetch(emit, behind, self._head_bytes)
            if kind.groups > 1:
                self._store_scales(emit, here, stored, self._scale_bytes)

            def sum_group(group: ir.Value) -> None:
                at = builder.add(builder.mul(group, I64(self._group_bytes)), I64(self._head_bytes))
                _fetch(emit, emit.at(behind, at), self._group_bytes)
                codes = emit.at(here, at)
                numbers = builder.bitcast(emit.at(stored, builder.mul(group, I64(self._scale_bytes))), F32_P)

                def scales() -> list[GroupScales]:
                    if kind.groups == 1:
                        return [emit.scales(here, place)[0] for place in _VECTORS]
                    return [emit.load_scales(numbers, place) for place in _VECTORS]

                at_groups = [emit.at(row, builder.mul(group, I64(GROUP_BYTES))) for row in of_rows]
                walk = _Walk(at_groups, [emit.quads(codes, place) for place in _VECTORS], scales)
                self._sum_group(emit, walk, acc)

            if kind.groups == 1:
                sum_group(I64(0))
            else:
                with cgutils.for_range(builder, I64(kind.groups), intp=I64) as groups:
                    sum_group(groups.index)
        for r in range(mr):
            of_row = [builder.load(place) for place in acc[r * PANEL_VECTORS : (r + 1) * PANEL_VECTORS]]
            _store_sums(emit, of_row, emit.at(y, builder.mul(ldy, I64(r))), adds)
        builder.ret_void()
        return function

    def _many_rows(self) -> ir.Function:
        """``y[num_rows, W] (+)= x[num_rows, K] @ panel[K, W]``, stretch by stretch of the panel.

        (x, ldx, panel, num_blocks, num_rows, y, ldy, adds, following): ``ldx`` in bytes.
        """
        kinds = [I8_P, I64, I8_P, I64, I64, F32_P, I64, I64, I8_P]
        function, _ = new_function(self.module, "pagefold_many", kinds)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        x, ldx, panel, num_blocks, num_rows, y, ldy, adds, following = function.args
        emit, kind = self._emitter(builder), self._kind
        room = cgutils.alloca_once(builder, I8, size=_STRETCH_GROUPS * (_CODE_BYTES + self._scale_bytes))
        sums = cgutils.alloca_once(builder, F32, size=_ROWS_AT_ONCE * PANEL_WIDTH)
        with in_passes(builder, num_rows, _ROWS_AT_ONCE) as some:
            with cgutils.for_range(builder, builder.mul(some.num_steps, I64(PANEL_VECTORS)), intp=I64) as loop:
                emit.store(emit.all_floats(0.0), emit.at(sums, builder.mul(loop.index, I64(MAX_LANES))), 0)
            own = rows_on(builder, x, ldx, some.first)
            with in_passes(builder, num_blocks, _STRETCH_GROUPS // kind.groups) as one:
                offset = builder.mul(one.first, I64(self._block_bytes))
                stretch = [emit.at(panel, offset), one.num_steps, room, emit.at(following, offset)]
                builder.call(self._expand(), stretch)
                num_groups = builder.mul(one.num_steps, I64(kind.groups))
                here = emit.at(own, builder.mul(one.first, I64(kind.groups * GROUP_BYTES)))
                with in_passes(builder, some.num_steps, _MAX_ROWS) as rows:
                    at_x = rows_on(builder, here, ldx, rows.first)
                    at_sums = emit.at(sums, builder.mul(rows.first, I64(PANEL_WIDTH)))
                    for mr in range(1, _MAX_ROWS + 1):
                        with builder.if_then(builder.icmp_signed("==", rows.num_steps, I64(mr))):
                            builder.call(self._stretch_tile(mr), [at_x, ldx, room, num_groups, at_sums])
            with cgutils.for_range(builder, some.num_steps, intp=I64) as loop:
                row = emit.at(sums, builder.mul(loop.index, I64(PANEL_WIDTH)))
                of_row = [emit.load(row, v * MAX_LANES) for v in range(PANEL_VECTORS)]
                _store_sums(emit, of_row, rows_on(builder, y, ldy, builder.add(some.first, loop.index)), adds)
        builder.ret_void()
        return function

    def _stretch_tile(self, mr: int) -> ir.Function:
        """``sums[mr, W] += x[mr, groups] @ groups``, of a stretch that lies there as bytes and scales.

        (x, ldx, room, num_groups, sums): ``ldx`` in bytes.
        """
        function, is_new = new_function(self.module, f"pagefold_stretch_{mr}", [I8_P, I64, I8_P, I64, F32_P])
        if not is_new:
            return function
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        x, ldx, room, num_groups, sums = function.args
        emit = self._emitter(builder)
        acc = emit.accumulators(PANEL_VECTORS * mr)
        outs = [emit.at(sums, index * MAX_LANES) for index in range(len(acc))]
        for place, out in zip(acc, outs, strict=True):
            builder.store(emit.load(out), place)
        rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
        with cgutils.for_range(builder, num_groups, intp=I64) as groups:
            codes = emit.at(room, builder.mul(groups.index, I64(_CODE_BYTES + self._scale_bytes)))
            numbers = builder.bitcast(emit.at(codes, _CODE_BYTES), F32_P)

            def quads(place: Place, codes: ir.Value = codes) -> Callable[[int], ir.Value]:
                return lambda index: emit.load_column_words(codes, index, place)

            def scales(numbers: ir.Value = numbers) -> list[GroupScales]:
                return [emit.load_scales(numbers, place) for place in _VECTORS]

            at_groups = [emit.at(row, builder.mul(groups.index, I64(GROUP_BYTES))) for row in rows]
            self._sum_group(emit, _Walk(at_groups, [quads(place) for place in _VECTORS], scales), acc)
        for place, out in zip(acc, outs, strict=True):
            emit.store(builder.load(place), out, 0)
        builder.ret_void()
        return function

    def _expand(self) -> ir.Function:
        """Blocks of a panel become bytes and float32 scales, group by group; as many that follow are fetched ahead.

        (panel, num_blocks, room, following)
        """
        function, is_new = new_function(self.module, "pagefold_expand", [I8_P, I64, I8_P, I8_P])
        if not is_new:
            return function
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        panel, num_blocks, room, following = function.args
        emit, kind, stride = self._emitter(builder), self._kind, _CODE_BYTES + self._scale_bytes
        with cgutils.for_range(builder, num_blocks, intp=I64) as blocks:
            offset = builder.mul(blocks.index, I64(self._block_bytes))
            here, behind = emit.at(panel, offset), emit.at(following, offset)
            into = emit.at(room, builder.mul(blocks.index, I64(kind.groups * stride)))
            _fetch(emit, behind, self._head_bytes)
            self._store_scales(emit, here, emit.at(into, _CODE_BYTES), stride)
            with cgutils.for_range(builder, I64(kind.groups), intp=I64) as groups:
                at = builder.add(builder.mul(groups.index, I64(self._group_bytes)), I64(self._head_bytes))
                _fetch(emit, emit.at(behind, at), self._group_bytes)
                out = builder.bitcast(emit.at(into, builder.mul(groups.index, I64(stride))), F32_P)
                for place in _VECTORS:
                    quads = emit.quads(emit.at(here, at), place)
                    for index in range(_NUM_WORDS):
                        emit.store(emit.as_floats(quads(index)), out, index * PANEL_WIDTH + place.column)
        builder.ret_void()
        return function

    def _sum_group(self, emit: BlockEmitter, walk: _Walk, acc: list[ir.Value]) -> None:
        """Emit: a group of a panel, times that of each row, is added to the accumulators."""
        builder, sums, of_columns = emit.builder, emit.sums(walk.quads, walk.rows), walk.scales()
        for r, row in enumerate(walk.rows):
            own = emit.row_float(row, SCALE_AT)
            total = emit.row_float(row, TOTAL_AT) if self._kind.has_minimum else None
            for v, scales in enumerate(of_columns):
                place = acc[r * PANEL_VECTORS + v]
                so_far = builder.load(place)
                for part, factor in enumerate(scales.factors):
                    number = builder.sitofp(sums[part][r][v], emit.vector)
                    so_far = emit.exact_fma(number, builder.fmul(factor, own), so_far)
                if scales.minimum is not None:
                    so_far = emit.exact_fma(total, scales.minimum, so_far)
                builder.store(so_far, place)

    def _store_scales(self, emit: BlockEmitter, head: ir.Value, room: ir.Value, stride: int) -> None:
        """Emit: scales of a block are stored, as float32, those of a group ``stride`` bytes behind another's."""
        for place in _VECTORS:
            for group, one in enumerate(emit.scales(head, place)):
                out = emit.builder.bitcast(emit.at(room, group * stride), F32_P)
                for index, vector in enumerate(one.vectors):
                    emit.store(vector, out, index * PANEL_WIDTH + place.column)

    def add_column(self) -> None:
        """Add ``column``: number by number, by the code of vectors, of one lane."""
        builder, (panel, column, num_k, out) = entry(self.module, "column", 4)
        panel, out = builder.inttoptr(panel, I8_P), builder.inttoptr(out, F32_P)
        kind = self._kind
        emit = BlockEmitter(builder, 1, kind, is_native=True)  # by which codes have no sign
        place, width = Place(PANEL_WIDTH, column), stored_scales(kind)
        stored = cgutils.alloca_once(builder, F32, size=kind.groups * width)
        with cgutils.for_range(builder, builder.sdiv(num_k, I64(kind.numbers)), intp=I64) as blocks:
            here = emit.at(panel, builder.mul(blocks.index, I64(self._block_bytes)))
            for group, scales in enumerate(emit.scales(here, place)):
                for index, vector in enumerate(scales.vectors):
                    emit.store(vector, stored, group * width + index)
            with cgutils.for_range(builder, I64(kind.groups), intp=I64) as groups:
                at = builder.add(builder.mul(groups.index, I64(self._group_bytes)), I64(self._head_bytes))
                quads = emit.quads(emit.at(here, at), place)
                own = emit.at(stored, builder.mul(groups.index, I64(width)))
                numbers = [builder.load(emit.at(own, index), align=FLOAT_BYTES) for index in range(width)]
                first = builder.add(builder.mul(blocks.index, I64(kind.groups)), groups.index)
                into = emit.at(out, builder.mul(first, I64(GROUP)))
                for index in range(_NUM_WORDS):
                    word = builder.extract_element(quads(index), I32(0))
                    factor = numbers[index * parts_of(kind) // _NUM_WORDS]
                    for byte in range(WORD_BYTES):
                        code = builder.and_(builder.lshr(word, I32(8 * byte)), I32(0xFF))
                        number = builder.fmul(builder.sitofp(builder.sub(code, I32(kind.zero)), F32), factor)
                        if kind.has_minimum:
                            number = builder.fadd(number, numbers[-1])
                        builder.store(number, emit.at(into, WORD_BYTES * index + byte))
        builder.ret_void()

    def _emitter(self, builder: ir.IRBuilder) -> BlockEmitter:
        return BlockEmitter(builder, MAX_LANES, self._kind, is_native=self._is_native)


def _store_sums(emit: BlockEmitter, sums: list[ir.Value], out: ir.Value, adds: ir.Value) -> None:
    """Emit: a row's sums are stored, or added to what is there."""
    builder = emit.builder
    must_add = builder.icmp_signed("!=", adds, I64(0))
    with builder.if_else(must_add) as (then, other):
        with then:
            for v, total in enumerate(sums):
                emit.store(builder.fadd(total, emit.load(out, v * MAX_LANES)), out, v * MAX_LANES)
        with other:
            for v, total in enumerate(sums):
                emit.store(total, out, v * MAX_LANES)


def _fetch(emit: BlockEmitter, start: ir.Value, num_bytes: int) -> None:
    """Emit: the cache lines of so many bytes are fetched ahead."""
    for line in range(0, num_bytes, LINE_BYTES):
        emit.fetch(emit.at(start, line))
