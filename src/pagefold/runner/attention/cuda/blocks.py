"""CardBlocks: what a card's kernels are given of a slab: its blocks, and what they must know to read codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagefold.runner.attention.cuda.codes import PLAIN
from pagefold.runner.attention.cuda.configs import Reads
from pagefold.runner.codecs.hadamard import hadamard_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.runner.cells import CellPlaces
    from pagefold.runner.codecs import CellCodec
    from pagefold.runner.slab import AnySlab

__all__ = ["CardBlocks", "CellFormat", "reads_of"]

_MOST_ALIGNMENT = 16


class CellFormat(NamedTuple):
    """How K and V lie in a cell: what kernels are compiled for, under the names of their constants.

    Attributes:
        KEY_FORMAT, VALUE_FORMAT: numbers of the formats.
        KEY_ROW, VALUE_ROW: elements of the slab from a slot's K or V to the next one's.
        ROTATION: how many numbers are rotated together; 0 for none.
        HAS_CENTRES: whether constants are taken off.
        HAS_BASIS: whether K has a basis instead of being rotated.
        SEALS: whether K's scales are those of a block's channels.
        ALIGNMENT: by how many bytes each part of a block is aligned.
    """

    KEY_FORMAT: int
    VALUE_FORMAT: int
    KEY_ROW: int
    VALUE_ROW: int
    ROTATION: int = 0
    HAS_CENTRES: bool = False
    HAS_BASIS: bool = False
    SEALS: bool = False
    ALIGNMENT: int = 1


@dataclass(frozen=True, slots=True)
class CardBlocks:
    """The blocks of a slab, and tables of its cells, all on the card.

    Attributes:
        data: as the slab has it.
        formats: of each cell. Where there is no codec, one, of all of them; then what follows is ``data``, unread.
        places: int32 ``[num_cells, 4]``: where a cell's parts begin: codes of K and of V, scales of K and of V.
        num_ranges: R: of how many ranges of entries K has centres.
        key_centres: float32 ``[num_cells, 1 + R, D]``: what is taken off K.
        stored_key_centres: the same as K is stored: in its basis, or rotated.
        value_centres: float32 ``[num_cells, 2, D]``: what is taken off V, where tokens are encoded one by one.
        output_centres: the same as V is stored: by how much the first entry's is beside the others', and the others'.
        key_bases, query_bases: float32 ``[num_cells, D, D]``: by what K and queries are multiplied, where K has one.
        residuals: float16 ``[num_cells, num_residuals, 2, block_size * D]``, where blocks are sealed; else ``data``.
    """

    data: torch.Tensor
    formats: tuple[CellFormat, ...]
    places: torch.Tensor
    num_ranges: int
    key_centres: torch.Tensor
    stored_key_centres: torch.Tensor
    value_centres: torch.Tensor
    output_centres: torch.Tensor
    key_bases: torch.Tensor
    query_bases: torch.Tensor
    residuals: torch.Tensor

    @classmethod
    def of(cls, slab: AnySlab) -> CardBlocks:
        """Return those of a slab whose K lies in rows."""
        data, stored = slab.data, slab.cells()
        assert stored.in_rows, "the kernels read K in rows"
        if not stored.codecs:
            plain = CellFormat(PLAIN.value, PLAIN.value, slab.head_dim, slab.head_dim)
            return cls(data, (plain,), data, 1, *[data] * 7)
        constants = stored.constants
        first, others = stored.values_as_stored(constants.value_centres).unbind(1)
        alignment, places = _places(stored.places, data)
        return cls(
            data,
            tuple(_format_of(codec, slab.head_dim, alignment) for codec in stored.codecs),
            places,
            constants.num_ranges,
            constants.key_centres,
            stored.keys_as_stored(constants.key_centres),
            data if slab.seals else constants.value_centres,
            torch.stack((first - others, others), 1),
            constants.bases.contiguous() if stored.has_basis else data,
            stored.query_bases if stored.has_basis else data,
            stored.residuals if slab.seals else data,
        )

    @property
    def has_codes(self) -> bool:
        """Whether there is a codec."""
        return len(self.formats) > 1 or PLAIN.value != self.formats[0].KEY_FORMAT

    @property
    def num_residuals(self) -> int:
        """How many there are, where blocks are sealed."""
        return self.residuals.shape[1] if self.formats[0].SEALS else 0

    def format_of(self, cell: int) -> CellFormat:
        """Return the format of a cell."""
        return self.formats[cell if self.has_codes else 0]


def reads_of(codec: CellCodec) -> Reads:
    """Return what the kernels read of blocks of this codec."""
    if codec.seals:
        return Reads.SEALED_CODES
    return Reads.CENTRED_CODES if codec.centres else Reads.CODES


def _places(places: Sequence[CellPlaces], data: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return by how many bytes all parts of cells are aligned, and where they begin."""
    begins = [own[:4] for own in places]
    alignment = math.gcd(_MOST_ALIGNMENT, data.stride(0), *(at for own in begins for at in own))
    return alignment, torch.tensor(begins, dtype=torch.int32, device=data.device)


def _format_of(codec: CellCodec, head_dim: int, alignment: int) -> CellFormat:
    return CellFormat(
        codec.keys.number,
        codec.values.number,
        codec.keys.num_code_bytes(head_dim),
        codec.values.num_code_bytes(head_dim),
        hadamard_size(head_dim) if codec.rotates else 0,
        codec.centres,
        codec.has_basis,
        codec.seals,
        alignment,
    )
