"""What to evict: the protocol of a policy, and an adapter that makes one from a key function. See ``policies/``.

Leaf first, always: the tree offers a node (``on_idle``) only when it is cached, has no children and no transfer reads
it, and takes it back (``on_busy``) when that ends. So no policy can break a prefix in the middle. Blocks of groups that
keep the last tokens only go there too, one by one, and no policy is asked: see ``block_cache.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagefold.kv.ordered import OrderedNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.kv.block import Node

__all__ = ["EvictionPolicy", "KeyPolicy", "RequestFacts"]


class RequestFacts(NamedTuple):
    """What is known of the request that lets go of its blocks.

    Attributes:
        progress: share of its tokens that were computed, 0 to 1; 1 for a request that is done.
        priority: as its client gave it: the smaller, the sooner it is served.
        weight: what its customer's class is worth; 1 for everybody.
        is_repeat: its prompt was told of before: by another sample of it, or by the same one before it was preempted or
            its step failed. Somebody asked once, however often blocks are let go of.
    """

    progress: float = 1.0
    priority: int = 0
    weight: float = 1.0
    is_repeat: bool = False


class EvictionPolicy(Protocol):
    """Chooses which evictable node goes first. Told of everything that happens to nodes; changes none of them."""

    def on_insert(self, node: Node) -> None:
        """``node`` was published."""

    def on_hit(self, path: list[Node]) -> None:
        """A request acquired all of ``path``, from the first block on."""

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """A cache lets go of the path from the root to ``tail``: all of it was used just now."""

    def on_evict(self, node: Node) -> None:
        """``node`` has left the tree."""

    def on_idle(self, node: Node) -> None:
        """``node`` became evictable."""

    def on_busy(self, node: Node) -> None:
        """``node`` is evictable no more."""

    def victim(self) -> Node | None:
        """The evictable node that should go first; None when there is none. Changes nothing that can be seen."""

    def score(self, node: Node) -> float:
        """What an evictable node is ranked by, among those of its queue: the least goes first. To be told, no more."""

    def candidates(self) -> Iterator[Node]:
        """All evictable nodes, in any order: for audits."""


class KeyPolicy:
    """Evicts the node with the smallest key. O(log n) a change.

    A key is read when its node becomes evictable; it must not change while the node stays so.

    Args:
        key: node to a comparable tuple of numbers.
    """

    def __init__(self, key: Callable[[Node], tuple[float, ...]]) -> None:
        self._key = key
        self._idle = OrderedNodes()

    def on_insert(self, node: Node) -> None:
        """Nothing to do: keys are read when a node becomes evictable."""

    def on_hit(self, path: list[Node]) -> None:
        """Nothing to do: the core stamps use and hits on the nodes themselves."""

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """Nothing to do: ``on_idle`` follows."""

    def on_evict(self, node: Node) -> None:
        """Nothing to do: ``on_busy`` came first."""

    def on_idle(self, node: Node) -> None:
        """Offer ``node``."""
        self._idle.add(node, self._key(node))

    def on_busy(self, node: Node) -> None:
        """Withdraw ``node``."""
        self._idle.remove(node)

    def victim(self) -> Node | None:
        """Return the evictable node with the smallest key, ties by who became evictable first."""
        return self._idle.first()

    def score(self, node: Node) -> float:
        """Return the first number of its key."""
        return float(self._key(node)[0])

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable nodes."""
        return iter(self._idle)
