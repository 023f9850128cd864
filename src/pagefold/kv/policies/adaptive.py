"""Adaptive: follows, of several policies, the one that finds most lately, as ghost caches tell.

Each policy runs a cache of its own that holds no memory, only names: what it would have found is counted, and fades.
The idea of N. Megiddo and D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003 (ghost lists
that tell which side should have had the room), taken from two lists to whole policies as in "Cache replacement based on
reward" (G. Vietri et al., "Driving cache replacement with ML-based LeCaR", HotStorage 2018).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.block import Node
from pagefold.kv.policies.learned import Learned
from pagefold.kv.policies.lfu import Lfu
from pagefold.kv.policies.lru import Lru

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.kv.eviction import EvictionPolicy, RequestFacts

__all__ = ["Adaptive", "GhostCache"]

_FADE = 0.8
_FADE_EVERY = 256
_BETTER = 1.02


class GhostCache:
    """The blocks that a policy would have kept: nodes without blocks, leaf first as in the tree.

    Args:
        policy: a fresh one.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._nodes: dict[int, Node] = {}
        self._tick = 0

    def use(self, path: list[Node], facts: RequestFacts, num_blocks: int) -> int:
        """Use ``path``, then evict down to ``num_blocks``. Return how many of its first blocks were there."""
        self._tick += 1
        nodes = self._nodes
        found = []
        for node in path:
            known = nodes.get(node.path_hash)
            if known is None:
                break
            found.append(known)
        if found:
            self._busy(found[-1])
            for each in found:
                each.last_used = self._tick
                each.num_hits += 1
            self.policy.on_hit(found)
        tail = found[-1] if found else None
        for node in path[len(found) :]:
            tail = self._insert(tail, node)
        assert tail is not None, "paths have blocks"
        last = path[-1]
        for mine, theirs in zip(_upwards(tail), reversed(path), strict=True):
            mine.reuse_hint = theirs.reuse_hint
        self.policy.on_release(tail, facts)
        assert last.path_hash in nodes
        self._offer(tail)
        while len(nodes) > num_blocks:
            victim = self.policy.victim()
            assert victim is not None, "leaves are evictable"
            self._remove(victim)
        return len(found)

    def _insert(self, parent: Node | None, twin: Node) -> Node:
        node = Node(twin.key, parent if parent is not None else _ROOT, (), self._tick)
        node.depth, node.path_hash = twin.depth, twin.path_hash
        if parent is not None:
            parent.children[twin.key] = node
        self._nodes[twin.path_hash] = node
        self.policy.on_insert(node)
        return node

    def _remove(self, node: Node) -> None:
        self._busy(node)
        del self._nodes[node.path_hash]
        self.policy.on_evict(node)
        parent = node.parent
        assert parent is not None
        if parent is not _ROOT:
            del parent.children[node.key]
            self._offer(parent)

    def _busy(self, node: Node) -> None:
        if node.evictable:
            node.evictable = False
            self.policy.on_busy(node)

    def _offer(self, node: Node) -> None:
        if not node.children and not node.evictable:
            node.evictable = True
            self.policy.on_idle(node)


_ROOT = Node(b"", None, (), 0)
"""Above the first block of every path of a ghost cache; it has no children that anybody asks for."""


class _Candidate:
    """A policy that may be followed.

    Attributes:
        real: knows the nodes of the cache.
        ghost: has a cache of its own.
        found: blocks that its own cache found, fading.
    """

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self.real = make()
        self.ghost = GhostCache(make())
        self.found = 0.0


class Adaptive:
    """Evicts as the best policy of late would. Each of them costs its time twice: here, and in its ghost cache.

    Args:
        makers: of the policies, the first of which is followed until another is better.
    """

    def __init__(self, *makers: Callable[[], EvictionPolicy]) -> None:
        self._candidates = [_Candidate(make) for make in makers or (Learned, Lru, Lfu)]
        self._leader = self._candidates[0]
        self._num_nodes = 0
        self._room = 0  # blocks that were there when one was last evicted
        self._num_uses = 0

    @property
    def leader(self) -> EvictionPolicy:
        """The policy that is followed now."""
        return self._leader.real

    def on_insert(self, node: Node) -> None:
        """Tell all."""
        self._num_nodes += 1
        for each in self._candidates:
            each.real.on_insert(node)

    def on_hit(self, path: list[Node]) -> None:
        """Tell all."""
        for each in self._candidates:
            each.real.on_hit(path)

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """Tell all, replay the use in their caches, and follow the best."""
        path = list(_upwards(tail))
        path.reverse()
        room = max(self._room or self._num_nodes, len(path))
        for each in self._candidates:
            each.real.on_release(tail, facts)
            num_found = each.ghost.use(path, facts, room)
            each.found += 0 if facts.is_repeat else num_found
        best = max(self._candidates, key=lambda each: each.found)
        if best.found > _BETTER * self._leader.found:
            self._leader = best
        self._num_uses += 1
        if self._num_uses % _FADE_EVERY == 0:
            for each in self._candidates:
                each.found *= _FADE

    def on_evict(self, node: Node) -> None:
        """Tell all."""
        self._room = self._num_nodes
        self._num_nodes -= 1
        for each in self._candidates:
            each.real.on_evict(node)

    def on_idle(self, node: Node) -> None:
        """Offer ``node`` to all."""
        for each in self._candidates:
            each.real.on_idle(node)

    def on_busy(self, node: Node) -> None:
        """Withdraw ``node`` from all."""
        for each in self._candidates:
            each.real.on_busy(node)

    def victim(self) -> Node | None:
        """Ask the leader."""
        return self._leader.real.victim()

    def score(self, node: Node) -> float:
        """Ask the leader."""
        return self._leader.real.score(node)

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable nodes."""
        return self._leader.real.candidates()


def _upwards(tail: Node) -> Iterator[Node]:
    """Yield the nodes of a path, the last first."""
    node = tail
    while node.parent is not None:
        yield node
        node = node.parent
