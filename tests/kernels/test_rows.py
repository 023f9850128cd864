"""What is done with rows between products, beside the same in plain numpy, to the bit; and beside the truth."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.kernels.formats import call
from pagefold.kernels.pairs import round_to_bfloat16
from pagefold.kernels.rows import LANES, row_tiles

F = np.float32
EXP2 = (1.0, 0.6931472, 0.24022651, 0.05550411, 0.009618129, 0.0013333558, 0.00015403530)
ABOVE = (
    *(4.89352455891786e-3, 6.37261928875436e-4, 1.48572235717979e-5, 5.12229709037114e-8),
    *(-8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16),
)
BELOW = (4.89352518554385e-3, 2.26843463243900e-3, 1.18534705686654e-4, 1.19825839466702e-6)
NOTHING = F(-1e30)
lengths = st.integers(1, 70)
seeds = st.integers(0, 2**32)


def fma(a, b, c):
    """A multiply-add that is rounded once: long double has room for all of a product, and all but a sliver of a sum."""
    wide = np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)
    return wide.astype(F)


def polynomial(x, factors):
    total = np.full_like(x, F(factors[-1]))
    for factor in factors[-2::-1]:
        total = fma(x, total, F(factor))
    return total


def exp2(exponent):
    """Powers of two as the kernel makes them."""
    whole = (exponent + F(1.5 * 2**23)) - F(1.5 * 2**23)
    power = np.ldexp(np.ones_like(exponent), np.nan_to_num(whole).astype(np.int32))
    return polynomial(exponent - whole, EXP2) * power


def summed(row, start, step):
    """A sum in lanes, and then across them."""
    lanes = np.zeros(LANES, F)
    for first in range(0, len(row), LANES):
        piece = row[first : first + LANES]
        lanes[: len(piece)] = step(lanes[: len(piece)], piece)
    for half in (8, 4, 2, 1):
        lanes = lanes + np.roll(lanes, -half)
    return lanes[start]


def numbers(seed, *shape, spread=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(F)


def bits(number):
    return int(np.array(number, F).view(np.int32))


def same(a, b):
    return np.array_equal(np.ascontiguousarray(a, F).view(np.uint32), np.ascontiguousarray(b, F).view(np.uint32))


def norm(x, weight, epsilon, out):
    call(
        row_tiles().norm,
        *(x.ctypes.data, x.strides[0], weight.ctypes.data, len(weight), bits(epsilon), len(x)),
        *(out.ctypes.data, out.strides[0]),
    )


@given(lengths, st.integers(0, 5), seeds)
def test_norms_are_those_of_the_stated_order(length, num_rows, seed):
    x, weight = numbers(seed, num_rows, length + 3, spread=5), numbers(seed + 1, length)
    out = np.full((num_rows, length + 3), 7, F)
    norm(x, weight, F(1e-5), out)
    assert (out[:, length:] == 7).all(), "nothing is written beyond a row"
    for row, got in zip(x[:, :length], out[:, :length], strict=True):
        total = summed(row, 0, lambda lanes, piece: fma(piece, piece, lanes))
        factor = F(1) / np.sqrt(total / F(length) + F(1e-5))
        assert same(row * factor * weight, got)
    into = x.copy()
    norm(into, weight, F(1e-5), into)
    assert same(into[:, :length], out[:, :length]), "in place too"


def gate(tile, gates, ups):
    """Gates in place, of as many numbers as ``ups`` has."""
    ends = gates.ctypes.data, gates.strides[0], ups.ctypes.data, ups.strides[0]
    call(tile, *ends, ups.shape[1], len(gates))


class Gated(NamedTuple):
    """The numbers of gates, and what was made of them."""

    gates: np.ndarray
    out: np.ndarray


def held_to_order(tile, exponent, gates, ups):
    """Gates of ``gate / (1 + 2^exponent) * up`` are those of that order, to the bit, and nothing else is written."""
    length = ups.shape[1]
    before = gates.copy()
    gate(tile, gates, ups)
    x, out = before[:, :length], gates[:, :length]
    assert same(ups * x / (F(1) + exp2(np.clip(exponent(x), F(-126), F(126)))), out)
    assert same(gates[:, length:], before[:, length:])
    return Gated(x, out)


@given(lengths, st.integers(0, 5), seeds, st.sampled_from([0.1, 10.0, 300.0]))
def test_silu_is_that_of_the_stated_order(length, num_rows, seed, spread):
    gates, ups = numbers(seed, num_rows, length + 2, spread=spread), numbers(seed + 1, num_rows, length)
    gated = held_to_order(row_tiles().silu, lambda x: x * F(-1.4426950408889634), gates, ups)
    x = gated.gates
    exact = np.clip(x.astype(np.float64), -80, 80)  # beyond, 2^126 is what the kernel divides by
    assert gated.out == pytest.approx(ups * (x / (1 + np.exp(-exact))), rel=1e-5, abs=1e-30)


GELU = -2 * np.sqrt(2 / np.pi) * 1.4426950408889634


@given(lengths, st.integers(0, 5), seeds, st.sampled_from([0.1, 3.0, 300.0]))
def test_gelu_is_that_of_the_stated_order(length, num_rows, seed, spread):
    gates, ups = numbers(seed, num_rows, length + 2, spread=spread), numbers(seed + 1, num_rows, length)
    held_to_order(row_tiles().gelu, lambda x: x * fma(x * x, F(GELU * 0.044715), F(GELU)), gates, ups)


@pytest.mark.parametrize("spread", [1e-20, 1e-3, 0.1, 1.0, 3.0, 50.0])
def test_gelu_is_near_that_of_torch(spread):
    """Beside float64; and where torch's float32 has digits left, no further from it than a few of its last ones."""
    import torch

    gates = numbers(7, 5, 203, spread=spread)
    before = torch.from_numpy(gates.copy())
    gate(row_tiles().gelu, gates, np.ones_like(gates))
    exact = torch.nn.functional.gelu(before.double(), approximate="tanh").numpy()
    assert gates == pytest.approx(exact, rel=1e-6, abs=1e-7 * spread)
    told = torch.nn.functional.gelu(before, approximate="tanh").numpy()
    assert gates == pytest.approx(told, rel=2e-6, abs=3e-7 * spread)


