"""Residuals: where running sequences have K and V of the block that they are filling, until it is sealed.

Of a codec that seals blocks (``codec.py``). A residual has room for one block in 16 bit, of all layers, and belongs to
one table, from ``acquire`` or ``fork`` to ``release``. In it is what its sequence has computed of its last block; of a
block that is full nothing is read there any more.

There are as many as sequences may run at once, so a sequence that may run has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.plans import ResidualCopy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv.table import BlockTable

__all__ = ["Residuals"]


class Residuals:
    """Who has which residual, and the copies that forks need.

    Args:
        num_residuals: how many there are.

    Attributes:
        num_residuals: as given.
        free_ids: those that nobody has.
    """

    def __init__(self, num_residuals: int) -> None:
        self.num_residuals = num_residuals
        self.free_ids = list(reversed(range(num_residuals)))
        self._copies: list[ResidualCopy] = []  # decided, and not handed over yet
        self._lost: set[int] = set()

    def take(self, table: BlockTable) -> None:
        """Give ``table`` a residual, with nothing in it."""
        assert self.free_ids, "more tables than sequences that may run"
        table.residual_id = self.free_ids.pop()

    def fork(self, table: BlockTable, twin: BlockTable) -> None:
        """Give ``twin`` a residual with what that of ``table`` holds: copied before the next step's first write."""
        self.take(twin)
        self._copies.append(ResidualCopy(table.residual_id, twin.residual_id))

    def release(self, table: BlockTable) -> None:
        """Take a table's residual back; what it was to be filled with is not copied any more.

        What others copy from it is still there: nobody writes before the copies are made.
        """
        self._copies = [copy for copy in self._copies if copy.dst != table.residual_id]
        self._lost.discard(table.residual_id)
        self.free_ids.append(table.residual_id)
        table.residual_id = -1

    def take_copies(self) -> list[ResidualCopy]:
        """Hand over the copies that the step being planned must make before its first write."""
        copies, self._copies = self._copies, []
        return copies

    def failed(self, copies: Iterable[ResidualCopy]) -> None:
        """A step failed that was to make these: whoever wrote in it may have written where they read from."""
        self._lost.update(copy.dst for copy in copies)

    def is_intact(self, table: BlockTable) -> bool:
        """Whether the residual of ``table`` holds what it should: not after a step failed that was to fill it."""
        return table.residual_id not in self._lost
