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
    from collections.abc import Callable, Iterable, Iterator

    from pagefold.kv.block import Node

__all__ = ["AgingNodes", "Ranks"]

_MOST_MOVES = 64
"""Nodes that grow older at one call: who calls at every use is hardly ever behind, and never waits long."""

Ranks = dict[int, list[float]]
"""The rank of each range of ages, for each class: the smallest goes first."""


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
        self._due: list[tuple[int, int]] = []  # (when its oldest node may grow out of it, cell)
        self._due_at: dict[int, int] = {}  # cell -> of its one valid entry there

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
        self.grow(now)
        while self._by_rank:
            cell = self._by_rank[0][1]
            node = self._cells[cell].first()
            if node is not None:
                return node
            heappop(self._by_rank)
            self._is_ranked.remove(cell)
        return None

    def rank_of(self, node: Node) -> float:
        """Return the rank of a node that is in the set."""
        cell = self._cell_of[node]
        return self._ranks[cell // NUM_AGES][cell % NUM_AGES]

    def rank_again(self, ranks: Ranks) -> None:
        """Order the cells by other ranks: no node moves."""
        self._ranks = ranks
        self._cells = {cell: nodes for cell, nodes in self._cells.items() if len(nodes)}
        self._by_rank = [(ranks[cell // NUM_AGES][cell % NUM_AGES], cell) for cell in self._cells]
        self._is_ranked = set(self._cells)
        heapify(self._by_rank)

    def classes(self) -> set[int]:
        """Return the classes that have nodes."""
        return {cell // NUM_AGES for cell, nodes in self._cells.items() if len(nodes)}

    def classify(self, nodes: Iterable[Node], class_of: Callable[[Node], int], now: int) -> int:
        """Give those of some nodes that are in the set the classes that they have now. Return how many moved."""
        num_moved = 0
        for node in nodes:
            known = self._class_of.get(node)
            if known is None:
                continue
            class_index = class_of(node)
            if class_index != known:
                self._cells[self._cell_of[node]].remove(node)
                self._class_of[node] = class_index
                self._put(node, class_index, self._used_at[node], now)
                num_moved += 1
        return num_moved

    def grow(self, now: int) -> None:
        """Move what has grown out of its cell to the next one: so many nodes at most, the rest when asked again."""
        num_left = _MOST_MOVES
        while self._due and self._due[0][0] <= now and num_left:
            at, cell = heappop(self._due)
            if self._due_at.get(cell) != at:
                continue
            del self._due_at[cell]
            nodes = self._cells.get(cell)
            if nodes is None:
                continue
            until = AGE_STARTS[cell % NUM_AGES + 1]
            node = nodes.first()
            while node is not None and self._used_at[node] + until <= now and num_left:
                nodes.remove(node)
                self._put(node, self._class_of[node], self._used_at[node], now)
                node = nodes.first()
                num_left -= 1
            if node is not None:
                self._wait(cell, self._used_at[node] + until)

    def _wait(self, cell: int, at: int) -> None:
        """Look at ``cell`` at that time, if not sooner."""
        if at < self._due_at.get(cell, at + 1):
            self._due_at[cell] = at
            heappush(self._due, (at, cell))

    def _put(self, node: Node, class_index: int, used_at: int, now: int) -> None:
        age = age_range(now - used_at)
        cell = class_index * NUM_AGES + age
        nodes = self._cells.get(cell)
        if nodes is None:
            nodes = self._cells[cell] = OrderedNodes()
        nodes.add(node, (used_at, -node.depth))
        self._cell_of[node] = cell
        if age + 1 < NUM_AGES:
            self._wait(cell, used_at + AGE_STARTS[age + 1])
        if cell not in self._is_ranked:
            self._is_ranked.add(cell)
            heappush(self._by_rank, (self._ranks[class_index][age], cell))
