"""KVCore: the centre. Which blocks a sequence holds, which prefixes are known, what goes when memory is short.

It decides and never acts: no tensors, no I/O, no clock. What a decision needs to be copied is collected in
``core.moves`` for the step that is being planned.

The life of a sequence here::

    hit = core.match(namespace, packed, max_tokens)     reads only
    cache, n = core.acquire(hit)                        holds what was found
    core.extend(cache, start, end)                      blocks for positions [start, end), or False
    core.release(cache)                                 published blocks stay cached, private ones become free

The core's parts have what is theirs:

    core.publishing     what a step will write: promised, committed or abandoned
    core.moves          what a step copies: between blocks, to the host and back
    core.blocks         the blocks themselves, and how memory is found
    core.rules          what the cache groups keep
    core.quotas         what of the blocks tenants keep, and may have (``quotas.py``)
    core.pins           what stays cached though no table holds it
    core.host, slow     the tiers behind the device (``host_tier.py``, ``slow_tiers.py``)
    core.uses           what is noted of blocks that are used, and hints
    core.forgetting     what must not be found any more
    core.losses         what giving up a sequence's blocks would come to
    core.residuals      where sequences have their unsealed blocks, of a codec that seals (``residuals.py``)
    core.streaming      sequences larger than the device (``streaming.py``): these begin with ``begin_streaming``
    core.packing        what was kept of chunks that are not seen whole any more (``packing.py``)
    core.lodgers        the last three as one (``lodger.py``): what they are told and asked of every sequence

A part that is off is there too, and has nothing and does nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pagefold.events import Emit, ignore
from pagefold.kv.arbiter import Arbiter
from pagefold.kv.block_cache import BlockCache
from pagefold.kv.forgetting import Forgetting
from pagefold.kv.held_block import HOST
from pagefold.kv.holding import Holding
from pagefold.kv.host_tier import NO_HOST
from pagefold.kv.keep import KEEP_ALL
from pagefold.kv.keep_rules import KeepRules
from pagefold.kv.lodger import Lodgers
from pagefold.kv.losses import Losses
from pagefold.kv.missing import NOTHING_MISSING
from pagefold.kv.moves import Moves
from pagefold.kv.packing import NO_PACKING, Packing
from pagefold.kv.pins import PinLimits, PinTable
from pagefold.kv.policies import make_policy
from pagefold.kv.prefixes import Prefixes, PrefixesByGroups
from pagefold.kv.publishing import Publishing, PublishingByGroups
from pagefold.kv.quotas import NO_QUOTAS
from pagefold.kv.residuals import NO_RESIDUALS
from pagefold.kv.sequence_cache import Mark, SequenceCache
from pagefold.kv.slow_tiers import NO_SLOW_TIERS
from pagefold.kv.streaming import NO_STREAMING, Streaming
from pagefold.kv.table import num_blocks_for
from pagefold.kv.tree import attached_part
from pagefold.kv.uses import Uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv.eviction import EvictionPolicy
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.keep import KeepRule
    from pagefold.kv.missing import Missing
    from pagefold.kv.quotas import AnyQuotas
    from pagefold.kv.residuals import Residuals
    from pagefold.kv.slow_tiers import SlowTiers
    from pagefold.kv.tree import PrefixHit

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
        quotas: of tenants; there must be one group that keeps all then, and nothing streams. ``policy`` is what their
            :meth:`AnyQuotas.policy` has returned.
        emit: where events go.

    Attributes:
        publishes: whether anything is ever cached.
        trims: whether any group gives blocks back while a sequence runs.
        rules: what each cache group keeps.
        blocks, moves, publishing, quotas, pins, host, slow, uses, forgetting, losses, residuals, streaming, packing,
            lodgers: the parts, as the module says.
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
        quotas: AnyQuotas = NO_QUOTAS,
        emit: Emit = ignore,
    ) -> None:
        assert not slow.is_on or slow.host is host, "slow tiers of another arena"
        assert not (residuals.is_on and allow_streaming), "what streams is not sealed"
        assert host.is_on or not allow_streaming, "what streams lies in the host's arena"
        is_plain = [rule.trims for rule in rules] == [False]
        assert is_plain or not allow_streaming, "what streams is known of one group that keeps all"
        assert not quotas.is_on or (is_plain and not allow_streaming), "quotas are known of one group that keeps all"
        self.block_size = block_size
        self.rules = KeepRules(rules, block_size)
        self.publishes = enable_prefix_caching
        self.caches: set[SequenceCache] = set()
        self.host = host
        self.slow = slow
        self.arbiter = arbiter or Arbiter(1, block_size, compute_s_per_token=0.0)
        self.residuals = residuals
        policy = policy or quotas.policy(make_policy("default"), partial(make_policy, "default"))
        self.blocks = blocks = BlockCache(num_blocks, self.rules, policy, host, slow, quotas, emit)
        self.quotas = quotas
        self.pool, self.tree, self.policy = blocks.pool, blocks.tree, blocks.policy
        self.moves = Moves(blocks, host, slow, emit)
        self.publishing = (Publishing if is_plain else PublishingByGroups)(blocks, block_size, emit)
        self.pins = PinTable(blocks.pool, self.rules, pin_limits, update_evictable=blocks.update_evictable, emit=emit)
        self.streaming = Streaming(blocks.pool, host, block_size, self.moves.store) if allow_streaming else NO_STREAMING
        self.losses = Losses(blocks.pool, host, self.arbiter, block_size)
        self.uses = Uses(blocks, emit)
        self._holding = Holding(blocks, self.rules, self.moves, host, self.uses)
        packs = self.rules.packing is not None
        assert not packs or not residuals.is_on, "what is packed is not sealed"
        assert not (packs and slow.is_on) or host.notes is not None, "slow tiers have to know what was packed"
        assert not (packs and slow.is_on and self.rules.keeps_paths), "packed chunks lead through slow tiers alone"
        self.packing = Packing(blocks, self.rules, self._holding) if packs else NO_PACKING
        self.lodgers = Lodgers((residuals, self.streaming, self.packing))
        self.forgetting = Forgetting(blocks, self.rules, host, slow, self.pins, self.lodgers, self.caches, emit)
        self.trims = bool(self.rules.trimmed)
        find = Prefixes if is_plain else PrefixesByGroups
        self._prefixes = find(self.tree, self.rules, host, self._holding, copies_parts=not residuals.is_on)

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
        """Blocks that who asked last could get: the free ones, and the cached ones that no pin keeps."""
        return self.blocks.num_available

    def num_available_to(self, tenant: str) -> int:
        """Return the blocks that ``tenant`` could get, had it no cap: the free ones, and cached ones that no pin keeps.

        Without those that floors withhold from it (``quotas.py``).
        """
        pool = self.pool
        return pool.num_free + pool.num_cached - pool.num_pinned - self.quotas.num_withheld_from(tenant)

    @property
    def num_groups(self) -> int:
        """Cache groups: how many tables a sequence has."""
        return len(self.rules)

    @property
    def num_active(self) -> int:
        """Blocks held by sequences or transfers."""
        return self.pool.num_blocks - self.pool.num_free - self.pool.num_cached

    @property
    def usage(self) -> float:
        """Share of blocks held by sequences or transfers, 0 to 1."""
        return self.num_active / self.pool.num_blocks

    def match(self, namespace: bytes, packed: bytes, max_tokens: int, mask: int = 0) -> PrefixHit:
        """Find the longest known prefix of ``packed``, of at most ``max_tokens`` tokens. Writes nothing, pins nothing.

        Args:
            namespace: :meth:`Namespace.key`.
            packed: the tokens, 4 bytes each.
            max_tokens: a bound; a request passes its length less one, since its last token must be computed to
                know the next.
            mask: by which mask the sequence keeps older tokens, where those are packed; ``NO_MASK`` for all of them.
                Of a namespace all are kept by one.
        """
        return self._prefixes.match(namespace, packed, max_tokens, mask=mask)

    def worth(self, hit: PrefixHit) -> PrefixHit:
        """Return ``hit`` without what the host holds, where computing that is sooner than restoring it.

        To be asked of a hit that is acquired then: the arbiter counts what it is asked.
        """
        if not hit.held:
            return hit
        num_whole = self.rules.of(hit.mask).num_whole(hit.nodes)
        if self.arbiter.restores(HOST, len(hit.held), hit.num_blocks - num_whole):
            return hit
        lost = hit.lost or (hit.nodes[-1] if num_whole < len(hit.nodes) else None)
        return hit._replace(nodes=hit.nodes[:num_whole], held=(), num_behind=0, lost=lost)

    def missing(self, namespace: bytes, packed: bytes, max_tokens: int, mask: int = 0) -> Missing:
        """Return what of the whole blocks of ``packed`` neither device nor host has, behind those they have.

        Arguments are those of :meth:`match`.
        """
        if self.forgetting.doubts(namespace, packed):
            return NOTHING_MISSING
        of_chunk = self.packing.expected_blocks(mask) if self.packing.is_on else 0
        return self._prefixes.missing(namespace, packed, max_tokens, mask=mask, of_chunk=of_chunk)

    # Sequences' caches.

    def acquire(  # noqa: PLR0913 - facts of who asks, by name
        self,
        hit: PrefixHit,
        message_ends: Sequence[int] = (),
        *,
        is_return: bool = False,
        owner: str = "",
        tenant: str = "",
        session: object | None = None,
    ) -> tuple[SequenceCache, int]:
        """Make a cache that starts with what ``hit`` found, and hold that. Return it and the number of tokens it holds.

        A hit is a value and may be stale: what has left the tree since is cut off. A partial block is taken over by
        copying it, and a block that the host tier holds by loading it, if a block can be had for that. What is loaded
        is published by the cache's next promise, as what the step computes.

        Args:
            hit: what was found.
            message_ends: positions behind the last tokens of messages, ascending: there conversations go on, or part.
                Where groups keep the last tokens only, their windows stay cached there while memory is to spare; the
                last one's firmly (``landmarks.py``).
            is_return: whether who asks has had a cache of the same before: where it begins says nothing of others.
            owner: the request that it is for, as events name it.
            tenant: whose blocks they are, where tenants have quotas.
            session: for whose session the blocks are used (``expectations.py``); None for none.
        """
        self.blocks.next_tick()
        self.blocks.asked_by = owner
        nodes = attached_part(hit.nodes)
        cache = SequenceCache(len(self.rules), None)
        cache.mask = hit.mask
        cache.owner = owner
        cache.tenant = self.quotas.of(tenant)
        self.quotas.ask(cache.tenant)
        self.caches.add(cache)
        self.lodgers.on_acquire(cache)
        nodes = self._prefixes.begin(cache, nodes, hit)
        if self.publishes:
            cache.tail = nodes[-1] if nodes else self.tree.root(hit.namespace, mask=hit.mask)
        if nodes:
            self.uses.note(nodes)
            self.blocks.expectations.note_use(nodes, session)
        cache.num_published = len(nodes)
        num_tokens = len(nodes) * self.block_size + self._prefixes.go_on(cache, nodes, hit)
        cache.num_begun = num_tokens // self.block_size
        cache.capacity = cache.tables[0].end * self.block_size
        if self.publishes and self.rules.of(hit.mask).trimmed:
            cache.marks = self._marks(hit, num_tokens, message_ends, is_return=is_return)
        return cache, num_tokens

    def begin_streaming(self, hit: PrefixHit, *, owner: str = "") -> tuple[SequenceCache, int]:
        """Make a cache that streams and starts with what ``hit`` found. Return it and the number of tokens it holds.

        The cache holds none of the device's blocks yet, and what it will hold is never published. ``owner`` is the
        request that it is for, as events name it.
        """
        cache = self.streaming.begin(hit)
        cache.owner = owner
        self.caches.add(cache)
        cache.capacity = cache.tables[0].end * self.block_size
        return cache, cache.capacity

    def extend(self, cache: SequenceCache, start: int, end: int) -> bool:
        """Make room for writing positions [start, end), evicting cached blocks if need be.

        Blocks that a fork shares are replaced first (copy-on-write), so that a write never reaches another sequence.
        False, with nothing changed that matters, when memory is short.
        """
        self.blocks.asked_by = cache.owner
        self.quotas.ask(cache.tenant)
        if cache.may_share_tail and not self._holding.unshare(cache, start, copies=not self.residuals.is_on):
            return False
        if end > cache.capacity and not self._holding.extend(cache, end):
            return False
        return not self.packing.is_on or self.packing.grant(cache, end)

    def num_blocks_for(
        self,
        num_tokens: int,
        num_new: int,
        cache: SequenceCache | None = None,
        *,
        is_expected: bool = False,
        mask: int = 0,
    ) -> int:
        """Return how many blocks of the device a sequence takes at most at once until it has ``num_tokens``.

        Args:
            num_tokens: how many it will have.
            num_new: the most that one step computes of it.
            cache: what it has already, if it has begun; that is not counted.
            is_expected: whether as much of older chunks is kept as has been of others; else all may be.
            mask: by which mask it keeps older tokens, where those are packed; ``NO_MASK`` for all of them.
        """
        kept_share = self.packing.expected_share(mask) if is_expected and self.packing.is_on else 1.0
        rules = self.rules.of(mask)
        num_blocks = rules.num_blocks_for(num_tokens, num_new, cache, kept_share)
        return num_blocks if cache is None else self.lodgers.growth(cache, num_tokens, num_blocks)

    def trim(self, cache: SequenceCache, num_tokens: int) -> None:
        """Give back the blocks that nobody sees from position ``num_tokens`` on: what groups do not keep.

        They are free in this moment; or cached, if they are published, until anybody needs a block. Blocks that are
        still to be published or only promised stay, and so does what whoever goes on behind the published ones needs:
        so the path is found again as far as it is published. Where blocks are sealed, what is seen from the beginning
        of the block on that is being filled stays too: whoever loses a residual begins again there.

        To be called when the step has ended that wrote the tokens of ``cache`` before ``num_tokens``; a step planned
        behind it may be in flight.
        """
        if self.trims:
            self._holding.trim(cache, self.residuals.begins_again_at(num_tokens))

    def shrink(self, cache: SequenceCache, num_tokens: int) -> None:
        """Give back the blocks behind those that ``num_tokens`` need: of drafts that were rejected.

        They are the cache's own, and were never published.
        """
        num_blocks = num_blocks_for(num_tokens, self.block_size)
        if num_blocks * self.block_size < cache.capacity:
            self._holding.cut(cache, num_blocks)

    def fork(self, cache: SequenceCache, *, owner: str = "") -> SequenceCache:
        """Make a second cache on the same blocks. Whoever writes into a shared block first gets a copy of it.

        Both go on from the same position: what lies before it in the shared block is what the copy is for. All whole
        blocks of ``cache`` that are to be published are: as at the end of a prompt, whose tokens are all known when a
        step promises them. Of others, neither would be published, nor given back where groups trim, while both live.
        ``owner`` is the request that it is for, as events name it.
        """
        assert cache.promise is None, "a cache forks between steps"
        twin = SequenceCache(len(cache.tables), cache.tail)
        twin.mask = cache.mask
        twin.owner = owner
        twin.tenant = cache.tenant
        self._holding.share(cache, twin)
        twin.capacity = cache.capacity
        twin.num_published = cache.num_published
        twin.num_begun = cache.num_begun
        twin.copied_from = cache.copied_from
        twin.marks = list(cache.marks)
        twin.num_loaded_tokens = cache.num_loaded_tokens
        self.caches.add(twin)
        self.lodgers.on_fork(cache, twin)
        return twin

    def release(self, cache: SequenceCache) -> None:
        """Let go of all blocks of ``cache``: published ones become cached, private ones free.

        Tails go first, so that of one prefix the tail is always evicted before the head.
        """
        assert cache.promise is None, "commit or abandon a promise before releasing its cache"
        self.blocks.next_tick()
        self.caches.remove(cache)
        if cache.has_path:
            assert cache.tail is not None
            self.policy.on_release(cache.tail, cache.facts)
        self.lodgers.on_release(cache)
        self._holding.release(cache)
        cache.capacity = cache.num_published = 0
        cache.tail = None
        self.moves.drop_unheld()

    def _marks(self, hit: PrefixHit, num_tokens: int, message_ends: Sequence[int], *, is_return: bool) -> list[Mark]:
        """Return the places of a path that will be landmarks, the first last.

        Args:
            hit: what was found of the path.
            num_tokens: that a cache began with of it.
            message_ends: positions behind its messages.
            is_return: whether only these count.
        """
        size, lost, begun = self.block_size, hit.lost, num_tokens // self.block_size
        marks: dict[int, Mark] = {}
        for position in message_ends:
            end = -(-position // size)
            if end > begun:
                marks[end] = Mark(end, "prompt" if position == message_ends[-1] else "message")
        if lost is not None and lost.attached and lost.children and not is_return:
            marks[lost.depth + 1] = Mark(lost.depth + 1, "lost")
        if begun and not is_return:
            parts = begun <= len(hit.nodes) and bool(hit.nodes[begun - 1].children)
            marks[begun] = Mark(begun, "parting" if parts else "turn")
        return [marks[end] for end in sorted(marks, reverse=True)]
