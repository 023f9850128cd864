"""CodecSlab: the bytes of all blocks whose K and V are encoded. As in ``slab.py``, a block is contiguous.

::

    block = the cells of layer 0, those of layer 1, ...; a layer's cells are equal in bytes, layers may differ
    cell  = K's codes, as [a byte or number of a vector][slot]: panels, so that one vector holds many slots
            V's codes, as [slot][a byte or number of a vector]
            K's scales: [slot] of bfloat16, then its zero points where it has them
            V's scales: the same

Behind the cells there may be marks, as in ``slab.py``.

A code of 4 bits is half a byte: byte ``i`` of n such elements holds element ``i`` (low) and element ``i + n / 2``
(high), so a byte belongs to one token, and nobody reads it to write half of it. Where the first elements of K have 8
bits, the panels of these come first.

On a card K's codes lie as V's do, in rows: a token's codes of one head are read in one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagefold.runner.cells import SlabCells, cell_places
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.basis import basis_for_queries
from pagefold.runner.codecs.constants import CodecConstants
from pagefold.runner.codecs.hadamard import hadamard
from pagefold.runner.slab import TokenSlab, empty_bytes, no_residuals

if TYPE_CHECKING:
    from pagefold.kv import KVGeometry
    from pagefold.runner.cells import CellPlaces
    from pagefold.runner.codecs import CellCodec
    from pagefold.runner.codecs.vectors import VectorFormat

__all__ = ["CODEC_LAYOUT", "CODEC_ROWS_LAYOUT", "CodecSlab", "codec_layout_on"]

CODEC_LAYOUT = "codec-panels-v3"
"""Names the arrangement of bytes inside a block and what they stand for, for the namespace."""

CODEC_ROWS_LAYOUT = "codec-rows-v3"
"""The layout of codes on a card."""


def codec_layout_on(device: torch.device | str) -> str:
    """Return the arrangement of bytes that attention on this device reads."""
    return CODEC_ROWS_LAYOUT if torch.device(device).type == "cuda" else CODEC_LAYOUT


class CodecSlab(TokenSlab):
    """Blocks of one geometry, whose cells have codecs.

    Pages of memory are taken from the system as blocks are first written. What was never written is undefined, and
    attention never reads it.

    Args:
        data: uint8 ``[num_blocks, bytes_per_block]``.
        geometry: of the blocks; has a codec.
        constants: what is done to K and V before they are encoded, in cells whose codecs say so; None where nothing
            is known of the model: nothing is taken off then, and bases only rotate.
        layout: how K's codes lie in a block.

    Attributes:
        data, layout: as given to the constructor.
        block_size, head_dim, mark_begin: of the geometry.
        places: where the parts of each cell are.
        constants: where the blocks are; zeros in cells whose codec takes nothing off.
        query_bases: float32 ``[num_cells, D, D]``: by what queries are multiplied; none where no codec has a basis.
    """

    def __init__(
        self,
        data: torch.Tensor,
        geometry: KVGeometry,
        constants: CodecConstants | None = None,
        layout: str = CODEC_LAYOUT,
    ) -> None:
        self.data = data
        self.layout = layout
        self.block_size = geometry.block_size
        self.head_dim = geometry.head_dim
        self.mark_begin = geometry.mark_begin
        self._geometry = geometry
        self.places = cell_places(geometry)
        codecs = [self.codec(cell) for cell in range(len(self.places))]
        num_ranges = 1 if constants is None else constants.num_ranges
        self.constants = CodecConstants.unknown(len(self.places), geometry.head_dim, num_ranges)
        if constants is not None:
            self.constants = self.constants.where(
                constants,
                torch.tensor([one.centres for one in codecs]),
                torch.tensor([one.has_basis for one in codecs]),
            )
        bases = self.constants.bases
        has_basis = any(one.has_basis for one in codecs)
        self.query_bases = basis_for_queries(bases if has_basis else bases[:0]).to(data.device)
        self.constants = self.constants.to(data.device)

    @classmethod
    def allocate(
        cls,
        geometry: KVGeometry,
        num_blocks: int,
        constants: CodecConstants | None = None,
        device: torch.device | str = "cpu",
    ) -> CodecSlab:
        """Return ``num_blocks`` blocks of ``geometry`` in the memory of ``device``, not yet written."""
        data = empty_bytes((num_blocks, geometry.bytes_per_block), device)
        return cls(data, geometry, constants, codec_layout_on(device))

    def cells(self) -> SlabCells:
        """Return where the cells' parts lie, and how they are stored; see :meth:`TokenSlab.cells`."""
        return SlabCells(
            in_rows=self.layout == CODEC_ROWS_LAYOUT,
            places=self.places,
            codecs=[self.codec(cell) for cell in range(len(self.places))],
            constants=self.constants,
            query_bases=self.query_bases,
            residuals=no_residuals(self.data.device),
        )

    def write(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> None:
        """Encode K and V of some tokens into their slots of one cell; see :meth:`TokenSlab.write`."""
        codec, places, slots = self.codec(cell), self.places[cell], entries % self.block_size
        keys, values = (vectors.float() for vectors in kv)
        if codec.centres:
            keys = keys - self.constants.centre_keys(cell, entries)
            values = values - self.constants.value_centres[cell, entries.clamp(max=1)]
        codes, scales = codec.keys.encode(codec.keys_as_stored(keys, self.constants.bases[cell]))
        self._panels(places, codec)[block_ids, :, slots] = _in_units(codes, codec.keys)
        self._scales(places.key_scales, codec.keys)[block_ids, :, slots] = scales
        codes, scales = codec.values.encode(codec.values_as_stored(values))
        self._rows(places, codec)[block_ids, slots] = codes
        self._scales(places.value_scales, codec.values)[block_ids, :, slots] = scales

    def read(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V, float32 ``[n, D]`` each, that slots of one cell hold; see :meth:`TokenSlab.read`."""
        codec, places, slots = self.codec(cell), self.places[cell], entries % self.block_size
        codes = self._panels(places, codec)[block_ids, :, slots].flatten(1)
        keys = codec.keys.decode(codes, self._scales(places.key_scales, codec.keys)[block_ids, :, slots])
        codes = self._rows(places, codec)[block_ids, slots]
        values = codec.values.decode(codes, self._scales(places.value_scales, codec.values)[block_ids, :, slots])
        if codec.has_basis:
            keys = keys @ self.query_bases[cell].T
        elif codec.rotates:
            keys = hadamard(keys)
        if codec.rotates:
            values = hadamard(values)
        if codec.centres:
            keys = keys + self.constants.centre_keys(cell, entries)
            values = values + self.constants.value_centres[cell, entries.clamp(max=1)]
        return keys, values

    def codec(self, cell: int) -> CellCodec:
        """Return how a cell's K and V are stored."""
        return CELL_CODECS[self._geometry.codec_of(cell // self._geometry.num_kv_heads).name]

    def _panels(self, places: CellPlaces, codec: CellCodec) -> torch.Tensor:
        """Return a view of K's codes, uint8 ``[num_blocks, units of a vector, slots, bytes a unit]``."""
        unit = max(1, codec.keys.bits // 8)
        codes = self.data[:, places.keys : places.values]
        if self.layout == CODEC_ROWS_LAYOUT:
            return codes.view(len(codes), self.block_size, -1, unit).transpose(1, 2)
        return codes.view(len(codes), -1, self.block_size, unit)

    def _rows(self, places: CellPlaces, codec: CellCodec) -> torch.Tensor:
        """Return a view of V's codes, uint8 ``[num_blocks, slots, bytes of a vector]``."""
        num_bytes = codec.values.num_code_bytes(self.head_dim)
        return self.data[:, places.values : places.key_scales].view(-1, self.block_size, num_bytes)

    def _scales(self, begin: int, form: VectorFormat) -> torch.Tensor:
        """Return a view of scales, bfloat16 ``[num_blocks, num_scales, slots]``."""
        size = 2 * form.num_scales * self.block_size
        scales = self.data[:, begin : begin + size].view(torch.bfloat16)
        return scales.view(len(scales), form.num_scales, self.block_size)


def _in_units(codes: torch.Tensor, form: VectorFormat) -> torch.Tensor:
    """Return codes ``[n, bytes]`` as ``[n, units, bytes a unit]``: what lies together in a panel."""
    unit = max(1, form.bits // 8)
    return codes.view(len(codes), codes.shape[1] // unit, unit)
