"""A rule like 2Q: the first use counts for little; a block that comes back after its eviction has shown its worth.

T. Johnson and D. Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB 1994,
section 3 (full version): new blocks go through a FIFO (A1in) and are remembered when they leave it (A1out); one that
comes back meanwhile joins an LRU list (Am).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.ordered import OrderedNodes
from pagefold.kv.policies.ghosts import LEAST_GHOSTS, Ghosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import Node
    from pagefold.kv.eviction import RequestFacts

__all__ = ["TwoQueues"]

_IN_SHARE = 0.25
_GHOSTS_PER_NODE = 0.5


class TwoQueues:
    """Evicts from the queue of new blocks while that is too long, else the least recent of the others.

    Leaf first makes it "like" 2Q: a block in the middle of a prefix waits for those below it.

    Args:
        in_share: of all blocks that are there, how many may be new ones (Kin; the paper's 25 %).
        ghosts_per_node: how many of those that left are remembered, for each block that is there (Kout; 50 %).
        sample: share of all blocks that it is told of.
    """

    def __init__(
        self, in_share: float = _IN_SHARE, ghosts_per_node: float = _GHOSTS_PER_NODE, sample: float = 1.0
    ) -> None:
        self._in_share = in_share
        self._ghosts: Ghosts[bool] = Ghosts(ghosts_per_node, round(sample * LEAST_GHOSTS))
        self._is_main: dict[Node, bool] = {}
        self._num_new = 0
        self._new = OrderedNodes()
        self._main = OrderedNodes()

    def on_insert(self, node: Node) -> None:
        """Put it into the queue of new ones, or among the others if it was there not long ago."""
        is_main = self._ghosts.recall(node.path_hash) is not None
        self._is_main[node] = is_main
        self._num_new += not is_main

    def on_hit(self, path: list[Node]) -> None:
        """Nothing to do: hits while a block is new are correlated, and say nothing; the core stamps use."""

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """Nothing to do: ``on_idle`` follows."""

    def on_evict(self, node: Node) -> None:
        """Remember a new one, forget one of the others."""
        if self._is_main.pop(node):
            return
        self._num_new -= 1
        self._ghosts.remember(node.path_hash, True, len(self._is_main))  # noqa: FBT003 - a set, as a dict

    def on_idle(self, node: Node) -> None:
        """Offer ``node`` in the order of its queue."""
        if self._is_main[node]:
            self._main.add(node, (node.last_used, -node.depth))
        else:
            self._new.add(node, (node.created_at, -node.depth))

    def on_busy(self, node: Node) -> None:
        """Withdraw ``node``."""
        (self._main if self._is_main[node] else self._new).remove(node)

    def victim(self) -> Node | None:
        """Return the oldest new one while there are too many of them, else the least recent of the others."""
        if self._num_new > self._in_share * len(self._is_main):
            return self._new.first() or self._main.first()
        return self._main.first() or self._new.first()

    def score(self, node: Node) -> float:
        """Return when it was used last, or when it came, of a new one; in ticks."""
        return float(node.last_used if self._is_main[node] else node.created_at)

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable nodes."""
        yield from self._new
        yield from self._main
