"""CountingPool: a pool that knows whose each block is, and counts what each tenant has. O(1) a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.block import BlockState
from pagefold.kv.pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv.block import Block, BlockId
    from pagefold.kv.quotas import Quotas

__all__ = ["CountingPool"]


class CountingPool(BlockPool):
    """All blocks of one slab, each with the tenant that it was allocated for.

    Args:
        num_blocks: how many blocks the slab has.
        quotas: know who asks, and keep the counts.
    """

    def __init__(self, num_blocks: int, quotas: Quotas) -> None:
        super().__init__(num_blocks)
        self._quotas = quotas

    def allocate(self) -> Block | None:
        """See :class:`BlockPool`. The block is that tenant's which asks."""
        block = super().allocate()
        if block is not None:
            block.tenant = self._quotas.asker
            self._quotas.count(block.tenant, 1, 0, 0)
        return block

    def acquire(self, block: Block) -> None:
        """See :class:`BlockPool`."""
        if block.state == BlockState.CACHED:
            self._quotas.count(block.tenant, 0, -1, -bool(block.num_pin_refs))
        super().acquire(block)

    def acquire_all(self, blocks: Iterable[Block]) -> list[BlockId]:
        """See :class:`BlockPool`."""
        block_ids: list[BlockId] = []
        for block in blocks:
            self.acquire(block)
            block_ids.append(block.block_id)
        return block_ids

    def release(self, block: Block) -> bool:
        """See :class:`BlockPool`."""
        is_last = super().release(block)
        if block.state == BlockState.CACHED:
            self._quotas.count(block.tenant, 0, 1, bool(block.num_pin_refs))
        return is_last

    def pin(self, block: Block) -> bool:
        """See :class:`BlockPool`."""
        is_first = super().pin(block)
        if is_first and block.state == BlockState.CACHED:
            self._quotas.count(block.tenant, 0, 0, 1)
        return is_first

    def unpin(self, block: Block) -> bool:
        """See :class:`BlockPool`."""
        is_last = super().unpin(block)
        if is_last and block.state == BlockState.CACHED:
            self._quotas.count(block.tenant, 0, 0, -1)
        return is_last

    def withdraw(self, block: Block) -> None:
        """See :class:`BlockPool`."""
        if block.state == BlockState.CACHED:
            self._quotas.count(block.tenant, 0, -1, 0)
        super().withdraw(block)

    def _free(self, block: Block) -> None:
        super()._free(block)
        self._quotas.count(block.tenant, -1, 0, 0)
