"""PauseForecast: how long a pause will be, by those before it, and what keeping blocks through it is worth.

Pauses are counted in ranges of equal ratio, since tools take a second or a minute. What a path is worth while its
session pauses is its Gittins index: of all times until which it might be kept, the best ratio of how likely the session
has come back by then to how long the blocks are kept for it on average. Its reciprocal, in seconds, is when it is worth
as much as one that surely comes back then: so paths are compared by one time each.

Source: J. C. Gittins, "Bandit processes and dynamic allocation indices", Journal of the Royal Statistical Society B
41(2), 1979; for caches as hit density in N. Beckmann, H. Chen, A. Cidon, "LHD: improving cache hit rate by maximizing
hit density", NSDI 2018, section 3.
"""

from __future__ import annotations

from itertools import pairwise
from math import log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NUM_RANGES", "PauseForecast", "range_of", "said"]

_LEAST_S = 0.25
_PER_OCTAVE = 4
NUM_RANGES = 60
"""Ranges of pauses: the first up to a quarter of a second, the last from about two hours on."""

_ENDS = [_LEAST_S * 2 ** (index / _PER_OCTAVE) for index in range(NUM_RANGES)]
_MIDS = [0.5 * _LEAST_S, *(0.5 * (start + end) for start, end in pairwise(_ENDS))]
_NEVER = 0.03
"""Share of sessions that never come back, whatever they did before."""

_LOOK_AGAIN = 1.3
_SAID_RIGHTLY, _LATER = 0.85, 3
_LATE_RANGES = 2 * _PER_OCTAVE
_LATE_S = 1.0
_SOONEST_S = 0.05


def range_of(pause_s: float) -> int:
    """Return the range that a pause falls into."""
    if pause_s <= _LEAST_S:
        return 0
    return min(NUM_RANGES - 1, 1 + int(log2(pause_s / _LEAST_S) * _PER_OCTAVE))


class PauseForecast:
    """How likely a pause is to end in each range of times.

    Args:
        weights: of ranges; they need not add up to anything.
        said_s: the very pause that the client has announced; None where it has said nothing.
    """

    __slots__ = ("_ranges", "_said", "_said_s")

    def __init__(self, weights: Mapping[int, float], said_s: float | None = None) -> None:
        total = sum(weights.values()) / (1 - _NEVER)
        self._ranges = sorted((at, weight / total) for at, weight in weights.items() if weight > 0.0)
        self._said_s = said_s
        self._said = -1 if said_s is None else range_of(said_s)

    def expected_s(self, age_s: float) -> float | None:
        """Return in how many seconds the session is expected back; None where it is overdue by far.

        Args:
            age_s: how long it has paused by now.
        """
        left = _NEVER
        ahead: list[tuple[float, float]] = []
        for at, weight in self._ranges:
            if at == self._said and self._said_s is not None and age_s <= self._said_s:
                ahead.append((max(_SOONEST_S, self._said_s - age_s), weight))
            elif age_s < _ENDS[at] and at != self._said:
                ahead.append((max(_MIDS[at] - age_s, 0.5 * (_ENDS[at] - age_s)), weight))
            else:
                continue
            left += weight
        if not ahead:
            return None
        best = come = waited = 0.0
        for in_s, weight in ahead:
            come += weight
            waited += weight * in_s
            index = come / (waited + (left - come) * in_s)
            best = max(best, index)
        return 1.0 / best

    @staticmethod
    def look_again_s(age_s: float) -> float:
        """Return at which age it is worth asking again, after that age."""
        return max(_LEAST_S, age_s * _LOOK_AGAIN)


def said(pause_s: float) -> PauseForecast:
    """Return the forecast of a pause that a client has announced: it mostly keeps to it, and else is somewhat late."""
    first = range_of(pause_s)
    last = min(NUM_RANGES - 1, range_of(pause_s + _LATE_S) + _LATE_RANGES)
    late = (1 - _SAID_RIGHTLY) / max(1, last - first)
    weights = dict.fromkeys(range(first + 1, last + 1), late)
    weights[first] = _SAID_RIGHTLY
    return PauseForecast(weights, pause_s)
