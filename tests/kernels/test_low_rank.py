"""Low-rank updates beside the same chains in plain numpy, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.kernels.formats import call
from pagefold.kernels.low_rank import BFLOAT16, FLOAT16, FLOAT32, low_rank_tiles
from pagefold.kernels.pairs import round_to_bfloat16

F = np.float32
DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
seeds = st.integers(0, 2**32)


def fma(a, b, c):
    """Rounded once: long double holds a product of two float32 numbers, and all but a sliver of the sum."""
    wide = np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)
    return wide.astype(F)


def stored(numbers, dtype):
    """Numbers as a file has them, and as float32."""
    if dtype == FLOAT32:
        return numbers, numbers
    if dtype == FLOAT16:
        half = numbers.astype(np.float16)
        return half, half.astype(F)
    shorts = round_to_bfloat16(numbers)
    return shorts, (shorts.astype(np.uint32) << 16).view(F)


def chain(x, weights):
    total = np.zeros(weights.shape[1], F)
    for number, row in zip(x, weights, strict=True):
        total = fma(number, row, total)
    return total


def same(a, b):
    return np.array_equal(np.ascontiguousarray(a, F).view(np.uint32), np.ascontiguousarray(b, F).view(np.uint32))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 120), st.sampled_from(DTYPES), seeds)
def test_shrink_is_a_chain_in_the_order_of_k(num_k, num_low, dtype, seed):
    random = np.random.default_rng(seed)
    x, scales = random.standard_normal(num_k).astype(F), random.standard_normal(num_low).astype(F)
    weights, as_floats = stored(random.standard_normal((num_k, num_low)).astype(F), dtype)
    low = np.full(num_low + 1, 7, F)
    ends = x.ctypes.data, weights.ctypes.data, scales.ctypes.data
    call(low_rank_tiles().shrink, *ends, num_k, num_low, dtype, low.ctypes.data)
    assert same(low[:-1], chain(x, as_floats) * scales)
    assert low[-1] == 7


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 200), st.integers(0, 9), st.sampled_from(DTYPES), seeds)
def test_expand_adds_a_chain_in_the_order_of_ranks(num_low, num, more, dtype, seed):
    random = np.random.default_rng(seed)
    low, y = random.standard_normal(num_low).astype(F), random.standard_normal(num + 1).astype(F)
    weights, as_floats = stored(random.standard_normal((num_low, num + more)).astype(F), dtype)
    before = y.copy()
    call(
        low_rank_tiles().expand,
        *(low.ctypes.data, weights.ctypes.data, num_low, num + more, dtype, y.ctypes.data, num),
    )
    assert same(y[:-1], before[:-1] + chain(low, as_floats[:, :num]))
    assert y[-1] == before[-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_the_same_whatever_is_beside_them(dtype):
    random = np.random.default_rng(dtype)
    low = random.standard_normal(8).astype(F)
    weights, _ = stored(random.standard_normal((8, 96)).astype(F), dtype)
    whole, parts = np.zeros(96, F), np.zeros(96, F)
    expand = low_rank_tiles().expand
    call(expand, low.ctypes.data, weights.ctypes.data, 8, 96, dtype, whole.ctypes.data, 96)
    for first in range(0, 96, 32):
        at = weights[:, first:].ctypes.data
        call(expand, low.ctypes.data, at, 8, 96, dtype, parts[first:].ctypes.data, 32)
    assert same(whole, parts)
