"""What to evict: one protocol, and an adapter that makes a policy from a key function.

Leaf first, always: the tree offers a node (``on_idle``) only when it is cached, has no children and no transfer reads
it, and takes it back (``on_busy``) when that ends. So no policy can break a prefix in the middle.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.kv.tree import Node

__all__ = ["POLICIES", "EvictionPolicy", "KeyPolicy", "make_policy"]


class EvictionPolicy(Protocol):
    """Chooses which evictable node goes first. Told of everything that happens to nodes; changes none of them."""

    def on_insert(self, node: Node) -> None:
        """``node`` was published."""

    def on_hit(self, path: list[Node]) -> None:
        """A request acquired all of ``path``, from the first block on."""

    def on_evict(self, node: Node) -> None:
        """``node`` has left the tree."""

    def admit(self, node: Node) -> bool:
        """Whether ``node``, which no table holds any more, is worth keeping at all."""

    def on_idle(self, node: Node) -> None:
        """``node`` became evictable."""

    def on_busy(self, node: Node) -> None:
        """``node`` is evictable no more."""

    def victim(self) -> Node | None:
        """The evictable node that should go first; None when there is none. Changes nothing that can be seen."""

    def candidates(self) -> Iterator[Node]:
        """All evictable nodes, in any order: for audits."""


class KeyPolicy:
    """Evicts the node with the smallest key. O(log n) a change, by a heap whose stale entries are skipped.

    A key is read when its node becomes evictable; it must not change while the node stays so.

    Args:
        key: node to a comparable tuple of ints.
    """

    def __init__(self, key: Callable[[Node], tuple[int, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._live: dict[Node, int] = {}  # evictable node -> the ticket of its one valid heap entry
        self._ticket = 0

    def on_insert(self, node: Node) -> None:
        """Nothing to do: keys are read when a node becomes evictable."""

    def on_hit(self, path: list[Node]) -> None:
        """Nothing to do: the core stamps use and hits on the nodes themselves."""

    def on_evict(self, node: Node) -> None:
        """Nothing to do: ``on_busy`` came first."""

    def admit(self, node: Node) -> bool:  # noqa: ARG002 - a policy that keeps everything
        """Keep everything."""
        return True

    def on_idle(self, node: Node) -> None:
        """Offer ``node``."""
        self._ticket += 1
        self._live[node] = self._ticket
        heappush(self._heap, (self._key(node), self._ticket, node))
        if len(self._heap) > 2 * len(self._live) + 64:  # mostly stale: rebuild, amortised O(1)
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def on_busy(self, node: Node) -> None:
        """Withdraw ``node``; its heap entry goes stale."""
        del self._live[node]

    def victim(self) -> Node | None:
        """Return the evictable node with the smallest key, ties by who became evictable first."""
        while self._heap:
            _, ticket, node = self._heap[0]
            if self._live.get(node) == ticket:
                return node
            heappop(self._heap)
        return None

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable nodes."""
        return iter(self._live)


POLICIES: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_used, -node.depth),
    "lfu": lambda node: (node.num_hits, node.last_used, -node.depth),
    "fifo": lambda node: (node.created_at, -node.depth),
}


def make_policy(name: str) -> EvictionPolicy:
    """Return a fresh policy by name.

    Raises:
        KeyError: no policy has that name; ``POLICIES`` lists them.
    """
    return KeyPolicy(POLICIES[name])
