"""Moves: what a step copies before it computes: blocks to blocks, blocks to the host arena, and back.

A move is planned here, handed over when its step is planned, and ends with that step::

    copies, ops = moves.take_copies(), moves.take_host_ops()
    moves.copies_done(copies), moves.host_done(ops)             the step ran
    moves.copies_failed(copies), moves.host_failed(ops)         it failed

Always: what a move reads or writes on the device is pinned from when it is planned until its step has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import BlocksRegained, Emit, HostTransfer
from pagefold.kv.ops import CopyOp

if TYPE_CHECKING:
    from collections import deque

    from pagefold.kv.block import Block, BlockId, Node
    from pagefold.kv.block_cache import BlockCache
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.ops import HostOps
    from pagefold.kv.sequence_cache import SequenceCache
    from pagefold.kv.slow_tiers import SlowTiers

__all__ = ["Moves"]


class Moves:
    """Moves that wait for a step, or are part of one in flight.

    Args:
        blocks: of the device.
        host: those of the host.
        slow: what is behind the host.
        emit: where events go.

    Attributes:
        pending_copies: decided and not handed over yet.
        copies_in_flight: of steps that have not ended.
        lacking: the nodes that lack what is being loaded, by the block that it is loaded into.
    """

    def __init__(self, blocks: BlockCache, host: HostTier, slow: SlowTiers, emit: Emit) -> None:
        self.pending_copies: list[CopyOp] = []
        self.copies_in_flight: list[CopyOp] = []
        self.lacking: dict[BlockId, Node] = {}
        self._blocks = blocks
        self._host = host
        self._slow = slow
        self._emit = emit

    # Planning.

    def copy(self, src: Block, dst: Block, num_tokens: int) -> None:
        """Plan to copy the first ``num_tokens`` positions of a block into another."""
        for copy in self.pending_copies:  # after a failed step src may wait for a copy itself: no copy leans on another
            if copy.dst == src.block_id:
                src = self._blocks.pool.blocks[copy.src]
                break
        self._blocks.pool.pin_io(src)
        self._blocks.pool.pin_io(dst)
        self.pending_copies.append(CopyOp(src.block_id, dst.block_id, num_tokens))

    def load(self, held: HeldBlock, dst: Block, node: Node | None = None) -> None:
        """Plan to load a block that the host holds, pinned, into another.

        Args:
            held: what is loaded.
            dst: where to.
            node: that lacks this block: it has it when it is there.
        """
        self._blocks.pool.pin_io(dst)
        self._host.load(held, dst.block_id)
        if node is not None:
            self.lacking[dst.block_id] = node

    def store(self, node: Node) -> int:
        """Plan to store a node's blocks, which stay what they are. Return how many the host does not hold and will."""
        num_stored = 0
        for block in node.blocks:
            if block is not None and not self._blocks.windows.is_spare(block) and self._host.keep_live(node, block):
                self._blocks.pool.pin_io(block)
                num_stored += 1
        if node.packed is not None and (num_of_chunk := self._blocks.keep_chunk(node, is_live=True)):
            for block in node.packed.blocks:
                self._blocks.pool.pin_io(block)
            num_stored += num_of_chunk
        if num_stored:
            self._blocks.update_evictable(node)
        return num_stored

    def store_cached(self, nodes: deque[Node], num_blocks: int) -> None:
        """Plan to store up to ``num_blocks`` of ``nodes`` that are still cached and not held, taking them off."""
        while nodes and num_blocks > 0:
            node = nodes.popleft()
            if node.attached and node.committed:
                num_blocks -= self.store(node)

    def write_through(self, cache: SequenceCache) -> None:
        """Plan to store what the policy of slow tiers wants written of a cache that will be released."""
        node = cache.tail if self._slow.is_on else None
        while node is not None and node.blocks and node.attached:
            if node.committed and self._slow.writes.wants(node):
                self.store(node)
            node = node.parent

    def drop_unheld(self) -> None:
        """Forget the moves into blocks that no table holds any more, so that they are pinned no longer."""
        blocks = self._blocks.pool.blocks
        if self.pending_copies:
            copies, self.pending_copies = self.pending_copies, []
            for copy in copies:
                if blocks[copy.dst].num_table_refs:
                    self.pending_copies.append(copy)
                else:
                    self._unpin_copy(copy)
        if self._host.has_loads:
            loads = [load for load in self._host.pending.loads if not blocks[load.block_id].num_table_refs]
            self._host.cancel(loads)
            for load in loads:
                self.lacking.pop(load.block_id, None)
            self._blocks.unpin_io(load.block_id for load in loads)

    # The step.

    def take_copies(self) -> list[CopyOp]:
        """Hand over the copies that the step being planned must make before its first write."""
        copies, self.pending_copies = self.pending_copies, []
        self.copies_in_flight.extend(copies)
        return copies

    def copies_done(self, copies: list[CopyOp]) -> None:
        """The copies were made: their blocks are pinned no more."""
        for copy in copies:
            self.copies_in_flight.remove(copy)
            self._unpin_copy(copy)

    def copies_failed(self, copies: list[CopyOp]) -> None:
        """The step failed, perhaps before its copies were made: the next step makes them, again or at last.

        A cache that had been running before the step still waits for its copy; a copy that no cache waits for is
        dropped, here or when its cache is released.
        """
        for copy in copies:
            self.copies_in_flight.remove(copy)
        self.pending_copies[:0] = copies
        self.drop_unheld()

    def take_host_ops(self) -> HostOps:
        """Hand over what the step being planned must move between device and host before its copies."""
        return self._host.take()

    def host_done(self, ops: HostOps) -> None:
        """The step ran: what it loaded and stored is there."""
        if self.lacking:
            regained = [node for load in ops.loads if (node := self._give(load.block_id)) is not None]
            if regained:
                self._emit(BlocksRegained(tuple(regained)))
        self._unpin_host_ops(ops)
        self._host.done(ops)
        if ops.stores or ops.loads:
            self._emit(HostTransfer(len(ops.stores), len(ops.loads)))

    def host_failed(self, ops: HostOps, damaged_ids: frozenset[int] = frozenset()) -> None:
        """The step failed. What it was to store is lost, and so is what came back damaged.

        Tables that wait for loads of the step must be released by the caller: their blocks hold nothing.
        """
        for load in ops.loads:
            self.lacking.pop(load.block_id, None)
        self._unpin_host_ops(ops)
        self._host.failed(ops, damaged_ids)
        if damaged_ids:
            self._emit(HostTransfer(0, 0, tuple(sorted(damaged_ids))))

    # Inside.

    def _give(self, block_id: BlockId) -> Node | None:
        """Give a loaded block to the node that lacks it, if that still does and some table still holds the block.

        Return the node; None if it was not given.
        """
        node, block = self.lacking.pop(block_id, None), self._blocks.pool.blocks[block_id]
        if node is None or not node.attached or node.blocks[block.group] is not None or not block.num_table_refs:
            return None
        node.put(block.group, block)
        block.node = node
        self._blocks.update_evictable(node)
        return node

    def _unpin_host_ops(self, ops: HostOps) -> None:
        self._blocks.unpin_io(load.block_id for load in ops.loads)
        self._blocks.unpin_io(store.block_id for store in ops.stores if store.is_live)

    def _unpin_copy(self, copy: CopyOp) -> None:
        self._blocks.unpin_io((copy.dst, copy.src))
