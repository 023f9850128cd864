"""ChunkTree: chunks of which names alone are told, as paths of nodes for an eviction policy of ours.

vLLM evicts *chunks* by name. A name is the digest of all that is before it, so a name that two requests have means
the same path up to there; and when a request ends vLLM says which names it used, in order. From that a tree is made:
whoever is one place behind in a request is the child. So leaves go first here as well, and what a policy learns of
conversations it can learn here.

A chunk that no request has ended with yet is not shown to the policy: its request runs, and in our own cache would hold
it. It goes when nothing else can, as do chunks whose children are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pagefold.kv import RequestFacts
from pagefold.kv.block import Node
from pagefold.kv.ordered import OrderedNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from pagefold.kv import EvictionPolicy

__all__ = ["ChunkTree", "HeldChunk"]

_ROOT = Node(b"", None, (), 0)
"""Above all chunks whose parent is not there."""


class HeldChunk(Protocol):
    """A chunk of the host's memory, as vLLM counts who uses it.

    Attributes:
        ref_cnt: how many transfers read it; -1 while it is written.
    """

    ref_cnt: int


C = TypeVar("C", bound=HeldChunk)


class _Place(Generic[C]):
    """Where a chunk is in the tree.

    Attributes:
        node: stands for it.
        chunk: vLLM's.
        order: how many were inserted before it.
        is_free: whether no transfer uses it.
        is_used: whether a request that had it has ended: the policy knows it.
        is_placed: whether its node's depth is known.
    """

    __slots__ = ("chunk", "is_free", "is_placed", "is_used", "node", "order")

    def __init__(self, node: Node, chunk: C, order: int) -> None:
        self.node = node
        self.chunk = chunk
        self.order = order
        self.is_free = chunk.ref_cnt == 0
        self.is_used = False
        self.is_placed = False


class ChunkTree(Generic[C]):
    """The chunks that there are, and which of them goes first.

    Not for several threads at once. Every method but ``clear`` is O(log n) for each chunk that it is given.

    Args:
        make_policy: returns a fresh policy.
    """

    def __init__(self, make_policy: Callable[[], EvictionPolicy]) -> None:
        self._make_policy = make_policy
        self.clear()

    def __len__(self) -> int:
        return len(self._places)

    def clear(self) -> None:
        """Forget all chunks, whoever uses them, and all that was learned."""
        self._policy = self._make_policy()
        self._places: dict[bytes, _Place[C]] = {}
        self._rest = OrderedNodes()  # free, and not shown to the policy
        self._num_free = 0
        self._num_inserted = 0
        self._tick = 0

    def get(self, key: bytes) -> C | None:
        """Return a chunk, if it is there. Changes nothing."""
        place = self._places.get(key)
        return None if place is None else place.chunk

    def insert(self, key: bytes, chunk: C) -> None:
        """Add a chunk that is not there."""
        assert key not in self._places, "a chunk is inserted once"
        self._num_inserted += 1
        place = self._places[key] = _Place(Node(key, _ROOT, (), self._tick), chunk, self._num_inserted)
        self._policy.on_insert(place.node)
        self._num_free += place.is_free
        self._offer(place)

    def remove(self, key: bytes) -> None:
        """Take out a chunk that could not be written; one that is not there is none of ours."""
        place = self._places.get(key)
        if place is not None:
            self._drop(place)

    def mark_evictable(self, key: bytes) -> None:
        """Say that nobody uses a chunk any more."""
        place = self._places[key]
        self._num_free += not place.is_free
        place.is_free = True
        self._offer(place)

    def mark_non_evictable(self, key: bytes) -> None:
        """Say that somebody uses a chunk."""
        place = self._places[key]
        self._withdraw(place)
        self._num_free -= place.is_free
        place.is_free = False

    def use(self, keys: Iterable[bytes], reused: Collection[bytes], position_of: Callable[[bytes], int | None]) -> None:
        """Say that a request has ended that used a path.

        Args:
            keys: of its chunks, first to last, as far as they were told; those that are not there are passed over.
            reused: those that it found.
            position_of: returns how many tokens there are up to a chunk's end, if that is known.
        """
        places = [place for key in dict.fromkeys(keys) if (place := self._places.get(key)) is not None]
        if not places:
            return
        self._tick += 1
        self._link(places, position_of)
        path = _path_to(places[-1].node)
        places = [self._places[node.key] for node in path]
        for place in places:
            self._withdraw(place)
            place.node.last_used = self._tick
        num_found = next((num for num in range(len(path), 0, -1) if path[num - 1].key in reused), 0)
        found = [place.node for place in places[:num_found] if place.is_used or place.node.key in reused]
        if found:
            for node in found:
                node.num_hits += 1
            self._policy.on_hit(found)
        self._policy.on_release(path[-1], RequestFacts())
        for place in places:
            place.is_used = True
            self._offer(place)

    def evict(self, num: int, protected: Collection[bytes]) -> list[tuple[bytes, C]] | None:
        """Take out ``num`` chunks that nobody uses, none of them ``protected``; if there are fewer, none, and None."""
        kept = {key for key in protected if (place := self._places.get(key)) is not None and place.is_free}
        if self._num_free - len(kept) < num:
            return None
        evicted: list[tuple[bytes, C]] = []
        aside: list[_Place[C]] = []
        while len(evicted) < num:
            node = self._policy.victim() or self._rest.first()
            assert node is not None, "so many are free"
            place = self._places[node.key]
            if node.key in kept:
                self._withdraw(place)
                aside.append(place)
            else:
                assert place.chunk.ref_cnt == 0, "nobody uses what is free"
                evicted.append((node.key, place.chunk))
                self._drop(place)
        for place in aside:
            self._offer(place)
        return evicted

    # Inside.

    def _link(self, places: list[_Place[C]], position_of: Callable[[bytes], int | None]) -> None:
        """Make each the child of the one before it; but never of one that is as deep: such names contradict others."""
        before = _ROOT
        for place in places:
            node = place.node
            if not place.is_placed:
                position = position_of(node.key)
                node.depth = before.depth + 1 if position is None else position
                place.is_placed = True
            if before is not _ROOT and node.parent is not before and before.depth < node.depth:
                assert node.parent is not None, "only the root has none"
                node.parent.children.pop(node.key, None)
                was_leaf_of = self._places.get(node.parent.key)
                node.parent = before
                before.children[node.key] = node
                if was_leaf_of is not None:
                    self._offer(was_leaf_of)
                above = self._places[before.key]
                self._withdraw(above)
                self._offer(above)  # it is no leaf any more
            before = node

    def _drop(self, place: _Place[C]) -> None:
        node = place.node
        self._withdraw(place)
        self._num_free -= place.is_free
        del self._places[node.key]
        self._policy.on_evict(node)
        for child in node.children.values():
            child.parent = _ROOT
        node.children = {}
        parent = node.parent
        if parent is not None and parent is not _ROOT:
            parent.children.pop(node.key, None)
            self._offer(self._places[parent.key])

    def _offer(self, place: _Place[C]) -> None:
        """Let a chunk be chosen, if nobody uses it: by the policy, if it knows it and it is a leaf."""
        node = place.node
        if not place.is_free or node.evictable:
            return
        if place.is_used and not node.children:
            if node in self._rest:
                self._rest.remove(node)
            node.evictable = True
            self._policy.on_idle(node)
        elif node not in self._rest:
            self._rest.add(node, (node.last_used, -place.order))

    def _withdraw(self, place: _Place[C]) -> None:
        node = place.node
        if node.evictable:
            node.evictable = False
            self._policy.on_busy(node)
        elif node in self._rest:
            self._rest.remove(node)


def _path_to(tail: Node) -> list[Node]:
    """Return the nodes of a path, the first one first."""
    path = [tail]
    while (parent := path[-1].parent) is not None and parent is not _ROOT:
        path.append(parent)
    path.reverse()
    return path
