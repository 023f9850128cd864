"""KernelSlab: the blocks as kernels see them: bytes, and where in a block the parts of each cell are."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagefold.runner.attention.tiles import FLOAT32, INT2
from pagefold.runner.codecs.hadamard import hadamard, hadamard_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.runner.codec_slab import CodecSlab
    from pagefold.runner.sealed_slab import SealedSlab
    from pagefold.runner.slab import AnySlab, Slab

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
    "SealedBlocks",
    "kernel_slab",
]

KEYS, VALUES, KEY_SCALES, VALUE_SCALES, KEY_FORMAT, VALUE_FORMAT, ROTATION, HAS_BASIS = _COLUMNS = range(8)
"""Columns of ``KernelSlab.cells``."""

_NO_ROTATION = _NO_BASIS = 0


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


class CodedBlocks(KernelSlab):
    """Blocks of codes."""


class SealedBlocks(KernelSlab):
    """Blocks that are sealed."""


def kernel_slab(slab: AnySlab, num_kv_heads: int) -> KernelSlab:
    """Return the blocks of a slab on the CPU, without copying them.

    Args:
        slab: of float32 numbers, or encoded.
        num_kv_heads: of a layer.
    """
    from pagefold.runner.codec_slab import CODEC_LAYOUT, CodecSlab  # noqa: PLC0415 - it imports what imports this
    from pagefold.runner.sealed_slab import SealedSlab  # noqa: PLC0415
    from pagefold.runner.slab import Slab  # noqa: PLC0415

    head_dim = slab.head_dim
    residuals, opened = np.zeros((0, 0, 0), np.uint16), np.zeros((0, num_kv_heads, 0), np.uint16)
    bases = np.zeros((0, 2, head_dim, head_dim), np.float32)
    kind = KernelSlab
    if isinstance(slab, SealedSlab):
        cells, kind = _sealed_cells(slab), SealedBlocks
        nothing = np.zeros((len(cells), 2, head_dim), np.float32)
        centres = slab.centres.numpy(), nothing[:, :1], nothing, nothing
        residuals = slab.residuals.flatten(2).view(torch.uint16).numpy()
        opened = np.zeros((0, num_kv_heads, residuals.shape[2]), np.uint16)
    elif isinstance(slab, CodecSlab):
        assert slab.layout == CODEC_LAYOUT, "the kernels read K in panels"
        cells, constants, kind = _encoded_cells(slab), slab.constants, CodedBlocks
        of_values = constants.value_centres
        drifts = _drifts(slab)
        centres = constants.key_centres.numpy(), drifts.numpy(), of_values.numpy(), hadamard(of_values).numpy()
        if cells[:, HAS_BASIS].any():
            bases = torch.stack((constants.bases, slab.query_bases), 1).numpy()
    else:
        assert isinstance(slab, Slab), "a slab of a kind that kernels do not know"
        cells = _plain_cells(slab)
        nothing = np.zeros((len(cells), 2, head_dim), np.float32)
        centres = nothing, nothing[:, :1], nothing, nothing
    codes = np.asarray(slab.as_bytes())
    return kind(
        codes,
        codes.view(np.uint16),
        codes.view(np.float32),
        cells,
        *centres,
        bases,
        residuals,
        opened,
        slab.block_size,
        head_dim,
    )


def _plain_cells(slab: Slab) -> NDArray[np.int64]:
    num_cells, part_bytes = slab.data.shape[1], slab.data[0, 0, 0].nbytes
    begin = 2 * part_bytes * np.arange(num_cells)
    cells = np.zeros((num_cells, len(_COLUMNS)), np.int64)
    cells[:, KEYS], cells[:, VALUES] = begin, begin + part_bytes
    cells[:, KEY_FORMAT] = cells[:, VALUE_FORMAT] = FLOAT32
    cells[:, ROTATION] = _NO_ROTATION
    return cells


def _encoded_cells(slab: CodecSlab) -> NDArray[np.int64]:
    rows = []
    for cell, places in enumerate(slab.places):
        codec = slab.codec(cell)
        rotation = hadamard_size(slab.head_dim) if codec.rotates else _NO_ROTATION
        rows.append((*places[:4], codec.keys.number, codec.values.number, rotation, codec.has_basis))
    return np.array(rows, np.int64)


def _drifts(slab: CodecSlab) -> torch.Tensor:
    """Return how far centres of K are from the first range's, as each cell stores K."""
    drifts = slab.constants.key_centres[:, 1:] - slab.constants.key_centres[:, 1:2]
    return torch.stack([slab.keys_as_stored(cell, own) for cell, own in enumerate(drifts)])


def _sealed_cells(slab: SealedSlab) -> NDArray[np.int64]:
    return np.array([(*places[:4], INT2, INT2, _NO_ROTATION, _NO_BASIS) for places in slab.places], np.int64)
