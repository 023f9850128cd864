"""Nodes in order of a key, the smallest first: a heap whose stale entries are skipped."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import Node

__all__ = ["OrderedNodes"]


class OrderedNodes:
    """A set of nodes with keys. O(log n) a change, the first one in O(1) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Node]] = []
        self._tickets: dict[Node, int] = {}  # node -> the ticket of its one valid entry
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._tickets)

    def __contains__(self, node: Node) -> bool:
        return node in self._tickets

    def add(self, node: Node, key: tuple[float, ...]) -> None:
        """Add ``node``, or give it another key. Equal keys go by who came first."""
        self._ticket += 1
        self._tickets[node] = self._ticket
        heappush(self._heap, (key, self._ticket, node))
        if len(self._heap) > 2 * len(self._tickets) + 64:  # mostly stale: rebuild, amortised O(1)
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def remove(self, node: Node) -> None:
        """Take ``node`` out; its entry goes stale."""
        del self._tickets[node]

    def first(self) -> Node | None:
        """Return the node with the smallest key; None when there is none."""
        while self._heap:
            _, ticket, node = self._heap[0]
            if self._tickets.get(node) == ticket:
                return node
            heappop(self._heap)
        return None

    def first_key(self) -> tuple[float, ...] | None:
        """Return the smallest key; None when there is no node."""
        return None if self.first() is None else self._heap[0][0]
