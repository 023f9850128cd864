"""Exponentials over rows, as polynomials: LLVM vectorises them, which it does not do with math.exp."""

from __future__ import annotations

import numpy as np

from pagefold.kernels.bits import float_of_bits
from pagefold.kernels.compiled import part

__all__ = ["exp2_row", "silu_times"]

_EXP2_MIN = np.float32(-126.0)  # below, a float32 power of two is no normal number: 2^-126 is 0 here
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(c) for c in (1.0, 0.6931472, 0.24022651, 0.05550411, 0.009618129, 0.0013333558, 0.00015403530)
)
"""2^f on [-.5, .5] by its Taylor series to f^6: within 1.3e-7 of the truth, less than rounding leaves."""
_HALF, _LOG2E = np.float32(0.5), np.float32(1.4426950408889634)
_BIAS, _SHIFT = np.int32(127), np.int32(23)
_TANH_MAX = np.float32(7.9)  # beyond, tanh is within 3e-7 of 1
_A1, _A3, _A5, _A7, _A9, _A11, _A13 = (
    np.float32(c)
    for c in (
        *(4.89352455891786e-3, 6.37261928875436e-4, 1.48572235717979e-5, 5.12229709037114e-8),
        *(-8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16),
    )
)
_B0, _B2, _B4, _B6 = (
    np.float32(c) for c in (4.89352518554385e-3, 2.26843463243900e-3, 1.18534705686654e-4, 1.19825839466702e-6)
)
"""tanh on [-7.9, 7.9] as the quotient of two polynomials, x^1 to x^13 over x^0 to x^6 (Eigen's): within 3.5e-7 of the
truth, relatively, also near 0, where a form in powers of two loses it."""
_FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan: what is NaN stays NaN, for somebody to see


@part(fastmath=_FAST | {"nnan"})
def _largest(row, least):
    """Return the largest of a row and ``least``. Of a row with a NaN anything: its weights are NaN all the same."""
    top = least
    for e in range(len(row)):
        top = max(top, row[e])
    return top


@part(fastmath=_FAST, forceinline=True)
def _exp2(exponent):
    """Return a power of two, of an exponent in [-126, 126]: Horner for the fraction, exponent bits for the whole."""
    whole = np.floor(exponent + _HALF)
    f = exponent - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    return fraction * float_of_bits((np.int32(whole) + _BIAS) << _SHIFT)


@part(fastmath=_FAST)
def exp2_row(scores, num_seen, num_entries, softcap, nothing):
    """Turn scores into weights ``2^(score - top)`` in place; return their largest score and their sum.

    Entries from ``num_seen`` on get weight 0, whatever was there. With ``softcap`` (in powers of two) scores first
    become ``softcap * tanh(score)``. Of no entries the top is ``nothing`` and the sum 0.
    """
    if softcap != 0.0:
        for e in range(num_seen):
            x = min(max(scores[e], -_TANH_MAX), _TANH_MAX)
            y = x * x
            odd = x * (_A1 + y * (_A3 + y * (_A5 + y * (_A7 + y * (_A9 + y * (_A11 + y * _A13))))))
            scores[e] = softcap * (odd / (_B0 + y * (_B2 + y * (_B4 + y * _B6))))
    top = _largest(scores[:num_seen], nothing)
    total = np.float32(0.0)
    for e in range(num_seen):
        weight = _exp2(max(scores[e] - top, _EXP2_MIN))
        scores[e] = weight
        total += weight
    for e in range(num_seen, num_entries):
        scores[e] = np.float32(0.0)
    return top, total


@part(fastmath=_FAST)
def silu_times(gate, up):
    """``gate = gate / (1 + exp(-gate)) * up``; of one row."""
    for e in range(len(gate)):
        power = _exp2(min(max(-gate[e] * _LOG2E, _EXP2_MIN), -_EXP2_MIN))
        gate[e] = up[e] * gate[e] / (np.float32(1.0) + power)
