"""BlockCache: the blocks of the device, those that stay cached though nobody holds them, and how room is made.

A block is given out of the free list. If that is empty, the policy says which cached block is evicted; and if none can
be, *givers* are asked, one after another, to let go of what they keep. That order is written here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import BlockEvicted, Emit, EvictionCause
from pagefold.kv.block import BlockState
from pagefold.kv.pool import BlockPool
from pagefold.kv.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagefold.kv.block import Block, BlockId, Node
    from pagefold.kv.eviction import EvictionPolicy
    from pagefold.kv.tiers import HostTier

__all__ = ["BlockCache"]


class BlockCache:
    """The pool, the tree of published blocks, and the policy, which agree about every block.

    Args:
        num_blocks: blocks of the slab.
        block_size: tokens a block.
        policy: who is evicted first.
        host: where evicted blocks go.
        emit: where events go.

    Attributes:
        pool: who holds which block.
        tree: which blocks hold which tokens.
        policy: who is evicted first.
        givers: who is asked for memory when nothing can be evicted, in order: each lets go of what it keeps, so that
            more can be, and says whether it had anything.
        now_s: the time, which whoever calls sets; nothing that is decided hangs on it. It is told with events.
        tick: logical time: one for every acquire and release, so recency has no ties between tables.
    """

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy, host: HostTier, emit: Emit) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size)
        self.policy = policy
        self.givers: list[Callable[[], bool]] = []
        self.now_s = 0.0
        self.tick = 0
        self._host = host
        self._emit = emit

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get: the free ones, and the cached ones that no pin keeps."""
        return self.pool.num_free + self.pool.num_cached - self.pool.num_pinned

    def next_tick(self) -> int:
        """Let logical time go on, and return it."""
        self.tick += 1
        return self.tick

    def allocate(self) -> Block | None:
        """Take a block for one table, evicting one if need be. None when memory is short."""
        block = self.pool.allocate()
        if block is None and self._make_one_free():
            block = self.pool.allocate()
        return block

    def make_free(self, num_blocks: int) -> bool:
        """Evict until so many blocks are free, those included that givers keep; False if they cannot be had."""
        pool = self.pool
        self.reclaim(num_blocks - pool.num_free)
        for give in self.givers:
            if pool.num_free < num_blocks and give():
                self.reclaim(num_blocks - pool.num_free)
        return pool.num_free >= num_blocks

    def reclaim(self, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` cached blocks into the free list, and keep them on the host if it can hold any.

        Return how many went.
        """
        num_evicted = 0
        while num_evicted < num_blocks:
            node = self.policy.victim()
            if node is None:
                break
            self._host.keep_evicted(node)
            self.evict(node, "allocation")
            num_evicted += 1
        return num_evicted

    def evict(self, node: Node, cause: EvictionCause) -> None:
        """Take a leaf out of the tree: its block is free if nobody holds it."""
        self.tree.remove(node)
        self._withdraw(node, cause)
        assert node.parent is not None
        self.update_evictable(node.parent)

    def clear(self) -> None:
        """Take all out of the tree: cached blocks become free, and those that somebody holds private."""
        for node in reversed(list(self.tree.nodes())):
            self._withdraw(node, "reset")
        self.tree.clear()

    def update_evictable(self, node: Node) -> None:
        """Tell the policy if ``node`` became evictable or ceased to be."""
        block = node.block
        if block is None:  # a root
            return
        evictable = not (block.state != BlockState.CACHED or node.children or block.num_io_refs or block.num_pin_refs)
        if evictable != node.evictable:
            node.evictable = evictable
            if evictable:
                self.policy.on_idle(node)
            else:
                self.policy.on_busy(node)

    def unpin_io(self, block_ids: Iterable[BlockId]) -> None:
        """Count a transfer less for each of these blocks."""
        for block_id in block_ids:
            block = self.pool.blocks[block_id]
            self.pool.unpin_io(block)
            if block.node is not None:
                self.update_evictable(block.node)

    def _make_one_free(self) -> bool:
        return bool(self.reclaim(1)) or any(give() and self.reclaim(1) for give in self.givers)

    def _withdraw(self, node: Node, cause: EvictionCause) -> None:
        """Undo the publication of ``node``: its block is free if nobody holds it, else private."""
        assert node.block is not None
        if node.evictable:
            node.evictable = False
            self.policy.on_busy(node)
        was_cached = node.block.state == BlockState.CACHED
        node.attached = False
        self.policy.on_evict(node)
        self.pool.withdraw(node.block)
        if was_cached:
            now_s = self.now_s
            self._emit(BlockEvicted(node.block.block_id, node.depth, cause, now_s - node.born_s, now_s - node.used_s))
