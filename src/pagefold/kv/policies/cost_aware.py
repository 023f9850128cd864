"""Cost-aware: evict what would cost least to compute again, for how often it is used (GDSF).

L. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HP Labs HPL-98-69,
1998, section 3: key = clock + frequency * cost / size, the clock being the key of what was evicted last. All blocks
have equal bytes, so size falls out. A block's cost is that of computing it again: its own products, and attention over
all before it, which grows with depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.policies.counting import CountingPolicy
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from pagefold.kv.block import Node

__all__ = ["CostAware"]

_EVEN_CONTEXT = 8192
"""Tokens of context at which attention costs as much as all else: about 6 * hidden size, for models of 1 to 8 B."""


class CostAware(CountingPolicy):
    """Evicts by clock + uses * cost of computing again, of equals the least recently used, then the deepest.

    The clock makes old keys small: what was used often long ago goes in the end.

    Args:
        even_context: tokens of context at which attending to them costs as much as the rest of the model.
    """

    def __init__(self, even_context: int = _EVEN_CONTEXT) -> None:
        super().__init__(self._key_of)
        self._even_context = even_context
        self._clock = 0.0
        self._keys: dict[Node, float] = {}

    def recompute_cost(self, node: Node) -> float:
        """Return what computing ``node`` again costs, where a block without context costs 1."""
        return 1.0 + node.depth * (len(node.key) // TOKEN_BYTES) / self._even_context

    def on_insert(self, node: Node) -> None:
        """Count the node, and give it a key."""
        super().on_insert(node)
        self._rekey(node)

    def on_hit(self, path: list[Node]) -> None:
        """Count a use of all of ``path``, and renew their keys."""
        super().on_hit(path)
        for node in path:
            self._rekey(node)

    def on_evict(self, node: Node) -> None:
        """Move the clock on to its key."""
        super().on_evict(node)
        self._clock = max(self._clock, self._keys.pop(node))

    def _rekey(self, node: Node) -> None:
        self._keys[node] = self._clock + self.num_uses(node) * self.recompute_cost(node)

    def _key_of(self, node: Node) -> tuple[float, ...]:
        return (self._keys[node], node.last_used, -node.depth)
