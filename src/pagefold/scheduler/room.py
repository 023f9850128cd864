"""Room: whether there is memory for a request that waits, beside those that run.

Memory comes from free and cached blocks, and then from pins; for somebody who waits nobody is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv import PrefixHit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import KVCore
    from pagefold.request import Request
    from pagefold.scheduler.streaming import Streamer

__all__ = ["Room"]

_WATERMARK = 0.01
"""Share of all blocks that admission leaves free beside running requests, so that they can grow before one of them must
be preempted again (vLLM's value)."""


class Room:
    """What the scheduler asks before it lets a request in.

    Args:
        core: the KV core.
        streamer: knows how requests that stream grow.
    """

    def __init__(self, core: KVCore, streamer: Streamer) -> None:
        self._core = core
        self._streamer = streamer
        self._watermark_blocks = int(core.pool.num_blocks * _WATERMARK)

    def for_all(self, request: Request, hit: PrefixHit, running: Sequence[Request], now: float) -> PrefixHit | None:
        """Return what of ``hit`` can be used if all of the request's tokens fit beside ``running``, or None.

        All its tokens, not only its first chunk: a prompt that is let in and cannot be finished only preempts others.
        Samples that will fork need a block each, for a copy of the tail or the next one. A request that runs alone does
        not wait for these: its samples can run one after another.
        """
        needed = -(-(request.num_tokens + 1) // self._core.block_size)
        for other in running:
            needed += self._streamer.num_growth(other) + len(other.forks)
        if running:
            needed += self._watermark_blocks + len(request.forks)
        missing = self._num_missing(needed, hit)
        if missing > 0 and not self._give_up_pins(missing, hit, now):
            return None
        if self._num_missing(needed, hit) == 0:  # a copy keeps its source pinned for this step: one block more
            return hit._replace(partial=None, num_partial_tokens=0)
        return hit

    def to_stream(self, request: Request, running: Sequence[Request], now: float) -> bool:
        """Make room for what a request that streams needs of the device at a time; False if there is none."""
        core, streamer = self._core, self._streamer
        if request.forks or not streamer.fits(request, running):
            return False
        needed = streamer.num_hot_blocks(request.num_tokens)
        needed += sum(streamer.num_growth(other) for other in running)
        hit = PrefixHit(request.namespace, [], None, 0)
        while (missing := self._num_missing(needed, hit)) > 0 and streamer.cool(running):
            pass
        if missing > 0 and not self._give_up_pins(missing, hit, now):
            return False
        return core.cache.make_free(needed)

    def _num_missing(self, needed: int, hit: PrefixHit) -> int:
        """Return how many of ``needed`` blocks can neither be allocated nor are a gift of ``hit``; may be negative."""
        # Hit blocks that nobody keeps are among the available ones, so they are needed too; kept ones are a gift.
        kept = sum(1 for node in hit.nodes if node.block and (node.block.num_table_refs or node.block.num_pin_refs))
        return needed - kept - self._core.num_available

    def _give_up_pins(self, num_blocks: int, hit: PrefixHit, now: float) -> bool:
        """Give up pins until ``num_blocks`` fewer are missing beside ``hit``; none at all if that is out of reach."""
        left = self._num_kept_beside(hit) - num_blocks
        if left < 0:
            return False
        while self._num_kept_beside(hit) > left:
            has_gained = self._core.pins.give_up(now, hit.nodes)
            assert has_gained, "pins alone keep a block, and no pin keeps it"
        return True

    def _num_kept_beside(self, hit: PrefixHit) -> int:
        """Return how many blocks pins alone keep, those of ``hit`` aside: it has them anyway."""
        own = sum(1 for node in hit.nodes if node.block and node.block.num_pin_refs and not node.block.num_table_refs)
        return self._core.pool.num_pinned - own