def test_gelu_keeps_what_is_no_number():
    gates = np.array([[np.nan, np.inf, 1e30, -1e30, 0.0]], F)
    gate(row_tiles().gelu, gates, np.ones_like(gates))
    assert np.isnan(gates[0, 0])
    assert np.isinf(gates[0, 1])
    assert gates[0, 2] == F(1e30)
    assert abs(gates[0, 3]) < 1e-7
    assert gates[0, 4] == 0


def cap(x, length, softcap):
    call(row_tiles().cap, x.ctypes.data, x.strides[0], length, len(x), bits(softcap))


@given(lengths, st.integers(0, 5), seeds, st.sampled_from([0.1, 10.0, 300.0]))
def test_softcaps_are_those_of_the_stated_order(length, num_rows, seed, spread):
    x = numbers(seed, num_rows, length + 3, spread=spread)
    before = x.copy()
    cap(x, length, F(30))
    below = np.clip(before[:, :length] / F(30), F(-7.9), F(7.9))
    square = below * below
    assert same(F(30) * (below * polynomial(square, ABOVE) / polynomial(square, BELOW)), x[:, :length])
    assert same(x[:, length:], before[:, length:])
    exact = 30 * np.tanh(before[:, :length].astype(np.float64) / 30)
    assert x[:, :length] == pytest.approx(exact, rel=1e-6)


def weigh(scores, hidden, limits, num_entries, softcap=0.0, *, to_pairs=False):
    """Weights in place; the largest scores, and the sums."""
    tops, totals = np.zeros((2, len(scores)), F)
    call(
        row_tiles().weights,
        *(scores.ctypes.data, scores.strides[0], hidden.ctypes.data, limits.ctypes.data, len(scores), num_entries),
        *(bits(softcap), tops.ctypes.data, totals.ctypes.data, int(to_pairs)),
    )
    return tops, totals


