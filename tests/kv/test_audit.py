"""audit: silent on a core at work, and loud on each corruption: one seeded case for every check in audit.py."""

from __future__ import annotations

import ast
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from landmark_driver import a_core_with_landmarks

import pagefold.kv
from pagefold.kv import (
    Arbiter,
    AuditError,
    BlockState,
    CopyOp,
    HostTier,
    KVCore,
    KVQuota,
    PrefixHit,
    Quotas,
    Residuals,
    SequenceCache,
    SlowTiers,
    StoreOp,
    audit,
    make_policy,
)
from pagefold.kv.block import NOBODY, Block, BlockId, Node, PackedChunk
from pagefold.kv.expectations import ExpectedPath
from pagefold.kv.held_block import HeldBlock, HeldChunk
from pagefold.kv.keep import NO_MASK, KeepRule
from pagefold.kv.keep_rules import KeepRules
from pagefold.kv.names import BlockName
from pagefold.kv.packing import Packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv import Pin

NS = b"namespace"


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class World:
    """A core with something of everything, by name, to corrupt.

    Attributes:
        cache: runs; its first two blocks are published, its third is private.
        promising: holds out a promise of one block.
        cached: one of two leaves under a block, all three cached.
        free: a block that nobody has.
        held: a block on the host, which is to be loaded; others are to be stored.
        streamed: a table with a cold block and a hot one.
    """

    def __init__(self) -> None:
        self.host = HostTier(4)
        self.core = core = KVCore(20, block_size=4, policy=make_policy("lru"), host=self.host, allow_streaming=True)
        self.pool = core.pool
        core.release(self.serve(range(90, 94)))
        core.blocks.reclaim(1)
        core.moves.host_done(core.moves.take_host_ops())
        loading, _ = core.acquire(core.match(NS, pack(range(90, 96)), 5))
        (self.held,) = self.host.blocks.all()
        assert loading.only_table.block_ids == [load.block_id for load in self.host.pending.loads]
        core.release(self.serve(range(80, 84)))
        core.blocks.reclaim(1)
        core.release(self.serve([50, 51, 52, 53, 60, 61, 62, 63]))
        core.release(self.serve(range(50, 58)))
        self.cached = core.match(NS, pack(range(50, 58)), 8).nodes[1]
        self.cache = self.serve(range(10))
        self.promising = self.plan(range(70, 74))
        self.streamed, _ = core.begin_streaming(PrefixHit(NS, [], None, 0))
        assert core.extend(self.streamed, 0, 8)
        assert core.streaming.cool(self.streamed, pack(range(100, 108)), 8, 1) == 1
        self.free = self.pool.blocks[self.pool.free_ids[0]]
        audit(core)

    def plan(self, tokens: Sequence[int]) -> SequenceCache:
        core = self.core
        cache, start = core.acquire(core.match(NS, pack(tokens), len(tokens) - 1))
        assert core.extend(cache, start, len(tokens))
        core.publishing.promise(cache, pack(tokens), len(tokens))
        return cache

    def serve(self, tokens: Sequence[int]) -> SequenceCache:
        cache = self.plan(tokens)
        assert cache.promise is not None
        self.core.publishing.commit(cache.promise)
        return cache

    def block(self, cache: SequenceCache, index: int) -> Block:
        return self.pool.blocks[cache.only_table.block_ids[index]]

    def node(self, cache: SequenceCache, index: int) -> Node:
        node = self.block(cache, index).node
        assert node is not None
        return node


def misplaced_block(world: World) -> None:
    blocks = world.pool.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def cached_count_off_by_one(world: World) -> None:
    world.pool.num_cached += 1


def free_twice(world: World) -> None:
    world.pool.free_ids.append(world.pool.free_ids[0])


def free_block_lost(world: World) -> None:
    world.pool.free_ids.pop()


def held_block_in_the_free_list(world: World) -> None:
    world.pool.free_ids.append(world.cache.only_table.block_ids[0])


def table_count_off_by_one(world: World) -> None:
    world.block(world.cache, 1).num_table_refs += 1


def table_count_too_small(world: World) -> None:
    world.block(world.cache, 2).num_table_refs -= 1


def free_block_with_a_ref(world: World) -> None:
    world.free.num_table_refs = 1


def transfer_count_off_by_one(world: World) -> None:
    world.block(world.cache, 2).num_io_refs += 1


def free_block_with_a_node(world: World) -> None:
    world.free.node = world.cached


