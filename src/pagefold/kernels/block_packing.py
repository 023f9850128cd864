"""From blocks as a file has them to panels: bytes are moved, and bits among them, by compiled code.

What a panel's block has, and in which order, is said in ``block_kinds.py``. Each column is a row of the file, known by
its address. The columns of a block are done one after another, while the block lies in the first-level cache.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.block_kinds import KINDS, BlockKind
from pagefold.kernels.emit import I8_P, I32, I64, I64_P, entry
from pagefold.kernels.formats import PANEL_WIDTH
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.words import I32_P, WORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["block_packer"]

_HALF_BYTES = 2
_I16 = ir.IntType(16)
_LOW, _HIGH, _LAST, _LAST_TWO = 0x0F0F0F0F, 0xF0F0F0F0, 0x01010101, 0x03030303
_SIGNS = 0x80808080
_OCTETS = ((3, 0x03030303), (6, 0x000F000F), (12, 0x000000FF))
"""Shifts and masks that bring every fourth bit of a word together in its lowest byte."""


@cache
def block_packer(kind: str) -> int:
    """Return the address of what packs blocks of a kind, by its name.

    (rows, num_blocks, panels, panel_distance, num_panels): ``rows`` is where the addresses of rows of blocks are, int64
    ``[num_panels, W]``; panels are so many bytes apart.
    """

    def build() -> ir.Module:
        module = ir.Module()
        _add_pack(module, KINDS[kind])
        return module

    return addresses_in(f"block-packing-{kind}", build, ["pack"])["pack"]


def _add_pack(module: ir.Module, kind: BlockKind) -> None:
    builder, (rows, num_blocks, panels, distance, num_panels) = entry(module, "pack", 5)
    rows, panels = builder.inttoptr(rows, I64_P), builder.inttoptr(panels, I8_P)
    words_at = kind.halves * _HALF_BYTES
    halves_from, words_from = (kind.block_bytes - words_at, 0) if kind.name == "Q6_K" else (0, words_at)
    with cgutils.for_range(builder, num_panels, intp=I64) as some:
        columns = builder.gep(rows, [builder.mul(some.index, I64(PANEL_WIDTH))])
        panel = builder.gep(panels, [builder.mul(some.index, distance)])
        with cgutils.for_range(builder, num_blocks, intp=I64) as blocks:
            offset = builder.mul(blocks.index, I64(kind.block_bytes))
            out = builder.gep(panel, [builder.mul(offset, I64(PANEL_WIDTH))])
            out_halves = builder.bitcast(out, _I16.as_pointer())
            out_words = builder.bitcast(builder.gep(out, [I64(words_at * PANEL_WIDTH)]), I32_P)
            with cgutils.for_range(builder, I64(PANEL_WIDTH), intp=I64) as loop:
                row = builder.inttoptr(builder.load(builder.gep(columns, [loop.index]), align=8), I8_P)
                block = builder.gep(row, [offset])
                halves = builder.bitcast(builder.gep(block, [I64(halves_from)]), _I16.as_pointer())
                words = builder.bitcast(builder.gep(block, [I64(words_from)]), I32_P)
                loaded = [
                    builder.load(builder.gep(words, [I64(index)]), align=1)
                    for index in range((kind.block_bytes - words_at) // WORD_BYTES)
                ]
                for index in range(kind.halves):
                    half = builder.load(builder.gep(halves, [I64(index)]), align=1)
                    where = builder.gep(out_halves, [builder.add(loop.index, I64(index * PANEL_WIDTH))])
                    builder.store(half, where, align=_HALF_BYTES)
                for index, word in enumerate(_ARRANGED[kind.name](builder, loaded)):
                    where = builder.gep(out_words, [builder.add(loop.index, I64(index * PANEL_WIDTH))])
                    builder.store(word, where, align=WORD_BYTES)
    builder.ret_void()


def _as_they_are(_builder: ir.IRBuilder, words: list[ir.Value]) -> list[ir.Value]:
    return words


def _fifths_first(builder: ir.IRBuilder, words: list[ir.Value]) -> list[ir.Value]:
    """Of fifth bits, a file's bit i is number i's."""
    bytes_ = []
    for byte in range(WORD_BYTES):
        bits = builder.and_(_right(builder, words[0], byte), I32(0x11111111))
        for shift, mask in _OCTETS:
            bits = builder.and_(builder.or_(bits, _right(builder, bits, shift)), I32(mask))
        bytes_.append(_left(builder, bits, 8 * byte))
    return [_joined(builder, bytes_), *words[1:]]


def _without_signs(builder: ir.IRBuilder, words: list[ir.Value]) -> list[ir.Value]:
    return [builder.xor(word, I32(_SIGNS)) for word in words]


def _q4_k(builder: ir.IRBuilder, words: list[ir.Value]) -> list[ir.Value]:
    return [*words[:3], *(word for group in _lower_of_pairs(builder, words[3:]) for word in group)]


def _q5_k(builder: ir.IRBuilder, words: list[ir.Value]) -> list[ir.Value]:
    """Of fifth bits, bit g of a file's byte i is that of number i of group g."""
    upper, arranged = words[3:11], words[:3]
    for group, lower in enumerate(_lower_of_pairs(builder, words[11:])):
        bits = [builder.and_(_right(builder, word, group), I32(_LAST)) for word in upper]
        fifths = _joined(builder, [_left(builder, word, index) for index, word in enumerate(bits)])
        arranged = [*arranged, fifths, *lower]
    return arranged


