"""Streaming: sequences that are larger than the device, whose cold blocks are read where they are, in the host's arena.

A cache that streams is ``[cold ... cold][hot ... hot]``: cold blocks lie in the arena, hot ones on the device, and new
tokens are written into hot ones only. Attention reads both: a cold block's id is ``num_blocks + host_id``, and who
computes has the arena behind the device's blocks. So nothing is staged: of a cold block a layer reads its own cells
only, and the device never holds more than its budget.

What is cold is named and found like all that the host holds, so that a later sequence goes on from it. What is hot is
private to its cache: a path can only be published from its beginning.

Always: a cache's cold blocks are held by the arena and pinned there once for each such cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.block import BlockId
from pagefold.kv.host_tier import NO_HOST
from pagefold.kv.lodger import Lodger
from pagefold.kv.names import digest_of, names_behind, root_digest
from pagefold.kv.pool import BlockPool
from pagefold.kv.sequence_cache import SequenceCache
from pagefold.kv.table import num_blocks_for
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv.block import Node
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.tree import PrefixHit

__all__ = ["NO_STREAMING", "Streaming", "max_hot_blocks_of"]

_HOT_SHARE = 2
"""One over the share of the device that a cache that streams may take: others run beside it."""


def max_hot_blocks_of(num_blocks: int) -> int:
    """Return how many hot blocks a cache has on a device of ``num_blocks``, beside the one that is being filled."""
    return max(1, num_blocks // _HOT_SHARE)


class Streaming(Lodger):
    """Cold blocks: taking them over, making them of hot ones, letting go of them.

    Args:
        pool: the device's blocks.
        host: where cold blocks are.
        block_size: tokens a block.
        store: plans to store the block of a node that stays cached; 0 if the host holds it or has no room.

    Attributes:
        is_on: whether sequences may be larger than the device.
        max_hot_blocks: how many hot blocks a cache has, beside the one that is being filled.
        num_cold_blocks: that caches hold now.
    """

    def __init__(self, pool: BlockPool, host: HostTier, block_size: int, store: Callable[[Node], int]) -> None:
        self.max_hot_blocks = max_hot_blocks_of(pool.num_blocks)
        self.num_cold_blocks = 0
        self._num_forgotten = 0
        self._pool = pool
        self._host = host
        self._block_size = block_size
        self._stride = block_size * TOKEN_BYTES
        self._store = store

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence that can be streamed."""
        return self.max_cold_blocks + self.max_hot_blocks

    @property
    def max_cold_blocks(self) -> int:
        """Cold blocks that all caches could have, if nothing else had a claim on the arena."""
        return self._host.blocks.num_blocks

    def begin(self, hit: PrefixHit) -> SequenceCache:
        """Make a cache that starts with what ``hit`` found, all of it cold: what the device has is stored first."""
        cache = SequenceCache(1, None)
        cache.cold_root = cache.cold_tip = root_digest(hit.namespace)
        host = self._host
        pinned = host.blocks.pin(hit.held)  # before storing, which may need their place
        if self._take_nodes(cache, hit.nodes):
            for held in pinned:
                self._take(cache, held)
                held.count_use(cache.num_loaded_tokens, self._stride // TOKEN_BYTES)
        host.blocks.unpin(pinned)
        return cache

    def cool(self, cache: SequenceCache, packed: bytes, num_tokens: int, num_hot: int, *, is_read: bool = True) -> int:
        """Make hot blocks cold, from the first on, until ``num_hot`` are left. Return how many blocks became free.

        Args:
            cache: one that streams.
            packed: the sequence's packed tokens.
            num_tokens: how many are written; a block that is not full of them stays hot.
            num_hot: how many hot blocks to leave, at least.
            is_read: whether the cache will be read again.
        """
        root = cache.cold_root
        assert root is not None, "a cache that does not stream"
        first = len(cache.cold)
        block_ids = cache.only_table.block_ids
        end = min(len(block_ids) - num_hot, num_tokens * TOKEN_BYTES // self._stride)
        num_cooled = 0
        packed = packed[first * self._stride : max(first, end) * self._stride]
        for name in names_behind(root, cache.cold_tip, packed, self._stride):
            block = self._pool.blocks[block_ids[first + num_cooled]]
            is_stored = self._host.keep(name, block.block_id)
            held = self._host.blocks.get(name.digest)
            if held is None:
                break
            del block_ids[first + num_cooled]
            self._take(cache, held, is_checked=is_read and not is_stored)
            self._pool.release(block)
            num_cooled += 1
        return num_cooled

    def on_fork(self, cache: SequenceCache, twin: SequenceCache) -> None:  # noqa: ARG002
        """See to it that none streams that forks."""
        assert not cache.streams, "a cache that streams does not fork"

    def on_release(self, cache: SequenceCache) -> None:
        """Let go of the cold blocks of ``cache``, if it has any: the host keeps them as all others."""
        if not cache.cold:
            return
        self._host.blocks.unpin(cache.cold)
        self.num_cold_blocks -= len(cache.cold)
        del cache.only_table.block_ids[: len(cache.cold)]
        cache.cold = []

    def num_left(self, cache: SequenceCache, num_tokens: int) -> int | None:
        """Return ``num_tokens``; None where a cold block of ``cache`` is gone: a step failed that was to store it.

        What lies behind a lost block is of no use.
        """
        is_whole = all(self._host.blocks.get(held.name.digest) is held for held in cache.cold)
        return num_tokens if is_whole else None

    def growth(self, cache: SequenceCache, num_tokens: int, num_blocks: int) -> int:
        """Return how many blocks ``cache`` takes yet; see :meth:`Lodger.growth`. Hot ones only, if it streams."""
        if not cache.streams:
            return num_blocks
        num_hot = len(cache.tables[0].block_ids) - len(cache.cold)
        return max(0, min(num_blocks, self.num_hot_blocks(num_tokens) - num_hot))

    def num_hot_blocks(self, num_tokens: int) -> int:
        """Return the most hot blocks of a sequence that streams and has so many tokens."""
        return num_blocks_for(min(num_tokens, self.max_new_tokens), self._block_size) + 1

    def on_forget(self, cache: SequenceCache) -> None:
        """What ``cache`` holds is not to be found any more: its blocks get names that nobody asks for."""
        if cache.cold_root is not None:
            self._num_forgotten += 1
            cache.cold_root = cache.cold_tip = root_digest(b"forgotten %d" % self._num_forgotten)

    def limit(self, cache: SequenceCache, start: int, num_tokens: int, num_all: int) -> int:  # noqa: ARG002
        """Return how many tokens a sequence may compute in one step; see :meth:`Lodger.limit`."""
        return min(num_tokens, self.max_new_tokens) if cache.streams else num_tokens

    def draft_limit(self, cache: SequenceCache, start: int, num_tokens: int) -> int:  # noqa: ARG002
        """Return how many tokens a row may have that ends in drafts: what streams has none."""
        return 1 if cache.streams else num_tokens

    @property
    def max_new_tokens(self) -> int:
        """How many tokens a cache that streams may have computed in one step."""
        return self.max_hot_blocks * self._stride // TOKEN_BYTES

    def _take_nodes(self, cache: SequenceCache, nodes: Sequence[Node]) -> bool:
        """Make the blocks of ``nodes`` cold ones of ``cache`` too; whether all could be."""
        host = self._host
        for node in nodes:
            if not (node.attached and node.committed):  # promised only: it cannot be stored before it is written
                return False
            is_stored = self._store(node)
            held = host.blocks.get(digest_of(node))
            if held is None:
                return False
            self._take(cache, held, is_checked=not is_stored)
        return True

    def _take(self, cache: SequenceCache, held: HeldBlock, *, is_checked: bool = True) -> None:
        """Make ``held`` the next cold block of ``cache``. What is not stored just now is checked before it is read."""
        self._host.blocks.pin([held])
        if is_checked:
            self._host.check(held)
        cache.only_table.block_ids.insert(len(cache.cold), BlockId(self._pool.num_blocks + held.host_id))
        cache.cold.append(held)
        cache.cold_tip = held.name.digest
        self.num_cold_blocks += 1


class _NoStreaming(Streaming):
    """No sequence is larger than the device."""

    is_on = False

    def begin(self, hit: PrefixHit) -> SequenceCache:
        msg = f"{hit.namespace!r}: streaming is not allowed"
        raise AssertionError(msg)


NO_STREAMING: Streaming = _NoStreaming(BlockPool(0), NO_HOST, 1, lambda _: 0)
"""No streaming; it never changes, so all cores without it share it."""