def active_but_nobody_holds_it(world: World) -> None:
    world.cached.blocks[0].state = BlockState.ACTIVE
    world.pool.num_cached -= 1


def cached_but_held(world: World) -> None:
    world.block(world.cache, 1).state = BlockState.CACHED
    world.pool.num_cached += 1


def cached_but_not_published(world: World) -> None:
    world.cached.blocks[0].node = None


def copy_for_nobody(world: World) -> None:
    src, dst = world.block(world.cache, 0), world.cached.blocks[0]
    assert dst is not None
    world.core.moves.pending_copies.append(CopyOp(src.block_id, dst.block_id, 1))
    world.pool.pin_io(src)
    world.pool.pin_io(dst)


def root_under_another_name(world: World) -> None:
    world.core.tree.roots[b"other"] = world.core.tree.roots[NS]


def root_without_children(world: World) -> None:
    world.core.tree.roots[b"other"] = Node(b"other", None, (), 0)


def root_not_attached(world: World) -> None:
    world.core.tree.roots[NS].attached = False


def node_for_another_number_of_groups(world: World) -> None:
    world.cached.blocks += (None,)


def node_without_block(world: World) -> None:
    parent = world.cached.parent
    assert parent is not None
    parent.put(0, None)


def leaf_without_blocks(world: World) -> None:
    world.cached.put(0, None)


def node_under_another_key(world: World) -> None:
    parent = world.cached.parent
    assert parent is not None
    parent.children[b"\0" * 16] = parent.children.pop(world.cached.key)


def wrong_key_length(world: World) -> None:
    node, parent = world.cached, world.cached.parent
    assert parent is not None
    del parent.children[node.key]
    node.key += b"\0"
    parent.children[node.key] = node


def wrong_depth(world: World) -> None:
    world.cached.depth = 7


def node_in_the_tree_that_says_it_left(world: World) -> None:
    world.cached.attached = False


def block_published_by_two_nodes(world: World) -> None:
    root, block = world.core.tree.roots[NS], world.cached.blocks[0]
    assert block is not None
    world.core.tree.insert(root, b"\0" * 16, (block,), 0).committed = True
    block.node = world.cached


def two_blocks_of_one_id(world: World) -> None:
    root, block = world.core.tree.roots[NS], world.cached.blocks[0]
    assert block is not None
    twin = Block(block.block_id)
    twin.node = world.core.tree.insert(root, b"\0" * 16, (twin,), 0)
    twin.node.committed = True
    twin.node.children, world.cached.children = world.cached.children, twin.node.children


def held_but_not_the_block_before_it(world: World) -> None:
    world.pool.release(world.block(world.cache, 0))
    del world.cache.only_table.block_ids[0]


def never_committed(world: World) -> None:
    world.node(world.cache, 1).committed = False


def committed_while_promised(world: World) -> None:
    world.node(world.promising, 0).committed = True


def evictable_while_held(world: World) -> None:
    world.node(world.cache, 1).evictable = True


def idle_but_not_evictable(world: World) -> None:
    world.cached.evictable = False


def used_before_it_was_born(world: World) -> None:
    world.cached.born_s = 1.0


def used_in_the_future(world: World) -> None:
    world.cached.used_s = 1.0


def orphaned_node(world: World) -> None:
    parent = world.cached.parent
    assert parent is not None
    del parent.children[world.cached.key]


def promise_of_another_table(world: World) -> None:
    assert world.promising.promise is not None
    world.cache.promise = world.promising.promise


def promises_with_a_gap(world: World) -> None:
    assert world.promising.promise is not None
    world.promising.promise.end = world.cached


def block_twice_in_a_table(world: World) -> None:
    world.pool.acquire(world.block(world.cache, 2))
    world.cache.only_table.block_ids.append(world.cache.only_table.block_ids[2])


def wrong_capacity(world: World) -> None:
    world.cache.capacity += 4


def more_published_than_held(world: World) -> None:
    world.cache.num_published = 4


def tail_that_left_the_tree(world: World) -> None:
    tail = world.cache.tail
    assert tail is not None
    world.cache.tail = Node(tail.key, tail.parent, (tail.blocks[0],), 0)
    world.cache.tail.attached = False


def path_of_another_length(world: World) -> None:
    world.cache.num_published = 1


def path_that_is_not_the_table(world: World) -> None:
    ids = world.cache.only_table.block_ids
    ids[0], ids[1] = ids[1], ids[0]


def blocks_given_back_that_are_kept(world: World) -> None:
    world.cache.tables[0].num_trimmed = 1


