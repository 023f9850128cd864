"""Returning: conversations that somebody expects to go on, until what slow tiers have of them is worth bringing."""

from __future__ import annotations

import heapq
from typing import NamedTuple

__all__ = ["Expected", "Returning"]

_MAX_EXPECTED = 1024
"""So many conversations are remembered at most, with their tokens; of more, those that return last are forgotten."""


class Expected(NamedTuple):
    """A conversation that goes on.

    Attributes:
        due_s: when to begin to bring its blocks.
        order: its place in the order of those that are due together.
        namespace: of its blocks.
        packed: its tokens, 4 bytes each.
    """

    due_s: float
    order: int
    namespace: bytes
    packed: bytes


class Returning:
    """Conversations in the order in which they are due."""

    def __init__(self) -> None:
        self._heap: list[Expected] = []
        self._num_added = 0

    def add(self, due_s: float, namespace: bytes, packed: bytes) -> None:
        """Expect a conversation."""
        heapq.heappush(self._heap, Expected(due_s, self._num_added, namespace, packed))
        self._num_added += 1
        if len(self._heap) > _MAX_EXPECTED:
            self._heap.remove(max(self._heap))
            heapq.heapify(self._heap)

    def take(self, now: float, at_most: int) -> list[Expected]:
        """Return those that are due, up to ``at_most``, and forget them."""
        taken: list[Expected] = []
        while self._heap and self._heap[0].due_s <= now and len(taken) < at_most:
            taken.append(heapq.heappop(self._heap))
        return taken

    def next_due_s(self) -> float:
        """Return when the next one is due; inf for never."""
        return self._heap[0].due_s if self._heap else float("inf")

    def clear(self) -> None:
        """Expect nobody any more."""
        self._heap.clear()
