"""KVCore: the centre. Which blocks a sequence holds, which prefixes are known, what goes when memory is short.

It decides and never acts: no tensors, no I/O, no clock. Copies that a decision needs are collected as
:class:`~pagefold.kv.plans.CopyOp` for the step that is being planned.

The life of a sequence here::

    hit = core.match(namespace, packed, max_tokens)     reads only
    table = core.acquire(hit)                           pins what was found
    core.extend(table, start, end)                      blocks for positions [start, end), or False
    promise = core.promise(table, packed, end)          the step will write them: others may lean on them
    core.commit(promise)  |  core.abandon(promise)      the step ran                    |  it failed
    core.release(table)                                 published blocks stay cached, private ones become free

What must stay cached though no table holds it is ``core.pins``' business. And of the copies of a step::

    copies = core.take_copies()                         when all of it is planned, before it runs
    core.copies_done(copies)  |  core.copies_failed(copies)

Where blocks are sealed (``residuals.py``) a table has a residual, and only whole blocks are ever taken over.

A sequence that is larger than the device begins with ``begin_streaming`` instead of ``acquire``: see ``streaming.py``.

Where there is a host tier (``tiers.py``), what is evicted goes there and comes back, by copies that are taken likewise:
``take_host_ops``, ``host_done``, ``host_failed``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import BlockEvicted, BlocksReused, CacheReset, Emit, EvictionCause, HostTransfer, ignore
from pagefold.kv.block import Block, BlockState, Node
from pagefold.kv.held_block import HOST
from pagefold.kv.names import digest_of, name_of, names_behind, root_digest
from pagefold.kv.pins import PinLimits, PinTable
from pagefold.kv.plans import NO_HOST_OPS, CopyOp
from pagefold.kv.policies import make_policy
from pagefold.kv.pool import BlockPool
from pagefold.kv.streaming import Streaming
from pagefold.kv.table import BlockTable, Promise, num_blocks_for
from pagefold.kv.tree import TOKEN_BYTES, PrefixHit, PrefixTree, doubtful_nodes

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable, Sequence

    from pagefold.kv.arbiter import Arbiter
    from pagefold.kv.block import BlockId
    from pagefold.kv.eviction import EvictionPolicy
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.names import BlockName
    from pagefold.kv.plans import HostOps, LoadOp
    from pagefold.kv.residuals import Residuals
    from pagefold.kv.slow_tiers import SlowTiers
    from pagefold.kv.tiers import HostTier

__all__ = ["KVCore"]


class KVCore:
    """Paged blocks with prefix sharing.

    Args:
        num_blocks: blocks of the slab.
        block_size: tokens a block.
        policy: who is evicted first; the default of ``policies/`` if none is given.
        enable_prefix_caching: False publishes nothing, so nothing is ever matched.
        pin_limits: what pins may keep, and how long they count.
        host: where evicted blocks go; None for nowhere.
        slow: what is behind the host; None for nothing.
        arbiter: weighs restoring from the host against computing. None where restoring always pays: on a CPU it is a
            copy, of some hundredth of what computing takes.
        allow_streaming: whether sequences may be larger than the device; there must be a host tier then.
        residuals: of the sequences that may run, where blocks are sealed when they are full; None where they are not.
        emit: where events go.

    Attributes:
        publishes: whether anything is ever cached.
        pins: prefixes that stay cached though nobody holds them.
        host: the host tier, if there is one.
        slow: slower tiers, if there are any.
        arbiter: weighs restoring against computing, if that is in question.
        streaming: of sequences larger than the device, if they are allowed.
        residuals: of unsealed blocks, if blocks are sealed.
        now_s: the time, which whoever calls sets; nothing that is decided hangs on it. It is told with events.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        enable_prefix_caching: bool = True,
        pin_limits: PinLimits | None = None,
        host: HostTier | None = None,
        slow: SlowTiers | None = None,
        arbiter: Arbiter | None = None,
        allow_streaming: bool = False,
        residuals: Residuals | None = None,
        emit: Emit = ignore,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size)
        self.policy: EvictionPolicy = make_policy("default") if policy is None else policy
        self.tables: set[BlockTable] = set()
        self.copies_in_flight: list[CopyOp] = []
        self._copies: list[CopyOp] = []
        self.publishes = enable_prefix_caching
        assert slow is None or slow.host is host, "slow tiers of another arena"
        self.host = host
        self.slow = slow
        self.arbiter = arbiter
        self._emit = emit
        self.pins = PinTable(self.pool, pin_limits or PinLimits(), update_evictable=self._update_evictable, emit=emit)
        self._stride = block_size * TOKEN_BYTES
        assert residuals is None or not allow_streaming, "what streams is not sealed"
        self.residuals = residuals
        self.streaming: Streaming | None = None
        if allow_streaming:
            assert host is not None, "what streams lies in the host's arena"
            self.streaming = Streaming(self.pool, host, block_size, self._store_live)
        self.now_s = 0.0
        self._tick = 0  # logical time: one for every acquire and release, so recency has no ties between tables

    # What there is.

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get: the free ones, and the cached ones that no pin keeps."""
        return self.pool.num_free + self.pool.num_cached - self.pool.num_pinned

    @property
    def num_active(self) -> int:
        """Blocks held by sequences or transfers."""
        return self.pool.num_blocks - self.pool.num_free - self.pool.num_cached

    @property
    def usage(self) -> float:
        """Share of blocks held by sequences or transfers, 0 to 1."""
        return self.num_active / self.pool.num_blocks

    def match(self, namespace: bytes, packed: bytes, max_tokens: int) -> PrefixHit:
        """Find the longest known prefix of ``packed``, of at most ``max_tokens`` tokens. Writes nothing, pins nothing.

        Args:
            namespace: :meth:`Namespace.key`.
            packed: the tokens, 4 bytes each.
            max_tokens: a bound; a request passes its length less one, since its last token must be computed to
                know the next.
        """
        hit = self.tree.match(namespace, packed, max_tokens)
        if self.residuals is not None:  # a part of a sealed block is not what its tokens alone come to
            hit = hit._replace(partial=None, num_partial_tokens=0)
        if self.host is None:
            return hit
        rest = packed[len(hit.nodes) * self._stride : max_tokens * TOKEN_BYTES]
        parent = digest_of(hit.nodes[-1]) if hit.nodes else root_digest(namespace)
        held = self.host.match(parent, rest, self._stride)
        return hit._replace(partial=None, num_partial_tokens=0, held=held) if held else hit

    def worth(self, hit: PrefixHit) -> PrefixHit:
        """Return ``hit`` without what the host holds, where computing that is sooner than restoring it.

        To be asked of a hit that is acquired then: the arbiter counts what it is asked.
        """
        if not hit.held or self.arbiter is None or self.arbiter.restores(HOST, len(hit.held)):
            return hit
        return hit._replace(held=())

    def missing(self, namespace: bytes, packed: bytes, max_tokens: int) -> list[BlockName]:
        """Return the names of the whole blocks of ``packed`` that neither device nor host has, behind those they have.

        Arguments are those of :meth:`match`. There must be a host tier.
        """
        hit = self.match(namespace, packed, max_tokens)
        root = root_digest(namespace)
        parent = digest_of(hit.nodes[-1]) if hit.nodes else root
        if hit.held:
            parent = hit.held[-1].name.digest
        num_found = len(hit.nodes) + len(hit.held)
        return names_behind(root, parent, packed[num_found * self._stride : max_tokens * TOKEN_BYTES], self._stride)

    # Tables.

    def acquire(self, hit: PrefixHit) -> tuple[BlockTable, int]:
        """Make a table that starts with what ``hit`` found, and pin it. Return it and the number of tokens it holds.

        A hit is a value and may be stale: what has left the tree since is cut off. A partial block is taken over by
        copying it, and a block that the host tier holds by loading it, if a block can be had for that. What is loaded
        is published by the table's next promise, as what the step computes.
        """
        self._tick = tick = self._tick + 1
        nodes = hit.nodes
        num_nodes = num_found = len(nodes)
        while num_nodes and not nodes[num_nodes - 1].attached:  # leaves leave first: parents are attached
            num_nodes -= 1
        if num_nodes < len(nodes):
            nodes = nodes[:num_nodes]
        table = BlockTable((nodes[-1] if nodes else self.tree.root(hit.namespace)) if self.publishes else None)
        self.tables.add(table)
        if self.residuals is not None:
            self.residuals.take(table)
        acquire = self.pool.acquire
        append = table.block_ids.append
        now_s = self.now_s
        gaps: dict[float, int] = {}
        used_s, num_alike = (nodes[0].used_s if nodes else now_s), 0  # blocks of a path were mostly used together
        for node in nodes:
            block = node.block
            assert block is not None
            acquire(block)
            append(block.block_id)
            node.last_used = tick
            node.num_hits += 1
            if node.used_s != used_s:
                gaps[now_s - used_s] = gaps.get(now_s - used_s, 0) + num_alike
                used_s, num_alike = node.used_s, 0
            num_alike += 1
            node.used_s = now_s
        if nodes:
            gaps[now_s - used_s] = gaps.get(now_s - used_s, 0) + num_alike
            self._emit(BlocksReused(gaps))
            self._update_evictable(nodes[-1])
            self.policy.on_hit(nodes)
        table.num_published = len(nodes)
        num_tokens = len(nodes) * self.block_size
        if hit.partial is not None and hit.partial.attached:  # then all of hit.nodes are
            num_tokens += self._acquire_partial(table, hit.partial, hit.num_partial_tokens)
        elif hit.held and num_nodes == num_found:
            num_tokens += self._acquire_held(table, hit.held)
        table.capacity = len(table.block_ids) * self.block_size
        return table, num_tokens

    def begin_streaming(self, hit: PrefixHit) -> tuple[BlockTable, int]:
        """Make a table that streams and starts with what ``hit`` found. Return it and the number of tokens it holds.

        The table holds none of the device's blocks yet, and what it will hold is never published.
        """
        assert self.streaming is not None, "streaming is not allowed"
        table = self.streaming.begin(hit)
        self.tables.add(table)
        table.capacity = len(table.block_ids) * self.block_size
        return table, table.capacity

    def extend(self, table: BlockTable, start: int, end: int) -> bool:
        """Make room for writing positions [start, end), evicting cached blocks if need be.

        Blocks that a fork shares are replaced first (copy-on-write), so that a write never reaches another sequence.
        False, with nothing changed that matters, when memory is short.
        """
        if table.may_share_tail and not self._unshare(table, start):
            return False
        if end <= table.capacity:
            return True
        num_new = num_blocks_for(end, self.block_size) - len(table.block_ids)
        if num_new > self.num_available:
            return False
        new: list[Block] = []
        for _ in range(num_new):
            block = self._allocate()
            if block is None:  # cached blocks that a transfer reads cannot go
                for taken in reversed(new):
                    self.pool.release(taken)
                return False
            new.append(block)
        table.block_ids.extend(block.block_id for block in new)
        table.capacity = len(table.block_ids) * self.block_size
        return True

    def fork(self, table: BlockTable) -> BlockTable:
        """Make a second table on the same blocks. Whoever writes into a shared block first gets a copy of it.

        Both go on from the same position: what lies before it in the shared block is what the copy is for.
        """
        assert table.promise is None, "a table forks between steps"
        assert table.cold_root is None, "a table that streams does not fork"
        twin = BlockTable(table.tail)
        twin.block_ids = list(table.block_ids)
        twin.capacity = table.capacity
        twin.num_published = table.num_published
        twin.copied_from = table.copied_from
        twin.may_share_tail = table.may_share_tail = True
        for block_id in twin.block_ids:
            self.pool.acquire(self.pool.blocks[block_id])
        self.tables.add(twin)
        if self.residuals is not None:
            self.residuals.fork(table, twin)
        return twin

    def hint(self, table: BlockTable, will_be_reused: Iterable[bool]) -> None:
        """Say of the first blocks of ``table`` whether they will be used again; call it before releasing the table.

        Policies may heed it, as far as hints have proved right; nothing else does. It holds until the next user's hint.
        """
        blocks = self.pool.blocks
        for block_id, hint in zip(table.block_ids[: table.num_published], will_be_reused, strict=False):
            node = blocks[block_id].node
            assert node is not None, "published blocks have nodes"
            node.reuse_hint = hint

    def release(self, table: BlockTable) -> None:
        """Let go of all blocks of ``table``: published ones become cached, private ones free.

        Tails go first, so that of one prefix the tail is always evicted before the head.
        """
        assert table.promise is None, "commit or abandon a promise before releasing its table"
        self._tick = tick = self._tick + 1
        now_s = self.now_s
        self.tables.remove(table)
        if self.residuals is not None:
            self.residuals.release(table)
        if table.has_path:
            assert table.tail is not None
            self.policy.on_release(table.tail, table.facts)
        if table.cold and self.streaming is not None:
            self.streaming.release(table)
        blocks = self.pool.blocks
        release = self.pool.release
        for block_id in reversed(table.block_ids):
            block = blocks[block_id]
            node = block.node
            if node is not None:
                node.last_used = tick
                node.used_s = now_s
            if release(block) and node is not None and not node.children:
                if block.num_pin_refs or self.policy.admit(node):
                    self._update_evictable(node)
                else:
                    self._evict(node, "not_admitted")
        table.block_ids = []
        table.capacity = table.num_published = 0
        table.tail = None
        if self._copies:
            self._drop_copies()
        if self.host is not None and self.host.pending.loads:
            self._drop_loads(self.host)

    def write_through(self, table: BlockTable) -> None:
        """Plan to store what the policy of slow tiers wants written of a table that will be released."""
        node = table.tail
        if self.slow is None or node is None:
            return
        while node is not None and node.block is not None and node.attached:
            if node.committed and self.slow.wants(node):
                self._store_live(node)
            node = node.parent

    def store_cached(self, nodes: deque[Node], num_blocks: int) -> None:
        """Plan to store up to ``num_blocks`` of ``nodes`` that are still cached and not held, taking them off."""
        while nodes and num_blocks > 0:
            node = nodes.popleft()
            if node.attached and node.committed:
                num_blocks -= self._store_live(node)

    # Promises.

    def promise(self, table: BlockTable, packed: bytes, num_tokens: int) -> Promise | None:
        """Publish the whole blocks among the first ``num_tokens`` that the step being planned will complete.

        Until :meth:`commit` they are promised: requests planned later in the same step may lean on them, since each
        layer writes K and V before it attends. None when there is nothing to publish.

        A table may have two: that of a step in flight, and that of the step planned behind it.
        """
        older = table.promise
        assert older is None or older.before is None, "two promises a table: commit or abandon the last ones first"
        tail = table.tail
        index = table.num_published
        num_blocks = num_tokens // self.block_size
        if num_blocks <= index or tail is None:
            return None
        if tail.parent is None:
            tail = self.tree.root(tail.key)  # the namespace's root may have left and come back since
        promise = Promise(table, packed, num_blocks, tail)
        table.promise = promise
        stride = self._stride
        tick, now_s = self._tick, self.now_s
        blocks = self.pool.blocks
        block_ids = table.block_ids
        insert = self.tree.insert
        on_insert = self.policy.on_insert
        while index < num_blocks:
            key = packed[index * stride : (index + 1) * stride]
            if key in tail.children:
                break  # somebody else's: commit() joins it once ours and theirs are both written
            block = blocks[block_ids[index]]
            if block.num_table_refs > 1:
                break  # a fork holds it too, off the tree: published, it would not be of that table's path
            node = insert(tail, key, block, tick)
            node.born_s = node.used_s = now_s
            block.node = node
            on_insert(node)
            tail = node
            index += 1
        table.tail = promise.end = tail
        table.num_published = index
        return promise

    def commit(self, promise: Promise, *, joins: bool = True) -> None:
        """The step ran: what was promised is written and stays. A table's oldest promise first.

        Where another table had published the same tokens first, this table joins those blocks: see :meth:`join`. Not
        without ``joins``: then that is the caller's, when all of the step is committed, and no other reads the table.
        """
        table = promise.table
        assert promise.before is None, "a table's oldest promise is committed first"
        if table.promise is promise:
            table.promise = None
        elif table.promise is not None:
            table.promise.before = None
        if table.tail is None:  # the cache was reset while the step ran
            return
        node = promise.end
        while node is not promise.tail:
            node.committed = True
            assert node.parent is not None
            node = node.parent
        if joins and promise.is_behind:
            self.join(promise)

    def join(self, promise: Promise) -> None:
        """Publish what a committed promise left; where others had published the same tokens first, join their blocks.

        The table gives its own back for them, so that a published path is always the path of the table itself.
        """
        if not promise.is_behind:
            return
        table = promise.table
        tail = table.tail
        assert tail is not None, "behind, and it publishes nothing"
        if tail.parent is None:
            tail = self.tree.root(tail.key)
        index = table.num_published
        while index < promise.num_blocks:
            key = promise.packed[index * self._stride : (index + 1) * self._stride]
            own = self.pool.blocks[table.block_ids[index]]
            child = tail.children.get(key)
            if child is None:
                if own.num_table_refs > 1:  # as in promise()
                    break
                child = self.tree.insert(tail, key, own, self._tick)
                own.node = child
                child.born_s = self.now_s
                child.committed = True
                self.policy.on_insert(child)
            elif child.committed:
                assert child.block is not None
                self.pool.acquire(child.block)
                self._update_evictable(child)
                table.block_ids[index] = child.block.block_id
                self.pool.release(own)
            else:  # theirs is still being written by a step in flight: try again when this table grows
                break
            child.last_used = self._tick
            child.used_s = self.now_s
            tail = child
            index += 1
        table.tail = tail
        table.num_published = index

    def abandon(self, promise: Promise) -> None:
        """The step failed: take back what was promised. Newest promise first.

        Tables that lean on it (acquired after the promise was made) must be released by the caller, after all promises
        of the step are abandoned: their blocks hold nothing.
        """
        table = promise.table
        assert table.promise is promise, "a table's newest promise is abandoned first"
        table.promise = promise.before
        node = table.tail
        if node is None:
            return
        while node is not promise.tail:
            parent = node.parent
            assert parent is not None
            assert node.block is not None
            self.tree.remove(node)
            self.policy.on_evict(node)
            self.pool.withdraw(node.block)
            node = parent
        table.tail = promise.tail
        table.num_published = promise.first

    # Memory.

    def take_copies(self) -> list[CopyOp]:
        """Hand over the copies that the step being planned must make before its first write."""
        copies, self._copies = self._copies, []
        self.copies_in_flight.extend(copies)
        return copies

    def copies_done(self, copies: list[CopyOp]) -> None:
        """The copies were made: their blocks are pinned no more."""
        for copy in copies:
            self.copies_in_flight.remove(copy)
            self._unpin_copy(copy)

    def copies_failed(self, copies: list[CopyOp]) -> None:
        """The step failed, perhaps before its copies were made: the next step makes them, again or at last.

        A table that had been running before the step still waits for its copy; a copy that no table waits for is
        dropped, here or when its table is released.
        """
        for copy in copies:
            self.copies_in_flight.remove(copy)
        self._copies[:0] = copies
        self._drop_copies()

    @property
    def pending_copies(self) -> list[CopyOp]:
        """Copies decided and not handed over yet."""
        return self._copies

    def take_host_ops(self) -> HostOps:
        """Hand over what the step being planned must move between device and host before its copies."""
        return NO_HOST_OPS if self.host is None else self.host.take()

    def host_done(self, ops: HostOps) -> None:
        """The step ran: what it loaded and stored is there."""
        if self.host is not None:
            self._unpin_host_ops(ops)
            self.host.done(ops)
            if ops.stores or ops.loads:
                self._emit(HostTransfer(len(ops.stores), len(ops.loads)))

    def host_failed(self, ops: HostOps, damaged_ids: frozenset[int] = frozenset()) -> None:
        """The step failed. What it was to store is lost, and so is what came back damaged.

        Tables that wait for loads of the step must be released by the caller: their blocks hold nothing.
        """
        if self.host is not None:
            self._unpin_host_ops(ops)
            self.host.failed(ops, damaged_ids)
            if damaged_ids:
                self._emit(HostTransfer(0, 0, tuple(sorted(damaged_ids))))

    def reclaim(self, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` cached blocks into the free list, and keep them on the host if there is a tier.

        Return how many went.
        """
        num_evicted = 0
        while num_evicted < num_blocks:
            node = self.policy.victim()
            if node is None:
                break
            if self.host is not None and node.block is not None:
                self.host.keep(name_of(node), node.block.block_id, num_hits=node.num_hits)
            self._evict(node, "allocation")
            num_evicted += 1
        return num_evicted

    def make_free(self, num_blocks: int) -> bool:
        """Evict until so many blocks are free, those included that were to be stored; False if they cannot be had."""
        pool = self.pool
        self.reclaim(num_blocks - pool.num_free)
        if pool.num_free < num_blocks and self._cancel_live_stores():
            self.reclaim(num_blocks - pool.num_free)
        return pool.num_free >= num_blocks

    def reset(self) -> int:
        """Forget every prefix: cached blocks become free, and what running tables hold is never published again.

        Pins are dropped: what they keep must not be used any more. Return how many cached blocks were freed.
        """
        self._emit(CacheReset())
        self.pins.clear()
        if self.slow is not None:
            self.slow.reset()
        if self.host is not None:
            self._cancel_live_stores()  # else their blocks would wait for a step, which may wait for the blocks
            self.host.reset()
        num_cached = self.pool.num_cached
        for node in reversed(list(self.tree.nodes())):
            assert node.block is not None
            self._withdraw(node, "reset")
        self.tree = PrefixTree(self.block_size)
        for table in self.tables:
            table.tail = None
            table.num_published = 0
            if self.streaming is not None:
                self.streaming.forget(table)
        return num_cached

    def distrust(self, table: BlockTable, namespace: bytes, packed: bytes) -> set[bytes]:
        """Forget what ``table`` has, what it began with, and whatever else goes on from that: it may be corrupted.

        Those are all paths that begin with its first block, since nobody knows which of its blocks is at fault. Other
        tables on them go on, and publish nothing any more.

        Args:
            table: of a sequence whose logits were no numbers.
            namespace: key of the namespace that its blocks are in.
            packed: the sequence's packed tokens.

        Returns the digests of the paths, for slower tiers to forget; none without a host tier.
        """
        nodes = doubtful_nodes(self.tree, namespace, packed[: self._stride], table.copied_from)
        digests: set[bytes] = set()
        if self.host is not None:
            root = root_digest(namespace)
            digests.update(name.digest for name in names_behind(root, root, packed, self._stride))
            if table.copied_from is not None:  # it may have left the tree, and be held all the same
                digests.add(digest_of(table.copied_from))
            digests = self.host.forget_behind(digests.union(map(digest_of, nodes)))
        if self.slow is not None:
            self.slow.distrust(digests)
        self.pins.distrust(set(nodes))
        for node in reversed(nodes):
            self._evict(node, "corrupted")
        for other in self.tables:
            tail = other.tail
            if other is table or (tail is not None and tail.parent is not None and not tail.attached):
                other.tail = None
                other.num_published = 0
            is_cold = other is table or any(held.name.digest in digests for held in other.cold)
            if self.streaming is not None and is_cold:
                self.streaming.forget(other)
        return digests

    # Inside.

    def _allocate(self) -> Block | None:
        block = self.pool.allocate()
        if block is None and (self.reclaim(1) or (self._cancel_live_stores() and self.reclaim(1))):
            block = self.pool.allocate()
        return block

    def _acquire_partial(self, table: BlockTable, node: Node, num_tokens: int) -> int:
        src = node.block
        assert src is not None
        self.pool.pin_io(src)  # before allocating, which might evict it
        self._update_evictable(node)
        dst = self._allocate()
        if dst is None:
            self.pool.unpin_io(src)
            self._update_evictable(node)
            return 0
        node.last_used = self._tick
        node.num_hits += 1
        self._emit(BlocksReused({self.now_s - node.used_s: 1}))
        node.used_s = self.now_s
        table.copied_from = node
        self.pool.pin_io(dst)
        self._copies.append(CopyOp(src.block_id, dst.block_id, num_tokens))
        table.block_ids.append(dst.block_id)
        return num_tokens

    def _acquire_held(self, table: BlockTable, held: tuple[HeldBlock, ...]) -> int:
        assert self.host is not None
        pinned = self.host.pin(held)  # before allocating, which may evict into the arena
        num_loaded = 0
        for one in pinned:
            block = self._allocate()
            if block is None:
                break
            self.pool.pin_io(block)
            self.host.load(one, block.block_id)
            table.block_ids.append(block.block_id)
            one.count_use(table.num_loaded_tokens, self.block_size)
            num_loaded += 1
        self.host.unpin(pinned[num_loaded:])
        return num_loaded * self.block_size

    def _store_live(self, node: Node) -> bool:
        """Plan to store a node's block, which stays what it is; False if the host holds it or has no room."""
        assert self.host is not None
        assert node.block is not None
        if not self.host.keep(name_of(node), node.block.block_id, num_hits=node.num_hits, is_live=True):
            return False
        self.pool.pin_io(node.block)
        self._update_evictable(node)
        return True

    def _cancel_live_stores(self) -> bool:
        """Let go of the blocks that are to be stored though they are cached; whether there were any.

        Else a request that needs all memory would wait for a step that cannot be planned without it. So what is kept
        of them in the arena for requests that wait gives way too.
        """
        if self.host is None:
            return False
        stores = self.host.cancel_live_stores()
        if not stores and self.slow is not None and self.host.has_live_stores and self.slow.let_go():
            stores = self.host.cancel_live_stores()
        self._unpin_io(store.block_id for store in stores)
        return bool(stores)

    def _drop_loads(self, host: HostTier) -> None:
        """Forget the loads into blocks that no table holds any more."""
        blocks = self.pool.blocks
        loads = [load for load in host.pending.loads if not blocks[load.block_id].num_table_refs]
        host.cancel(loads)
        self._unpin_loads(loads)

    def _unpin_host_ops(self, ops: HostOps) -> None:
        self._unpin_loads(ops.loads)
        self._unpin_io(store.block_id for store in ops.stores if store.is_live)

    def _unpin_loads(self, loads: Sequence[LoadOp]) -> None:
        self._unpin_io(load.block_id for load in loads)

    def _unpin_io(self, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            block = self.pool.blocks[block_id]
            self.pool.unpin_io(block)
            if block.node is not None:
                self._update_evictable(block.node)

    def _drop_copies(self) -> None:
        """Forget the copies into blocks that no table holds any more, so that they are pinned no longer."""
        copies, self._copies = self._copies, []
        for copy in copies:
            if self.pool.blocks[copy.dst].num_table_refs:
                self._copies.append(copy)
            else:
                self._unpin_copy(copy)

    def _unpin_copy(self, copy: CopyOp) -> None:
        self._unpin_io((copy.dst, copy.src))

    def _unshare(self, table: BlockTable, start: int) -> bool:
        """Give ``table`` blocks of its own from position ``start`` on; False when memory is short."""
        first = start // self.block_size
        for index in range(first, len(table.block_ids)):
            src = self.pool.blocks[table.block_ids[index]]
            if src.num_table_refs == 1:
                continue
            dst = self._allocate()
            if dst is None:
                return False  # blocks replaced so far stay replaced: the next try goes on from there
            num_tokens = start % self.block_size if index == first else 0
            if num_tokens and self.residuals is None:  # else nothing is in a block that is not full
                self._copy_tail(src, dst, num_tokens)
            table.block_ids[index] = dst.block_id
            self.pool.release(src)
        table.may_share_tail = False
        return True

    def _copy_tail(self, src: Block, dst: Block, num_tokens: int) -> None:
        for copy in self._copies:  # src may wait for a copy itself, after a failed step: no copy leans on another
            if copy.dst == src.block_id:
                src = self.pool.blocks[copy.src]
                break
        self.pool.pin_io(src)
        self.pool.pin_io(dst)
        self._copies.append(CopyOp(src.block_id, dst.block_id, num_tokens))

    def _update_evictable(self, node: Node) -> None:
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

    def _evict(self, node: Node, cause: EvictionCause) -> None:
        self.tree.remove(node)
        self._withdraw(node, cause)
        assert node.parent is not None
        self._update_evictable(node.parent)

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