def last_published_block_given_back(world: World) -> None:
    world.core.rules = KeepRules((KeepRule(4),), world.core.block_size)
    world.cache.tables[0].num_trimmed = 2


def with_sinks(corrupt: Callable[[KVCore, SequenceCache], None]) -> Callable[[World], None]:
    """Let a world have another core, of which a cache runs that has sinks in its first block, and has gone on."""

    def corrupted(world: World) -> None:
        world.core = core = KVCore(20, block_size=4, rules=(KeepRule(4, num_sinks=1),))
        cache = world.serve(range(22))
        core.trim(cache, 22)
        assert (len(cache.only_table.sink_ids), cache.only_table.num_trimmed) == (1, 4)
        audit(core)
        corrupt(core, cache)

    corrupted.__name__ = corrupt.__name__
    return corrupted


def sinks_given_back(core: KVCore, cache: SequenceCache) -> None:
    core.pool.release(core.pool.blocks[cache.only_table.sink_ids.pop()])


def sinks_apart_of_a_whole_table(core: KVCore, cache: SequenceCache) -> None:
    cache.only_table.num_trimmed = 1


def sinks_of_another_path(core: KVCore, cache: SequenceCache) -> None:
    table = cache.only_table
    table.sink_ids, table.block_ids[0] = [table.block_ids[0]], table.sink_ids[0]


def sinks_published_off_the_path(_: KVCore, cache: SequenceCache) -> None:
    cache.num_published = 0
    cache.tail = None


def node_without_sinks(core: KVCore, cache: SequenceCache) -> None:
    node = core.pool.blocks[cache.only_table.sink_ids[0]].node
    assert node is not None
    node.put(0, None)


def pack_chunks(world: World) -> SequenceCache:
    """Let the core pack chunks of 4 tokens. Return a cache of 14, with three packed chunks of 2, 1 and no blocks."""
    core = world.core = KVCore(40, block_size=2, rules=[KeepRule(4, is_chunked=True, packs=True)])
    cache, _ = core.acquire(core.match(NS, b"", 0))
    assert core.extend(cache, 0, 14)
    promise = core.publishing.promise(cache, pack(range(14)), 14)
    assert promise is not None
    core.publishing.commit(promise)
    core.packing.commit(cache, [Packed(num, "counts") for num in (2, 1, 0)])
    core.trim(cache, 14)
    audit(core)
    return cache


def with_packing(corrupt: Callable[[SequenceCache, list[Node]], None]) -> Callable[[World], None]:
    """Corrupt a core that packs. It is given the cache of :func:`pack_chunks`, and the nodes that end the chunks."""

    def corrupt_world(world: World) -> None:
        cache = pack_chunks(world)
        corrupt(cache, [chunk.node for chunk in cache.chunks])

    corrupt_world.__name__ = corrupt.__name__
    return corrupt_world


def packed_where_no_chunk_ends(_: SequenceCache, ends: list[Node]) -> None:
    ends[0].parent.packed = PackedChunk((), None)


def packed_chunk_that_may_go(world: World) -> None:
    (chunk, *_) = pack_chunks(world).chunks
    world.core.blocks._packed[chunk] = None


def packed_chunk_that_may_not_go(world: World) -> None:
    cache = pack_chunks(world)
    world.core.release(cache)
    world.core.blocks._packed.popitem()


def packed_chunk_that_went_and_may_go(world: World) -> None:
    pack_chunks(world)
    world.core.blocks._packed[PackedChunk((), None)] = None


def packed_blocks_counted_wrongly(cache: SequenceCache, _: list[Node]) -> None:
    cache.num_packed_blocks += 1


def packed_chunk_told_of_another_node(cache: SequenceCache, ends: list[Node]) -> None:
    cache.chunks[0].node = ends[1]


def packed_block_of_another_group(cache: SequenceCache, _: list[Node]) -> None:
    cache.chunks[0].blocks[0].group = 0


def packed_block_of_another_mask(world: World) -> None:
    block = pack_chunks(world).chunks[0].blocks[0]
    block.packed_by = 1
    world.core.pool.num_packed.update({0: -1, 1: 1})


def packed_blocks_of_another_mask_than_their_cache(cache: SequenceCache, _: list[Node]) -> None:
    cache.tail, cache.num_published, cache.mask = None, 0, 1


def packed_blocks_of_the_pool_miscounted(world: World) -> None:
    pack_chunks(world)
    world.core.pool.num_packed[0] += 1


