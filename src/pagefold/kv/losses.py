"""Losses: what giving up a sequence's blocks would free, and what of them would have to be computed again.

What another table or a pin keeps is neither freed nor lost: whoever goes on from it finds it again. Of the rest nothing
is hoped to be found on the device, since it is given up because memory is short. Where there is a host tier, what is
published goes there, and coming back costs the share of computing that the arbiter says.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.held_block import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv.arbiter import Arbiter
    from pagefold.kv.block import BlockId
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.pool import BlockPool
    from pagefold.kv.sequence_cache import SequenceCache

__all__ = ["Loss", "Losses"]


class Loss(NamedTuple):
    """What giving up would come to.

    Attributes:
        num_tokens: tokens to be computed again; of those that would be restored, a share.
        num_blocks: blocks that would be free, or could be evicted.
    """

    num_tokens: float
    num_blocks: int

    def in_blocks(self, block_size: int) -> float:
        """Return blocks of tokens lost for each block freed, to the nearest whole number; inf where none is freed."""
        return round(self.num_tokens / block_size / self.num_blocks) if self.num_blocks else float("inf")


class Losses:
    """Weighs what sequences have. It reads only.

    Args:
        pool: the blocks.
        host: where evicted blocks go.
        arbiter: says what restoring costs.
        block_size: tokens a block.
    """

    def __init__(self, pool: BlockPool, host: HostTier, arbiter: Arbiter, block_size: int) -> None:
        self._pool = pool
        self._host = host
        self._arbiter = arbiter
        self._block_size = block_size

    def of(self, caches: Sequence[SequenceCache], num_tokens: Sequence[int]) -> Loss:
        """Return what giving up ``caches``, all of them at once, would come to.

        Args:
            caches: of one sequence; or of several that go together and have their beginning in common.
            num_tokens: how many tokens each of them has computed.
        """
        first = caches[0]
        if first.streams:  # all of it is in the arena then, and is gone on from there
            hot = len(first.only_table.block_ids) - len(first.cold)
            return Loss(num_tokens[0] * self._arbiter.restore_share(HOST), hot)
        if len(caches) == 1 and len(first.tables) == 1 and not first.tables[0].num_trimmed:
            block_ids = first.tables[0].block_ids
            num_kept = bisect_left(block_ids, x=True, key=self._is_own)  # whoever keeps a block keeps those before it
            return Loss(self._lost(first, num_kept, num_tokens[0]), len(block_ids) - num_kept)
        return self._of_several(caches, num_tokens)

    def _is_own(self, block_id: BlockId) -> bool:
        """Whether no other table holds a block, and no pin keeps it."""
        block = self._pool.blocks[block_id]
        return block.num_table_refs == 1 and not block.num_pin_refs

    def _lost(self, cache: SequenceCache, num_kept: int, num_tokens: int) -> float:
        """Return the tokens lost of a cache whose first ``num_kept`` blocks stay with somebody."""
        num_published = cache.num_published if cache.has_path else 0
        begins = min(num_tokens, min(num_kept, num_published) * self._block_size)
        if not self._host.is_on:
            return num_tokens - begins
        restored = max(0, min(num_tokens, num_published * self._block_size) - begins)
        return num_tokens - begins - restored + restored * self._arbiter.restore_share(HOST)

    def _of_several(self, caches: Sequence[SequenceCache], num_tokens: Sequence[int]) -> Loss:
        """The same of several sequences or cache groups, block by block."""
        num_refs: dict[BlockId, int] = {}
        for cache in caches:
            for block_id in cache.all_block_ids():
                num_refs[block_id] = num_refs.get(block_id, 0) + 1
        blocks = self._pool.blocks
        freed = {
            block_id
            for block_id, num in num_refs.items()
            if blocks[block_id].num_table_refs == num and not blocks[block_id].num_pin_refs
        }
        whole = [table.block_ids for table in caches[0].tables if not table.num_trimmed]
        num_kept = min((_num_before(block_ids, freed) for block_ids in whole), default=0)
        lost = self._lost(caches[0], num_kept, num_tokens[0])
        seen = set(caches[0].tables[0].block_ids)
        for cache, num in zip(caches[1:], num_tokens[1:], strict=True):
            table = cache.tables[0]
            for place, block_id in enumerate(table.block_ids, table.num_trimmed):
                if block_id in freed and block_id not in seen:
                    lost += max(0, min(self._block_size, num - place * self._block_size))
                    seen.add(block_id)
        return Loss(lost, len(freed))


def _num_before(block_ids: Sequence[BlockId], freed: set[BlockId]) -> int:
    """Return how many of the first blocks are none of ``freed``."""
    return next((place for place, block_id in enumerate(block_ids) if block_id in freed), len(block_ids))
