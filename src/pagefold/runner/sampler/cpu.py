"""The race on a CPU: one compiled kernel, a row at a time, on one thread.

Two logarithms a token would be most of the cost. So each token first gets a bound of what it can reach, by the bits of
a float (they are its logarithm to base 2, linear between the powers); only who could still win is looked at exactly,
some dozen of a row. And nothing is sorted: where top_k or top_p ends is found digit by digit.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pagefold.kernels.compiled import part, specialised
from pagefold.kernels.kept import kernel
from pagefold.kernels.rows import LOG2E
from pagefold.runner.sampler.draws import GOLDEN, MIX_1, MIX_2, REACHED, make_draws

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagefold.runner.sampler.draws import Draws

__all__ = ["race"]

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_U0, _U1, _U12, _U27, _U30, _U31, _U52 = (np.uint64(number) for number in (0, 1, 12, 27, 30, 31, 52))
_ONE = np.uint64(0x3FF0000000000000)  # the bits of 1.0: with 52 more a float64 in [1, 2)
_UP_TO_HALF = 1.0 - 2.0**-53  # less this, 1 + m / 2^52 is (m + 1/2) / 2^52, exactly
_PER_POWER, _BIAS = 2.0**-52, np.int64(1023)  # of a float64's exponent
_SLACK = 1e-6  # bounds are rounded too, and must rule nobody out
_BLOCK = 512  # tokens whose bounds are computed together, in the nearest cache

_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11 = (
    math.log(2.0) ** n / math.factorial(n) for n in range(12)
)
"""2^f on [-.5, .5] by its Taylor series to f^11: within 1e-14 of the truth, relatively."""
_LEAST_POWER = -1000.0

_NEVER = np.float32(-np.inf)
_SIGN, _ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
_DIGITS = ((np.uint64(21), np.uint64(11)), (np.uint64(10), np.uint64(11)), (np.uint64(0), np.uint64(10)))
"""Shift and width of the digits of a 32-bit number, the highest first."""
_NUM_BINS = 2048


def race(logits: NDArray[np.float32], draws: Draws) -> NDArray[np.int64]:
    """Return a token id for each draw, -1 where the row has no distribution.

    Args:
        logits: ``[R, vocab]``; the numbers of a row lie side by side.
        draws: of ``D`` of the rows.
    """
    vocab_size = logits.shape[1]
    row_size = logits.strides[0] // logits.itemsize
    # A decoder's rows may be padded: a flat view of them all spares a copy.
    flat = as_strided(logits, ((len(logits) - 1) * row_size + vocab_size,), (logits.itemsize,))
    chosen = np.empty(len(draws.rows), np.int64)
    _kernel()(flat, row_size, vocab_size, draws, chosen)
    return chosen


@cache
def _kernel() -> Callable[..., None]:
    return specialised(_race, (np.empty(0, np.float32), 1, 1, make_draws([], [], [], []), np.empty(0, np.int64)))


@kernel(error_model="numpy")
def _race(logits, row_size, vocab_size, draws, chosen):
    """Fill ``chosen``, a row after the other. What a cut leaves is moved together: the next one has less to do."""
    everyone = np.arange(vocab_size)
    bits, masses = np.empty(_BLOCK, np.uint64), np.empty(_NUM_BINS)
    row, tokens, weights = np.empty(vocab_size, np.float32), np.empty(vocab_size, np.int64), np.empty(vocab_size)
    for d in range(len(draws.rows)):
        start = draws.rows[d] * row_size
        own = logits[start : start + vocab_size]
        top, scale = np.float64(_largest(own)), draws.inverse_temperatures[d]
        top_k, top_p = draws.top_k[d], draws.top_p[d]
        if not _has_distribution(own, top):
            chosen[d] = -1
        elif draws.log_min_p[d] == -np.inf and not 0 < top_k < vocab_size and top_p == 1.0:
            chosen[d] = _winner(own, everyone, top, scale, draws.keys[d], bits)
        else:
            n = _keep_likely(own, top, scale, draws.log_min_p[d], row, tokens)
            if 0 < top_k < n:
                weights[:n] = 1.0
                n = _keep_largest(row[:n], tokens, weights, np.float64(top_k), masses)
            if top_p < 1.0:
                _weigh(row[:n], top, scale, weights, bits)
                n = _keep_largest(row[:n], tokens, weights, _sum(weights[:n]) * top_p * REACHED, masses)
            chosen[d] = _winner(row[:n], tokens, top, scale, draws.keys[d], bits)


@part(fastmath={"reassoc", "nsz", "nnan"})
def _largest(row):
    """Return the largest of a row. Of a row with a NaN anything."""
    top = _NEVER
    for t in range(len(row)):
        top = max(top, row[t])
    return top


@part()
def _has_distribution(row, top):
    num_nan = 0
    for t in range(len(row)):
        num_nan += row[t] != row[t]  # NaN alone is not itself
    return num_nan == 0 and np.isfinite(top)


@part()
def _keep_likely(logits, top, scale, log_min_p, row, tokens):
    """Fill ``row`` and ``tokens`` with the logits and ids that min_p keeps; return how many they are."""
    n = 0
    for t in range(len(logits)):
        row[n] = logits[t] + np.float32(0.0)  # -0 becomes 0: equal numbers are to have equal bits
        tokens[n] = t
        n += logits[t] > _NEVER and (np.float64(logits[t]) - top) * scale >= log_min_p
    return n


@part(fastmath={"reassoc"})
def _sum(numbers):
    total = 0.0
    for t in range(len(numbers)):
        total += numbers[t]
    return total


@part()
def _weigh(row, top, scale, weights, bits):
    """``weights = exp((row - top) * scale)``: 1 of the largest, next to nothing of minus infinity."""
    factors = bits.view(np.float64)
    for begin in range(0, len(row), _BLOCK):
        block = row[begin : begin + _BLOCK]
        out = weights[begin : begin + _BLOCK]
        for t in range(len(block)):
            x = max((np.float64(block[t]) - top) * scale * LOG2E, _LEAST_POWER)
            whole = np.floor(x + 0.5)
            f = x - whole
            high = _C6 + f * (_C7 + f * (_C8 + f * (_C9 + f * (_C10 + f * _C11))))
            out[t] = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * high)))))
            bits[t] = np.uint64(np.int64(np.int32(whole)) + _BIAS) << _U52
        for t in range(len(block)):
            out[t] *= factors[t]


@part()
def _order_key(bits):
    """Turn a float32's bits into a number that orders as the floats do: of a negative one all bits turn round."""
    return np.uint64(bits ^ (_ALL if bits & _SIGN else _SIGN))


