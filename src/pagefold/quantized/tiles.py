"""A quantized matrix in blocks of one of GGML's kinds, where these are exactly it.

A block is 32 weights of a row that follow each other, with one scale in float16 (GGML's ``ggml-common.h``). A matrix
has the smallest kind that is exactly it whatever its codes are, so that scales and zero points alone say which:

- ``Q4_0``: 4 bit with all zero points 8, which is what is quantized without any;
- ``Q4_1``: 4 bit where zero point times scale is a float16;
- ``Q5_0``: 4 bit with any zero points, as code less zero point is within [-16, 15];
- ``Q8_0``: 8 bit without zero points.

No kind has scales that are no float16, blocks with two scales, e4m3, or columns in an order of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pagefold.files.stored_matrix import StoredMatrix
from pagefold.quantized.codes import coded_rows, groups_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from pagefold.quantized.codes import CodedRows
    from pagefold.quantized.layout import MatrixLayout

__all__ = ["kind_of", "stored_matrix"]

_BLOCK = 32
_KINDS = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""Ranges of code less zero point, the smallest kind first."""
_NIBBLE_BITS, _NIBBLE = 4, 15


def kind_of(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> str | None:
    """Return in which kind of blocks a matrix is exact, by GGML's name; None where in none. Codes are not read.

    Args:
        layout: of it; see :func:`~pagefold.quantized.codes.settled`.
        read: returns a stored tensor.

    Raises:
        UnsupportedModelError: what is stored contradicts itself.
    """
    if layout.codes.is_float or layout.shape[1] % _BLOCK:
        return None
    zeros, scales, columns = groups_of(layout, read)
    of_blocks = columns.view(-1, _BLOCK)
    if not bool((of_blocks == of_blocks[:, :1]).all()) or not _are_halves(scales.numpy()):
        return None
    low, high = (0, (1 << layout.codes.bits) - 1) if layout.codes.bits else (-128, 127)
    if zeros is not None:
        low, high = low - int(zeros.max()), high - int(zeros.min())
    kinds = [kind for kind, (least, most) in _KINDS.items() if least <= low and high <= most]
    if layout.codes.bits == _NIBBLE_BITS and zeros is not None and "Q4_0" not in kinds:
        minima = _minima(zeros.numpy(), scales.numpy())
        kinds = ["Q4_1"] if _are_halves(minima) else kinds
    return kinds[0] if kinds else None


def stored_matrix(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> StoredMatrix | None:
    """Return a matrix in the kind of blocks that :func:`kind_of` says; None where it says none.

    Args:
        layout: of it; see :func:`~pagefold.quantized.codes.settled`.
        read: returns a stored tensor.

    Raises:
        UnsupportedModelError: what is stored contradicts itself.
    """
    kind = kind_of(layout, read)
    if kind is None:
        return None
    blocks = np.concatenate([_packed(kind, rows) for rows in coded_rows(layout, read)])
    return StoredMatrix(kind, layout.shape, blocks)


def _packed(kind: str, rows: CodedRows) -> NDArray[np.uint8]:
    """Return blocks of some rows, ``[rows, bytes of a row]``."""
    of_blocks = rows.groups[::_BLOCK]
    codes = rows.codes.numpy().astype(np.int16).reshape(len(rows.codes), -1, _BLOCK)
    scales = rows.scales[:, of_blocks].numpy()
    zeros = np.zeros(scales.shape, np.int16)
    if rows.zeros is not None:
        zeros = rows.zeros[:, of_blocks].numpy().astype(np.int16)
    if kind == "Q4_1":
        parts = [_halves(scales), _halves(_minima(zeros, scales)), _nibbles(codes)]
    else:
        parts = [_halves(scales), *_bytes_of(kind, codes - zeros[:, :, None])]
    return np.concatenate(parts, axis=-1).reshape(len(codes), -1)


def _minima(zeros: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what code 0 stands for."""
    return np.asarray(-zeros.astype(np.float32) * scales, np.float32)


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
    low = (codes & _NIBBLE).astype(np.uint8)
    joined: NDArray[np.uint8] = np.bitwise_or(low[..., : _BLOCK // 2], low[..., _BLOCK // 2 :] << 4)
    return joined


def _are_halves(numbers: NDArray[np.float32]) -> bool:
    """Whether all are exactly float16, and finite."""
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16)
    return bool(np.isfinite(halves).all() and (halves.astype(np.float32) == numbers).all())


def _halves(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    return numbers.astype("<f2")[..., None].view(np.uint8)
