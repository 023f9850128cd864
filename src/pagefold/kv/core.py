"""KVCore: the centre. Which blocks a sequence holds, which prefixes are known, what goes when memory is short.

It decides and never acts: no tensors, no I/O, no clock. What a decision needs to be copied is collected in
``core.moves`` for the step that is being planned.

The life of a sequence here::

    hit = core.match(namespace, packed, max_tokens)     reads only
    table = core.acquire(hit)                           pins what was found
    core.extend(table, start, end)                      blocks for positions [start, end), or False
    core.release(table)                                 published blocks stay cached, private ones become free

The core's parts have what is theirs:

    core.publishing     what a step will write: promised, committed or abandoned
    core.moves          what a step copies: between blocks, to the host and back
    core.cache          the blocks themselves, and how memory is found
    core.pins           what stays cached though no table holds it
    core.host, slow     the tiers behind the device (``tiers.py``, ``slow_tiers.py``)
    core.residuals      where tables have their unsealed blocks, of a codec that seals (``residuals.py``)
    core.streaming      sequences larger than the device (``streaming.py``): these begin with ``begin_streaming``

A part that is off is there too, and has nothing and does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import BlocksReused, CacheReset, Emit, ignore
from pagefold.kv.arbiter import Arbiter
from pagefold.kv.block_cache import BlockCache
from pagefold.kv.held_block import HOST
from pagefold.kv.moves import Moves
from pagefold.kv.names import digest_of, names_behind, root_digest
from pagefold.kv.pins import PinLimits, PinTable
from pagefold.kv.policies import make_policy
from pagefold.kv.publishing import Publishing
from pagefold.kv.residuals import NO_RESIDUALS
from pagefold.kv.slow_tiers import NO_SLOW_TIERS
from pagefold.kv.streaming import NO_STREAMING, Streaming
from pagefold.kv.table import BlockTable, num_blocks_for
from pagefold.kv.tiers import NO_HOST
from pagefold.kv.tree import TOKEN_BYTES, doubtful_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv.block import Block, Node
    from pagefold.kv.eviction import EvictionPolicy
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.names import BlockName
    from pagefold.kv.residuals import Residuals
    from pagefold.kv.slow_tiers import SlowTiers
    from pagefold.kv.tiers import HostTier
    from pagefold.kv.tree import PrefixHit

__all__ = ["KVCore"]

_NO_LIMITS = PinLimits()


class KVCore:
    """Paged blocks with prefix sharing.

    Args:
        num_blocks: blocks of the slab.
        block_size: tokens a block.
        policy: who is evicted first; the default of ``policies/`` if none is given.
        enable_prefix_caching: False publishes nothing, so nothing is ever matched.
        pin_limits: what pins may keep, and how long they count.
        host: where evicted blocks go.
        slow: what is behind the host.
        arbiter: weighs restoring from the host against computing. If none is given, restoring always pays: on a CPU it
            is a copy, of some hundredth of what computing takes.
        allow_streaming: whether sequences may be larger than the device; there must be a host tier then.
        residuals: of the sequences that may run, where blocks are sealed when they are full.
        emit: where events go.

    Attributes:
        publishes: whether anything is ever cached.
        cache, moves, publishing, pins, host, slow, residuals, streaming: the parts, as the module says.
        arbiter: weighs restoring against computing.
        pool, tree, policy: of ``cache``.
        tables: all that were acquired and not released.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        enable_prefix_caching: bool = True,
        pin_limits: PinLimits = _NO_LIMITS,
        host: HostTier = NO_HOST,
        slow: SlowTiers = NO_SLOW_TIERS,
        arbiter: Arbiter | None = None,
        allow_streaming: bool = False,
        residuals: Residuals = NO_RESIDUALS,
        emit: Emit = ignore,
    ) -> None:
        assert not slow.is_on or slow.host is host, "slow tiers of another arena"
        assert not (residuals.is_on and allow_streaming), "what streams is not sealed"
        assert host.is_on or not allow_streaming, "what streams lies in the host's arena"
        self.block_size = block_size
        self.publishes = enable_prefix_caching
        self.tables: set[BlockTable] = set()
        self.host = host
        self.slow = slow
        self.arbiter = arbiter or Arbiter(1, block_size, compute_s_per_token=0.0)
        self.residuals = residuals
        self.cache = cache = BlockCache(num_blocks, block_size, policy or make_policy("default"), host, emit)
        self.pool, self.tree, self.policy = cache.pool, cache.tree, cache.policy
        self.moves = Moves(cache, host, slow, emit)
        self.publishing = Publishing(cache, block_size)
        self.pins = PinTable(cache.pool, pin_limits, update_evictable=cache.update_evictable, emit=emit)
        self.streaming = Streaming(cache.pool, host, block_size, self.moves.store) if allow_streaming else NO_STREAMING
        self._emit = emit
        self._stride = block_size * TOKEN_BYTES

    # What there is.

    @property
    def now_s(self) -> float:
        """The time, which whoever calls sets; nothing that is decided hangs on it. It is told with events."""
        return self.cache.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.cache.now_s = now_s

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get: the free ones, and the cached ones that no pin keeps."""
        return self.cache.num_available

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
        if self.residuals.is_on:  # a part of a sealed block is not what its tokens alone come to
            hit = hit._replace(partial=None, num_partial_tokens=0)
        return self.host.extend(hit, packed, max_tokens, self._stride)

    def worth(self, hit: PrefixHit) -> PrefixHit:
        """Return ``hit`` without what the host holds, where computing that is sooner than restoring it.

        To be asked of a hit that is acquired then: the arbiter counts what it is asked.
        """
        if not hit.held or self.arbiter.restores(HOST, len(hit.held)):
            return hit
        return hit._replace(held=())

    def missing(self, namespace: bytes, packed: bytes, max_tokens: int) -> list[BlockName]:
        """Return the names of the whole blocks of ``packed`` that neither device nor host has, behind those they have.

        Arguments are those of :meth:`match`.
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
        tick = self.cache.next_tick()
        nodes = hit.nodes
        num_nodes = num_found = len(nodes)
        while num_nodes and not nodes[num_nodes - 1].attached:  # leaves leave first: parents are attached
            num_nodes -= 1
        if num_nodes < len(nodes):
            nodes = nodes[:num_nodes]
        table = BlockTable((nodes[-1] if nodes else self.tree.root(hit.namespace)) if self.publishes else None)
        self.tables.add(table)
        self.residuals.take(table)
        acquire = self.pool.acquire
        append = table.block_ids.append
        now_s = self.cache.now_s
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
            self.cache.update_evictable(nodes[-1])
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
        if num_new > self.cache.num_available:
            return False
        new: list[Block] = []
        for _ in range(num_new):
            block = self.cache.allocate()
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
        assert not table.streams, "a table that streams does not fork"
        twin = BlockTable(table.tail)
        twin.block_ids = list(table.block_ids)
        twin.capacity = table.capacity
        twin.num_published = table.num_published
        twin.copied_from = table.copied_from
        twin.may_share_tail = table.may_share_tail = True
        for block_id in twin.block_ids:
            self.pool.acquire(self.pool.blocks[block_id])
        self.tables.add(twin)
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
        tick = self.cache.next_tick()
        now_s = self.cache.now_s
        self.tables.remove(table)
        self.residuals.release(table)
        if table.has_path:
            assert table.tail is not None
            self.policy.on_release(table.tail, table.facts)
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
                    self.cache.update_evictable(node)
                else:
                    self.cache.evict(node, "not_admitted")
        table.block_ids = []
        table.capacity = table.num_published = 0
        table.tail = None
        self.moves.drop_unheld()

    def reset(self) -> int:
        """Forget every prefix: cached blocks become free, and what running tables hold is never published again.

        Pins are dropped: what they keep must not be used any more. Return how many cached blocks were freed.
        """
        self._emit(CacheReset())
        self.pins.clear()
        self.slow.reset()
        self.moves.cancel_stores()  # else their blocks would wait for a step, which may wait for the blocks
        self.host.reset()
        num_cached = self.pool.num_cached
        self.cache.clear()
        for table in self.tables:
            table.tail = None
            table.num_published = 0
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
        digests = self.host.distrust(namespace, packed, self._stride, nodes, table.copied_from)
        self.slow.distrust(digests)
        self.pins.distrust(set(nodes))
        for node in reversed(nodes):
            self.cache.evict(node, "corrupted")
        for other in self.tables:
            tail = other.tail
            if other is table or (tail is not None and tail.parent is not None and not tail.attached):
                other.tail = None
                other.num_published = 0
            if other is table or any(held.name.digest in digests for held in other.cold):
                self.streaming.forget(other)
        return digests

    # Inside.

    def _acquire_partial(self, table: BlockTable, node: Node, num_tokens: int) -> int:
        src = node.block
        assert src is not None
        self.pool.pin_io(src)  # before allocating, which might evict it
        self.cache.update_evictable(node)
        dst = self.cache.allocate()
        if dst is None:
            self.pool.unpin_io(src)
            self.cache.update_evictable(node)
            return 0
        node.last_used = self.cache.tick
        node.num_hits += 1
        now_s = self.cache.now_s
        self._emit(BlocksReused({now_s - node.used_s: 1}))
        node.used_s = now_s
        table.copied_from = node
        self.moves.copy(src, dst, num_tokens)
        self.pool.unpin_io(src)  # the copy has pinned it too
        table.block_ids.append(dst.block_id)
        return num_tokens

    def _acquire_held(self, table: BlockTable, held: tuple[HeldBlock, ...]) -> int:
        pinned = self.host.pin(held)  # before allocating, which may evict into the arena
        num_loaded = 0
        for one in pinned:
            block = self.cache.allocate()
            if block is None:
                break
            self.moves.load(one, block)
            table.block_ids.append(block.block_id)
            one.count_use(table.num_loaded_tokens, self.block_size)
            num_loaded += 1
        self.host.unpin(pinned[num_loaded:])
        return num_loaded * self.block_size

    def _unshare(self, table: BlockTable, start: int) -> bool:
        """Give ``table`` blocks of its own from position ``start`` on; False when memory is short."""
        first = start // self.block_size
        for index in range(first, len(table.block_ids)):
            src = self.pool.blocks[table.block_ids[index]]
            if src.num_table_refs == 1:
                continue
            dst = self.cache.allocate()
            if dst is None:
                return False  # blocks replaced so far stay replaced: the next try goes on from there
            num_tokens = start % self.block_size if index == first else 0
            if num_tokens and not self.residuals.is_on:  # else nothing is in a block that is not full
                self.moves.copy(src, dst, num_tokens)
            table.block_ids[index] = dst.block_id
            self.pool.release(src)
        table.may_share_tail = False
        return True
