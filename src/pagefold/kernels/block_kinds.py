"""The quantized kinds of GGML: what a block of a file has, and the same bytes as a panel has them.

A row of a matrix is cut into blocks of 32 or 256 numbers; in both, 32 numbers are a *group*, whose codes are whole
numbers without a sign. A file packs codes, their upper bits and scales in another way for each kind. Panels know only
four ways to pack codes and four ways to scale them, so that there is little to compile. A block of a column is:

* the *head*: scales, 16-bit floats ``halves`` and then 32-bit ``words`` of what is packed smaller;
* for each group the upper bits of its codes, in ``bits - 4`` words, and then the lower four bits, in four. Byte b of
  word j has number ``4j + b`` of the group in its low half, and number ``16 + 4j + b`` in its high half. Bit ``8b + j``
  of the one word of fifth bits belongs to number ``4j + b``. Of fifth and sixth bits, bits ``8b + 2f`` and the next of
  word k belong to number ``4 * (4k + f) + b``. Codes of 8 bit are eight words, number after number.

So a quad, four numbers that follow each other, comes out of words by a shift and a mask. Not a byte is added: a panel
takes what the file takes. Kinds are those of ``ggml-quants.h`` of llama.cpp, by its names; a number is

    d * (code - zero)                    Q4_0, Q5_0, Q8_0 (whose code is 128 above what the file has)
    d * code + m                         Q4_1, Q5_1
    (d * scale) * code - (dmin * min)    Q4_K, Q5_K: scale and min of 6 bits, a group
    (d * scale) * (code - zero)          Q6_K: scale of 8 bits with a sign, for 16 numbers

where d, m and dmin are the halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["GROUP", "KINDS", "BlockKind", "columns_of_blocks"]

GROUP = 32
"""Numbers of a group."""

_WORD_BYTES, _HALF_BYTES = 4, 2
_LOW, _HIGH = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
_LAST, _LAST_TWO = np.uint32(0x01010101), np.uint32(0x03030303)
_ABOVE = np.uint32(0x80808080)
_EIGHT, _FOUR = np.arange(8, dtype=np.uint32), np.arange(4, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One kind of blocks.

    Attributes:
        name: GGML's.
        groups: of a block.
        bits: of a code.
        zero: the code of zero, that is taken from all; 0 of kinds that have a minimum.
        scales: how a group is scaled: by a half of its own; by that, with a half as its minimum; by halves of the
            block times small numbers of the group, the scale and the minimum; by the block's half times a small number
            for 16 numbers.
    """

    name: str
    groups: int
    bits: Literal[4, 5, 6, 8]
    zero: int
    scales: Literal["own", "own with minimum", "shared with minimum", "shared by sixteen"]

    @property
    def numbers(self) -> int:
        """Numbers of a block: a row is a multiple of them."""
        return GROUP * self.groups

    @property
    def has_minimum(self) -> bool:
        """Whether something is added to all numbers of a group."""
        return self.scales in {"own with minimum", "shared with minimum"}

    @property
    def halves(self) -> int:
        """16-bit floats of a block."""
        return 2 if self.has_minimum else 1

    @property
    def head_words(self) -> int:
        """Words of small scales of a block."""
        return {"shared with minimum": 3, "shared by sixteen": 4}.get(self.scales, 0)

    @property
    def group_words(self) -> int:
        """Words of codes of a group."""
        return self.bits

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, in a file and in a column of a panel."""
        return self.halves * _HALF_BYTES + (self.head_words + self.groups * self.group_words) * _WORD_BYTES


KINDS = {
    one.name: one
    for one in (
        BlockKind("Q4_0", 1, 4, 8, "own"),
        BlockKind("Q4_1", 1, 4, 0, "own with minimum"),
        BlockKind("Q5_0", 1, 5, 16, "own"),
        BlockKind("Q5_1", 1, 5, 0, "own with minimum"),
        BlockKind("Q8_0", 1, 8, 128, "own"),
        BlockKind("Q4_K", 8, 4, 0, "shared with minimum"),
        BlockKind("Q5_K", 8, 5, 0, "shared with minimum"),
        BlockKind("Q6_K", 8, 6, 32, "shared by sixteen"),
    )
}
"""All kinds, by name."""


def columns_of_blocks(kind: BlockKind, blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Return blocks of a file as columns of panels have them.

    Args:
        kind: of all.
        blocks: ``[..., block_bytes]``.

    Returns:
        ``[..., halves]`` and ``[..., words]``: of a block all halves, then all words, in a panel's order.
    """
    halves, words = _SPLIT[kind.name](blocks)
    return halves, words.reshape(*blocks.shape[:-1], -1)


