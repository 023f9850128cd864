"""The matrix that quantized codes stand for, in float32: the product of code and scale is rounded once, if at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagefold.quantized.codes import coded_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.quantized.layout import MatrixLayout

__all__ = ["dequantize"]


def dequantize(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return a matrix, float32 ``[N, K]``.

    Args:
        layout: of it; see :func:`~pagefold.quantized.codes.settled`.
        read: returns a stored tensor.

    Raises:
        UnsupportedModelError: what is stored contradicts itself.
    """
    matrix = torch.empty(layout.shape, dtype=torch.float32)
    for rows in coded_rows(layout, read):
        weights = rows.codes.to(torch.float32)
        if rows.zeros is not None:
            weights = weights - rows.zeros.to(torch.float32)[:, rows.groups]
        matrix[rows.start : rows.start + len(weights)] = weights * rows.scales[:, rows.groups]
    return matrix
