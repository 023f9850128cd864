"""SealedSlab: blocks that are encoded when they are full, and the residuals of those that are not. After KIVI.

::

    block    = the cells of layer 0, those of layer 1, ...; all are equal in bytes
    cell     = K's codes, as [a byte of a vector][slot]: panels, as in ``codec_slab.py``
               V's codes, as [slot][a byte of a vector]
               K's scales: [channel] of bfloat16, then its zero points
               V's scales: [slot] of bfloat16, then its zero points
    residual = of each cell: K as [channel][slot], then V as [slot][channel], of float16

On a card K is as V: its codes ``[slot][a byte of a vector]``, and ``[slot][channel]`` in residuals.

K's scale is that of a channel over all tokens of the block, so a block cannot be encoded before it is full. Until then
its K and V lie in 16 bit in the residual of its sequence, or, where one step computes several blocks of a sequence, for
the time of a layer in what that step has of its own. A token sees its own block in 16 bit, up to itself, and all blocks
before it as they are sealed. That follows from its position alone, so what a token is and what is stored depends on no
chunks, no batch, and nothing that was cached. A block is encoded from its 16 bit, in however many steps it is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagefold.runner.cells import SlabCells, cell_places
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.constants import CodecConstants
from pagefold.runner.codecs.int2 import pack, quantize, unpack
from pagefold.runner.slab import SealingSlab, empty_bytes

if TYPE_CHECKING:
    from pagefold.kv import KVGeometry, ResidualCopy
    from pagefold.runner.cells import CellPlaces

__all__ = ["SEALED_LAYOUT", "SEALED_ROWS_LAYOUT", "SealedSlab", "sealed_layout_on", "to_residual"]

SEALED_LAYOUT = "sealed-panels-v1"
"""Names the arrangement of bytes inside a block and what they stand for, for the namespace."""

SEALED_ROWS_LAYOUT = "sealed-rows-v1"
"""The layout of sealed blocks on a card: K as V."""

_FLOAT16_MAX = 65504.0


def sealed_layout_on(device: torch.device | str) -> str:
    """Return the arrangement of bytes that attention on this device reads."""
    return SEALED_ROWS_LAYOUT if torch.device(device).type == "cuda" else SEALED_LAYOUT


def to_residual(vectors: torch.Tensor) -> torch.Tensor:
    """Round to float16, which saturates instead of overflowing. NaN stays NaN."""
    return vectors.float().clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half()


class SealedSlab(SealingSlab):
    """Blocks of one geometry whose codec seals them, and residuals.

    Pages of memory are taken from the system as they are first written. What was never written is undefined, and
    attention never reads it.

    Args:
        data: uint8 ``[num_blocks, bytes_per_block]``.
        residuals: float16 ``[num_cells, num_residuals, 2, block_size * head_dim]``.
        geometry: of the blocks; has a codec that seals.
        centres: float32 ``[num_cells, 2, D]``: what is taken off K before it is stored, sealed or not: off a sequence's
            first entry, and off all others; None for nothing. Scores of the others are all lower by the same then.
        layout: how K lies in a block, and in a residual.

    Attributes:
        data, residuals, layout: as given to the constructor.
        block_size, head_dim: of the geometry.
        codec: of all cells.
        places: where the parts of each cell are.
        centres: float32 ``[num_cells, 2, D]``, where the blocks are.
    """

    def __init__(
        self,
        data: torch.Tensor,
        residuals: torch.Tensor,
        geometry: KVGeometry,
        centres: torch.Tensor | None = None,
        layout: str = SEALED_LAYOUT,
    ) -> None:
        self.data = data
        self.residuals = residuals
        self.layout = layout
        self.block_size = geometry.block_size
        self.head_dim = geometry.head_dim
        assert geometry.codec is not None, "blocks are sealed by a codec"
        self.codec = CELL_CODECS[geometry.codec.name]
        self.places = cell_places(geometry)
        centres = torch.zeros((len(self.places), 2, geometry.head_dim)) if centres is None else centres
        self.centres = centres.to(data.device)

    @classmethod
    def allocate(
        cls,
        geometry: KVGeometry,
        num_blocks: int,
        num_residuals: int,
        centres: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> SealedSlab:
        """Return so many blocks of ``geometry`` and residuals in the memory of ``device``, not yet written."""
        data = empty_bytes((num_blocks, geometry.bytes_per_block), device)
        shape = geometry.num_cells, num_residuals, 2, geometry.block_size * geometry.head_dim
        residuals = torch.empty(shape, dtype=torch.float16, device=device)
        return cls(data, residuals, geometry, centres, sealed_layout_on(device))

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks and residuals."""
        return self.data.nbytes + self.residuals.nbytes

    def cells(self) -> SlabCells:
        """Return where the cells' parts lie, and how they are sealed; see :meth:`SealingSlab.cells`."""
        constants = CodecConstants.none(len(self.places), self.head_dim, self.data.device)
        return SlabCells(
            in_rows=self.layout == SEALED_ROWS_LAYOUT,
            places=self.places,
            codecs=[self.codec] * len(self.places),
            constants=constants._replace(key_centres=self.centres),
            query_bases=constants.bases,
            residuals=self.residuals,
        )

    def copy_residuals(self, ops: list[ResidualCopy]) -> None:
        """Carry out copies of residuals, in order."""
        for op in ops:
            self.residuals[:, op.dst] = self.residuals[:, op.src]

    def residual(self, cell: int, residual_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the K and the V of one cell in a residual, float16 ``[block_size, D]`` each."""
        keys, values = self.residuals[cell, residual_id]
        values = values.view(self.block_size, self.head_dim)
        if self.layout == SEALED_ROWS_LAYOUT:
            return keys.view(self.block_size, self.head_dim), values
        return keys.view(self.head_dim, self.block_size).T, values

    def centred(self, cell: int, entries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return K ``[n, D]`` of entries of a sequence less what is taken off it, float32."""
        return keys.float() - self.centres[cell, entries.clamp(max=1)]

    def uncentred(self, cell: int, entries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`centred`."""
        return keys.float() + self.centres[cell, entries.clamp(max=1)]

    def seal(self, cell: int, block_id: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode a full block's K, centred, and V of one cell, float16 ``[block_size, D]`` each."""
        places, block = self.places[cell], self.data[block_id]
        found = quantize(keys.float(), 0)
        self._key_codes(places)[block_id] = pack(found.codes).T
        self._scales(places.key_scales, self.head_dim)[block_id] = torch.cat((found.scales, found.zeros))
        found = quantize(values.float(), 1)
        block[places.values : places.key_scales] = pack(found.codes).flatten()
        self._scales(places.value_scales, self.block_size)[block_id] = torch.cat((found.scales, found.zeros), 1).T

    def read(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V that entries have in sealed blocks; see :meth:`SealingSlab.read`."""
        places, slots = self.places[cell], entries % self.block_size
        codes = self._key_codes(places)
        scales, zeros = self._scales(places.key_scales, self.head_dim)[block_ids].float().unbind(1)
        keys = unpack(codes[block_ids, :, slots]).float() * scales + zeros
        codes = self.data[:, places.values : places.key_scales].view(len(self.data), self.block_size, -1)
        pairs = self._scales(places.value_scales, self.block_size)[block_ids, :, slots].float()
        values = unpack(codes[block_ids, slots]).float() * pairs[:, :1] + pairs[:, 1:]
        return self.uncentred(cell, entries, keys), values

    def _key_codes(self, places: CellPlaces) -> torch.Tensor:
        """Return a view of K's codes, uint8 ``[num_blocks, bytes of a vector, slots]``."""
        codes = self.data[:, places.keys : places.values]
        if self.layout == SEALED_ROWS_LAYOUT:
            return codes.view(len(codes), self.block_size, -1).transpose(1, 2)
        return codes.view(len(codes), -1, self.block_size)

    def _scales(self, begin: int, count: int) -> torch.Tensor:
        """Return a view of scales and zero points, bfloat16 ``[num_blocks, 2, count]``."""
        scales = self.data[:, begin : begin + 4 * count].view(torch.bfloat16)
        return scales.view(len(scales), 2, count)
