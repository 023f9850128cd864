"""RecencyShadow: what LRU would have found, without a cache that evicts by it.

LRU with room for ``n`` blocks holds a block exactly if fewer than ``n`` others were used since its last use: its stack
distance (R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970, section 4).
Counted by spans of times: a sum over whole spans and over one span's times. What is too old is dropped a span at a
time, so that no use ever waits for a tree that is built anew.
"""

from __future__ import annotations

__all__ = ["RecencyShadow"]

_WINDOW = 1 << 15
_SPAN = 256
"""Times a span: about as many as there are spans, so that both sums are short."""


class RecencyShadow:
    """How many blocks were used last at each time, for the last so many times; older ones count as one time.

    Args:
        window: how many times are told apart, at least.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._most_spans = window // _SPAN + 2
        self._first = 0  # number of the first span that is kept
        self._counts: list[list[int]] = []  # of each span, by time: blocks that were used last then
        self._sums: list[int] = []  # of each span

    def add(self, tick: int, num_blocks: int) -> None:
        """Count blocks that were used now; times do not go back."""
        span, offset = divmod(tick, _SPAN)
        while span - self._first >= len(self._sums):
            self._counts.append([0] * _SPAN)
            self._sums.append(0)
            if len(self._sums) > self._most_spans:
                del self._counts[0], self._sums[0]
                self._first += 1
        self._counts[span - self._first][offset] += num_blocks
        self._sums[span - self._first] += num_blocks

    def take(self, tick: int) -> None:
        """Count one block less: it was used again since."""
        span, offset = divmod(tick, _SPAN)
        if span >= self._first:
            self._counts[span - self._first][offset] -= 1
            self._sums[span - self._first] -= 1

    def num_newer(self, tick: int) -> int:
        """Return how many blocks were used later than at that time."""
        span, offset = divmod(tick, _SPAN)
        if span < self._first:
            return sum(self._sums)
        index = span - self._first
        return sum(self._sums[index + 1 :]) + sum(self._counts[index][offset + 1 :])
