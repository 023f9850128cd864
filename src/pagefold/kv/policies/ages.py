"""Ages in ranges that grow with age: four to an octave."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["AGE_STARTS", "NUM_AGES", "RANGE_LENGTHS", "age_range"]

_PER_OCTAVE = 4
_OCTAVES = 16


def _starts() -> list[int]:
    starts = [0]
    for step in range(_PER_OCTAVE * _OCTAVES):
        start = int(2 ** (step / _PER_OCTAVE))
        if start > starts[-1]:
            starts.append(start)
    return starts


AGE_STARTS = _starts()
"""Ages at which the ranges begin: 0, 1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 16 ..."""

NUM_AGES = len(AGE_STARTS)

RANGE_LENGTHS = [after - start for start, after in zip(AGE_STARTS, [*AGE_STARTS[1:], 2 * AGE_STARTS[-1]], strict=True)]
"""How many ages each range has; the last one is cut at twice its start."""


def age_range(age: int) -> int:
    """Return the index of the range that ``age`` lies in."""
    return bisect_right(AGE_STARTS, age) - 1
