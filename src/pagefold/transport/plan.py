"""What packing must know of a block, and the ways to pack that a user can choose. Standard library only."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DROPPED_BITS", "BlockPlan", "TransportCodec"]

TransportCodec: TypeAlias = Literal["none", "lossless", "lossy7", "lossy6"]

DROPPED_BITS: Mapping[TransportCodec, int | None] = MappingProxyType(
    {"none": None, "lossless": 0, "lossy7": 1, "lossy6": 2}
)
"""How many of the lower bits of codes of 8 bit each rounds away; None packs nothing."""


class BlockPlan(NamedTuple):
    """Of what a block is made.

    Attributes:
        block_bytes: of it.
        parts: K and V as codes of 8 bit; each has the fields of ``kernel.PART_FIELDS``.
        planes: what else there is: where it begins and ends, and the bytes of its numbers.
    """

    block_bytes: int
    parts: Sequence[tuple[int, ...]]
    planes: Sequence[tuple[int, int, int]]
