"""SLRU: blocks used twice are protected from those used once.

R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system performance", IEEE Computer 27(3),
1994: a probationary and a protected segment, both LRU; a hit promotes, and what the protected segment has no room for
falls back to the recent end of the probationary one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.eviction import KeyPolicy

if TYPE_CHECKING:
    from pagefold.kv.block import Node

__all__ = ["Slru"]

_PROTECTED_SHARE = 0.8


class Slru(KeyPolicy):
    """Evicts the least recent block of the probationary segment, then of the protected one.

    Args:
        protected_share: of all blocks that are there, how many may be protected, 0 to 1.
    """

    def __init__(self, protected_share: float = _PROTECTED_SHARE) -> None:
        super().__init__(self._key_of)
        self._share = protected_share
        self._num_nodes = 0
        self._protected: dict[Node, None] = {}  # least recent first; of one hit, the deepest first
        self._fell: dict[Node, int] = {}  # those that fell back: when
        self._tick = 0

    def on_insert(self, node: Node) -> None:  # noqa: ARG002 - all are on probation first
        """Put the node on probation."""
        self._num_nodes += 1

    def on_hit(self, path: list[Node]) -> None:
        """Protect all of ``path``; those for whom there is no room fall back."""
        for node in reversed(path):
            self._protected.pop(node, None)
            self._protected[node] = None
            self._fell.pop(node, None)
        num_too_many = len(self._protected) - int(self._share * self._num_nodes)
        for _ in range(num_too_many):
            node = next(iter(self._protected))
            del self._protected[node]
            self._tick = max(self._tick, path[0].last_used)
            self._fell[node] = self._tick
            if node in self._idle:
                self._idle.add(node, self._key_of(node))

    def on_evict(self, node: Node) -> None:
        """Forget its segment."""
        self._num_nodes -= 1
        self._protected.pop(node, None)
        self._fell.pop(node, None)

    def _key_of(self, node: Node) -> tuple[float, ...]:
        return (node in self._protected, max(node.last_used, self._fell.get(node, 0)), -node.depth)
