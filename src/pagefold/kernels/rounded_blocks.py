"""RoundedBlocks: a model's own numbers, rounded into blocks of one of GGML's kinds as they are packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.kernels.block_rounding import round_to_blocks
from pagefold.kernels.blocks import blocks_of
from pagefold.kernels.formats import PANEL_WIDTH

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagefold.kernels.block_rounding import RoundingMethod
    from pagefold.kernels.blocks import Blocks
    from pagefold.kernels.formats import FormatTiles

__all__ = ["RoundedBlocks", "rounded_blocks"]

_PANELS_AT_ONCE = 16
"""Panels that are rounded together: a search for scales takes many times what it rounds."""


@dataclass(frozen=True, slots=True)
class RoundedBlocks:
    """Weights that are rounded to blocks: a :class:`~pagefold.kernels.formats.ProductFormat`.

    Attributes:
        blocks: what they become.
        method: how scales are chosen.
        name: of the format.
    """

    blocks: Blocks
    method: RoundingMethod
    name: str

    @property
    def arithmetic(self) -> str:
        """What decides the bits of a product: the blocks' own, and which weights it is of."""
        return f"{self.blocks.arithmetic}, rounded by {self.method}"

    @property
    def means(self) -> str:
        """What computes in it on this processor."""
        return self.blocks.means

    def row_bytes(self, num_k: int) -> int:
        """Return the bytes of a row."""
        return self.blocks.row_bytes(num_k)

    def panel_bytes(self, num_k: int) -> int:
        """Return the bytes of a panel."""
        return self.blocks.panel_bytes(num_k)

    def pack(self, matrix: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        """Round and pack a matrix ``[N, K]``."""
        for first in range(0, len(into), _PANELS_AT_ONCE):
            piece = into[first : first + _PANELS_AT_ONCE]
            rows = matrix[first * PANEL_WIDTH : (first + len(piece)) * PANEL_WIDTH]
            self.blocks.pack_blocks(round_to_blocks(self.blocks.kind.name, rows, self.method), piece)

    def tiles(self) -> FormatTiles:
        """Return what computes with such weights."""
        return self.blocks.tiles()


def rounded_blocks(kind: str, name: str, method: RoundingMethod = "search") -> RoundedBlocks:
    """Return the format of numbers that are rounded to blocks of a kind.

    Args:
        kind: GGML's name; see :func:`~pagefold.kernels.block_rounding.round_to_blocks`.
        name: of the format.
        method: how scales are chosen.
    """
    return RoundedBlocks(blocks_of(kind), method, name)
