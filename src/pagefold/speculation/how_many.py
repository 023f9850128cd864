"""How many drafts a step has: as long as one more brings more tokens a second.

A step of ``R`` requests brings ``R`` tokens, and a draft one more with some chance. Its time is that of so many tokens,
as it was measured. So drafts are taken one by one, the likeliest first, and as many as bring most tokens a second. Both
times and chances are estimates: what seems to bring little may bring less than nothing, and is left.

Drafts that a model makes take time before that: a step of the model for the first draft of all requests together, one
for the second, and so on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Chance", "StepCosts", "how_many"]

_LEAST_GAIN = 1.02
"""Drafts are to bring so many times the tokens a second of a step without, at least."""


class StepCosts:
    """What steps take, by how many tokens they compute; between and beyond what was measured, on a straight line.

    Args:
        num_tokens: of the steps that were measured, ascending, at least two.
        seconds: that each took.
    """

    def __init__(self, num_tokens: Sequence[int], seconds: Sequence[float]) -> None:
        self._num_tokens = list(num_tokens)
        self._seconds = _never_falling(seconds)

    def of(self, num_tokens: int) -> float:
        """Return the seconds of a step of so many tokens."""
        at = min(max(1, bisect_left(self._num_tokens, num_tokens)), len(self._num_tokens) - 1)
        left, right = self._num_tokens[at - 1], self._num_tokens[at]
        share = (num_tokens - left) / (right - left)
        return self._seconds[at - 1] + share * (self._seconds[at] - self._seconds[at - 1])


def _never_falling(numbers: Sequence[float]) -> list[float]:
    """Return the numbers that are nearest to those given and never fall: more tokens take no less, but for noise.

    Where some fall all of them have their mean (pool adjacent violators; Ayer et al., 1955).
    """
    pools: list[tuple[float, int]] = []
    for number in numbers:
        total, size = number, 1
        while pools and pools[-1][0] * size > total * pools[-1][1]:
            before = pools.pop()
            total, size = total + before[0], size + before[1]
        pools.append((total, size))
    return [total / size for total, size in pools for _ in range(size)]


class Chance(NamedTuple):
    """What drafts of a request promise.

    Attributes:
        is_right: the chance of each, if those before it are right.
        num_drafts: how many there are, or could be made.
        making: what it takes to make one more for each of so many requests at once; None where they are made already.
        first_s: seconds that making any takes beside that.
    """

    is_right: float
    num_drafts: int
    making: StepCosts | None = None
    first_s: float = 0.0


def how_many(
    costs: StepCosts, num_tokens: int, num_sampled: int, chances: Sequence[Chance], most_in_all: int
) -> list[int]:
    """Return how many drafts each request's row has.

    Args:
        costs: of steps.
        num_tokens: that the step computes without drafts.
        num_sampled: that it brings without drafts, at least one.
        chances: of each request that could have drafts.
        most_in_all: how many the step could have.
    """
    chosen = [0] * len(chances)
    heap = [(-one.is_right, at) for at, one in enumerate(chances) if one.num_drafts]
    heapify(heap)
    expected, making_s = float(num_sampled), 0.0
    num_made: Counter[int] = Counter()  # how many first drafts, second ones and so on are to be made
    best_rate, best = _LEAST_GAIN * expected / costs.of(num_tokens), list(chosen)
    while heap and most_in_all:
        most_in_all -= 1
        chance, at = heappop(heap)
        expected -= chance
        num_tokens += 1
        chosen[at] += 1
        making = chances[at].making
        if making is not None:
            num_before = num_made[chosen[at]]
            num_made[chosen[at]] += 1
            making_s += chances[at].first_s if chosen[at] == 1 else 0.0
            making_s += making.of(num_before + 1) - (making.of(num_before) if num_before else 0.0)
        rate = expected / (costs.of(num_tokens) + making_s)
        if rate > best_rate:
            best_rate, best = rate, list(chosen)
        if chosen[at] < chances[at].num_drafts:
            heappush(heap, (chance * chances[at].is_right, at))
    return best