def packed_block_twice(cache: SequenceCache, _: list[Node]) -> None:
    (block,) = cache.chunks[1].blocks
    cache.chunks[1].blocks = (block, block)
    block.num_table_refs = 2


def cache_that_keeps_others_than_its_path(world: World) -> None:
    world.cache.mask = NO_MASK


def packed_and_no_group_packs(world: World) -> None:
    world.cache.chunks.append(PackedChunk((), None))


def packed_chunk_of_another_path(cache: SequenceCache, ends: list[Node]) -> None:
    cache.chunks[0] = PackedChunk(cache.chunks[0].blocks, None)
    cache.chunks[0].node = ends[0]


def packed_chunk_of_a_node_that_left(cache: SequenceCache, ends: list[Node]) -> None:
    cache.tail, cache.num_published = None, 0
    cache.chunks[0] = PackedChunk(cache.chunks[0].blocks, None)
    cache.chunks[0].node = gone = Node(b"", ends[0], (), 0)
    gone.attached = False


def blocks_of_a_packed_chunk_published_alone(cache: SequenceCache, _: list[Node]) -> None:
    cache.tail, cache.num_published = None, 0
    cache.chunks[0] = PackedChunk(cache.chunks[0].blocks, None)


def given_back_and_not_packed(cache: SequenceCache, _: list[Node]) -> None:
    cache.chunks.pop()


def lacking_and_not_loaded(world: World) -> None:
    world.core.moves.lacking[BlockId(19)] = world.cached


def evictable_alone_twice(world: World) -> None:
    block = world.cached.blocks[0]
    assert block is not None
    world.core.blocks.windows._stale[block] = world.core.blocks.windows._idle[block] = None


def idle_and_not_evictable_alone(world: World) -> None:
    world.core.rules = KeepRules((KeepRule(4),), world.core.block_size)


def published_off_the_path(world: World) -> None:
    world.cache.num_published = 0
    world.cache.tail = world.core.tree.roots[NS]


def pin_count_off_by_one(world: World) -> None:
    world.block(world.cache, 0).num_pin_refs += 1


def pin(world: World, tail: Node | None = None) -> Pin:
    pinned = world.core.pins.add("p", tail or world.cached, 0.0)
    assert pinned is not None
    return pinned


def two_pins_of_one_tail(world: World) -> None:
    pinned = pin(world)
    world.core.pins._pins["q"] = pinned
    for block in pinned.blocks:
        world.pool.pin(block)


def pin_of_another_path(world: World) -> None:
    pinned = pin(world, world.node(world.cache, 0))
    world.pool.unpin(pinned.tail.blocks[0])
    other = world.block(world.cache, 1)
    world.pool.pin(other)
    world.core.pins._pins["p"] = replace(pinned, blocks=(other,))


def pin_on_what_is_not_published(world: World) -> None:
    pinned = pin(world)
    private = world.block(world.cache, 2)
    lost = replace(pinned, tail=Node(b"", world.core.tree.roots[NS], (private,), 0), blocks=(private,))
    private.num_pin_refs = 1
    for block in pinned.blocks:
        world.pool.unpin(block)
    world.core.policy.on_idle(world.cached)
    world.cached.evictable = True
    world.core.pins._pins["p"] = lost


def pinned_blocks_miscounted(world: World) -> None:
    pin(world)
    world.core.pins.num_blocks -= 1


def pinned_blocks_of_a_mask_miscounted(world: World) -> None:
    pin(world)
    world.core.pins.num_by_mask[1] += 1


def pins_beyond_their_quota(world: World) -> None:
    pin(world)
    world.core.pins.max_blocks = 1


def cached_pinned_blocks_miscounted(world: World) -> None:
    pin(world, world.node(world.cache, 1))
    world.pool.num_pinned += 1


def cold_block_elsewhere(world: World) -> None:
    world.streamed.only_table.block_ids[0] += 1


def streamed_and_published(world: World) -> None:
    world.streamed.num_published = 1


def cold_blocks_miscounted(world: World) -> None:
    world.core.streaming.num_cold_blocks += 1


def residual_that_nobody_has(world: World) -> None:
    core = world.core
    core.residuals = Residuals(len(core.caches) + 1, 4)
    for cache in core.caches:
        core.residuals.on_acquire(cache)
    core.residuals.free_ids.clear()


def table_without_residual(world: World) -> None:
    world.core.residuals = Residuals(len(world.core.caches), 4)


def lost_host_block(world: World) -> None:
    world.host.blocks._free.pop()


def host_pins_miscounted(world: World) -> None:
    world.held.num_pins += 1


