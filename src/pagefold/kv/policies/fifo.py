"""FIFO: evict what was published first, however often it was used since."""

from __future__ import annotations

from pagefold.kv.eviction import KeyPolicy

__all__ = ["Fifo"]


class Fifo(KeyPolicy):
    """Evicts by time of publication, of equals the deepest."""

    def __init__(self) -> None:
        super().__init__(lambda node: (node.created_at, -node.depth))
