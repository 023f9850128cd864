"""A quantized matrix in blocks of one of GGML's kinds, where these are exactly it.

A block is 32 weights of a row that follow each other, with one scale in float16 (GGML's ``ggml-common.h``). A matrix
has the smallest kind in which all its blocks are exact:

- ``Q4_0``, where codes less their zero points are within [-8, 7]: what is quantized without zero points;
- ``Q4_1``, where zero point times scale is a float16;
- ``Q5_0``, within [-16, 15]: 4 bit with any zero point;
- ``Q8_0``, within [-128, 127].

No kind has scales that are no float16, blocks with two scales, e4m3, or columns in an order of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagefold.files.stored_matrix import StoredMatrix
from pagefold.quantized.codes import coded_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from pagefold.quantized.layout import MatrixLayout

__all__ = ["stored_matrix"]

_BLOCK = 32
_KINDS = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""Ranges of whole numbers, the smallest kind first."""
_MOST_OF_4_BIT = 15


class _Blocks(NamedTuple):
    """N rows of B blocks.

    Attributes:
        codes: int16 ``[N, B, 32]``.
        zeros: int16 ``[N, B]``.
        scales: float32 ``[N, B]``.
    """

    codes: NDArray[np.int16]
    zeros: NDArray[np.int16]
    scales: NDArray[np.float32]


def stored_matrix(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> StoredMatrix | None:
    """Return a matrix in the smallest kind of blocks that is exactly it; None where none is.

    Args:
        layout: of it; see :func:`~pagefold.quantized.codes.settled`.
        read: returns a stored tensor.

    Raises:
        UnsupportedModelError: what is stored contradicts itself.
    """
    blocks = _blocks(layout, read)
    if blocks is None or not _are_halves(blocks.scales):
        return None
    codes, zeros, scales = blocks
    signed = codes - zeros[:, :, None]
    least, most = int(signed.min()), int(signed.max())
    kinds = [kind for kind, (low, high) in _KINDS.items() if low <= least and most <= high]
    if "Q4_0" not in kinds and int(codes.min()) >= 0 and int(codes.max()) <= _MOST_OF_4_BIT:
        minima = -zeros.astype(np.float32) * scales
        if _are_halves(minima):
            return _joined("Q4_1", layout.shape, [_halves(scales), _halves(minima), _nibbles(codes)])
    return _joined(kinds[0], layout.shape, [_halves(scales), *_bytes_of(kinds[0], signed)]) if kinds else None


def _blocks(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> _Blocks | None:
    """Return a matrix's codes in blocks that have one scale each; None where it has none such."""
    num_rows, num_columns = layout.shape
    if num_columns % _BLOCK:
        return None
    found = _Blocks(
        np.empty((num_rows, num_columns // _BLOCK, _BLOCK), np.int16),
        np.zeros((num_rows, num_columns // _BLOCK), np.int16),
        np.empty((num_rows, num_columns // _BLOCK), np.float32),
    )
    for rows in coded_rows(layout, read):
        of_blocks = rows.groups.view(-1, _BLOCK)
        if rows.codes.is_floating_point() or not bool((of_blocks == of_blocks[:, :1]).all()):
            return None
        groups, some = of_blocks[:, 0], slice(rows.start, rows.start + len(rows.codes))
        found.codes[some] = rows.codes.reshape(len(rows.codes), -1, _BLOCK).numpy()
        found.scales[some] = rows.scales[:, groups].numpy()
        if rows.zeros is not None:
            found.zeros[some] = rows.zeros[:, groups].numpy()
    return found


def _bytes_of(kind: str, signed: NDArray[np.int16]) -> list[NDArray[np.uint8]]:
    """Return what a block has behind its scale."""
    if kind == "Q8_0":
        return [signed.astype(np.int8).view(np.uint8)]
    raised = signed - _KINDS[kind][0]
    if kind == "Q4_0":
        return [_nibbles(raised)]
    fifths = np.packbits((raised >> 4).astype(np.uint8), axis=-1, bitorder="little")
    return [fifths, _nibbles(raised)]


def _nibbles(codes: NDArray[np.int16]) -> NDArray[np.uint8]:
    """Return the low four bits of a block's codes: the first half's in the low bits of bytes, the second's above."""
    low = (codes & _MOST_OF_4_BIT).astype(np.uint8)
    return np.bitwise_or(low[..., : _BLOCK // 2], low[..., _BLOCK // 2 :] << 4, dtype=np.uint8)


def _are_halves(numbers: NDArray[np.float32]) -> bool:
    """Whether all are exactly float16, and finite."""
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16)
    return bool(np.isfinite(halves).all() and (halves.astype(np.float32) == numbers).all())


def _halves(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    return numbers.astype("<f2")[..., None].view(np.uint8)


def _joined(kind: str, shape: tuple[int, int], parts: list[NDArray[np.uint8]]) -> StoredMatrix:
    blocks = np.concatenate(parts, axis=-1)
    return StoredMatrix(kind, shape, blocks.reshape(shape[0], -1))
