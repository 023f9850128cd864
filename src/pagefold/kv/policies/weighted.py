"""Weighted: what a request is worth decides how long its blocks stay, and the worth decays.

The rule of the priority queue with aging: a worth that halves every ``half_life`` requests orders blocks by
``log2(worth) + last use / half_life``, which does not change as time goes on, so a heap keeps the order.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from pagefold.kv.eviction import KeyPolicy

if TYPE_CHECKING:
    from pagefold.kv.block import Node
    from pagefold.kv.eviction import RequestFacts

__all__ = ["Weighted"]

_HALF_LIFE = 512
_MOST_LEVELS = 16


class Weighted(KeyPolicy):
    """Evicts what is worth least by now, of equals the deepest.

    A request's worth is its customer's weight, times two for each level of priority before 0, times up to four for one
    that was interrupted: the nearer it was to its end, the more its blocks are worth, since it will be back for them. A
    block is worth the most that any of its users made it, decayed.

    Args:
        half_life: a worth halves while so many requests come and go.
    """

    def __init__(self, half_life: int = _HALF_LIFE) -> None:
        super().__init__(lambda node: (self._score[node], -node.depth))
        self._half_life = half_life
        self._tick = 0  # one for every request that let go
        self._score: dict[Node, float] = {}  # log2 of the worth, as it would have been at tick 0

    def on_insert(self, node: Node) -> None:
        """Give the node a worth of 1 until its request tells."""
        self._score[node] = self._tick / self._half_life

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """Let all of the path be worth what its request is."""
        levels = max(-_MOST_LEVELS, min(_MOST_LEVELS, -facts.priority))
        worth = log2(max(facts.weight, 2.0**-_MOST_LEVELS)) + levels
        if facts.progress < 1:
            worth += 2 * facts.progress
        self._tick += 1
        score = worth + self._tick / self._half_life
        node = tail
        while node.parent is not None:
            self._score[node] = max(self._score[node], score)
            node = node.parent

    def on_evict(self, node: Node) -> None:
        """Forget its worth."""
        del self._score[node]
