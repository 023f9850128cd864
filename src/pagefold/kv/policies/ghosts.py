"""Ghosts: what is remembered of blocks that were evicted. A block that comes back soon should have stayed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["LEAST_GHOSTS", "Ghosts"]

T = TypeVar("T")

LEAST_GHOSTS = 4096
"""So many may always be remembered, where nothing else is said."""


class Ghosts(Generic[T]):
    """A bounded memory of evicted blocks, by :attr:`Node.path_hash`. The oldest is forgotten first.

    Args:
        per_node: how many are remembered for each node that is there, at most.
        least: how many may always be remembered.
    """

    def __init__(self, per_node: float, least: int = LEAST_GHOSTS) -> None:
        self._per_node = per_node
        self._least = least
        self._values: OrderedDict[int, T] = OrderedDict()  # a dict looks for its first entry behind all that have left

    def __len__(self) -> int:
        return len(self._values)

    def remember(self, path_hash: int, value: T, num_nodes: int) -> None:
        """Remember ``value`` of a block that goes, while ``num_nodes`` blocks are there."""
        values = self._values
        values.pop(path_hash, None)
        values[path_hash] = value
        most = max(self._least, int(self._per_node * num_nodes))
        for _ in range(min(2, len(values) - most)):  # two at a time, so that it shrinks when the cache did
            values.popitem(last=False)

    def recall(self, path_hash: int) -> T | None:
        """Return what is remembered of a block that came back, and forget it; None for nothing."""
        return self._values.pop(path_hash, None)
