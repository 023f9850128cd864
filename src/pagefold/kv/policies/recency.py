"""RecencyShadow: what LRU would have found, without a cache that evicts by it.

LRU with room for ``n`` blocks holds a block exactly if fewer than ``n`` others were used since its last use: its stack
distance (R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970, section 4).
Counted by a tree of sums over time (P. M. Fenwick, "A new data structure for cumulative frequency tables", 1994):
O(log n).
"""

from __future__ import annotations

__all__ = ["RecencyShadow"]

_WINDOW = 1 << 15


class RecencyShadow:
    """How many blocks were used last at each time, for the last so many times; older ones count as one time.

    Args:
        window: how many times are told apart, at least.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self._counts: dict[int, int] = {}  # time -> blocks that were used last then
        self._first = 0  # of the times in the tree
        self._sums = [0] * (2 * window + 1)
        self._total = 0

    def add(self, tick: int, num_blocks: int) -> None:
        """Count blocks that were used now; times do not go back."""
        if tick - self._first >= 2 * self._window:
            self._rebuild(tick - self._window)
        self._counts[tick] = self._counts.get(tick, 0) + num_blocks
        self._change(tick, num_blocks)

    def take(self, tick: int) -> None:
        """Count one block less: it was used again since."""
        if tick >= self._first:
            self._counts[tick] -= 1
            self._change(tick, -1)

    def num_newer(self, tick: int) -> int:
        """Return how many blocks were used later than at that time."""
        index = tick - self._first + 1
        older = 0
        while index > 0:
            older += self._sums[index]
            index &= index - 1
        return self._total - older

    def _change(self, tick: int, by: int) -> None:
        self._total += by
        index = tick - self._first + 1
        while index < len(self._sums):
            self._sums[index] += by
            index += index & -index

    def _rebuild(self, first: int) -> None:
        counts = {tick: count for tick, count in self._counts.items() if tick >= first and count}
        self._counts, self._first, self._total = {}, first, 0
        self._sums = [0] * (2 * self._window + 1)
        for tick, count in counts.items():
            self._counts[tick] = count
            self._change(tick, count)
