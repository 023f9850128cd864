"""Residuals: where running sequences have K and V of the block that they are filling, until it is sealed.

Of a codec that seals blocks (``codec.py``). A residual has room for one block in 16 bit, of all layers, and belongs to
one sequence, from ``acquire`` or ``fork`` to ``release``. In it is what its sequence has computed of its last block; of
a block that is full nothing is read there any more.

One is enough where there are several cache groups. A sequence's tables all end with the same block (``SequenceCache``),
so it fills the same block in each of them at once, and every layer has a place of its own in the residual. What a group
gives back are full blocks, which nobody needs a residual for; the block that is being filled is always held. But a
sequence may lose what its residual holds, in a step that fails, and then computes that block from its beginning: so a
group keeps what is seen from there on (:meth:`Residuals.begins_again_at`).

There are as many as sequences may run at once, so a sequence that may run has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.lodger import Lodger
from pagefold.kv.ops import ResidualCopy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        """Take a cache's residual back; what it was to be filled with is not copied any more, unless others copy that.

        What they copy from it is still there: nobody writes before the copies are made.
        """
        wanted = {copy.src for copy in self.pending_copies}
        if cache.residual_id not in wanted:
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

    def draft_limit(self, cache: SequenceCache, start: int, num_tokens: int) -> int:  # noqa: ARG002
        """Return how many tokens a row may have that ends in drafts: it ends in its block.

        So what was accepted of it is in the residual still, if the rest is rejected; a block that it has sealed is
        sealed again when it is full of the sequence's own tokens.
        """
        return min(num_tokens, self._block_size - start % self._block_size)

    def begins_again_at(self, position: int) -> int:
        """Return where a sequence begins again that has got to ``position``, if what its residual holds is lost."""
        return position - position % self._block_size

    def take_copies(self) -> list[ResidualCopy]:
        """Hand over the copies that the step being planned must make before its first write."""
        copies, self.pending_copies = self.pending_copies, []
        return copies

    def on_failed(self, rows: Sequence[tuple[SequenceCache, int]], copies: Sequence[ResidualCopy]) -> None:
        """Note whose residual may hold something else now.

        Those into which the step was to copy: whoever wrote in it may have written where the copies read from. And
        those in which it began a block: it is the next one, if the step before it failed too.
        """
        self._lost.update(copy.dst for copy in copies)
        self._lost.update(cache.residual_id for cache, start in rows if start % self._block_size == 0)

    def num_left(self, cache: SequenceCache, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` computed ones ``cache`` has: not those of the last block, if it is lost."""
        if cache.residual_id not in self._lost:
            return num_tokens
        self._lost.discard(cache.residual_id)
        return num_tokens - num_tokens % self._block_size


class _NoResiduals(Residuals):
    """Blocks are not sealed: nobody needs a residual."""

    is_on = False

    def ids_of(self, caches: Iterable[SequenceCache | None]) -> list[int]:  # noqa: ARG002
        return []

    def begins_again_at(self, position: int) -> int:
        return position


NO_RESIDUALS: Residuals = _NoResiduals(0, 1)
"""No residuals; it never changes, so all cores without some share it."""
