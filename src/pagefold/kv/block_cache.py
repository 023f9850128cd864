"""BlockCache: the blocks of the device, those that stay cached though nobody holds them, and how room is made.

A block is given out of the free list. If that is empty, cached ones are evicted, in this order:

1. *stale* ones: those that a sequence left behind, of a group that keeps the last tokens only,
2. the blocks of the leaf that the policy names,
3. other blocks of such groups,
4. those that the next step was to store in the host's arena, which are not stored then.

No request and no pin gives anything up for it. Who does when all this is short is the scheduler's to say
(``scheduler/relief.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pagefold.events import BlockEvicted, Emit, EvictionCause
from pagefold.kv.block import BlockState
from pagefold.kv.pool import BlockPool
from pagefold.kv.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv.block import Block, BlockId, Node
    from pagefold.kv.eviction import EvictionPolicy
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.slow_tiers import SlowTiers

__all__ = ["BlockCache"]


class BlockCache:
    """The pool, the tree of published blocks, and the policy, which agree about every block.

    Args:
        num_blocks: blocks of the slab.
        rules: what each cache group keeps.
        policy: who is evicted first.
        host: where evicted blocks go.
        slow: for what part of the host's arena is kept.
        emit: where events go.

    Attributes:
        pool: who holds which block.
        tree: which blocks hold which tokens.
        policy: who is evicted first.
        now_s: the time, which whoever calls sets; nothing that is decided hangs on it. It is told with events.
        tick: logical time: one for every acquire and release, so recency has no ties between caches.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it holds together
        self,
        num_blocks: int,
        rules: KeepRules,
        policy: EvictionPolicy,
        host: HostTier,
        slow: SlowTiers,
        emit: Emit,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(rules.block_size)
        self.policy = policy
        self.now_s = 0.0
        self.tick = 0
        self._trimmed_groups = rules.trimmed
        self._stale: OrderedDict[Block, None] = OrderedDict()  # the first is evicted first; likewise the next
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._host = host
        self._slow = slow
        self._emit = emit

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get: the free ones, and the cached ones that no pin keeps."""
        pool = self.pool
        return len(pool.free_ids) + pool.num_cached - pool.num_pinned

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
        """Evict until so many blocks are free; False if they cannot be had."""
        pool = self.pool
        self.reclaim(num_blocks - pool.num_free)
        if pool.num_free < num_blocks and self.cancel_stores():
            self.reclaim(num_blocks - pool.num_free)
        return pool.num_free >= num_blocks

    def reclaim(self, num_blocks: int) -> int:
        """Evict cached blocks until ``num_blocks`` more are free, and keep them on the host if it can hold any.

        Stale ones it need not keep: who comes back to their path needs what was written last.

        Return how many went: perhaps a few more, since a leaf has a block of every group.
        """
        num_evicted = 0
        while num_evicted < num_blocks:
            if self._stale:
                self._evict_alone(next(iter(self._stale)))
                num_evicted += 1
                continue
            node = self.policy.victim()
            if node is not None:
                for block in node.blocks:
                    if block is not None:
                        self._host.keep_evicted(node, block)
                        num_evicted += 1
                self.evict(node, "allocation")
            elif self._idle:
                block = next(iter(self._idle))
                assert block.node is not None, "what is cached is published"
                self._host.keep_evicted(block.node, block)
                self._evict_alone(block)
                num_evicted += 1
            else:
                break
        return num_evicted

    def evict(self, node: Node, cause: EvictionCause) -> None:
        """Take a leaf out of the tree, and those above it that have neither blocks nor other children.

        Its blocks are free where nobody holds them.
        """
        while True:
            parent = node.parent
            assert parent is not None
            self.tree.remove(node)
            self._withdraw(node, cause)
            if not self._trimmed_groups or not parent.blocks or parent.children or not parent.is_bare:
                break  # where all groups keep all, a node has its blocks to its end
            node = parent
        self.update_evictable(parent)

    def note_idle(self, block: Block, *, is_stale: bool = False) -> None:
        """Nobody holds ``block`` any more: of a group that keeps the last tokens only it can be evicted alone.

        Args:
            block: that was released.
            is_stale: whether who held it last has left it behind.
        """
        if block.group not in self._trimmed_groups:
            return
        if block.state != BlockState.CACHED or block.num_io_refs or block.num_pin_refs:
            self.note_busy(block)
        elif is_stale:
            self._idle.pop(block, None)
            self._stale[block] = None
        elif block not in self._stale:
            self._idle[block] = None

    def note_busy(self, block: Block) -> None:
        """Somebody holds, reads or pins ``block``, or it is gone: it cannot be evicted alone."""
        self._idle.pop(block, None)
        self._stale.pop(block, None)

    def is_stale(self, block: Block) -> bool:
        """Whether who held ``block`` last has left it behind, and nobody holds it since."""
        return block in self._stale

    def evictable_alone(self) -> list[Block]:
        """Return the blocks that can be evicted though their nodes stay, in the order in which that happens."""
        return [*self._stale, *self._idle]

    def clear(self) -> None:
        """Take all out of the tree: cached blocks become free, and those that somebody holds private."""
        for node in reversed(list(self.tree.nodes())):
            self._withdraw(node, "reset")
        self.tree.clear()

    def update_evictable(self, node: Node) -> None:
        """Tell the policy if ``node`` became evictable or ceased to be."""
        blocks = node.blocks
        if not blocks:  # a root
            return
        evictable = not node.children
        for block in blocks:
            if block is not None and (block.state != BlockState.CACHED or block.num_io_refs or block.num_pin_refs):
                evictable = False
        for group in self._trimmed_groups:
            alone = blocks[group]
            if alone is not None:
                self.note_idle(alone)
        if evictable != node.evictable:
            node.evictable = evictable
            if evictable:
                self.policy.on_idle(node)
            else:
                self.policy.on_busy(node)

    def cancel_stores(self) -> bool:
        """Let go of the blocks that are to be stored though they are cached; whether there were any.

        Else a request that needs all memory would wait for a step that cannot be planned without it. So what is kept
        of them in the arena for requests that wait gives way too.
        """
        stores = self._host.cancel_live_stores()
        if not stores and self._host.has_live_stores and self._slow.fetches.let_go():
            stores = self._host.cancel_live_stores()
        self.unpin_io(store.block_id for store in stores)
        return bool(stores)

    def unpin_io(self, block_ids: Iterable[BlockId]) -> None:
        """Count a transfer less for each of these blocks."""
        for block_id in block_ids:
            block = self.pool.blocks[block_id]
            self.pool.unpin_io(block)
            if block.node is not None:
                self.update_evictable(block.node)

    def _make_one_free(self) -> bool:
        return bool(self.reclaim(1) or (self.cancel_stores() and self.reclaim(1)))

    def _evict_alone(self, block: Block) -> None:
        """Evict one block of a node, which stays if it has another, or children."""
        node = block.node
        assert node is not None
        if not node.children and node.blocks.count(None) == len(node.blocks) - 1:
            self.evict(node, "allocation")
            return
        node.put(block.group, None)
        self._withdraw_block(node, block, "allocation")

    def _withdraw(self, node: Node, cause: EvictionCause) -> None:
        """Undo the publication of ``node``: its blocks are free where nobody holds them, else private."""
        if node.evictable:
            node.evictable = False
            self.policy.on_busy(node)
        node.attached = False
        self.policy.on_evict(node)
        for block in node.blocks:
            if block is not None:
                self._withdraw_block(node, block, cause)

    def _withdraw_block(self, node: Node, block: Block, cause: EvictionCause) -> None:
        was_cached = block.state == BlockState.CACHED
        if self._trimmed_groups:
            self.note_busy(block)
        self.pool.withdraw(block)
        if was_cached:
            now_s = self.now_s
            self._emit(BlockEvicted(block.block_id, node.depth, cause, now_s - node.born_s, now_s - node.used_s))
