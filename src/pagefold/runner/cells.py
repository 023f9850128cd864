"""SlabCells: where the parts of a block's cells lie, and how K and V are stored in them, in slabs of all kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagefold.runner.codecs import CELL_CODECS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import KVGeometry
    from pagefold.runner.codecs import CellCodec
    from pagefold.runner.codecs.constants import CodecConstants

__all__ = ["CellPlaces", "SlabCells", "cell_places"]


class CellPlaces(NamedTuple):
    """Where a cell's parts begin, in bytes from the beginning of its block.

    Attributes:
        keys, values: codes, or numbers.
        key_scales, value_scales: scales, with zero points behind them.
        end: where the next cell begins.
    """

    keys: int
    values: int
    key_scales: int
    value_scales: int
    end: int


def cell_places(geometry: KVGeometry) -> list[CellPlaces]:
    """Return where the parts of every cell are in a block of its group, in the order of cells: layer by layer."""
    places: list[CellPlaces] = []
    for layer, layer_begin in enumerate(geometry.layer_begins):
        codec, begin = CELL_CODECS[geometry.codec_of(layer).name], layer_begin
        for _ in range(geometry.num_kv_heads):
            values = begin + codec.keys.num_code_bytes(geometry.head_dim) * geometry.block_size
            key_scales = values + codec.values.num_code_bytes(geometry.head_dim) * geometry.block_size
            value_scales = key_scales + codec.key_scale_bytes(geometry.head_dim, geometry.block_size)
            end = value_scales + 2 * codec.values.num_scales * geometry.block_size
            places.append(CellPlaces(begin, values, key_scales, value_scales, end))
            begin = end
    end = geometry.mark_begin or geometry.bytes_per_block
    assert max(own.end for own in places) == end, "codecs and geometry disagree about bytes"
    return places


@dataclass(frozen=True, slots=True)
class SlabCells:
    """All that kernels must know of a slab's cells, on whichever device they run. Tensors are where the blocks are.

    Attributes:
        in_rows: whether K lies as V does, ``[slot][head_dim]``, as a card reads it; else in panels, as a CPU does.
        places: where the parts of each cell are.
        codecs: of each cell; none where numbers are stored as they are computed. In rows, such cells follow one another
            in their own order, the K of each before its V: a card's kernels do not ask where they are.
        constants: what is done to K and V before they are stored; no bases where no codec has one.
        query_bases: float32 ``[num_cells, D, D]``: by what queries are multiplied where K has a basis, else empty.
        residuals: float16 ``[num_cells, num_residuals, 2, block_size * D]``: of blocks that are not sealed yet. Empty
            where none ever is.
    """

    in_rows: bool
    places: Sequence[CellPlaces]
    codecs: Sequence[CellCodec]
    constants: CodecConstants
    query_bases: torch.Tensor
    residuals: torch.Tensor

    @property
    def has_basis(self) -> bool:
        """Whether K of some cell has a basis."""
        return any(codec.has_basis for codec in self.codecs)

    def keys_as_stored(self, keys: torch.Tensor) -> torch.Tensor:
        """Return K of each cell, ``[num_cells, n, D]``, as it is stored: the same tensor where none is turned."""
        if not any(codec.has_basis or codec.rotates for codec in self.codecs):
            return keys
        of_cells = zip(self.codecs, keys, self.constants.bases, strict=True)
        return torch.stack([codec.keys_as_stored(own, basis) for codec, own, basis in of_cells])

    def values_as_stored(self, values: torch.Tensor) -> torch.Tensor:
        """Return V of each cell, ``[num_cells, n, D]``, as it is stored: the same tensor where none is rotated."""
        if not any(codec.rotates for codec in self.codecs):
            return values
        of_cells = zip(self.codecs, values, strict=True)
        return torch.stack([codec.values_as_stored(own) for codec, own in of_cells])
