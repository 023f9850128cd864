"""BlockCache: the blocks of the device, those that stay cached though nobody holds them, and how room is made.

A block is given out of the free list. If that is empty, cached ones are evicted, in this order:

0. leaves that are *superseded*: their session has edited them away, or has ended (``expectations.py``),
1. *stale* ones: those that a sequence left behind, of a group that keeps the last tokens only, and no landmark keeps
   (``landmarks.py``),
2. what is left of a path whose end was evicted last, down to where it can be gone on from: where a group keeps the last
   tokens only, a path that is cut is of no use before that,
3. what a landmark keeps that is not firm,
4. the blocks of the leaf that the policy names, or of the end of a path whose session is expected back late,
5. what a firm landmark keeps, and other blocks of such groups,
6. packed chunks of which no node behind them has anything that could go: somebody who does not need them yet goes on
   there, or a pin does,
7. those that the next step was to store in the host's arena, which are not stored then.

Where tenants have quotas (``quotas.py``), what goes is such as who asks can have.

No request and no pin gives anything up for it. Who does when all this is short is the scheduler's to say
(``scheduler/relief.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.events import BlockEvicted, Emit, EvictionCause, EvictionRule, PathForgotten
from pagefold.kv.block import Block, BlockState, PackedChunk
from pagefold.kv.counting_pool import CountingPool
from pagefold.kv.expectations import Expectations
from pagefold.kv.host_chunks import keep_chunk
from pagefold.kv.names import digest_of
from pagefold.kv.pool import BlockPool
from pagefold.kv.quotas import Quotas
from pagefold.kv.tree import PrefixTree
from pagefold.kv.window_blocks import WindowBlocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pagefold.kv.block import BlockId, Node
    from pagefold.kv.eviction import EvictionPolicy
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.quotas import AnyQuotas
    from pagefold.kv.slow_tiers import SlowTiers

__all__ = ["BlockCache"]


class _Next(NamedTuple):
    """What goes next, by which rule, and what the policy went by, where it decided."""

    one: Block | Node | PackedChunk
    rule: EvictionRule
    score: float | None = None


class BlockCache:
    """The pool, the tree of published blocks, and the policy, which agree about every block.

    Args:
        num_blocks: blocks of the slab.
        rules: what each cache group keeps.
        policy: who is evicted first.
        host: where evicted blocks go.
        slow: for what part of the host's arena is kept.
        quotas: of tenants.
        emit: where events go.

    Attributes:
        pool: who holds which block.
        tree: which blocks hold which tokens.
        policy: who is evicted first.
        quotas: of tenants: who asks is to be told them (:meth:`AnyQuotas.ask`) before it is given memory.
        expectations: who is expected to go on from which path; it asks the policy for all others.
        windows: cached blocks that can go though their nodes are no leaves, and the landmarks that keep some of them.
        now_s: the time, which whoever calls sets; nothing that is decided hangs on it. It is told with events.
        asked_by: the request for which memory is asked for, which whoever calls sets; as ``now_s``.
        tick: logical time: one for every acquire and release, so recency has no ties between caches.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it holds together
        self,
        num_blocks: int,
        rules: KeepRules,
        policy: EvictionPolicy,
        host: HostTier,
        slow: SlowTiers,
        quotas: AnyQuotas,
        emit: Emit,
    ) -> None:
        self.pool = CountingPool(num_blocks, quotas) if isinstance(quotas, Quotas) else BlockPool(num_blocks)
        self.tree = PrefixTree(rules.block_size)
        self.policy = policy
        self.quotas = quotas
        self.expectations = Expectations(policy, quotas)
        self.now_s = 0.0
        self.asked_by = ""
        self.tick = 0
        self._rule: EvictionRule = "policy"  # by which the last one that went was chosen, and its score
        self._score: float | None = None
        self._rules = rules
        self._trimmed_groups = rules.trimmed
        self.windows = WindowBlocks(rules)
        self._broken: Node | None = None  # where the path ends now whose end was evicted last
        self._packed: dict[PackedChunk, None] = {}  # whose blocks are all cached, and kept by no pin
        self._host = host
        self._slow = slow
        self._emit = emit

    @property
    def num_available(self) -> int:
        """Blocks that who asks could get: the free ones, and the cached ones that no pin keeps, as quotas let it."""
        pool = self.pool
        return self.quotas.limit(len(pool.free_ids) + pool.num_cached - pool.num_pinned)

    @property
    def idle_chunks(self) -> Collection[PackedChunk]:
        """Packed chunks that could go, though their nodes may be no leaves."""
        return self._packed.keys()

    def next_tick(self) -> int:
        """Let logical time go on, and return it."""
        self.tick += 1
        return self.tick

    def allocate(self) -> Block | None:
        """Take a block for one table, evicting one if need be. None when memory is short, or who asks is at its cap."""
        if self.quotas.is_at_cap and not self._make_one_free():
            return None
        block = self.pool.allocate()
        if block is None and self._make_one_free():
            block = self.pool.allocate()
        return block

    def make_free(self, num_blocks: int, *, asked_by: str = "") -> bool:
        """Evict until so many blocks are free, for the request ``asked_by``; False if they cannot be had."""
        pool = self.pool
        self.asked_by = asked_by
        self.reclaim(num_blocks - pool.num_free)
        if pool.num_free < num_blocks and self.cancel_stores():
            self.reclaim(num_blocks - pool.num_free)
        return pool.num_free >= num_blocks

    def reclaim(self, num_blocks: int) -> int:
        """Evict cached blocks until ``num_blocks`` more are free, and keep them on the host if it can hold any.

        What was left behind, and no firm landmark kept, it need not keep: who comes back needs what was written last.

        Return how many went: perhaps a few more, since a leaf has a block of every group.
        """
        num_evicted = 0
        while num_evicted < num_blocks:
            chosen = self._next()
            if chosen is None:
                break
            one, self._rule, self._score = chosen
            if isinstance(one, Block):
                assert one.node is not None, "what is cached is published"
                if self.windows.goes_to_host(one):
                    self._host.keep_evicted(one.node, one)
                num_evicted += self._evict_alone(one)
                continue
            if isinstance(one, PackedChunk):
                assert one.node is not None, "what is cached is published"
                self.keep_chunk(one.node)
                num_evicted += self._evict_chunk(one)
                continue
            is_wanted = self._rule != "superseded"
            for block in one.blocks:
                if block is not None:
                    if is_wanted:
                        self._host.keep_evicted(one, block)
                    num_evicted += 1
            if is_wanted:
                self.keep_chunk(one)
            num_evicted += 0 if one.packed is None else len(one.packed.blocks)
            self._broken = self.evict(one, "allocation")
        return num_evicted

    def keep_chunk(self, node: Node, *, is_live: bool = False) -> int:
        """Let the host keep what was kept of the chunk that ends with a node, if one does; see :func:`keep_chunk`."""
        if node.packed is None:
            return 0
        assert self._rules.packing is not None, "some group packs"
        chunk_blocks = self._rules.packing.chunk_blocks(self._rules.block_size)
        return keep_chunk(self._host, node, node.packed, chunk_blocks, is_live=is_live)

    def supersede_copies(self, nodes: list[Node], owner: object) -> None:
        """Let what the host holds of superseded ``nodes``, the last first, make room first.

        Only what ``owner`` alone has used.
        """
        if self._host.is_on:
            for node in reversed(nodes):
                self._host.supersede(node, owner, self._rules.num_names)

    def supersede_behind(self, node: Node, packed: bytes, owner: object) -> None:
        """Let what the host holds behind a node, or a root, make room first, but for what goes on with ``packed``.

        Only what ``owner`` alone has used; see :meth:`HostTier.supersede_behind`.
        """
        if self._host.is_on:
            self._host.supersede_behind(digest_of(node), packed, owner)

    def evict(self, node: Node, cause: EvictionCause) -> Node:
        """Take a leaf out of the tree, and those above it that have neither blocks nor other children.

        Its blocks are free where nobody holds them. Return the node above them.
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
        return parent

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
        if node.packed is not None and not self._note_chunk(node.packed):
            evictable = False
        for group in self._trimmed_groups:
            alone = blocks[group]
            if alone is not None:
                self.windows.note_idle(alone)
        if evictable != node.evictable:
            node.evictable = evictable
            if evictable:
                self.expectations.on_idle(node)
            else:
                self.expectations.on_busy(node)

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

    def _next(self) -> _Next | None:
        """Return what goes next: a block alone, a leaf, or a packed chunk; None where nothing can go."""
        if not self._trimmed_groups:
            return self._by_policy()
        superseded = self.expectations.superseded()
        if superseded is not None:
            return _Next(*superseded)
        useless = self._useless()
        if useless is not None:
            return useless
        kept = self.windows.kept_block()
        if kept is not None:
            return _Next(kept, "landmark")
        return self._by_policy() or self._last_resort()

    def _by_policy(self) -> _Next | None:
        """Return the leaf that the policy names, or expectations."""
        found = self.expectations.victim(self.now_s)
        return None if found is None else _Next(*found)

    def _useless(self) -> _Next | None:
        """Return what nobody would begin with: a stale block, or what is left of a path that is cut."""
        block = self.windows.stale_block()
        if block is not None:
            return _Next(block, "stale")
        broken = self._broken
        if broken is not None:
            if broken.attached and broken.evictable and not self._rules.of(broken.root.mask).is_whole(broken):
                return _Next(broken, "cut")
            self._broken = None
        return None

    def _last_resort(self) -> _Next | None:
        """Return what goes when no leaf can."""
        block = self.windows.firm_block()
        if block is not None:
            return _Next(block, "firm_landmark")
        block = self.windows.idle_block()
        if block is not None:
            return _Next(block, "idle")
        chunk = next(iter(self._packed), None)
        return None if chunk is None else _Next(chunk, "packed")

    def _make_one_free(self) -> bool:
        return bool(self.reclaim(1) or (self.cancel_stores() and self.reclaim(1)))

    def _note_chunk(self, chunk: PackedChunk) -> bool:
        """Note whether a packed chunk, which is published, could go; and return it. One without blocks is in no way."""
        idle = all(
            block.state == BlockState.CACHED and not block.num_io_refs and not block.num_pin_refs
            for block in chunk.blocks
        )
        if idle and chunk.blocks:
            self._packed.setdefault(chunk)
        else:
            self._packed.pop(chunk, None)
        return idle

    def _evict_alone(self, block: Block) -> int:
        """Evict one block of a node, which stays if it has another, or children. Return how many blocks went."""
        node = block.node
        assert node is not None
        num_whole = len(node.blocks) - node.blocks.count(None)
        is_last = not node.children and num_whole == 1
        if is_last and (node.packed is None or self._note_chunk(node.packed)):
            self.keep_chunk(node)
            num_gone = len(node.all_blocks) - node.blocks.count(None)
            self.evict(node, "allocation")
            return num_gone
        node.put(block.group, None)
        self._withdraw_block(node, block, "allocation")
        return 1

    def _evict_chunk(self, chunk: PackedChunk) -> int:
        """Evict what was kept of a chunk; its node stays, if it has anything else. Return how many blocks went."""
        node = chunk.node
        assert node is not None, "what is cached is published"
        for block in chunk.blocks:
            self._withdraw_block(node, block, "allocation")
        self._forget_chunk(chunk)
        if not node.children and node.is_bare:
            self.evict(node, "allocation")
        else:
            self.update_evictable(node)
        return len(chunk.blocks)

    def _forget_chunk(self, chunk: PackedChunk) -> None:
        """A packed chunk, whose blocks are withdrawn, is published no more."""
        self._packed.pop(chunk, None)
        chunk.put(None)

    def _withdraw(self, node: Node, cause: EvictionCause) -> None:
        """Undo the publication of ``node``: its blocks are free where nobody holds them, else private."""
        if node.evictable:
            node.evictable = False
            self.expectations.on_busy(node)
        node.attached = False
        self.policy.on_evict(node)
        self.expectations.on_evict(node)
        is_told = False
        for block in node.all_blocks:
            if block is not None:
                is_told |= self._withdraw_block(node, block, cause)
        if not is_told and cause == "allocation":
            self._emit(PathForgotten(node, self.asked_by))
        if node.packed is not None:
            self._forget_chunk(node.packed)

    def _withdraw_block(self, node: Node, block: Block, cause: EvictionCause) -> bool:
        """Undo the publication of one block; whether it was cached, and that it is not is told."""
        was_cached = block.state == BlockState.CACHED
        if self._trimmed_groups:
            self.windows.note_gone(block)
        self.pool.withdraw(block)
        if was_cached:
            self._tell_evicted(node, block, cause)
        return was_cached

    def _tell_evicted(self, node: Node, block: Block, cause: EvictionCause) -> None:
        now_s = self.now_s
        is_for_memory = cause == "allocation"
        self._emit(
            BlockEvicted(
                block.block_id,
                node.depth,
                cause,
                now_s - node.born_s,
                now_s - node.used_s,
                node,
                self._rule,
                self._score if is_for_memory else None,
                self.asked_by if is_for_memory else "",
            )
        )
