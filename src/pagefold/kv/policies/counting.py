"""How often blocks were used, those included that were evicted and came back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.eviction import KeyPolicy
from pagefold.kv.policies.ghosts import Ghosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.kv.block import Node

__all__ = ["CountingPolicy"]

_GHOSTS_PER_NODE = 8.0
_LEAST_GHOSTS = 1 << 16


class CountingPolicy(KeyPolicy):
    """A key policy that knows how often a node was used: published or hit, now or before it was last evicted.

    Args:
        key: node to a comparable tuple of numbers; may ask :meth:`num_uses`.
        sample: share of all blocks that it is told of.
    """

    def __init__(self, key: Callable[[Node], tuple[float, ...]], sample: float = 1.0) -> None:
        super().__init__(key)
        self._uses: dict[Node, int] = {}
        self._ghosts: Ghosts[int] = Ghosts(_GHOSTS_PER_NODE, round(sample * _LEAST_GHOSTS))

    def num_uses(self, node: Node) -> int:
        """Return how often ``node`` was used."""
        return self._uses[node]

    def on_insert(self, node: Node) -> None:
        """Count a first use, or the next one after its eviction."""
        self._uses[node] = 1 + (self._ghosts.recall(node.path_hash) or 0)

    def on_hit(self, path: list[Node]) -> None:
        """Count a use of all of ``path``."""
        for node in path:
            self._uses[node] += 1

    def on_evict(self, node: Node) -> None:
        """Remember its count."""
        num_uses = self._uses.pop(node)
        self._ghosts.remember(node.path_hash, num_uses, len(self._uses))
