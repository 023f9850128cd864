"""OrderKey: what a request is ordered by among those that wait, and among those that run."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OrderKey"]


class OrderKey(NamedTuple):
    """What a request is ordered by: the smallest goes first, and no two are equal.

    Attributes:
        tag: the scheduling policy's.
        rank: twice its place in the order of arrival; of who was put behind another one, one more than that one's.
        arrival: its place in the order of arrival.
    """

    tag: float
    rank: int
    arrival: int

    @classmethod
    def of(cls, tag: float, arrival: int) -> OrderKey:
        """Return the key of who has ``tag`` and was the ``arrival``-th to come."""
        return cls(tag, 2 * arrival, arrival)

    def behind(self, arrival: int) -> OrderKey:
        """Return the key of who was the ``arrival``-th to come, and goes right behind whose key this is."""
        return OrderKey(self.tag, self.rank + 1, arrival)
