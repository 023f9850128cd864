"""Slab: the bytes of all blocks, in one tensor. A block is contiguous, so to move one is one copy.

::

    slab[block][cell][0] = K of the cell as [head_dim][slot]: a panel, so that one vector holds as many slots' scores
    slab[block][cell][1] = V of the cell as [slot][head_dim]

Of bfloat16 that a CPU multiplies in pairs, two numbers are a word: K is ``[head_dim / 2][slot]`` words, of two numbers
of a vector, and V ``[slot / 2][head_dim]`` words, of two slots.

Where chunks are packed (``attention/packed.py``), a block's *marks* lie behind its cells: bits of each token, layer by
layer, that say of which KV heads its entry is kept::

    marks[layer][slot][head // 8] bit head % 8

On a card both are ``[slot][head_dim]``: a token's K of one head is read in one piece, whatever tile it is part of.

Other kinds of slab have files of their own. What anybody may ask of all of them is here too (``AnySlab``): nobody asks
of which class a slab is.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

import torch

from pagefold.memory.host import host_memory
from pagefold.runner.cells import CellPlaces, SlabCells
from pagefold.runner.codecs.constants import CodecConstants

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagefold.kv import CopyOp, KVGeometry, ResidualCopy

__all__ = [
    "LAYOUT",
    "PAIRS_LAYOUT",
    "ROWS_LAYOUT",
    "AnySlab",
    "SealingSlab",
    "Slab",
    "TokenSlab",
    "empty_bytes",
    "layout_on",
    "no_residuals",
]

LAYOUT = "panels-v1"
"""Names the arrangement of bytes inside a block, for the namespace."""

ROWS_LAYOUT = "rows-v1"
"""The layout of numbers on a card: K as V, ``[slot][head_dim]``."""


PAIRS_LAYOUT = "pairs-v1"
"""The layout of bfloat16 in words of two."""


def layout_on(device: torch.device | str, *, in_pairs: bool = False) -> str:
    """Return the arrangement of bytes that attention on this device reads.

    Args:
        device: where it computes.
        in_pairs: whether it multiplies pairs of bfloat16, on a CPU.
    """
    if torch.device(device).type == "cuda":
        return ROWS_LAYOUT
    return PAIRS_LAYOUT if in_pairs else LAYOUT


def empty_bytes(shape: tuple[int, int], device: torch.device | str) -> torch.Tensor:
    """Return uint8 of that shape in the memory of ``device``, not yet written."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(host_memory(math.prod(shape))).view(shape)
    return torch.empty(shape, dtype=torch.uint8, device=device)


def no_residuals(device: torch.device) -> torch.Tensor:
    """Return the residuals of cells that have none; see :class:`~pagefold.runner.cells.SlabCells`."""
    return torch.empty((0, 0, 2, 0), dtype=torch.float16, device=device)


class _Blocks(ABC):
    """Blocks of one geometry, however K and V are stored in them.

    Attributes:
        data: ``[num_blocks, ...]``, contiguous; what is beyond the first dimension is the implementation's own.
        layout: names the arrangement of bytes inside a block.
        block_size: tokens a block.
        head_dim: numbers of a head.
        mark_begin: where a block's marks begin, in bytes; 0 where it has none.
    """

    data: torch.Tensor
    layout: str
    block_size: int
    head_dim: int
    mark_begin: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, and of what is beside them."""
        return self.data.nbytes

    def as_bytes(self) -> NDArray[np.uint8] | torch.Tensor:
        """Return a view of all blocks as bytes, uint8 ``[num_blocks, block_bytes]``: NumPy's on a CPU, else torch's."""
        view = self.data.flatten(1).view(torch.uint8)
        return view.numpy() if view.device.type == "cpu" else view

    def copy(self, ops: list[CopyOp]) -> None:
        """Carry out copies, in order."""
        for op in ops:
            self.data[op.dst] = self.data[op.src]

    @abstractmethod
    def cells(self) -> SlabCells:
        """Return what kernels must know of the cells: where they lie, and how K and V are stored in them."""


class TokenSlab(_Blocks):
    """Blocks into which tokens are written one by one: ``Slab``, and ``codec_slab.py``'s.

    Attributes:
        seals: whether blocks are encoded as a whole, when they are full.
    """

    seals: Literal[False] = False

    def copy_residuals(self, ops: list[ResidualCopy]) -> None:
        """Carry out copies of residuals: there are none."""
        assert not ops, "copies of residuals, where blocks are not sealed"

    @abstractmethod
    def write(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> None:
        """Put K and V of some tokens into the slots of one cell.

        Args:
            cell: the cell that all these tokens are written to.
            block_ids: int64 ``[n]``: of each token.
            entries: int64 ``[n]``: which of its sequence's entries each is.
            kv: K and V, ``[n, D]`` each, in any dtype.
        """

    @abstractmethod
    def read(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V, ``[n, D]`` each, that entries have in one cell; arguments as in :meth:`write`."""


