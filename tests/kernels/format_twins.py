"""What every format of products computes, said again in NumPy, number after number: slow and obvious."""

from __future__ import annotations

import numpy as np
import torch

from pagefold.kernels.pairs import MAX_STEPS
from pagefold.kernels.quads import GROUP

__all__ = ["fma", "pairs_product", "quads_product", "round_group", "turned"]

_SMALLEST = np.finfo(np.float32).tiny


def fma(a, b, c):
    """``a * b + c`` of float32, rounded once.

    The product is exact in float64. Their sum is rounded to odd there (Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums", 2008), so that rounding it again to float32 does no harm.
    """
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    is_even = (total.view(np.int64) & 1) == 0
    towards = np.where((error > 0) == (total > 0), 1, -1)
    must_move = is_even & (error != 0) & np.isfinite(total) & np.isfinite(error)
    odd = np.where(must_move, (total.view(np.int64) + towards).view(np.float64), total)
    return odd.astype(np.float32)


def _without_small(numbers):
    """What is too small to be normal is zero, with its sign."""
    return np.where(np.abs(numbers) < _SMALLEST, np.copysign(np.float32(0), numbers), numbers)


def _bfloat16(numbers):
    return torch.from_numpy(np.array(numbers)).to(torch.bfloat16).to(torch.float32).numpy()


def pairs_product(x, w):
    """``x[T, K] @ w[N, K].T`` in bfloat16."""
    odd_k = x.shape[1] % 2
    x, w = (np.pad(_without_small(_bfloat16(one)), ((0, 0), (0, odd_k))) for one in (x, w))
    num_words = x.shape[1] // 2
    num_chains = -(-num_words // MAX_STEPS)
    length = -(-num_words // num_chains)
    y = None
    for begin in range(0, num_words, length):
        chain = np.zeros((len(x), len(w)), np.float32)
        for word in range(begin, min(begin + length, num_words)):
            for k in (2 * word + 1, 2 * word):
                chain = _without_small(fma(x[:, k, None], w[None, :, k], chain))
        y = chain if y is None else _without_small(chain + y)
    return y


def turned(group):
    """A whole group times Hadamard's matrix over 8, in stages of butterflies; a shorter one as it is."""
    if len(group) < GROUP:
        return group
    numbers = group * np.float32(0.125)
    for stride in (1, 2, 4, 8, 16, 32):
        before = numbers.copy()
        for i in range(GROUP):
            if not i & stride:
                numbers[i] = before[i] + before[i + stride]
                numbers[i + stride] = before[i] - before[i + stride]
    return numbers


def round_group(group):
    """A group of a row, or of a column: its int8 numbers, once it is turned, and its scale."""
    group = turned(group)
    largest = np.abs(group).max()  # NaN if one is
    scale = np.maximum(largest / np.float32(127), _SMALLEST)
    if not np.isfinite(scale):
        return np.zeros(len(group), np.int64), np.float32(np.nan)
    return np.rint(group * (np.float32(1) / scale)).astype(np.int64), scale


def quads_product(x, w):
    """``x[T, K] @ w[N, K].T`` in int8."""
    y = np.zeros((len(x), len(w)), np.float32)
    for begin in range(0, x.shape[1], GROUP):
        rows = [round_group(row) for row in x[:, begin : begin + GROUP]]
        columns = [round_group(column) for column in w[:, begin : begin + GROUP]]
        sums = np.array([numbers for numbers, _ in rows]) @ np.array([numbers for numbers, _ in columns]).T
        scales = np.outer(
            np.array([scale for _, scale in rows], np.float32), np.array([scale for _, scale in columns], np.float32)
        )
        y = fma(sums.astype(np.float32), scales, y)
    return y