def _q6_k(builder: ir.IRBuilder, words: list[ir.Value]) -> list[ir.Value]:
    """In each half of a block: two groups in the low halves of bytes, two in the high ones; four of upper bits."""
    arranged = words[48:]
    for group in range(8):
        half, within = divmod(group, 4)
        of_group = words[16 * half + 8 * (within % 2) :][:8]
        lower = [builder.and_(_right(builder, word, 4 * (within // 2)), I32(_LOW)) for word in of_group]
        fours = [builder.or_(lower[index], _left(builder, lower[index + 4], 4)) for index in range(4)]
        upper = words[32 + 8 * half :][:8]
        twos = [builder.and_(_right(builder, word, 2 * within), I32(_LAST_TWO)) for word in upper]
        pairs = [
            _joined(builder, [_left(builder, twos[first + field], 2 * field) for field in range(4)]) for first in (0, 4)
        ]
        arranged = [*arranged, *pairs, *fours]
    return arranged


def _lower_of_pairs(builder: ir.IRBuilder, words: list[ir.Value]) -> list[list[ir.Value]]:
    """Return the lower bits of eight groups: a file has two groups in the halves of 32 bytes."""
    groups = []
    for pair in range(0, len(words), 8):
        both = list(zip(words[pair : pair + 4], words[pair + 4 : pair + 8], strict=True))
        low, high = I32(_LOW), I32(_HIGH)
        groups.append(
            [builder.or_(builder.and_(one, low), _left(builder, builder.and_(other, low), 4)) for one, other in both]
        )
        groups.append(
            [builder.or_(_right(builder, builder.and_(one, high), 4), builder.and_(other, high)) for one, other in both]
        )
    return groups


def _joined(builder: ir.IRBuilder, words: list[ir.Value]) -> ir.Value:
    first, *others = words
    for one in others:
        first = builder.or_(first, one)
    return first


def _left(builder: ir.IRBuilder, word: ir.Value, by: int) -> ir.Value:
    return builder.shl(word, I32(by)) if by else word


def _right(builder: ir.IRBuilder, word: ir.Value, by: int) -> ir.Value:
    return builder.lshr(word, I32(by)) if by else word


_ARRANGED: dict[str, Callable[[ir.IRBuilder, list[ir.Value]], list[ir.Value]]] = {
    "Q4_0": _as_they_are,
    "Q4_1": _as_they_are,
    "Q5_0": _fifths_first,
    "Q5_1": _fifths_first,
    "Q8_0": _without_signs,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
