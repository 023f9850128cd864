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
    core.blocks         the blocks themselves, and how memory is found
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
from pagefold.kv.keep import KEEP_ALL
from pagefold.kv.moves import Moves
from pagefold.kv.names import digest_of, names_behind, root_digest
from pagefold.kv.pins import PinLimits, PinTable
from pagefold.kv.policies import make_policy
from pagefold.kv.publishing import Publishing
from pagefold.kv.residuals import NO_RESIDUALS
from pagefold.kv.sequence_cache import SequenceCache
from pagefold.kv.slow_tiers import NO_SLOW_TIERS
from pagefold.kv.streaming import NO_STREAMING, Streaming
from pagefold.kv.table import num_blocks_for
from pagefold.kv.tiers import NO_HOST
from pagefold.kv.tree import TOKEN_BYTES, PrefixHit, doubtful_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagefold.kv.block import Block, Node
    from pagefold.kv.eviction import EvictionPolicy
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.keep import KeepRule
    from pagefold.kv.names import BlockName
    from pagefold.kv.residuals import Residuals
    from pagefold.kv.slow_tiers import SlowTiers
    from pagefold.kv.tiers import HostTier

__all__ = ["KVCore"]

_NO_LIMITS = PinLimits()


class KVCore:
    """Paged blocks with prefix sharing.

    Args:
        num_blocks: blocks of the slab.
        block_size: tokens a block.
        rules: what each cache group keeps.
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
        trims: whether any group gives blocks back while a sequence runs.
        rules: what each cache group keeps.
        blocks, moves, publishing, pins, host, slow, residuals, streaming: the parts, as the module says.
        arbiter: weighs restoring against computing.
        pool, tree, policy: of ``blocks``.
        caches: all that were acquired and not released.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        rules: Sequence[KeepRule] = (KEEP_ALL,),
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
        assert len(rules) == 1 or not (host.is_on or residuals.is_on), "tiers and residuals know one cache group"
        self.block_size = block_size
        self.rules = tuple(rules)
        self.publishes = enable_prefix_caching
        self.caches: set[SequenceCache] = set()
        self.host = host
        self.slow = slow
        self.arbiter = arbiter or Arbiter(1, block_size, compute_s_per_token=0.0)
        self.residuals = residuals
        self.blocks = blocks = BlockCache(
            num_blocks, block_size, self.rules, policy or make_policy("default"), host, emit
        )
        self.pool, self.tree, self.policy = blocks.pool, blocks.tree, blocks.policy
        self.moves = Moves(blocks, host, slow, emit)
        self.publishing = Publishing(blocks, block_size)
        self.pins = PinTable(
            blocks.pool, self.rules, block_size, pin_limits, update_evictable=blocks.update_evictable, emit=emit
        )
        self.streaming = Streaming(blocks.pool, host, block_size, self.moves.store) if allow_streaming else NO_STREAMING
        self._emit = emit
        self._stride = block_size * TOKEN_BYTES
        self.trims = bool(blocks.trimmed_groups)

    # What there is.

    @property
    def now_s(self) -> float:
        """The time, which whoever calls sets; nothing that is decided hangs on it. It is told with events."""
        return self.blocks.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.blocks.now_s = now_s

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get: the free ones, and the cached ones that no pin keeps."""
        return self.blocks.num_available

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
        if self.trims:
            hit = self._with_windows(hit, packed, max_tokens)
        if self.residuals.is_on:  # a part of a sealed block is not what its tokens alone come to
            hit = hit._replace(partial=None, num_partial_tokens=0)
        return self.host.extend(hit, packed, max_tokens, self._stride)

    def blocks_of(self, hit: PrefixHit) -> list[Block]:
        """Return the blocks that a cache holds which is made from ``hit``, but for a partial one and loaded ones."""
        num_blocks = len(hit.nodes)
        return [
            block
            for group, rule in enumerate(self.rules)
            for node in hit.nodes[rule.first_block(num_blocks, self.block_size) :]
            if (block := node.blocks[group]) is not None
        ]

    def num_blocks_for(self, num_tokens: int, num_new: int, cache: SequenceCache | None = None) -> int:
        """Return the most blocks, of all groups, that a sequence of ``num_tokens`` holds at once.

        Args:
            num_tokens: of the sequence.
            num_new: the most that one step computes of it.
            cache: what it has already; that is not counted.
        """
        num_blocks = 0
        for group, rule in enumerate(self.rules):
            num_held = len(cache.tables[group].block_ids) if cache is not None else 0
            num_blocks += max(0, rule.num_blocks_for(num_tokens, num_new, self.block_size) - num_held)
        return num_blocks

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

    def acquire(self, hit: PrefixHit) -> tuple[SequenceCache, int]:
        """Make a table that starts with what ``hit`` found, and pin it. Return it and the number of tokens it holds.

        A hit is a value and may be stale: what has left the tree since is cut off. A partial block is taken over by
        copying it, and a block that the host tier holds by loading it, if a block can be had for that. What is loaded
        is published by the table's next promise, as what the step computes.
        """
        tick = self.blocks.next_tick()
        nodes = hit.nodes
        num_nodes = num_found = len(nodes)
        while num_nodes and not nodes[num_nodes - 1].attached:  # leaves leave first: parents are attached
            num_nodes -= 1
        if self.trims:
            num_nodes = self._num_whole(nodes[:num_nodes])
        if num_nodes < num_found:
            nodes = nodes[:num_nodes]
        tail = nodes[-1] if nodes else self.tree.root(hit.namespace)
        cache = SequenceCache(len(self.rules), tail if self.publishes else None)
        self.caches.add(cache)
        self.residuals.take(cache)
        self._take(cache, nodes)
        now_s = self.blocks.now_s
        gaps: dict[float, int] = {}
        used_s, num_alike = (nodes[0].used_s if nodes else now_s), 0  # blocks of a path were mostly used together
        for node in nodes:
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
            self.blocks.update_evictable(nodes[-1])
            self.policy.on_hit(nodes)
        cache.num_published = len(nodes)
        num_tokens = len(nodes) * self.block_size
        if num_nodes == num_found:
            if hit.partial is not None and hit.partial.attached:
                num_tokens += self._acquire_partial(cache, hit.partial, hit.num_partial_tokens)
            elif hit.held:
                num_tokens += self._acquire_held(cache, hit.held)
        cache.capacity = cache.tables[0].end * self.block_size
        return cache, num_tokens

    def begin_streaming(self, hit: PrefixHit) -> tuple[SequenceCache, int]:
        """Make a table that streams and starts with what ``hit`` found. Return it and the number of tokens it holds.

        The table holds none of the device's blocks yet, and what it will hold is never published.
        """
        cache = self.streaming.begin(hit)
        self.caches.add(cache)
        cache.capacity = cache.tables[0].end * self.block_size
        return cache, cache.capacity

    def extend(self, cache: SequenceCache, start: int, end: int) -> bool:
        """Make room for writing positions [start, end), evicting cached blocks if need be.

        Blocks that a fork shares are replaced first (copy-on-write), so that a write never reaches another sequence.
        False, with nothing changed that matters, when memory is short.
        """
        if cache.may_share_tail and not self._unshare(cache, start):
            return False
        if end <= cache.capacity:
            return True
        num_new = num_blocks_for(end, self.block_size) - cache.tables[0].end
        if num_new * len(cache.tables) > self.blocks.num_available:
            return False
        new: list[Block] = []
        for _ in range(num_new * len(cache.tables)):
            block = self.blocks.allocate()
            if block is None:  # cached blocks that a transfer reads cannot go
                for taken in reversed(new):
                    self.pool.release(taken)
                return False
            new.append(block)
        for group, table in enumerate(cache.tables):
            own = new[group * num_new : (group + 1) * num_new]
            table.block_ids += [block.block_id for block in own]
            for block in own:
                block.group = group
        cache.capacity = cache.tables[0].end * self.block_size
        return True

    def trim(self, cache: SequenceCache, num_tokens: int) -> None:
        """Give back the blocks that nobody sees from position ``num_tokens`` on: what groups do not keep.

        They are free in this moment; or cached, if they are published, until anybody needs a block. Blocks that are
        still to be published or only promised stay, and so does what whoever goes on behind the published ones needs:
        so the path is found again as far as it is published.

        To be called when the step has ended that wrote the tokens of ``cache`` before ``num_tokens``; a step planned
        behind it may be in flight.
        """
        if not self.trims:
            return
        promise = cache.promise
        num_published = cache.num_published if promise is None else (promise.before or promise).first
        pool = self.pool
        for group in self.blocks.trimmed_groups:
            table, rule = cache.tables[group], self.rules[group]
            first = rule.first_seen(num_tokens) // self.block_size
            if cache.tail is not None:
                first = min(first, rule.first_block(num_published, self.block_size))
            num_old = first - table.num_trimmed
            if num_old <= 0:
                continue
            for block_id in table.block_ids[:num_old]:
                block = pool.blocks[block_id]
                if pool.release(block) and block.node is not None:
                    self.blocks.note_idle(block, is_stale=True)
            del table.block_ids[:num_old]
            table.num_trimmed = first

    def fork(self, cache: SequenceCache) -> SequenceCache:
        """Make a second table on the same blocks. Whoever writes into a shared block first gets a copy of it.

        Both go on from the same position: what lies before it in the shared block is what the copy is for.
        """
        assert cache.promise is None, "a table forks between steps"
        assert not cache.streams, "a table that streams does not fork"
        twin = SequenceCache(len(cache.tables), cache.tail)
        for table, other in zip(cache.tables, twin.tables, strict=True):
            other.block_ids = list(table.block_ids)
            other.num_trimmed = table.num_trimmed
        twin.capacity = cache.capacity
        twin.num_published = cache.num_published
        twin.copied_from = cache.copied_from
        twin.may_share_tail = cache.may_share_tail = True
        for block_id in twin.all_block_ids():
            self.pool.acquire(self.pool.blocks[block_id])
        self.caches.add(twin)
        self.residuals.fork(cache, twin)
        return twin

    def hint(self, cache: SequenceCache, will_be_reused: Iterable[bool]) -> None:
        """Say of the first blocks of ``cache`` whether they will be used again; call it before releasing the table.

        Policies may heed it, as far as hints have proved right; nothing else does. It holds until the next user's hint.
        """
        path: list[Node] = []
        node = cache.tail
        while node is not None and node.blocks:
            path.append(node)
            node = node.parent
        for one, hint in zip(reversed(path), will_be_reused, strict=False):
            one.reuse_hint = hint

    def release(self, cache: SequenceCache) -> None:
        """Let go of all blocks of ``cache``: published ones become cached, private ones free.

        Tails go first, so that of one prefix the tail is always evicted before the head.
        """
        assert cache.promise is None, "commit or abandon a promise before releasing its table"
        tick = self.blocks.next_tick()
        now_s = self.blocks.now_s
        self.caches.remove(cache)
        self.residuals.release(cache)
        if cache.has_path:
            assert cache.tail is not None
            self.policy.on_release(cache.tail, cache.facts)
        self.streaming.release(cache)
        blocks = self.pool.blocks
        release = self.pool.release
        for table in cache.tables[1:]:
            for block_id in reversed(table.block_ids):
                block = blocks[block_id]
                node = block.node
                if release(block) and node is not None and not node.children:  # the first group may not hold it
                    self.blocks.update_evictable(node)
                self.blocks.note_idle(block)
        for block_id in reversed(cache.block_ids):
            block = blocks[block_id]
            node = block.node
            if node is not None:
                node.last_used = tick
                node.used_s = now_s
            if release(block) and node is not None and (self.trims or not node.children):
                self._keep_or_evict(node, block)
        for table in cache.tables:
            table.block_ids.clear()
        cache.capacity = cache.num_published = 0
        cache.tail = None
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
        self.blocks.clear()
        for cache in self.caches:
            cache.tail = None
            cache.num_published = 0
            self.streaming.forget(cache)
        return num_cached

    def distrust(self, cache: SequenceCache, namespace: bytes, packed: bytes) -> set[bytes]:
        """Forget what ``cache`` has, what it began with, and whatever else goes on from that: it may be corrupted.

        Those are all paths that begin with its first block, since nobody knows which of its blocks is at fault. Other
        tables on them go on, and publish nothing any more.

        Args:
            cache: of a sequence whose logits were no numbers.
            namespace: key of the namespace that its blocks are in.
            packed: the sequence's packed tokens.

        Returns the digests of the paths, for slower tiers to forget; none without a host tier.
        """
        nodes = doubtful_nodes(self.tree, namespace, packed[: self._stride], cache.copied_from)
        digests = self.host.distrust(namespace, packed, self._stride, nodes, cache.copied_from)
        self.slow.distrust(digests)
        self.pins.distrust(set(nodes))
        for node in reversed(nodes):
            if node.attached:  # one without blocks has gone with its last child
                self.blocks.evict(node, "corrupted")
        for other in self.caches:
            tail = other.tail
            if other is cache or (tail is not None and tail.parent is not None and not tail.attached):
                other.tail = None
                other.num_published = 0
            if other is cache or any(held.name.digest in digests for held in other.cold):
                self.streaming.forget(other)
        return digests

    # Inside.

    def _with_windows(self, hit: PrefixHit, packed: bytes, max_tokens: int) -> PrefixHit:
        """Return as much of ``hit`` as can be gone on from: each group has what it keeps behind it."""
        num_whole = self._num_whole(hit.nodes)
        if num_whole < len(hit.nodes):
            num_tokens = num_whole * self.block_size
            return self.tree.match_part(hit.namespace, hit.nodes[:num_whole], packed, num_tokens, max_tokens)
        return hit

    def _num_whole(self, nodes: list[Node]) -> int:
        """Return how many of ``nodes`` can be gone on from: groups that keep the last tokens only have those."""
        whole = set(range(len(nodes) + 1))
        for group in self.blocks.trimmed_groups:
            num_present = 0  # up to here, without a gap
            for end, node in enumerate(nodes, 1):
                num_present = 0 if node.blocks[group] is None else num_present + 1
                if end - num_present > self.rules[group].first_block(end, self.block_size):
                    whole.discard(end)
        return max(whole)

    def _take(self, cache: SequenceCache, nodes: list[Node]) -> None:
        """Let the tables of ``cache`` begin with the blocks of ``nodes``, as far as they are kept."""
        for group, (table, rule) in enumerate(zip(cache.tables, self.rules, strict=True)):
            table.num_trimmed = rule.first_block(len(nodes), self.block_size)
            kept = nodes[table.num_trimmed :] if table.num_trimmed else nodes
            blocks = [block for node in kept if (block := node.blocks[group]) is not None]
            self.pool.acquire_all(blocks)
            table.block_ids = [block.block_id for block in blocks]
            if rule.trims:
                for block in blocks:
                    self.blocks.note_busy(block)

    def _keep_or_evict(self, node: Node, block: Block) -> None:
        """Nobody holds ``block`` of ``node`` any more: its node stays cached, unless the policy does not want it."""
        if not node.children:
            if block.num_pin_refs or self.policy.admit(node):
                self.blocks.update_evictable(node)
                return
            self.blocks.evict(node, "not_admitted")
        self.blocks.note_idle(block)

    def _acquire_partial(self, cache: SequenceCache, node: Node, num_tokens: int) -> int:
        sources: list[Block] = []
        for block in node.blocks:
            if block is None:
                break
            self.pool.pin_io(block)  # before allocating, which might evict it
            sources.append(block)
        self.blocks.update_evictable(node)
        copies: list[Block] = []
        while len(copies) < len(node.blocks) == len(sources):
            dst = self.blocks.allocate()
            if dst is None:
                break
            copies.append(dst)
        is_taken = len(copies) == len(node.blocks)
        if is_taken:
            node.last_used = self.blocks.tick
            node.num_hits += 1
            now_s = self.blocks.now_s
            self._emit(BlocksReused({now_s - node.used_s: 1}))
            node.used_s = now_s
            cache.copied_from = node
            for table, src, dst in zip(cache.tables, sources, copies, strict=True):
                dst.group = src.group
                self.moves.copy(src, dst, num_tokens)
                table.block_ids.append(dst.block_id)
        else:
            for dst in copies:
                self.pool.release(dst)
        for src in sources:
            self.pool.unpin_io(src)  # the copy has pinned it too
        if not is_taken:
            self.blocks.update_evictable(node)
            return 0
        return num_tokens

    def _acquire_held(self, cache: SequenceCache, held: tuple[HeldBlock, ...]) -> int:
        pinned = self.host.pin(held)  # before allocating, which may evict into the arena
        num_loaded = 0
        for one in pinned:
            block = self.blocks.allocate()
            if block is None:
                break
            block.group = 0
            self.moves.load(one, block)
            cache.block_ids.append(block.block_id)
            one.count_use(cache.num_loaded_tokens, self.block_size)
            num_loaded += 1
        self.host.unpin(pinned[num_loaded:])
        return num_loaded * self.block_size

    def _unshare(self, cache: SequenceCache, start: int) -> bool:
        """Give ``cache`` blocks of its own from position ``start`` on; False when memory is short."""
        first = start // self.block_size
        for table in cache.tables:
            for at in range(first - table.num_trimmed, len(table.block_ids)):
                src = self.pool.blocks[table.block_ids[at]]
                if src.num_table_refs == 1:
                    continue
                dst = self.blocks.allocate()
                if dst is None:
                    return False  # blocks replaced so far stay replaced: the next try goes on from there
                dst.group = src.group
                num_tokens = start % self.block_size if at == first - table.num_trimmed else 0
                if num_tokens and not self.residuals.is_on:  # else nothing is in a block that is not full
                    self.moves.copy(src, dst, num_tokens)
                table.block_ids[at] = dst.block_id
                self.pool.release(src)
        cache.may_share_tail = False
        return True