@part()
def _keep_largest(row, tokens, weights, wanted, masses):
    """Keep the largest of a row, and their tokens, until their weights reach ``wanted``; return how many they are.

    Of equal numbers the first are kept. The last number that is kept is found digit by digit: the mass of each value of
    the first digit says which value it is, then only numbers with it are looked at, and so on. ``masses`` is room.
    """
    bits = row.view(np.uint32)
    last, mass_before = _U0, 0.0
    for shift, width in _DIGITS:
        masses[:] = 0.0
        above, mask = shift + width, (_U1 << width) - _U1
        for t in range(len(row)):
            key = _order_key(bits[t])
            if key >> above == last:
                masses[np.int64((key >> shift) & mask)] += weights[t]
        digit = -1
        for one in range(np.int64(mask), -1, -1):
            if masses[one] > 0.0:
                if digit >= 0:
                    mass_before += masses[digit]
                digit = one
                if mass_before + masses[one] >= wanted:
                    break
        last = (last << width) | np.uint64(digit)
    n = 0
    for t in range(len(row)):
        key = _order_key(bits[t])
        if key > last or (key == last and mass_before < wanted):
            if key == last:
                mass_before += weights[t]
            row[n], tokens[n] = row[t], tokens[t]
            n += 1
    return n


@part()
def _winner(row, tokens, top, scale, key, bits):
    """Return the one of ``tokens`` with the largest ``(row - top) * scale - log(-log(1 - v))``, v its uniform number.

    ``-log(1 - v) >= v``, so a token reaches no more than ``(row - top) * scale - log(v)``; and ``log2(v)`` is at least
    the bits of v, read as a whole number, over 2^52, less 1023.
    """
    uniforms, whole = bits.view(np.float64), bits.view(np.int64)
    winner, best, bound = -1, -np.inf, -np.inf
    for begin in range(0, len(row), _BLOCK):
        block, who = row[begin : begin + _BLOCK], tokens[begin : begin + _BLOCK]
        for t in range(len(block)):
            mixed = key + np.uint64(who[t] + 1) * _GOLDEN
            mixed = (mixed ^ (mixed >> _U30)) * _MIX_1
            mixed = (mixed ^ (mixed >> _U27)) * _MIX_2
            bits[t] = ((mixed ^ (mixed >> _U31)) >> _U12) | _ONE
        for t in range(len(block)):
            uniforms[t] -= _UP_TO_HALF
        num_hopeful = 0
        for t in range(len(block)):
            reach = (np.float64(block[t]) - top) * scale * LOG2E - np.float64(whole[t]) * _PER_POWER
            num_hopeful += reach > bound
        if num_hopeful:
            for t in range(len(block)):
                lead = (np.float64(block[t]) - top) * scale
                if lead * LOG2E - np.float64(whole[t]) * _PER_POWER > bound:
                    finish = lead - math.log(-math.log1p(-uniforms[t]))
                    if finish > best:
                        winner, best = who[t], finish
                        bound = best * LOG2E - np.float64(_BIAS) - _SLACK
    return winner
