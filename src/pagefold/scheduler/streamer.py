"""Requests that are larger than the device: when they run, how much at a time, and when they make room.

A request streams from its admission on if its tokens do not fit the device then; one that outgrows the device while it
runs is preempted, as the last of all, and streams when it is admitted again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv import num_blocks_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv import KVCore
    from pagefold.request import Request

__all__ = ["Streamer"]


class Streamer:
    """What the scheduler asks about requests that stream. Without streaming in the core no request does.

    Args:
        core: the KV core.
        max_num_batched_tokens: of one step.
    """

    def __init__(self, core: KVCore, max_num_batched_tokens: int) -> None:
        self._core = core
        self._max_num_batched_tokens = max_num_batched_tokens
        self._streaming = core.streaming

    def streams(self, request: Request) -> bool:
        """Whether ``request``, which waits, must stream: with the next token it does not fit the device."""
        return self._streaming.is_on and self.num_blocks(request) > self._core.pool.num_blocks

    def num_blocks(self, request: Request) -> int:
        """Return the most blocks that ``request`` holds at once, with the next token."""
        return self._core.rules.num_blocks_for(request.num_tokens + 1, self._max_num_batched_tokens)

    def limit(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` from ``start`` on ``request``, which has a cache, may compute in a step."""
        cache = request.cache
        assert cache is not None
        return self._core.limit(cache, start, num_tokens, request.num_tokens)

    def num_hot_blocks(self, num_tokens: int) -> int:
        """Return the most hot blocks that a request has which computes so many tokens more."""
        return num_blocks_for(min(num_tokens, self._streaming.max_new_tokens), self._core.block_size) + 1

    def num_growth(self, request: Request) -> int:
        """Return the most blocks that a running request takes yet, of what it has tokens for."""
        cache = request.cache
        assert cache is not None
        num_new = min(request.num_tokens - request.num_computed_tokens, self._max_num_batched_tokens)
        num_more = self._core.rules.num_blocks_for(request.num_tokens, num_new, cache)
        if cache.streams:
            num_hot = len(cache.block_ids) - len(cache.cold)
            num_more = max(0, min(num_more, self.num_hot_blocks(request.num_tokens) - num_hot))
        return num_more

    def fits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether the arena could hold ``request`` beside what streams already."""
        others = [other for other in running if other.cache is not None and other.cache.streams]
        if not others:
            return True
        num_cold = sum(self.num_blocks(one) - self._streaming.max_hot_blocks for one in (request, *others))
        return num_cold <= self._streaming.max_cold_blocks

    def make_room(self, request: Request, end: int) -> None:
        """Make cold what ``request`` has too much of on the device, before it is given room up to ``end``."""
        cache = request.cache
        assert cache is not None
        num_new = num_blocks_for(end, self._core.block_size) - len(cache.block_ids)
        self._cool(request, max(0, self._streaming.max_hot_blocks - num_new))

    def cool(self, running: Iterable[Request]) -> bool:
        """Make cold what can be of those that stream, until some block is free; whether any is."""
        return self._streaming.is_on and any(self._cool(request, 0) for request in running)

    def take_back(self, request: Request, end: int) -> bool:
        """Make room for a request that streams out of what is kept for those that wait; whether there was any."""
        cache = request.cache
        if cache is None or not cache.streams or not self._core.slow.fetches.let_go():
            return False
        self.make_room(request, end)
        return True

    def keep(self, request: Request) -> None:
        """Make cold what ``request`` has, before its cache is released: so that it can be gone on from."""
        self._cool(request, 0, is_read=False)

    def is_intact(self, request: Request) -> bool:
        """Whether all that ``request`` has is still there, after a step failed."""
        cache = request.cache
        return cache is None or self._streaming.is_intact(cache)

    def _cool(self, request: Request, num_hot: int, *, is_read: bool = True) -> int:
        cache = request.cache
        if cache is None or not cache.streams:
            return 0
        if len(cache.block_ids) - len(cache.cold) <= num_hot:
            return 0
        return self._streaming.cool(cache, request.packed(), request.num_computed_tokens, num_hot, is_read=is_read)
