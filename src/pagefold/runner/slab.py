"""Slab: the bytes of all blocks, in one tensor. A block is contiguous, so to move one is one copy.

::

    slab[block][cell][0] = K of the cell as [head_dim][slot]: a panel, so that one vector holds as many slots' scores
    slab[block][cell][1] = V of the cell as [slot][head_dim]

On a card both are ``[slot][head_dim]``: a token's K of one head is read in one piece, whatever tile it is part of.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

from pagefold.host_memory import host_memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagefold.kv import CopyOp, KVGeometry

__all__ = ["LAYOUT", "ROWS_LAYOUT", "AnySlab", "Slab", "TokenSlab", "empty_bytes", "layout_on"]

LAYOUT = "panels-v1"
"""Names the arrangement of bytes inside a block, for the namespace."""

ROWS_LAYOUT = "rows-v1"
"""The same of a card: K as V, ``[slot][head_dim]``."""


def layout_on(device: torch.device | str) -> str:
    """Return the arrangement of bytes that attention on this device reads."""
    return ROWS_LAYOUT if torch.device(device).type == "cuda" else LAYOUT


def empty_bytes(shape: tuple[int, int], device: torch.device | str) -> torch.Tensor:
    """Return uint8 of that shape in the memory of ``device``, not yet written."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(host_memory(math.prod(shape))).view(shape)
    return torch.empty(shape, dtype=torch.uint8, device=device)


class AnySlab(Protocol):
    """Blocks of one geometry, however K and V are stored in them: ``Slab``, ``codec_slab.py``'s, ``sealed_slab.py``'s.

    Attributes:
        data: ``[num_blocks, ...]``, contiguous; what is beyond the first dimension is the implementation's own.
        block_size: tokens a block.
        head_dim: numbers of a head.
    """

    data: torch.Tensor
    block_size: int
    head_dim: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        ...

    def as_bytes(self) -> NDArray[np.uint8] | torch.Tensor:
        """Return a view of all blocks as bytes, ``[num_blocks, block_bytes]``; torch's own on a card."""
        ...

    def copy(self, ops: list[CopyOp]) -> None:
        """Carry out copies, in order."""
        ...


class TokenSlab(AnySlab, Protocol):
    """Blocks into which tokens are written one by one: ``Slab``, and ``codec_slab.py``'s."""

    def write(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> None:
        """Put K and V of some tokens into the slots of one cell.

        Args:
            cell: of all of them.
            block_ids: int64 ``[n]``: of each token.
            entries: int64 ``[n]``: which of its sequence's entries each is.
            kv: K and V, ``[n, D]`` each, in any dtype.
        """
        ...

    def read(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V, ``[n, D]`` each, that entries have in one cell; arguments as in :meth:`write`."""
        ...


class Slab:
    """Blocks of one geometry, whose numbers are stored as they are computed.

    Pages of memory are taken from the system as blocks are first written. What was never written is undefined, and
    attention never reads it.

    Args:
        data: ``[num_blocks, num_cells, 2, block_size * head_dim]``.
        head_dim: numbers of a head.
        layout: how K lies in a block.

    Attributes:
        layout: how K and V lie in a block.
        data: ``[num_blocks, num_cells, 2, block_size * head_dim]``.
        block_size: tokens a block.
        head_dim: numbers of a head.
        keys: view ``[num_blocks, num_cells, block_size, head_dim]``.
        values: view ``[num_blocks, num_cells, block_size, head_dim]``.
    """

    def __init__(self, data: torch.Tensor, head_dim: int, layout: str = LAYOUT) -> None:
        num_blocks, num_cells, _, numbers = data.shape
        self.block_size = size = numbers // head_dim
        self.head_dim = head_dim
        self.layout = layout
        self.data = data
        if layout == ROWS_LAYOUT:
            self.keys = data[:, :, 0].view(num_blocks, num_cells, size, head_dim)
        else:
            self.keys = data[:, :, 0].view(num_blocks, num_cells, head_dim, size).transpose(2, 3)
        self.values = data[:, :, 1].view(num_blocks, num_cells, size, head_dim)

    @classmethod
    def allocate(
        cls, geometry: KVGeometry, num_blocks: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Slab:
        """Return ``num_blocks`` blocks of ``geometry`` in the memory of ``device``, not yet written."""
        assert dtype.itemsize == geometry.element_bytes, "geometry and slab disagree about the element size"
        num_cells = geometry.groups[0].num_cells
        shape = (num_blocks, num_cells, 2, geometry.block_size * geometry.head_dim)
        data = empty_bytes((num_blocks, math.prod(shape[1:]) * dtype.itemsize), device).view(dtype).view(shape)
        return cls(data, geometry.head_dim, layout_on(device))

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.data.nbytes

    def as_bytes(self) -> NDArray[np.uint8] | torch.Tensor:
        """Return a view of all blocks as bytes, uint8 ``[num_blocks, block_bytes]``: NumPy's on a CPU, else torch's."""
        view = self.data.flatten(1).view(torch.uint8)
        return view.numpy() if view.device.type == "cpu" else view

    def copy(self, ops: list[CopyOp]) -> None:
        """Carry out copies, in order."""
        for op in ops:
            self.data[op.dst] = self.data[op.src]

    def write(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> None:
        """Put K and V of some tokens into the slots of one cell; see :meth:`TokenSlab.write`."""
        slots = entries % self.block_size
        self.keys[block_ids, cell, slots], self.values[block_ids, cell, slots] = kv

    def read(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V that entries have in one cell; see :meth:`TokenSlab.read`."""
        slots = entries % self.block_size
        return self.keys[block_ids, cell, slots], self.values[block_ids, cell, slots]
