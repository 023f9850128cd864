"""Slab: the bytes of all blocks, in one tensor. A block is contiguous, so to move one is one copy.

::

    slab[block][cell][0] = K of the cell as [slot][head_dim]
    slab[block][cell][1] = V of the cell as [slot][head_dim]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagefold.kv import CopyOp, KVGeometry

__all__ = ["LAYOUT", "Slab"]

LAYOUT = "rows-v1"
"""Names the arrangement of bytes inside a block, for the namespace."""


class Slab:
    """Blocks of one geometry.

    Pages of memory are taken from the system as blocks are first written. What was never written is undefined, and
    attention never reads it.

    Attributes:
        data: ``[num_blocks, num_cells, 2, block_size * head_dim]``.
        keys: view ``[num_blocks, num_cells, block_size, head_dim]``.
        values: view ``[num_blocks, num_cells, block_size, head_dim]``.
    """

    def __init__(self, geometry: KVGeometry, num_blocks: int, dtype: torch.dtype) -> None:
        assert dtype.itemsize == geometry.element_bytes, "geometry and slab disagree about the element size"
        num_cells = geometry.groups[0].num_cells
        size, dim = geometry.block_size, geometry.head_dim
        self.block_size = size
        self.data = torch.empty((num_blocks, num_cells, 2, size * dim), dtype=dtype)
        self.keys = self.data[:, :, 0].view(num_blocks, num_cells, size, dim)
        self.values = self.data[:, :, 1].view(num_blocks, num_cells, size, dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.data.nbytes

    def copy(self, ops: list[CopyOp]) -> None:
        """Carry out copies, in order."""
        for op in ops:
            self.data[op.dst] = self.data[op.src]
