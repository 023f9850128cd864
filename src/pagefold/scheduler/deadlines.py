"""Deadlines: when the time of requests is up, the soonest first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Deadlines"]


class Deadlines:
    """A heap of deadlines, which holds some of requests that have ended too."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        """Return how many it holds."""
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """The soonest; inf for none."""
        return self._heap[0][0] if self._heap else float("inf")

    def add(self, deadline_s: float, index: int, request_id: str, living: Collection[str]) -> None:
        """Note when the time of a request is up.

        Args:
            deadline_s: when its time is up.
            index: tells it from others of the same name.
            request_id: the request's name.
            living: names of the requests that have not ended, its own included.
        """
        heapq.heappush(self._heap, (deadline_s, index, request_id))
        if len(self._heap) > 2 * len(living) + 64:  # mostly of the ended: rebuild, amortised O(1)
            self._heap = [entry for entry in self._heap if entry[2] in living]
            heapq.heapify(self._heap)

    def take(self, now: float) -> list[tuple[str, int]]:
        """Return the names of those whose time is up, each with its index, and forget them."""
        late: list[tuple[str, int]] = []
        while self._heap and self._heap[0][0] <= now:
            _, index, request_id = heapq.heappop(self._heap)
            late.append((request_id, index))
        return late
