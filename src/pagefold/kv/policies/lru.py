"""LRU: evict what was used least recently."""

from __future__ import annotations

from pagefold.kv.eviction import KeyPolicy

__all__ = ["Lru"]


class Lru(KeyPolicy):
    """Evicts by last use, of equals the deepest."""

    def __init__(self) -> None:
        super().__init__(lambda node: (node.last_used, -node.depth))
