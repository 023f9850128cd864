"""PauseForecast: how long a pause will be, by those before it.

Pauses are counted in ranges of equal ratio, since tools take a second or a minute. Paths are compared by one time each:
in how many seconds the session is expected back, on average over all that can still come of the pause by now. Who comes
back last by that goes first: Belady's rule with what is known. The average holds what is unlikely and long, so what may
be kept in vain for long goes before what is sure.

An average was measured to find more than a Gittins index, the best ratio of hits to room and time (``docs/sessions.md``
has the figures): that keeps whoever is likely back at once, however long it takes if not.
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

_LOOK_AGAIN = 1.3
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
        said_s: the very pause that the client has announced, None where it has said nothing; the ranges say what
            follows if it does not keep to it.
    """

    __slots__ = ("_ranges", "_said_s")

    def __init__(self, weights: Mapping[int, float], said_s: float | None = None) -> None:
        self._ranges = [(at, weight) for at, weight in weights.items() if weight > 0.0]
        self._said_s = said_s

    def expected_s(self, age_s: float) -> float | None:
        """Return in how many seconds the session is expected back; None where it is overdue by far.

        Args:
            age_s: how long it has paused by now.
        """
        if self._said_s is not None and age_s <= self._said_s:
            return max(_SOONEST_S, self._said_s - age_s)
        left = waited = 0.0
        for at, weight in self._ranges:
            if age_s < _ENDS[at]:
                left += weight
                waited += weight * max(_MIDS[at] - age_s, 0.5 * (_ENDS[at] - age_s))
        return waited / left if left else None

    @staticmethod
    def look_again_s(age_s: float) -> float:
        """Return at which age it is worth asking again, after that age."""
        return max(_LEAST_S, age_s * _LOOK_AGAIN)


def said(pause_s: float) -> PauseForecast:
    """Return the forecast of a pause that a client has announced: it keeps to it, or is somewhat late."""
    first = range_of(pause_s) + 1
    last = min(NUM_RANGES - 1, range_of(pause_s + _LATE_S) + _LATE_RANGES)
    return PauseForecast(dict.fromkeys(range(first, last + 1), 1.0), pause_s)
