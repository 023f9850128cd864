"""BlockPool: who holds which block. Equal blocks, one free list."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pagefold.kv.block import Block, BlockId, BlockState

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """All blocks of one slab, and the free list.

    The free list is a stack: the block freed last is handed out first, while its bytes may still be in a CPU cache.
    The pool counts references and moves states; what to evict is the tree's and the policy's business.

    Args:
        num_blocks: how many blocks the slab has.

    Attributes:
        num_cached: how many blocks are CACHED.
        num_pinned: how many of those a pin keeps.
        num_packed: how many blocks hold what was packed, by the mask that it was kept by.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[Block] = [Block(BlockId(i)) for i in range(num_blocks)]
        self.free_ids: list[BlockId] = [BlockId(i) for i in reversed(range(num_blocks))]
        self.num_cached = 0
        self.num_pinned = 0
        self.num_packed: Counter[int] = Counter()

    @property
    def num_blocks(self) -> int:
        """How many blocks there are in all."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """How many blocks are in the free list."""
        return len(self.free_ids)

    def allocate(self) -> Block | None:
        """Take a free block for one table: FREE -> ACTIVE. None when the free list is empty."""
        if not self.free_ids:
            return None
        block = self.blocks[self.free_ids.pop()]
        block.to(BlockState.ACTIVE)
        block.num_table_refs = 1
        return block

    def acquire(self, block: Block) -> None:
        """Count one more table that holds ``block``, waking it up if it was only cached."""
        if block.state == BlockState.CACHED:
            block.to(BlockState.ACTIVE)
            self.num_cached -= 1
            if block.num_pin_refs:
                self.num_pinned -= 1
        block.num_table_refs += 1

    def acquire_all(self, blocks: Iterable[Block]) -> list[BlockId]:
        """Count one more table that holds each of ``blocks``, and return their ids; see :meth:`acquire`.

        One loop: a hit has hundreds.
        """
        block_ids: list[BlockId] = []
        append = block_ids.append
        for block in blocks:
            if block.state == BlockState.CACHED:
                block.to(BlockState.ACTIVE)
                self.num_cached -= 1
                if block.num_pin_refs:
                    self.num_pinned -= 1
            block.num_table_refs += 1
            append(block.block_id)
        return block_ids

    def release(self, block: Block) -> bool:
        """Count one table less. Return True when that was the last one.

        A published block is then CACHED; a private one is FREE, or stays ACTIVE until its last transfer lets go.
        """
        assert block.num_table_refs > 0, f"block {block.block_id} is released, and no table holds it"
        block.num_table_refs -= 1
        if block.num_table_refs:
            return False
        if block.node is not None:
            block.to(BlockState.CACHED)
            self.num_cached += 1
            if block.num_pin_refs:
                self.num_pinned += 1
        elif not block.num_io_refs:
            self._free(block)
        return True

    def pin_io(self, block: Block) -> None:
        """Count a transfer that reads or writes ``block``: it cannot become free until :meth:`unpin_io`."""
        block.num_io_refs += 1

    def unpin_io(self, block: Block) -> None:
        """Count a transfer less; a private block that no table holds any more becomes free."""
        block.num_io_refs -= 1
        if not block.num_io_refs and not block.num_table_refs and block.node is None:
            self._free(block)

    def pin(self, block: Block) -> bool:
        """Count a pin that keeps ``block``, which is published. Return True when it is the first one."""
        block.num_pin_refs += 1
        if block.num_pin_refs > 1:
            return False
        if block.state == BlockState.CACHED:
            self.num_pinned += 1
        return True

    def unpin(self, block: Block) -> bool:
        """Count a pin less. Return True when that was the last one."""
        block.num_pin_refs -= 1
        if block.num_pin_refs:
            return False
        if block.state == BlockState.CACHED:
            self.num_pinned -= 1
        return True

    def withdraw(self, block: Block) -> None:
        """Record that no node publishes ``block`` any more, nor pins it; free it if nobody else holds it."""
        assert not block.num_pin_refs, "a pinned block is published"
        block.node = None
        if block.num_table_refs:
            return
        if block.state == BlockState.CACHED:
            self.num_cached -= 1
            if block.num_io_refs:  # a transfer still reads it: in use, though no table holds it
                block.to(BlockState.ACTIVE)
        if not block.num_io_refs:
            self._free(block)

    def note_packed(self, block: Block, mask: int) -> None:
        """Record that what ``block`` holds, from now on until it is free, was packed, and kept by ``mask``."""
        assert block.packed_by is None, f"block {block.block_id} is packed into once"
        block.packed_by = mask
        self.num_packed[mask] += 1

    def _free(self, block: Block) -> None:
        if block.packed_by is not None:
            self.num_packed[block.packed_by] -= 1
            block.packed_by = None
        block.to(BlockState.FREE)
        self.free_ids.append(block.block_id)
