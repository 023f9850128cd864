"""GhostCache: the blocks that a policy would have kept, by name, without memory: what a cache of its own would find."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.block import Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.kv.eviction import EvictionPolicy, RequestFacts

__all__ = ["GhostCache", "upwards"]


class GhostCache:
    """Nodes without blocks, leaf first as in the tree.

    Paths may be samples, if a block is in all of them or in none: each block has its first sampled ancestor as parent.

    Args:
        policy: a fresh one.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._nodes: dict[int, Node] = {}
        self._num_children: dict[Node, int] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def use(self, path: Sequence[Node], key: bytes, facts: RequestFacts, num_blocks: int) -> int:
        """Use ``path``, then evict down to ``num_blocks``. Return how many of its first blocks were there.

        Args:
            path: nodes of the cache itself, parents first; one at least.
            key: of its own nodes: policies ask it how many tokens a block has.
            facts: of the request.
            num_blocks: that stay.
        """
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
                each.num_hits += not facts.is_repeat
            if not facts.is_repeat:  # of which the cache itself has no hits either
                self.policy.on_hit(found)
        tail = found[-1] if found else _ROOT
        for node in path[len(found) :]:
            tail = self._insert(tail, node, key)
        for mine, theirs in zip(upwards(tail), reversed(path), strict=True):
            mine.reuse_hint = theirs.reuse_hint
        self.policy.on_release(tail, facts)
        self._offer(tail)
        while len(nodes) > num_blocks:
            victim = self.policy.victim()
            assert victim is not None, "leaves are evictable"
            self._remove(victim)
        return len(found)

    def _insert(self, parent: Node, twin: Node, key: bytes) -> Node:
        node = Node(key, parent, (), self._tick)
        node.depth, node.path_hash = twin.depth, twin.path_hash
        self._nodes[node.path_hash] = node
        self._num_children[node] = 0
        if parent is not _ROOT:
            self._num_children[parent] += 1
        self.policy.on_insert(node)
        return node

    def _remove(self, node: Node) -> None:
        self._busy(node)
        del self._nodes[node.path_hash]
        del self._num_children[node]
        self.policy.on_evict(node)
        parent = node.parent
        assert parent is not None, "the root is nobody's victim"
        if parent is not _ROOT:
            self._num_children[parent] -= 1
            self._offer(parent)

    def _busy(self, node: Node) -> None:
        if node.evictable:
            node.evictable = False
            self.policy.on_busy(node)

    def _offer(self, node: Node) -> None:
        if not self._num_children[node] and not node.evictable:
            node.evictable = True
            self.policy.on_idle(node)


_ROOT = Node(b"", None, (), 0)
"""Above the first block of every path of a ghost cache."""


def upwards(tail: Node) -> Iterator[Node]:
    """Yield the nodes of a path, the last first."""
    node = tail
    while node.parent is not None:
        yield node
        node = node.parent
