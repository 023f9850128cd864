"""Streamer: requests that are larger than the device: when they run, and when they make room.

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
    from pagefold.scheduler.needs import Needs

__all__ = ["Streamer"]


class Streamer:
    """What is done and asked of requests that stream only. Without streaming in the core no request does.

    Args:
        core: the KV core.
        needs: how many blocks requests take.
    """

    def __init__(self, core: KVCore, needs: Needs) -> None:
        self._core = core
        self._needs = needs

    def streams(self, request: Request) -> bool:
        """Whether ``request``, which waits, must stream: with the next token it does not fit the device."""
        return self._core.streaming.is_on and self._needs.whole(request) > self._core.pool.num_blocks

    def num_hot_blocks(self, request: Request) -> int:
        """Return the most hot blocks that ``request``, which waits, will have."""
        return self._core.streaming.num_hot_blocks(request.num_tokens)

    def fits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether the arena could hold ``request`` beside what streams already."""
        others = [other for other in running if other.cache is not None and other.cache.streams]
        if not others:
            return True
        num_cold = sum(self._needs.whole(one) - self._core.streaming.max_hot_blocks for one in (request, *others))
        return num_cold <= self._core.streaming.max_cold_blocks

    def make_room(self, request: Request, end: int) -> None:
        """Make cold what ``request`` has too much of on the device, before it is given room up to ``end``."""
        cache = request.cache
        assert cache is not None
        num_new = num_blocks_for(end, self._core.block_size) - len(cache.only_table.block_ids)
        self._cool(request, max(0, self._core.streaming.max_hot_blocks - num_new))

    def cool(self, running: Iterable[Request]) -> bool:
        """Make cold what can be of those that stream, until some block is free; whether any is."""
        return self._core.streaming.is_on and any(self._cool(request, 0) for request in running)

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

    def _cool(self, request: Request, num_hot: int, *, is_read: bool = True) -> int:
        cache = request.cache
        if cache is None or not cache.streams:
            return 0
        if len(cache.only_table.block_ids) - len(cache.cold) <= num_hot:
            return 0
        return self._core.streaming.cool(cache, request.packed(), request.num_computed_tokens, num_hot, is_read=is_read)
