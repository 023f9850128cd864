"""A product in some format, held to its twin: to the bit, of random numbers."""

from __future__ import annotations

import numpy as np

from pagefold.kernels.formats import multiply, pack

__all__ = ["bits_of", "hold", "hold_in_shape", "random_numbers"]


def random_numbers(seed, *shape, spread=0):
    """Normal numbers, each times a random power of two: up to ``2**spread`` and down to its inverse."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 2.0 ** random.integers(-spread, spread + 1, shape)).astype(np.float32)


def bits_of(numbers):
    """Their bits; every NaN is one."""
    return np.where(np.isnan(numbers), np.float32(np.nan), numbers).view(np.uint32)


def hold(product_format, twin, x, w):
    """Hold ``x @ w.T`` to the twin; return it, with the columns that fill its last panel."""
    y = multiply(product_format, x, pack(product_format, w))
    with np.errstate(all="ignore"):
        expected = twin(x, w)
    assert np.array_equal(bits_of(y[:, : len(w)]), bits_of(expected))
    return y


def hold_in_shape(product_format, twin, shape):
    """The same for products of a shape (rows, columns, k), of numbers that are near each other and far apart."""
    num_rows, num_columns, num_k = shape
    for spread in (0, 12):
        x, w = random_numbers(1, num_rows, num_k, spread=spread), random_numbers(2, num_columns, num_k, spread=spread)
        y = hold(product_format, twin, x, w)
        assert not y[:, num_columns:].any(), "columns that fill a panel are zeros"
