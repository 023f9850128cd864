"""Rows of numbers as products with blocks take them: int8 in groups of 32, whatever the blocks' kind.

A group is rounded symmetrically to -127 .. 127, by its largest number, to nearest. It lies in :data:`GROUP_BYTES`: its
numbers, its scale (float32), the sums of its first 16 numbers and of the others (int16 each), and the sum of all times
the scale (float32, rounded once). Codes of blocks are without a sign: what is zero to them is taken off by the former
sums, exactly, and minima are added by the latter.

A group that has infinity or NaN has the scale NaN: so the row gives NaN everywhere.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.block_kinds import GROUP
from pagefold.kernels.emit import F32, F32_P, FLOAT_BYTES, I8, I8_P, I32, I64, MAX_LANES, entry, rows_on
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.words import I32_P, WORD_BYTES, WordEmitter

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GROUP_BYTES", "SCALE_AT", "SUMS_AT", "TOTAL_AT", "rows_to_groups"]

SCALE_AT = GROUP
"""Where a group's scale is: bytes from its beginning."""

SUMS_AT = SCALE_AT + FLOAT_BYTES
"""Where the sums of its halves are, in one word."""

TOTAL_AT = SUMS_AT + WORD_BYTES
"""Where its sum times its scale is."""

GROUP_BYTES = TOTAL_AT + FLOAT_BYTES
"""Bytes of a group of a row."""

_MOST = 127.0
_SMALLEST = float(np.finfo(np.float32).tiny)
_ROUND = 1.5 * 2**23
"""Added to a small number, it leaves the nearest integer in the lowest bits."""
_ROUND_BITS = int(np.float32(_ROUND).view(np.int32))
_SIZE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
"""Bits of float32: all but the sign, infinity, and a NaN."""
_HIGH, _LOWER = 16, 0xFFFF


@cache
def rows_to_groups() -> int:
    """Return the address of what turns rows into such groups: ``rows`` of a format."""

    def build() -> ir.Module:
        module = ir.Module()
        _add_rows(module)
        return module

    return addresses_in("block-rows", build, ["rows"])["rows"]


def _add_rows(module: ir.Module) -> None:
    builder, (x, distance, num_k, num_rows, out, out_distance) = entry(module, "rows", 6)
    emit = WordEmitter(builder, MAX_LANES)
    x, out = builder.inttoptr(x, F32_P), builder.inttoptr(out, I8_P)
    ldx = builder.sdiv(distance, I64(FLOAT_BYTES))
    with cgutils.for_range(builder, num_rows, intp=I64) as rows:
        row, into = rows_on(builder, x, ldx, rows.index), rows_on(builder, out, out_distance, rows.index)
        with cgutils.for_range(builder, builder.sdiv(num_k, I64(GROUP)), intp=I64) as groups:
            numbers = emit.at(row, builder.mul(groups.index, I64(GROUP)))
            _round_group(emit, numbers, emit.at(into, builder.mul(groups.index, I64(GROUP_BYTES))))
    builder.ret_void()


def _round_group(emit: WordEmitter, x: ir.Value, out: ir.Value) -> None:
    """Emit: a group of a row rounded, with what belongs to it; all of it in registers."""
    builder = emit.builder
    vectors = [emit.load(x, at) for at in range(0, GROUP, emit.lanes)]
    sizes = [builder.and_(emit.as_words(one), emit.all_words(_SIZE)) for one in vectors]
    # Without the sign, bits of infinity are above those of all numbers, and those of NaN above them.
    largest = _across(emit, _folded(sizes, lambda a, b: _larger(builder, a, b)), "umax")
    largest = builder.select(builder.icmp_unsigned(">=", largest, I32(_INFINITY)), I32(_NAN), largest)
    scale = builder.fdiv(builder.bitcast(largest, F32), F32(_MOST))
    scale = builder.select(builder.fcmp_ordered("<", scale, F32(_SMALLEST)), F32(_SMALLEST), scale)
    builder.store(scale, builder.bitcast(emit.at(out, SCALE_AT), F32_P), align=FLOAT_BYTES)
    inverses = emit.broadcast(builder.fdiv(F32(1.0), scale))
    rounded = []
    for index, one in enumerate(vectors):
        shifted = builder.fadd(builder.fmul(one, inverses), emit.all_floats(_ROUND))
        words = builder.sub(emit.as_words(shifted), emit.all_words(_ROUND_BITS))
        small = builder.trunc(words, ir.VectorType(I8, emit.lanes))
        where = builder.bitcast(emit.at(out, index * emit.lanes), small.type.as_pointer())
        builder.store(small, where, align=1)
        rounded.append(words)
    half = len(rounded) // 2
    first, second = (_across(emit, _folded(part, builder.add), "add") for part in (rounded[:half], rounded[half:]))
    sums = builder.or_(builder.and_(first, I32(_LOWER)), builder.shl(second, I32(_HIGH)))
    builder.store(sums, builder.bitcast(emit.at(out, SUMS_AT), I32_P), align=WORD_BYTES)
    total = builder.fmul(builder.sitofp(builder.add(first, second), F32), scale)
    builder.store(total, builder.bitcast(emit.at(out, TOTAL_AT), F32_P), align=FLOAT_BYTES)


def _folded(values: list[ir.Value], join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Return all of them joined."""
    first, *others = values
    for one in others:
        first = join(first, one)
    return first


def _larger(builder: ir.IRBuilder, words: ir.Value, others: ir.Value) -> ir.Value:
    """Return the larger of words without a sign, lane by lane."""
    return builder.select(builder.icmp_unsigned(">", words, others), words, others)


def _across(emit: WordEmitter, words: ir.Value, how: str) -> ir.Value:
    """Return the words of a vector joined to one."""
    kind = ir.FunctionType(I32, [emit.words])
    name = f"llvm.vector.reduce.{how}.v{emit.lanes}i32"
    return emit.builder.call(cgutils.get_or_insert_function(emit.builder.module, kind, name), [words])
