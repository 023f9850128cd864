"""Returning: conversations that somebody expects to go on, until what slow tiers have of them is worth bringing."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["MAX_EXPECTED_BYTES", "Expected", "Returning"]

_MAX_EXPECTED, MAX_EXPECTED_BYTES = 1024, 2**26
"""How many conversations are remembered at most, and with how many bytes of tokens. Where there are more, those that
return last are forgotten."""


class Expected(NamedTuple):
    """A conversation that goes on.

    Attributes:
        due_s: when to begin to bring its blocks.
        order: its place in the order of those that are due together.
        namespace: of its blocks.
        packed: its tokens, 4 bytes each.
        mask: that of its last request.
    """

    due_s: float
    order: int
    namespace: bytes
    packed: bytes
    mask: int = 0


class Returning:
    """Conversations in the order in which they are due."""

    def __init__(self) -> None:
        self._heap: list[Expected] = []
        self._num_added = 0
        self._num_bytes = 0  # of all tokens

    @property
    def num_bytes(self) -> int:
        """What all tokens that are remembered take."""
        return self._num_bytes

    def add(self, due_s: float, namespace: bytes, packed: bytes, mask: int = 0) -> None:
        """Expect a conversation."""
        heapq.heappush(self._heap, Expected(due_s, self._num_added, namespace, packed, mask))
        self._num_added += 1
        self._num_bytes += len(packed)
        while len(self._heap) > _MAX_EXPECTED or self._num_bytes > MAX_EXPECTED_BYTES:
            last = max(self._heap)
            self._heap.remove(last)
            heapq.heapify(self._heap)
            self._num_bytes -= len(last.packed)

    def take(self, now: float, at_most: int) -> list[Expected]:
        """Return those that are due, up to ``at_most``, and forget them."""
        taken: list[Expected] = []
        while self._heap and self._heap[0].due_s <= now and len(taken) < at_most:
            taken.append(heapq.heappop(self._heap))
            self._num_bytes -= len(taken[-1].packed)
        return taken

    def forget(self, namespaces: Collection[bytes]) -> None:
        """Expect none of those whose blocks are in these namespaces."""
        self._heap = [one for one in self._heap if one.namespace not in namespaces]
        heapq.heapify(self._heap)
        self._num_bytes = sum(len(one.packed) for one in self._heap)

    def next_due_s(self) -> float:
        """Return when the next one is due; inf for never."""
        return self._heap[0].due_s if self._heap else float("inf")

    def clear(self) -> None:
        """Expect nobody any more."""
        self._heap.clear()
        self._num_bytes = 0