def host_block_that_says_which_chunk_it_is_and_is_of_none(world: World) -> None:
    world.held.chunk = HeldChunk(0, 1, None)


def host_chunk_of_a_core_that_packs_nothing(world: World) -> None:
    world.held.name = world.held.name._replace(group=1)
    world.held.chunk = HeldChunk(0, 1, None)


def host_block_written_twice(world: World) -> None:
    world.host._stores += [StoreOp(world.block(world.cache, 0).block_id, world.held.host_id)] * 2
    world.held.num_pins += 2


def store_into_a_free_host_block(world: World) -> None:
    world.host._stores.append(StoreOp(world.block(world.cache, 0).block_id, world.host.blocks._free[0]))


def held_without_a_place(world: World) -> None:
    world.host.blocks._held[b"?"] = HeldBlock(BlockName(b"?", b"", b"", b""), -1)


def kept_for_nobody(world: World) -> None:
    host_id = world.host.blocks._free.pop()
    world.host.blocks._by_id[host_id] = HeldBlock(BlockName(b"?", b"", b"", b""), host_id)


def unsaved_and_not_held(world: World) -> None:
    world.host.blocks.unsaved[b"?"] = HeldBlock(BlockName(b"?", b"", b"", b""), -1)


def unsaved_and_superseded(world: World) -> None:
    world.held.is_superseded = True
    world.host.blocks.unsaved[world.held.name.digest] = world.held


def held_and_not_found_behind_its_path(world: World) -> None:
    world.host.blocks._behind[world.held.name.parent] = {}


def superseded_and_last_to_make_room(world: World) -> None:
    for name in (b"old", b"new"):
        held = world.host.blocks._idle[name] = HeldBlock(BlockName(name, b"", b"", b""), -1)
    held.is_superseded = True


def candidate_missing(world: World) -> None:
    world.core.policy.on_busy(world.cached)


def candidate_too_many(world: World) -> None:
    world.core.policy.on_idle(world.node(world.cache, 1))


def candidates_but_no_victim(world: World) -> None:
    world.core.policy._idle._heap.clear()


def expected_path_that_has_left(world: World) -> None:
    path = ExpectedPath(world)
    world.core.blocks.expectations.put(path, Node(b"x", world.cached.parent, (), 0))


def expected_path_that_ends_elsewhere(world: World) -> None:
    path = ExpectedPath(world)
    world.core.blocks.expectations.put(path, world.cached)
    path.tail = world.cached.parent


def superseded_and_not_counted(world: World) -> None:
    world.node(world.cache, 0).claim = NOBODY


def superseded_and_kept(world: World) -> None:
    world.cached.claim = NOBODY
    world.core.blocks.expectations.num_superseded += 1


def expected_and_not_kept(world: World) -> None:
    world.core.blocks.expectations._at[world.cached] = [path := ExpectedPath(world)]
    path.tail = world.cached


def too_many_remembered(world: World) -> None:
    world.core.slow = SlowTiers(world.host, "write_through", Arbiter(1, 4, compute_s_per_token=1.0))
    world.core.slow.writes._early.extend([world.held] * 9)


def with_landmarks(damage: Callable[[KVCore], None]) -> Callable[[World], None]:
    """Do damage to a core with landmarks, in the place of the world's."""

    def corrupt(world: World) -> None:
        world.core = a_core_with_landmarks()
        audit(world.core)
        damage(world.core)

    corrupt.__name__ = damage.__name__
    return corrupt


def landmarks_that_blocks_do_not_know(core: KVCore) -> None:
    core.blocks.windows.landmarks._keepers.clear()


def landmark_with_a_block_too_few(core: KVCore) -> None:
    landmark = next(iter(core.blocks.windows.landmarks))
    landmark.blocks = landmark.blocks[:1]


def kept_by_a_landmark_that_is_none(core: KVCore) -> None:
    landmarks = core.blocks.windows.landmarks
    free = next(block for block in core.pool.blocks if block.node is None)
    landmarks._keepers[free] = dict.fromkeys(landmarks)


def stale_though_kept(core: KVCore) -> None:
    windows = core.blocks.windows
    block = next(iter(windows._firm))
    windows._stale[block] = False
    del windows._firm[block]


def landmark_of_another_path(core: KVCore) -> None:
    landmarks = list(core.blocks.windows.landmarks)
    leaf = next(mark for mark in landmarks if not mark.node.children)
    other = next(mark for mark in landmarks if not mark.node.children and mark is not leaf)
    leaf.blocks, other.blocks = other.blocks, leaf.blocks


