"""PromptCache: the real cache, with prompts one after another: looked up, computed, cached. No model, and no timing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import ignore
from pagefold.kv import KVCore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.events import Emit
    from pagefold.kv import EvictionPolicy

__all__ = ["PromptCache"]

_NAMESPACE = b""


class PromptCache:
    """A cache whose size is what is kept between prompts: the one that runs has room of its own.

    So no policy must evict before it knows what came.

    Args:
        num_blocks: that are kept.
        room: blocks of the longest prompt that will come.
        block_size: tokens a block.
        policy: who is evicted first.
        emit: where events go.
    """

    def __init__(
        self, num_blocks: int, room: int, block_size: int, policy: EvictionPolicy, emit: Emit = ignore
    ) -> None:
        self._num_blocks = num_blocks
        self._core = KVCore(num_blocks + room, block_size=block_size, policy=policy, emit=emit)

    def use(self, packed: bytes, num_tokens: int, hints: Sequence[bool] | None = None) -> int:
        """Use a prompt of whole blocks, and return how many of its first tokens were cached.

        Args:
            packed: its tokens.
            num_tokens: how many.
            hints: of each block whether it will be used again, as somebody thinks.
        """
        core = self._core
        hit = core.match(_NAMESPACE, packed, num_tokens)._replace(partial=None, num_partial_tokens=0)
        cache, num_found = core.acquire(hit)
        fits = core.extend(cache, num_found, num_tokens)
        assert fits, "there is room for any one request"
        promise = core.publishing.promise(cache, packed, num_tokens)
        if promise is not None:
            core.publishing.commit(promise)
        if hints is not None:
            core.uses.hint(cache, hints)
        core.release(cache)
        core.blocks.reclaim(core.pool.num_cached - self._num_blocks)
        return num_found
