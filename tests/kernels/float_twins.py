"""What products of float32 rows compute, said again in NumPy, number after number: slow and obvious."""

from __future__ import annotations

import numpy as np
from format_twins import fma

from pagefold.kernels.floats import MAX_STEPS

__all__ = ["floats_product", "int8_product", "round_column"]

_MOST = np.float32(127)
_SMALLEST = np.finfo(np.float32).tiny


def _chains(x, w):
    """Chains of multiply-adds in the order of k, as even as can be, for ``x[T, K] @ w[N, K].T``."""
    num_k = x.shape[1]
    length = -(-num_k // -(-num_k // MAX_STEPS))
    for begin in range(0, num_k, length):
        chain = np.zeros((len(x), len(w)), np.float32)
        for k in range(begin, min(begin + length, num_k)):
            chain = fma(x[:, k, None], w[None, :, k], chain)
        yield chain


def floats_product(x, w):
    """``x[T, K] @ w[N, K].T`` in float32: chains are added up."""
    first, *others = _chains(x, w)
    for chain in others:
        first = chain + first
    return first


def round_column(column):
    """Return a column's int8 numbers, as float32, and its scale."""
    scale = np.maximum(np.abs(column).max() / _MOST, _SMALLEST)
    return np.rint(column / scale).astype(np.float32), scale


def int8_product(x, w):
    """``x[T, K] @ w[N, K].T`` of int8 weights: each chain times the scale, with what is before it in one rounding."""
    columns = [round_column(column) for column in w]
    scales = np.array([scale for _, scale in columns], np.float32)
    first, *others = _chains(x, np.array([numbers for numbers, _ in columns]))
    y = first * scales
    for chain in others:
        y = fma(chain, scales, y)
    return y