def landmark_in_another_place(core: KVCore) -> None:
    landmarks = core.blocks.windows.landmarks
    landmark = next(iter(landmarks))
    landmarks._at[landmark.node.root] = landmarks._at.pop(landmark.node)


def landmark_that_keeps_what_is_kept_anyway(core: KVCore) -> None:
    landmark = next(iter(core.blocks.windows.landmarks))
    whole = landmark.node.blocks[0]
    assert whole is not None
    landmark.blocks = (*landmark.blocks, whole)


def core_with_quotas() -> tuple[KVCore, Quotas]:
    """A core in which tenant ``a`` has two cached blocks, all below its floor, and others one that is as old."""
    quotas = Quotas()
    quotas.arrived("a", KVQuota(2, 4))
    make = partial(make_policy, "lru")
    core = KVCore(8, block_size=4, policy=quotas.policy(make(), make), quotas=quotas)
    for tenant, tokens in (("a", range(8)), ("", range(4))):
        namespace = tenant.encode()
        cache, _ = core.acquire(core.match(namespace, pack(tokens), 0), tenant=tenant)
        assert core.extend(cache, 0, len(tokens))
        promise = core.publishing.promise(cache, pack(tokens), len(tokens))
        assert promise is not None
        core.publishing.commit(promise)
        core.release(cache)
    audit(core)
    return core, quotas


def with_quotas(corrupt: Callable[[KVCore, Quotas], None]) -> Callable[[World], None]:
    """Let a corruption have a core with quotas."""

    def corrupt_world(world: World) -> None:
        world.core, quotas = core_with_quotas()
        corrupt(world.core, quotas)

    corrupt_world.__name__ = corrupt.__name__
    return corrupt_world


def tenants_blocks_miscounted(_core: KVCore, quotas: Quotas) -> None:
    quotas.of("a").num_blocks += 1


def tenant_above_its_cap(_core: KVCore, quotas: Quotas) -> None:
    quotas.of("a").cap_blocks = 1


def withheld_of_a_tenant_miscounted(_core: KVCore, quotas: Quotas) -> None:
    quotas.of("a").num_withheld = 1


def withheld_of_all_miscounted(_core: KVCore, quotas: Quotas) -> None:
    quotas.num_withheld = 1


def published_among_anothers(core: KVCore, quotas: Quotas) -> None:
    mine, other = core.pool.blocks[0], core.pool.blocks[2]
    assert mine.tenant is not other.tenant
    mine.tenant, other.tenant = other.tenant, mine.tenant
    assert quotas.of("a").num_blocks == 2


def held_by_another_tenant(core: KVCore, quotas: Quotas) -> None:
    cache, _ = core.acquire(core.match(b"", pack(range(4)), 4), tenant="")
    cache.tenant = quotas.of("a")


def victim_below_a_floor(core: KVCore, quotas: Quotas) -> None:
    core.policy._givers = lambda: list(quotas)


