"""Lengths: how long outputs of one kind were lately, and what that says of one that has so many tokens already.

Not all that is known of an output is its length: where ``max_tokens`` or a client ended it, it would have been at least
as long. So quantiles are those of the product-limit estimate (Kaplan & Meier 1958, "Nonparametric Estimation from
Incomplete Observations", section 2): who was cut off counts among those at risk up to where it was cut off, and not
beyond. What is known of one that has ``k`` tokens is the same estimate over those that got beyond ``k``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque

__all__ = ["LEAST_LENGTHS", "Lengths"]

LEAST_LENGTHS = 8
"""From so many lengths on a quantile is told: the least and the most of 8 have 7 of 9 to come between them."""


class Lengths:
    """The last lengths of outputs of one kind.

    Args:
        most: how many are kept; the oldest goes first, so that what has changed is seen.
    """

    __slots__ = ("_by_age", "_in_order", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_age: deque[int] = deque()
        self._in_order = array("q")  # twice the length, and one more if it was cut off: so ends come before cuts

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._in_order)

    def add(self, num_tokens: int, *, is_cut: bool) -> None:
        """Note a length.

        Args:
            num_tokens: of an output that has ended.
            is_cut: whether it would have been longer, perhaps.
        """
        mark = 2 * num_tokens + is_cut
        if len(self._by_age) == self._most:
            del self._in_order[bisect_left(self._in_order, self._by_age.popleft())]
        self._by_age.append(mark)
        insort(self._in_order, mark)

    def num_beyond(self, num_tokens: int) -> int:
        """Return how many were longer than ``num_tokens``."""
        return len(self._in_order) - bisect_left(self._in_order, 2 * num_tokens + 2)

    def quantiles(self, shares: tuple[float, ...], beyond: int = 0) -> list[int | None]:
        """Return for each share the least length that so many are estimated not to pass; None where nothing says.

        Args:
            shares: between 0 and 1, ascending.
            beyond: only of those that were longer than so many tokens.
        """
        in_order = self._in_order
        begin = bisect_left(in_order, 2 * beyond + 2)
        at_risk = len(in_order) - begin
        found: list[int | None] = []
        surviving = 1.0
        for mark in in_order[begin:]:
            if not mark & 1:
                surviving *= (at_risk - 1) / at_risk
                while len(found) < len(shares) and 1.0 - surviving >= shares[len(found)] - 1e-9:
                    found.append(mark >> 1)
                if len(found) == len(shares):
                    return found
            at_risk -= 1
        return found + [None] * (len(shares) - len(found))