class SealingSlab(_Blocks):
    """Blocks that are encoded when they are full, and residuals of those that are not: ``sealed_slab.py``'s.

    Attributes:
        seals: whether blocks are encoded as a whole, when they are full.
    """

    seals: Literal[True] = True

    @abstractmethod
    def copy_residuals(self, ops: list[ResidualCopy]) -> None:
        """Carry out copies of residuals, in order."""

    @abstractmethod
    def residual(self, cell: int, residual_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the K and the V of one cell in a residual, float16 ``[block_size, D]`` each."""

    @abstractmethod
    def centred(self, cell: int, entries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return K ``[n, D]`` of entries of a sequence less what is taken off it, float32."""

    @abstractmethod
    def uncentred(self, cell: int, entries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`centred`."""

    @abstractmethod
    def seal(self, cell: int, block_id: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode a full block's K, centred, and V of one cell, float16 ``[block_size, D]`` each."""

    @abstractmethod
    def read(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V, float32 ``[n, D]`` each, that entries have in sealed blocks.

        Args:
            cell: the cell of all these entries.
            block_ids: int64 ``[n]``: of each.
            entries: int64 ``[n]``: which of its sequence's entries each is.
        """


AnySlab = TokenSlab | SealingSlab
"""Blocks of any kind: what everybody who is given some may ask is what both have. ``seals`` says which of the two."""


class Slab(TokenSlab):
    """Blocks of one geometry, whose numbers are stored as they are computed.

    Pages of memory are taken from the system as blocks are first written. What was never written is undefined, and
    attention never reads it.

    Args:
        data: ``[num_blocks, num_cells, 2, block_size * head_dim]``.
        head_dim: numbers of a head.
        layout: how K lies in a block.
        whole: uint8 ``[num_blocks, block_bytes]``, whose first bytes ``data`` is, where there are others; else None.
        mark_begin: where a block's marks begin, in bytes; 0 for none.

    Attributes:
        layout: how K and V lie in a block.
        data: ``[num_blocks, num_cells, 2, block_size * head_dim]``.
        block_size: tokens a block.
        head_dim: numbers of a head.
        keys: view ``[num_blocks, num_cells, block_size, head_dim]``; in pairs ``[..., head_dim / 2, 2]``.
        values: view ``[num_blocks, num_cells, block_size, head_dim]``; in pairs ``[..., block_size / 2, 2, head_dim]``.
    """

    def __init__(
        self,
        data: torch.Tensor,
        head_dim: int,
        layout: str = LAYOUT,
        whole: torch.Tensor | None = None,
        mark_begin: int = 0,
    ) -> None:
        num_blocks, num_cells, _, numbers = data.shape
        self._whole = whole
        self.mark_begin = mark_begin
        self.block_size = size = numbers // head_dim
        self.head_dim = head_dim
        self.layout = layout
        self.data = data
        if layout == PAIRS_LAYOUT:
            words = data.view(num_blocks, num_cells, 2, -1, 2)
            self.keys = words[:, :, 0].view(num_blocks, num_cells, head_dim // 2, size, 2).transpose(2, 3)
            self.values = words[:, :, 1].view(num_blocks, num_cells, size // 2, head_dim, 2).transpose(3, 4)
            return
        if layout == ROWS_LAYOUT:
            self.keys = data[:, :, 0].view(num_blocks, num_cells, size, head_dim)
        else:
            self.keys = data[:, :, 0].view(num_blocks, num_cells, head_dim, size).transpose(2, 3)
        self.values = data[:, :, 1].view(num_blocks, num_cells, size, head_dim)

    @classmethod
    def allocate(
        cls,
        geometry: KVGeometry,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: str = "",
    ) -> Slab:
        """Return ``num_blocks`` blocks of ``geometry`` in the memory of ``device``, not yet written."""
        assert dtype.itemsize == geometry.element_bytes, "geometry and slab disagree about the element size"
        num_cells = geometry.groups[0].num_cells
        shape = (num_blocks, num_cells, 2, geometry.block_size * geometry.head_dim)
        num_bytes = math.prod(shape[1:]) * dtype.itemsize
        layout = layout or layout_on(device)
        if not geometry.mark_begin:
            data = empty_bytes((num_blocks, num_bytes), device).view(dtype).view(shape)
            return cls(data, geometry.head_dim, layout)
        whole = empty_bytes((num_blocks, geometry.bytes_per_block), device)
        data = whole[:, :num_bytes].view(dtype).view(shape)
        return cls(data, geometry.head_dim, layout, whole, geometry.mark_begin)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.data.nbytes if self._whole is None else self._whole.nbytes

    def as_bytes(self) -> NDArray[np.uint8] | torch.Tensor:
        """Return a view of all blocks as bytes; see ``AnySlab``."""
        if self._whole is None:
            return super().as_bytes()
        return self._whole.numpy() if self._whole.device.type == "cpu" else self._whole

    def copy(self, ops: list[CopyOp]) -> None:
        """Carry out copies, in order."""
        blocks = self.data if self._whole is None else self._whole
        for op in ops:
            blocks[op.dst] = blocks[op.src]

    def cells(self) -> SlabCells:
        """Return where the cells' numbers lie: nothing is done to them; see :meth:`TokenSlab.cells`."""
        num_cells, part_bytes = self.data.shape[1], self.block_size * self.head_dim * self.data.itemsize
        begins = [2 * part_bytes * cell for cell in range(num_cells + 1)]
        places = [CellPlaces(begin, begin + part_bytes, end, end, end) for begin, end in itertools.pairwise(begins)]
        device = self.data.device
        constants = CodecConstants.none(num_cells, self.head_dim, device)
        return SlabCells(self.layout == ROWS_LAYOUT, places, (), constants, constants.bases, no_residuals(device))

    def write(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> None:
        """Put K and V of some tokens into the slots of one cell; see :meth:`TokenSlab.write`."""
        slots = entries % self.block_size
        keys, values = kv
        if self.layout == PAIRS_LAYOUT:
            self.keys[block_ids, cell, slots] = keys.reshape(len(keys), -1, 2).to(self.keys.dtype)
            self.values[block_ids, cell, slots // 2, slots % 2] = values.to(self.values.dtype)
        else:
            self.keys[block_ids, cell, slots], self.values[block_ids, cell, slots] = keys, values

    def read(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V that entries have in one cell; see :meth:`TokenSlab.read`."""
        slots = entries % self.block_size
        if self.layout == PAIRS_LAYOUT:
            values = self.values[block_ids, cell, slots // 2, slots % 2]
            return self.keys[block_ids, cell, slots].flatten(1), values
        return self.keys[block_ids, cell, slots], self.values[block_ids, cell, slots]