CORRUPTIONS: list[tuple[Callable[[World], None], str]] = [
    (misplaced_block, "a block is not at its place"),
    (cached_count_off_by_one, "pool.num_cached=4 but 3 are"),
    (free_twice, "in the free list twice"),
    (free_block_lost, "free list and FREE states differ"),
    (held_block_in_the_free_list, "free list and FREE states differ"),
    (table_count_off_by_one, "1 tables hold it"),
    (table_count_too_small, "1 tables hold it"),
    (free_block_with_a_ref, "0 tables hold it"),
    (transfer_count_off_by_one, "0 transfers use it"),
    (free_block_with_a_node, "free but held"),
    (active_but_nobody_holds_it, "active but nobody holds it"),
    (cached_but_held, "cached but held or not published"),
    (cached_but_not_published, "cached but held or not published"),
    (copy_for_nobody, "for a block that no table holds"),
    (root_under_another_name, "a root is no root"),
    (root_without_children, "a root without children"),
    (root_not_attached, "a root without children"),
    (node_for_another_number_of_groups, "for 1 groups"),
    (node_without_block, "none of group 0, which keeps what is there"),
    (leaf_without_blocks, "a leaf without blocks"),
    (node_under_another_key, "its parent does not know it"),
    (wrong_key_length, "a key of 17 bytes"),
    (wrong_depth, "depth 7 under 0"),
    (node_in_the_tree_that_says_it_left, "in the tree but not attached"),
    (block_published_by_two_nodes, "published by two nodes, or not told"),
    (two_blocks_of_one_id, "published twice"),
    (held_but_not_the_block_before_it, "held, but not the block before it"),
    (never_committed, "committed is False, against the promises"),
    (committed_while_promised, "committed is True, against the promises"),
    (evictable_while_held, "evictable is True"),
    (idle_but_not_evictable, "evictable is False"),
    (used_before_it_was_born, "born at 1.0, used at 0.0"),
    (used_in_the_future, "born at 0.0, used at 1.0"),
    (orphaned_node, "its node is not in the tree"),
    (promise_of_another_table, "a cache has another cache's promise"),
    (promises_with_a_gap, "does not end where the next one begins"),
    (block_twice_in_a_table, "a cache holds a block twice"),
    (wrong_capacity, "capacity 16 of 3 blocks"),
    (more_published_than_held, "and the path has 2 nodes"),
    (path_of_another_length, "and the path has 2 nodes"),
    (blocks_given_back_that_are_kept, "group 0 keeps all, and 1 blocks are gone"),
    (last_published_block_given_back, "group 0 begins at 2, and who goes on behind 2 needs block 1"),
    (lacking_and_not_loaded, "of {19} nodes lack, {"),
    (evictable_alone_twice, "both stale and not"),
    (idle_and_not_evictable_alone, "0 blocks can be evicted alone"),
    (with_landmarks(stale_though_kept), "not where landmarks say"),
    (with_landmarks(landmark_in_another_place), "a landmark is nowhere"),
    (with_landmarks(landmark_of_another_path), "kept by a landmark of another path"),
    (with_landmarks(landmark_that_keeps_what_is_kept_anyway), "kept by a landmark, and its group keeps all"),
    (with_landmarks(landmarks_that_blocks_do_not_know), "does not know the landmark that keeps it"),
    (with_landmarks(landmark_with_a_block_too_few), "a landmark keeps 1 of 2 blocks of group 1"),
    (with_landmarks(kept_by_a_landmark_that_is_none), "kept by a landmark that is none"),
    (with_sinks(sinks_given_back), "sinks in blocks [], and 4 blocks are gone"),
    (with_sinks(sinks_apart_of_a_whole_table), "1 blocks are gone, of which 1 hold sinks"),
    (with_sinks(sinks_of_another_path), "which is not of the path"),
    (with_sinks(sinks_published_off_the_path), "published but not by its cache's path"),
    (with_sinks(node_without_sinks), "none of group 0, which keeps what is there"),
    (with_packing(packed_where_no_chunk_ends), "packed, and ends no chunk"),
    (packed_chunk_that_may_go, "what is packed may go is True"),
    (packed_chunk_that_may_not_go, "what is packed may go is False"),
    (packed_chunk_that_went_and_may_go, "1 packed chunks may go, and nobody publishes them"),
    (with_packing(packed_blocks_counted_wrongly), "cache.num_packed_blocks=4, and its chunks fill 3"),
    (with_packing(packed_chunk_told_of_another_node), "is told of another node"),
    (with_packing(packed_block_of_another_group), "packed, and not told so"),
    (packed_block_of_another_mask, "packed by mask 1, and not told so"),
    (with_packing(packed_blocks_of_another_mask_than_their_cache), "was kept by another mask than the cache's, 1"),
    (packed_blocks_of_the_pool_miscounted, "core.pool.num_packed=Counter({0: 4}), and blocks say Counter({0: 3})"),
    (with_packing(packed_block_twice), "published twice"),
    (cache_that_keeps_others_than_its_path, "a cache keeps others than its path"),
    (packed_and_no_group_packs, "a cache has packed chunks, and none of its groups packs"),
    (with_packing(packed_chunk_of_another_path), "chunk 0 of a cache is not that of its path"),
    (with_packing(packed_chunk_of_a_node_that_left), "chunk 0 of a cache is nowhere"),
    (with_packing(blocks_of_a_packed_chunk_published_alone), "or blocks of it alone are"),
    (with_packing(given_back_and_not_packed), "6 blocks are gone, of 2 packed chunks"),
    (pin_of_another_path, "pins blocks of another path"),
    (tail_that_left_the_tree, "which left the tree"),
    (path_that_is_not_the_table, "is not the table"),
    (published_off_the_path, "published but not by its cache's path"),
    (pin_count_off_by_one, "0 pins keep it"),
    (two_pins_of_one_tail, "two pins have the same tail"),
    (pin_on_what_is_not_published, "p pins what is not there"),
    (pinned_blocks_miscounted, "pins.num_blocks=1, 2 are pinned"),
    (pinned_blocks_of_a_mask_miscounted, "and Counter({0: 2}) are pinned"),
    (pins_beyond_their_quota, "pins.num_blocks=2, 2 are pinned"),
    (cached_pinned_blocks_miscounted, "core.pool.num_pinned=1 but 0 cached blocks are"),
    (expected_path_that_has_left, "ends at what is not in the tree"),
    (expected_path_that_ends_elsewhere, "1: no path ends there that says so"),
    (superseded_and_not_counted, "expectations.num_superseded=0, 1 nodes are"),
    (superseded_and_kept, "1 superseded leaves, others go first"),
    (expected_and_not_kept, "1 ends of expected paths, others are kept"),
    (candidate_missing, "policy offers 1 nodes, 2 are evictable"),
    (candidate_too_many, "policy offers 3 nodes, 2 are evictable"),
    (candidates_but_no_victim, "no victim among its candidates"),
    (with_quotas(tenants_blocks_miscounted), "tenant 'a' has (2, 2, 0) blocks, cached and pinned ones, not (3, 2, 0)"),
    (with_quotas(tenant_above_its_cap), "tenant 'a' has 2 blocks, above its cap"),
    (with_quotas(withheld_of_a_tenant_miscounted), "1 blocks of 'a' are withheld"),
    (with_quotas(withheld_of_all_miscounted), "quotas.num_withheld=1, and tenants say 2"),
    (with_quotas(published_among_anothers), "published among another tenant's"),
    (with_quotas(held_by_another_tenant), "a cache holds another tenant's block"),
    (with_quotas(victim_below_a_floor), "the policy's victim is such as who asks cannot have"),
    (cold_block_elsewhere, "are not the first of"),
    (streamed_and_published, "a cache that streams has published blocks"),
    (cold_blocks_miscounted, "core.streaming.num_cold_blocks=2, 1 are held"),
    (residual_that_nobody_has, "residuals [0, 1"),
    (table_without_residual, "a cache has no residual"),
    (too_many_remembered, "9 blocks are to be written at once"),
    (lost_host_block, "host blocks [0, 1, 2] in use"),
    (host_pins_miscounted, "host block 0: 2 pins"),
    (host_block_that_says_which_chunk_it_is_and_is_of_none, "host block 0: of group 0, with chunk"),
    (host_chunk_of_a_core_that_packs_nothing, "host block 0: block 0 of a chunk of 1 blocks"),
    (host_block_written_twice, "host block 0 is written 2 times"),
    (store_into_a_free_host_block, "is to be written, and holds nothing"),
    (kept_for_nobody, "kept for nobody"),
    (unsaved_and_not_held, "to be written, and not held"),
    (held_without_a_place, "blocks are held that have no place"),
    (unsaved_and_superseded, "to be written, and superseded"),
    (held_and_not_found_behind_its_path, "not found behind the path before it"),
    (superseded_and_last_to_make_room, "1 superseded host blocks, others make room before"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS, ids=[corrupt.__name__ for corrupt, _ in CORRUPTIONS])
def test_each_corruption_is_found(corrupt: Callable[[World], None], message: str) -> None:
    world = World()
    corrupt(world)
    with pytest.raises(AuditError) as error:
        audit(world.core)
    assert message in str(error.value)


def test_every_check_has_a_corruption() -> None:
    """Each ``_check`` in audit.py is the one that some case above ends in."""
    source = Path(pagefold.kv.audit.__code__.co_filename)
    calls = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_check"
    ]
    reached = set()
    for corrupt, _ in CORRUPTIONS:
        world = World()
        corrupt(world)
        with pytest.raises(AuditError) as error:
            audit(world.core)
        lines = [entry.lineno for entry in error.traceback if entry.path == source]
        reached.add(lines[-2] + 1)  # the last is in _check itself
    missed = [call.lineno for call in calls if not any(call.lineno <= line <= call.end_lineno for line in reached)]
    assert not missed, f"no corruption reaches the checks in lines {missed}"


def test_an_audit_changes_nothing_and_passes_on_an_empty_core() -> None:
    audit(KVCore(4))
    world = World()
    before = [repr(block) for block in world.pool.blocks]
    victim = world.core.policy.victim()
    audit(world.core)
    assert [repr(block) for block in world.pool.blocks] == before
    assert world.core.policy.victim() is victim


def test_an_audit_error_is_an_assertion_error() -> None:
    """So that it never passes for an error of a user's."""
    assert issubclass(AuditError, AssertionError)
