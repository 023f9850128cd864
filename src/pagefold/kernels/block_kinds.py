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
from typing import Literal

__all__ = ["GROUP", "KINDS", "BlockKind"]

GROUP = 32
"""Numbers of a group."""

_WORD_BYTES, _HALF_BYTES = 4, 2


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
