"""S3-FIFO: three queues; most blocks are used once, so they leave by a small one.

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, section 4
(algorithm 1): new blocks enter a small FIFO; those used again there move to the main one, the others leave and are
remembered; one that comes back while remembered enters the main one at once. The main FIFO gives a used block another
round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.ordered import OrderedNodes
from pagefold.kv.policies.ghosts import Ghosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import Node
    from pagefold.kv.eviction import RequestFacts

__all__ = ["S3Fifo"]

_SMALL_SHARE = 0.1
_MOST_USES = 3
_GHOSTS_PER_NODE = 0.9


class _Place:
    """Where a node is.

    Attributes:
        is_main: in the main queue, not the small one.
        turn: its place in that queue: the smallest is at the head.
        num_uses: since it was published or given another round, at most three.
    """

    __slots__ = ("is_main", "num_uses", "turn")

    def __init__(self, is_main: bool, turn: int) -> None:  # noqa: FBT001 - of one caller
        self.is_main = is_main
        self.turn = turn
        self.num_uses = 0


class S3Fifo:
    """Evicts from the small queue while that has more than its share, else from the main one.

    Leaf first: of a queue, only what is evictable is looked at. A victim is found by moving those that deserve it, so
    each hit pays for at most one move: O(log n) amortised.

    Args:
        small_share: of all blocks that are there, how many may be in the small queue (the paper's 10 %).
        ghosts_per_node: how many are remembered, for each block that is there (as many as the main queue holds).
    """

    def __init__(self, small_share: float = _SMALL_SHARE, ghosts_per_node: float = _GHOSTS_PER_NODE) -> None:
        self._share = small_share
        self._ghosts: Ghosts[bool] = Ghosts(ghosts_per_node, least=0)
        self._places: dict[Node, _Place] = {}
        self._num_small = 0
        self._turn = 0
        self._small = OrderedNodes()
        self._main = OrderedNodes()

    def on_insert(self, node: Node) -> None:
        """Put it at the end of the small queue, or of the main one if it is remembered."""
        is_main = self._ghosts.recall(node.path_hash) is not None
        self._places[node] = _Place(is_main, self._next_turn())
        self._num_small += not is_main

    def on_hit(self, path: list[Node]) -> None:
        """Count a use of all of ``path``."""
        for node in path:
            place = self._places[node]
            if place.num_uses < _MOST_USES:
                place.num_uses += 1

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """Nothing to do: ``on_idle`` follows."""

    def on_evict(self, node: Node) -> None:
        """Remember the node, if it left by the small queue."""
        if self._places.pop(node).is_main:
            return
        self._num_small -= 1
        self._ghosts.remember(node.path_hash, True, len(self._places))  # noqa: FBT003 - a set, as a dict

    def on_idle(self, node: Node) -> None:
        """Offer ``node`` at its place."""
        place = self._places[node]
        (self._main if place.is_main else self._small).add(node, (place.turn,))

    def on_busy(self, node: Node) -> None:
        """Withdraw ``node``; it keeps its place."""
        (self._main if self._places[node].is_main else self._small).remove(node)

    def victim(self) -> Node | None:
        """Return the first that was not used since it came, moving those that were."""
        while True:
            from_small = self._num_small > self._share * len(self._places)
            node = (self._small if from_small else self._main).first()
            if node is None:
                from_small = not from_small
                node = (self._small if from_small else self._main).first()
                if node is None:
                    return None
            place = self._places[node]
            if from_small and place.num_uses > 1:
                self._small.remove(node)
                self._num_small -= 1
                place.is_main, place.num_uses = True, 0
            elif not from_small and place.num_uses > 0:
                place.num_uses -= 1
            else:
                return node
            place.turn = self._next_turn()
            self._main.add(node, (place.turn,))

    def score(self, node: Node) -> float:
        """Return its place in its queue."""
        return float(self._places[node].turn)

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable nodes."""
        yield from self._small
        yield from self._main

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn
