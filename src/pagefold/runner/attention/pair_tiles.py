"""Tiles over blocks of bfloat16 pairs: scores and weighted values, by what multiplies pairs (see ``kernels/pairs.py``).

A block's K is words ``[head_dim / 2][slot]``: two numbers of a vector. Its V is words ``[slot / 2][head_dim]``: one
number of two slots. Queries are rows of pairs, and so are the weights of a row, once scores have become weights. Of a
last pair whose second slot is not attended to, that is taken for zero: it may never have been written.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.emit import F32_P, I8_P, I64, I64_P, new_function
from pagefold.kernels.pairs import PairEmitter
from pagefold.kernels.words import I32_P, WORD_BYTES

__all__ = ["Width", "pair_block_tile", "pair_column_tile"]

_FIRST = 0xFFFF


def pair_column_tile(module: ir.Module, mr: int, lanes: int, *, fetches: bool, is_native: bool) -> ir.Function:
    """``y[mr, 2 * lanes] = x[mr, k] @ [w0 | w1]``: rows of panels are ``ldw`` bytes apart.

    (x, ldx, w0, w1, ldw, y, ldy, num_words, next0, next1): ``ldx`` and ``num_words``, of a row, in words.
    """
    kinds = [I32_P, I64, I8_P, I8_P, I64, F32_P, I64, I64, I8_P, I8_P]
    function, is_new = new_function(module, f"pagefold_pair_columns_{mr}_{int(fetches)}", kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, w0, w1, ldw, y, ldy, num_words, next0, next1 = function.args
    emit = PairEmitter(builder, lanes, is_native=is_native)
    acc = emit.accumulators(2 * mr)
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    with cgutils.for_range(builder, num_words, intp=I64) as loop:
        offset = builder.mul(loop.index, ldw)
        panel = [emit.load_words(builder.bitcast(emit.at(w, offset), I32_P)) for w in (w0, w1)]
        if fetches:
            for following in (next0, next1):
                emit.fetch(emit.at(following, offset))
        _sum(emit, [emit.at(row, loop.index) for row in rows], panel, acc)
    _store(emit, acc, y, ldy, 2)
    return function


class Width(NamedTuple):
    """How wide a tile of values is: numbers of a vector, and vectors."""

    lanes: int
    vectors: int


def pair_block_tile(module: ir.Module, mr: int, width: Width, *, fetches: bool, is_native: bool) -> ir.Function:
    """``y[mr, nv * lanes] = x[mr, :] @ rows of several blocks``, one block behind the other.

    (x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy, ahead): ``ldx`` in words, ``offset`` and
    ``ldw`` in bytes, ``block_size``, which is even, and ``num_k`` in slots. What lies behind ``ahead[b]`` as rows lie
    behind ``blocks[b]`` is fetched.
    """
    lanes, nv = width
    kinds = [I32_P, I64, I64_P, I64, I64, I64, I64, I64, F32_P, I64, I64_P]
    function, is_new = new_function(module, f"pagefold_pair_blocks_{mr}_{int(fetches)}", kinds)
    if not is_new:
        return function
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, ldx, blocks, num_blocks, block_size, num_k, offset, ldw, y, ldy, ahead = function.args
    emit = PairEmitter(builder, lanes, is_native=is_native)
    acc = emit.accumulators(nv * mr)
    rows = [emit.at(x, builder.mul(ldx, I64(r))) for r in range(mr)]
    half_block = builder.ashr(block_size, I64(1))
    num_whole = builder.ashr(num_k, I64(1))
    last = cgutils.alloca_once(builder, I8_P)  # behind the last whole pair

    def load(start: ir.Value) -> list[ir.Value]:
        words = builder.bitcast(start, I32_P)
        return [emit.load_words(words, v * lanes) for v in range(nv)]

    with cgutils.for_range(builder, num_blocks, intp=I64) as outer:
        first = builder.mul(outer.index, half_block)
        base, following = (
            emit.at(builder.inttoptr(builder.load(emit.at(one, outer.index)), I8_P), offset) for one in (blocks, ahead)
        )
        left = builder.sub(num_whole, first)
        length = builder.select(builder.icmp_signed("<", left, half_block), left, half_block)
        with cgutils.for_range(builder, length, intp=I64) as inner:
            row = builder.mul(inner.index, ldw)
            panel = load(emit.at(base, row))
            if fetches:
                for v in range(nv):
                    emit.fetch(emit.at(emit.at(following, row), v * lanes * WORD_BYTES))
            at = builder.add(first, inner.index)
            _sum(emit, [emit.at(row, at) for row in rows], panel, acc)
        builder.store(emit.at(base, builder.mul(length, ldw)), last)
    with builder.if_then(builder.trunc(num_k, ir.IntType(1))):
        panel = [builder.and_(words, emit.all_words(_FIRST)) for words in load(builder.load(last))]
        _sum(emit, [emit.at(row, num_whole) for row in rows], panel, acc)
    _store(emit, acc, y, ldy, nv)
    return function


def _sum(emit: PairEmitter, rows: list[ir.Value], panel: list[ir.Value], acc: list[ir.Value]) -> None:
    """Emit: the products of a word of each row with those of the panel are added to the accumulators."""
    builder = emit.builder
    for r, row in enumerate(rows):
        pair = emit.broadcast_word(builder.load(row, align=WORD_BYTES))
        for v, words in enumerate(panel):
            place = acc[r * len(panel) + v]
            builder.store(emit.sum_pairs(pair, words, builder.load(place)), place)


def _store(emit: PairEmitter, acc: list[ir.Value], y: ir.Value, ldy: ir.Value, nv: int) -> None:
    for r in range(len(acc) // nv):
        out = emit.at(y, emit.builder.mul(ldy, I64(r)))
        for v in range(nv):
            emit.store(emit.builder.load(acc[nv * r + v]), out, v * emit.lanes)
    emit.builder.ret_void()
