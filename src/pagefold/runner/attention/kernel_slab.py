"""KernelSlab: the blocks as kernels see them: bytes, and where in a block the parts of each cell are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagefold.runner.attention.tiles import FLOAT32, PAIRS
from pagefold.runner.codecs.hadamard import hadamard_size
from pagefold.runner.slab import PAIRS_LAYOUT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.runner.cells import SlabCells
    from pagefold.runner.slab import AnySlab

__all__ = [
    "HAS_BASIS",
    "KEYS",
    "KEY_FORMAT",
    "KEY_SCALES",
    "ROTATION",
    "VALUES",
    "VALUE_FORMAT",
    "VALUE_SCALES",
    "CodedBlocks",
    "KernelSlab",
    "PackedBlocks",
    "PackedCodes",
    "SealedBlocks",
    "kernel_slab",
]

KEYS, VALUES, KEY_SCALES, VALUE_SCALES, KEY_FORMAT, VALUE_FORMAT, ROTATION, HAS_BASIS = _COLUMNS = range(8)
"""Columns of ``KernelSlab.cells``."""

_NO_ROTATION = 0


class KernelSlab(NamedTuple):
    """All blocks, as numbers of several kinds: the same memory. Kernels are compiled for each subclass apart.

    Attributes:
        codes: uint8 ``[num_blocks, block_bytes]``.
        halves: uint16 ``[num_blocks, block_bytes / 2]``.
        floats: float32 ``[num_blocks, block_bytes / 4]``.
        cells: int64 ``[num_cells, 8]``: of each cell the bytes where K's codes, V's codes, K's scales and V's scales
            begin, the numbers of K's and V's formats, how many numbers are rotated together, 0 for none, and whether K
            has a basis instead.
        centres: float32 ``[num_cells, 1 + R, D]``: what is taken off K before it is encoded: off a sequence's first
            entry, and off the others of each range (see ``codecs/constants.py``).
        drifts: float32 ``[num_cells, R, D]``: by how much a range's centre is beside the first range's, as K is stored:
            in its basis, or rotated.
        value_centres: float32 ``[num_cells, 2, D]``: what is taken off V, off a sequence's first entry and off others.
        rotated_centres: those of V, rotated as V is.
        bases: float32 ``[num_cells, 2, D, D]``: by what K and by what queries are multiplied, where K has a basis;
            ``[0, 2, D, D]`` where no cell's has.
        residuals: uint16 ``[num_cells, num_residuals, 2 * block_size * D]``: float16 of unsealed blocks that sequences
            are filling, K as ``[channel][slot]`` and then V as ``[slot][channel]``. Empty where blocks are not sealed.
        opened: uint16 ``[num_opened, Hkv, 2 * block_size * D]``: the same of the blocks that a step fills from their
            beginning, for the time of a layer.
        block_size: tokens a block.
        head_dim: D.
        mark_begin: where a block's marks begin, in bytes; 0 where it has none.
    """

    codes: NDArray[np.uint8]
    halves: NDArray[np.uint16]
    floats: NDArray[np.float32]
    cells: NDArray[np.int64]
    centres: NDArray[np.float32]
    drifts: NDArray[np.float32]
    value_centres: NDArray[np.float32]
    rotated_centres: NDArray[np.float32]
    bases: NDArray[np.float32]
    residuals: NDArray[np.uint16]
    opened: NDArray[np.uint16]
    block_size: int
    head_dim: int
    mark_begin: int


class CodedBlocks(KernelSlab):
    """Blocks of codes."""

    __slots__ = ()


class SealedBlocks(KernelSlab):
    """Blocks that are sealed."""

    __slots__ = ()


class PackedBlocks(KernelSlab):
    """Blocks of which some hold packed chunks."""

    __slots__ = ()


class PackedCodes(CodedBlocks, PackedBlocks):  # type: ignore[misc]  # tuples of the same fields have one layout
    """Blocks of codes, of which some hold packed chunks."""

    __slots__ = ()


def kernel_slab(slab: AnySlab, num_kv_heads: int) -> KernelSlab:
    """Return the blocks of a slab on the CPU, without copying them.

    Args:
        slab: of float32 numbers, of bfloat16 in pairs, or encoded.
        num_kv_heads: of a layer.
    """
    stored, head_dim = slab.cells(), slab.head_dim
    assert not stored.in_rows, "the kernels read K in panels"
    key_centres, value_centres, bases = stored.constants
    bases_of_both = torch.stack((bases[: len(stored.query_bases)], stored.query_bases), 1)
    residuals = stored.residuals.flatten(2).view(torch.uint16).numpy()
    codes = np.asarray(slab.as_bytes())
    kind = SealedBlocks if slab.seals else CodedBlocks if stored.codecs else KernelSlab
    if slab.mark_begin:
        assert not slab.seals, "what is sealed is not packed"
        kind = PackedCodes if stored.codecs else PackedBlocks
    return kind(
        codes,
        codes.view(np.uint16),
        codes.view(np.float32),
        _cells(stored, head_dim, PAIRS if slab.layout == PAIRS_LAYOUT else FLOAT32),
        key_centres.numpy(),
        stored.keys_as_stored(key_centres[:, 1:] - key_centres[:, 1:2]).numpy(),
        value_centres.numpy(),
        stored.values_as_stored(value_centres).numpy(),
        bases_of_both.numpy(),
        residuals,
        np.zeros((0, num_kv_heads, residuals.shape[2]), np.uint16),
        slab.block_size,
        head_dim,
        slab.mark_begin,
    )


def _cells(stored: SlabCells, head_dim: int, numbers: int) -> NDArray[np.int64]:
    """Return the table of cells; where they have no codecs, they are of ``numbers``."""
    cells = np.zeros((len(stored.places), len(_COLUMNS)), np.int64)
    cells[:, [KEYS, VALUES, KEY_SCALES, VALUE_SCALES]] = [places[:4] for places in stored.places]
    cells[:, [KEY_FORMAT, VALUE_FORMAT]] = numbers
    for cell, codec in zip(cells, stored.codecs, strict=False):
        cell[KEY_FORMAT], cell[VALUE_FORMAT] = codec.keys.number, codec.values.number
        cell[ROTATION] = hadamard_size(head_dim) if codec.rotates else _NO_ROTATION
        cell[HAS_BASIS] = codec.has_basis
    return cells
