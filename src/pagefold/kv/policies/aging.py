"""Nodes ordered by a rank that depends on their class and their age, and so changes while nothing happens to them.

All nodes of one class and one range of ages have one rank: they share a cell. Cells are ordered by rank, nodes in a
cell by last use; a node that grows out of its range moves to the next cell of its class. So a victim is found in
O(log n): a node moves at most once for each range of ages.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from pagefold.kv.ordered import OrderedNodes
from pagefold.kv.policies.ages import AGE_STARTS, NUM_AGES, age_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.kv.tree import Node

__all__ = ["AgingNodes", "Ranks"]

Ranks = dict[int, list[float]]
"""Of each class, the rank of each range of ages: the smallest goes first."""


class AgingNodes:
    """A set of nodes, the first one being that of the smallest rank.

    Args:
        ranks: of every class that will be asked for.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._class_of: dict[Node, int] = {}
        self._used_at: dict[Node, int] = {}
        self._cell_of: dict[Node, int] = {}
        self._cells: dict[int, OrderedNodes] = {}  # class * NUM_AGES + range of ages
        self._by_rank: list[tuple[float, int]] = []  # (rank, cell), of all cells that hold anything, and some more
        self._is_ranked: set[int] = set()
        self._due: list[tuple[int, int]] = []  # (when its oldest node grows out of it, cell)

    def __len__(self) -> int:
        return len(self._cell_of)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._cell_of)

    def add(self, node: Node, class_index: int, used_at: int, now: int) -> None:
        """Add ``node`` of that class, last used at that time."""
        self._class_of[node] = class_index
        self._used_at[node] = used_at
        self._put(node, class_index, used_at, now)

    def remove(self, node: Node) -> None:
        """Take ``node`` out."""
        self._cells[self._cell_of.pop(node)].remove(node)
        del self._class_of[node], self._used_at[node]

    def first(self, now: int) -> Node | None:
        """Return the node of the smallest rank, the least recently used one of its cell, then the deepest."""
        self._grow(now)
        while self._by_rank:
            cell = self._by_rank[0][1]
            node = self._cells[cell].first()
            if node is not None:
                return node
            heappop(self._by_rank)
            self._is_ranked.remove(cell)
        return None

    def rank_again(self, ranks: Ranks, class_of: Callable[[Node], int], now: int) -> None:
        """Order all nodes by other ranks, and by the classes that they have now."""
        self._grow(now)
        self._ranks = ranks
        for node, known in list(self._class_of.items()):
            class_index = class_of(node)
            if class_index != known:  # others stay in their cells, whose ranks change
                self._cells[self._cell_of[node]].remove(node)
                self._class_of[node] = class_index
                self._put(node, class_index, self._used_at[node], now)
        self._cells = {cell: nodes for cell, nodes in self._cells.items() if len(nodes)}
        self._by_rank = [(ranks[cell // NUM_AGES][cell % NUM_AGES], cell) for cell in self._cells]
        self._is_ranked = set(self._cells)
        self._due = []
        for cell, nodes in self._cells.items():
            oldest = nodes.first_key()
            assert oldest is not None, "an empty cell was left out"
            if cell % NUM_AGES + 1 < NUM_AGES:
                self._due.append((int(oldest[0]) + AGE_STARTS[cell % NUM_AGES + 1], cell))
        heapify(self._by_rank)
        heapify(self._due)

    def _put(self, node: Node, class_index: int, used_at: int, now: int) -> None:
        age = age_range(now - used_at)
        cell = class_index * NUM_AGES + age
        nodes = self._cells.get(cell)
        if nodes is None:
            nodes = self._cells[cell] = OrderedNodes()
        oldest = nodes.first_key()
        nodes.add(node, (used_at, -node.depth))
        self._cell_of[node] = cell
        if age + 1 < NUM_AGES and (oldest is None or used_at < oldest[0]):
            heappush(self._due, (used_at + AGE_STARTS[age + 1], cell))
        if cell not in self._is_ranked:
            self._is_ranked.add(cell)
            heappush(self._by_rank, (self._ranks[class_index][age], cell))

    def _grow(self, now: int) -> None:
        """Move what has grown out of its cell to the next one."""
        while self._due and self._due[0][0] <= now:
            cell = heappop(self._due)[1]
            nodes = self._cells[cell]
            until = AGE_STARTS[cell % NUM_AGES + 1]
            node = nodes.first()
            while node is not None and self._used_at[node] + until <= now:
                nodes.remove(node)
                self._put(node, self._class_of[node], self._used_at[node], now)
                node = nodes.first()
            if node is not None:
                heappush(self._due, (self._used_at[node] + until, cell))