def weigh_plainly(scores, hidden, limits, num_entries, softcap=0.0):
    weights, tops, totals = scores.copy(), [], []
    for row, first, end in zip(weights, hidden, limits, strict=True):
        seen = row[first:end]
        if softcap:
            x = np.clip(seen, F(-7.9), F(7.9))
            square = x * x
            seen[:] = F(softcap) * (x * polynomial(square, ABOVE) / polynomial(square, BELOW))
        tops.append(max([NOTHING, *(one for one in seen if not np.isnan(one))]))
        seen[:] = exp2(np.maximum(seen - tops[-1], F(-126)))
        totals.append(summed(seen, 0, lambda lanes, piece: lanes + piece))
        row[:first] = row[end:num_entries] = 0
    return weights, np.array(tops, F), np.array(totals, F)


@given(st.data())
def test_weights_are_those_of_the_stated_order(data):
    num_entries, num_rows = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 4))
    ends = st.tuples(st.integers(0, num_entries), st.integers(0, num_entries)).map(sorted)
    drawn = np.array(data.draw(st.lists(ends, min_size=num_rows, max_size=num_rows)), np.int32).reshape(num_rows, 2)
    hidden, limits = np.ascontiguousarray(drawn[:, 0]), np.ascontiguousarray(drawn[:, 1])
    softcap = data.draw(st.sampled_from([0.0, 0.0, 30.0]))
    scores = numbers(data.draw(seeds), num_rows, num_entries + 5, spread=data.draw(st.sampled_from([0.5, 20.0, 500.0])))
    if num_rows and data.draw(st.booleans()):
        scores[0, data.draw(st.integers(0, num_entries - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    with np.errstate(all="ignore"):
        weights, tops, totals = weigh_plainly(scores, hidden, limits, num_entries, softcap)
    got, shorts = scores.copy(), scores.copy()
    found = weigh(got, hidden, limits, num_entries, softcap)
    for mine, expected in zip((got, *found), (weights, tops, totals), strict=True):
        assert np.array_equal(np.isnan(mine), np.isnan(expected))
        assert same(np.nan_to_num(mine, nan=1.0), np.nan_to_num(expected, nan=1.0))
    again = weigh(shorts, hidden, limits, num_entries, softcap, to_pairs=True)
    assert all(map(np.array_equal, np.nan_to_num(again), np.nan_to_num(found)))
    whole = num_entries + num_entries % 2
    rounded = np.zeros((num_rows, whole), np.uint16)
    rounded[:, :num_entries] = round_to_bfloat16(got[:, :num_entries])
    assert np.array_equal(shorts.view(np.uint16)[:, :whole], rounded)
    assert same(shorts[:, num_entries + 1 :], scores[:, num_entries + 1 :]), "nothing is written beyond a row"


def test_weights_are_near_the_truth():
    scores = numbers(5, 8, 1000, spread=30)
    before = scores.copy()
    every = np.zeros(8, np.int32)
    tops, totals = weigh(scores, every, every + 1000, 1000)
    assert np.array_equal(tops, before.max(1))
    truth = np.exp2((before - before.max(1, keepdims=True)).astype(np.float64))
    assert scores == pytest.approx(truth, rel=3e-7, abs=2e-38)
    assert totals == pytest.approx(truth.sum(1), rel=3e-7)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 0.1, 1.0, 7.0, 50.0])
def test_soft_capped_scores_are_near_the_truth(size):
    """Also near zero, where a quotient of powers would have no digits left."""
    scores = numbers(9, 1, 64, spread=size)
    before = scores.astype(np.float64)
    weigh(scores, np.zeros(1, np.int32), np.full(1, 64, np.int32), 64, 2.0)
    capped = 2 * np.tanh(before)
    assert np.log2(scores) == pytest.approx(capped - capped.max(), abs=2e-6)
