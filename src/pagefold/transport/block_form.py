"""BlockForm: what packing must know of a block. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockForm"]


class BlockForm(NamedTuple):
    """How a block is made: of parts and planes.

    Attributes:
        block_bytes: bytes of the block.
        parts: K and V as codes of 8 bit; each has the fields of ``kernel.PART_FIELDS``.
        planes: what else there is: where it begins and ends, and the bytes of its numbers.
    """

    block_bytes: int
    parts: Sequence[tuple[int, ...]]
    planes: Sequence[tuple[int, int, int]]