def _halves(blocks: NDArray[np.uint8]) -> NDArray[np.uint16]:
    return np.ascontiguousarray(blocks).view(np.uint16)


def _words(blocks: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.array(blocks, order="C").view(np.uint32)  # a copy: what is mapped cannot be written to


def _split_q4_0(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    return _halves(blocks[..., :2]), _words(blocks[..., 2:])


def _split_q4_1(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    return _halves(blocks[..., :4]), _words(blocks[..., 4:])


def _split_q5_0(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    words = _words(blocks[..., 2:])
    words[..., 0] = _fifth_of_ordered(words[..., 0])
    return _halves(blocks[..., :2]), words


def _split_q5_1(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    words = _words(blocks[..., 4:])
    words[..., 0] = _fifth_of_ordered(words[..., 0])
    return _halves(blocks[..., :4]), words


def _split_q8_0(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    words = _words(blocks[..., 2:])
    words ^= _ABOVE
    return _halves(blocks[..., :2]), words


def _split_q4_k(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    words = _words(blocks[..., 4:])
    return _halves(blocks[..., :4]), np.concatenate([words[..., :3], _flat(_lower_of_pairs(words[..., 3:]))], axis=-1)


def _split_q5_k(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    words = _words(blocks[..., 4:])
    head, upper, lower = words[..., :3], words[..., 3:11], words[..., 11:]
    # [..., group, word of numbers 4j to 4j + 3]
    fifths = ((upper[..., None, :] >> _EIGHT[:, None]) & _LAST) << _EIGHT
    groups = np.concatenate([np.bitwise_or.reduce(fifths, axis=-1, keepdims=True), _lower_of_pairs(lower)], axis=-1)
    return _halves(blocks[..., :4]), np.concatenate([head, _flat(groups)], axis=-1)


def _split_q6_k(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    words = _words(blocks[..., :208])
    lower, upper, scales = words[..., :32], words[..., 32:48], words[..., 48:]
    *before, _ = words.shape
    # In each half of a block: two groups of eight words in the low halves of bytes, then two in the high ones.
    lower = lower.reshape(*before, 2, 1, 2, 8)
    lower = np.concatenate([lower & _LOW, (lower & _HIGH) >> np.uint32(4)], axis=-3).reshape(*before, 8, 2, 4)
    lower = lower[..., 0, :] | (lower[..., 1, :] << np.uint32(4))
    # [..., half, group of it, word k, field f]
    upper = upper.reshape(*before, 2, 1, 2, 4) >> (np.uint32(2) * _FOUR)[:, None, None]
    upper = np.bitwise_or.reduce((upper & _LAST_TWO) << (np.uint32(2) * _FOUR), axis=-1).reshape(*before, 8, 2)
    groups = np.concatenate([upper, lower], axis=-1)
    return _halves(blocks[..., 208:]), np.concatenate([scales, _flat(groups)], axis=-1)


def _flat(groups: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return groups.reshape(*groups.shape[:-2], -1)


def _fifth_of_ordered(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return words of fifth bits, of which bit i is number i's, as panels have them."""
    out = np.zeros_like(words)
    for byte in range(4):
        bits = (words >> np.uint32(byte)) & np.uint32(0x11111111)
        for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0x000000FF)):
            bits = (bits | (bits >> np.uint32(shift))) & np.uint32(mask)
        out |= bits << np.uint32(8 * byte)
    return out


def _lower_of_pairs(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the four lower bits of eight groups, ``[..., 8, 4]``: a file has two groups in the halves of 32 bytes."""
    pairs = words.reshape(*words.shape[:-1], 4, 2, 4)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    four = np.uint32(4)
    low = (first & _LOW) | ((second & _LOW) << four)
    high = ((first & _HIGH) >> four) | (second & _HIGH)
    return np.stack([low, high], axis=-2).reshape(*words.shape[:-1], 8, 4)


_SPLIT: dict[str, Callable[[NDArray[np.uint8]], tuple[NDArray[np.uint16], NDArray[np.uint32]]]] = {
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q5_0": _split_q5_0,
    "Q5_1": _split_q5_1,
    "Q8_0": _split_q8_0,
    "Q4_K": _split_q4_k,
    "Q5_K": _split_q5_k,
    "Q6_K": _split_q6_k,
}
