"""Residuals: where running sequences have K and V of the block that they are filling, until it is sealed.

Of a codec that seals blocks (``codec.py``). A residual has room for one block in 16 bit, of all layers, and belongs to
one cache, from ``acquire`` or ``fork`` to ``release``. In it is what its sequence has computed of its last block; of a
block that is full nothing is read there any more.

There are as many as sequences may run at once, so a sequence that may run has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.lodger import Lodger
from pagefold.kv.plans import ResidualCopy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv.sequence_cache import SequenceCache

__all__ = ["NO_RESIDUALS", "Residuals"]


class Residuals(Lodger):
    """Who has which residual, and the copies that forks need.

    Args:
        num_residuals: how many there are.
        block_size: tokens a block.

    Attributes:
        num_residuals: how many there are.
        free_ids: those that nobody has.
        pending_copies: decided, and not handed over yet.
    """

    def __init__(self, num_residuals: int, block_size: int) -> None:
        self.num_residuals = num_residuals
        self._block_size = block_size
        self.free_ids = list(reversed(range(num_residuals)))
        self.pending_copies: list[ResidualCopy] = []
        self._lost: set[int] = set()

    def on_acquire(self, cache: SequenceCache) -> None:
        """Give ``cache`` a residual, with nothing in it."""
        assert self.free_ids, "more caches than sequences that may run"
        cache.residual_id = self.free_ids.pop()

    def on_fork(self, cache: SequenceCache, twin: SequenceCache) -> None:
        """Give ``twin`` a residual with what that of ``cache`` holds: copied before the next step's first write."""
        self.on_acquire(twin)
        self.pending_copies.append(ResidualCopy(cache.residual_id, twin.residual_id))

    def on_release(self, cache: SequenceCache) -> None:
        """Take a cache's residual back; what it was to be filled with is not copied any more.

        What others copy from it is still there: nobody writes before the copies are made.
        """
        self.pending_copies = [copy for copy in self.pending_copies if copy.dst != cache.residual_id]
        self._lost.discard(cache.residual_id)
        self.free_ids.append(cache.residual_id)
        cache.residual_id = -1

    def ids_of(self, caches: Iterable[SequenceCache | None]) -> list[int]:
        """Return the residual of each of ``caches``, all of which are held; none where blocks are not sealed."""
        return [cache.residual_id for cache in caches if cache is not None]

    def limit(self, cache: SequenceCache, start: int, num_tokens: int, num_all: int) -> int:  # noqa: ARG002
        """Return how many tokens a sequence may compute in one step; see :meth:`Lodger.limit`.

        What begins inside a block goes no further than its end. So a residual is overwritten only by who needs none of
        what it held, and a step that fails has taken nothing away. And what does not get to the end of its tokens ends
        where a block does, if it gets so far.
        """
        block_size = self._block_size
        if start % block_size:
            return min(num_tokens, block_size - start % block_size)
        if start + num_tokens < num_all and num_tokens > block_size:
            return num_tokens - num_tokens % block_size
        return num_tokens

    def take_copies(self) -> list[ResidualCopy]:
        """Hand over the copies that the step being planned must make before its first write."""
        copies, self.pending_copies = self.pending_copies, []
        return copies

    def failed(self, copies: Iterable[ResidualCopy]) -> None:
        """A step failed that was to make these: whoever wrote in it may have written where they read from."""
        self._lost.update(copy.dst for copy in copies)

    def overwritten(self, cache: SequenceCache) -> None:
        """A step failed that needs what this residual held, and one behind it may have begun the next block there."""
        self._lost.add(cache.residual_id)

    def take_lost(self, cache: SequenceCache) -> bool:
        """Whether what the residual of ``cache`` held is lost; who asks knows now that nothing is in it."""
        is_lost = cache.residual_id in self._lost
        self._lost.discard(cache.residual_id)
        return is_lost


class _NoResiduals(Residuals):
    """Blocks are not sealed: nobody needs a residual."""

    is_on = False

    def ids_of(self, caches: Iterable[SequenceCache | None]) -> list[int]:  # noqa: ARG002
        return []

    def overwritten(self, cache: SequenceCache) -> None:
        pass


NO_RESIDUALS: Residuals = _NoResiduals(0, 1)
"""No residuals; it never changes, so all cores without some share it."""
