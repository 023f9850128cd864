"""Needs: how many blocks a request takes of the device; of chunks that are packed, as many as others have kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv import NO_MASK, num_blocks_for

if TYPE_CHECKING:
    from pagefold.kv import KVCore
    from pagefold.request import Request

__all__ = ["Needs"]

_WATERMARK = 0.01
"""Share of all blocks that admission leaves free beside running requests, so that they can grow before one of them must
be preempted again (vLLM's value)."""


class Needs:
    """How many blocks requests take.

    Args:
        core: the KV core.
        max_num_batched_tokens: of one step.

    Attributes:
        watermark_blocks: that admission leaves free.
    """

    def __init__(self, core: KVCore, max_num_batched_tokens: int) -> None:
        self.watermark_blocks = int(core.pool.num_blocks * _WATERMARK)
        self._core = core
        self._max_num_batched_tokens = max_num_batched_tokens

    def whole(self, request: Request, num_steps: int = 0) -> int:
        """Return the blocks that ``request`` is expected to hold at most at once, with the next token.

        With those of ``num_steps`` steps more, as far as it may sample tokens.
        """
        num_tokens = request.num_tokens + 1 + _num_later(request, num_steps)
        return self._core.num_blocks_for(num_tokens, self._step_tokens(request), is_expected=True, mask=request.mask)

    def to_begin(self, request: Request, num_begun: int) -> int:
        """Return the most blocks that ``request`` holds behind its first step; 0 where nothing is packed.

        That step is granted all that its chunks may keep, which may be more than is expected to stay of the whole.

        Args:
            request: that waits.
            num_begun: how many of its tokens it begins with.
        """
        if not self._core.packing.is_on or request.mask == NO_MASK:
            return 0
        step_tokens = self._step_tokens(request)
        return self._core.num_blocks_for(min(request.num_tokens + 1, num_begun + step_tokens), step_tokens)

    def growth(self, request: Request, num_steps: int = 0) -> int:
        """Return the blocks that ``request``, which runs, is expected to take yet, of what it has tokens for.

        With those of ``num_steps`` steps more, as far as it may sample tokens.
        """
        core, cache = self._core, request.cache
        assert cache is not None
        num_tokens = request.num_tokens + _num_later(request, num_steps)
        if not core.trims and not cache.streams:  # asked of all that run, whenever somebody may be let in
            size = core.block_size
            return max(0, num_blocks_for(num_tokens, size) - num_blocks_for(cache.capacity, size)) * core.num_groups
        num_new = min(request.num_tokens - request.num_computed_tokens, self._step_tokens(request))
        return core.num_blocks_for(num_tokens, num_new, cache, is_expected=True, mask=request.mask)

    def at(self, request: Request, num_tokens: int) -> int:
        """Return the blocks that ``request`` is expected to hold at most at once until it has ``num_tokens``."""
        return self._core.num_blocks_for(num_tokens, self._step_tokens(request), is_expected=True, mask=request.mask)

    def left(self, request: Request, num_tokens: int) -> int:
        """Return the blocks that ``request``, which runs, is expected to take yet until it has ``num_tokens``."""
        core, cache = self._core, request.cache
        assert cache is not None
        if not core.trims and not cache.streams:  # asked whenever somebody takes a block
            size = core.block_size
            num_places = max(0, num_blocks_for(num_tokens, size) - num_blocks_for(cache.capacity, size))
            return (num_places + cache.may_share_tail) * core.num_groups
        return core.num_blocks_for(num_tokens, self._step_tokens(request), cache, is_expected=True, mask=request.mask)

    def _step_tokens(self, request: Request) -> int:
        """Return the most tokens of ``request`` that a step computes where there is no room for more."""
        if not self._core.packing.is_on or request.mask == NO_MASK:
            return self._max_num_batched_tokens
        return min(self._max_num_batched_tokens, self._core.packing.short_step)


def _num_later(request: Request, num_steps: int) -> int:
    """Return how many tokens ``request`` may sample in so many steps."""
    return max(0, min(num_steps, request.stop.max_total_tokens - request.num_tokens)) if num_steps else 0
