"""SlowTiers under random operations, beside bytes that can be checked: wherever a block lies, its content is its name.

Held after every operation: ``audit`` passes; what the host is said to hold has the right bytes; what a sequence finds
has the right bytes; a block that a transfer reads or writes belongs to nobody else; nothing that was in a slow tier
before a reset is found after it, unless it was written anew.
"""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pagefold.kv import Arbiter, Fetch, HostTier, KVCore, LinkModel, Namespace, SlowTiers, audit, make_policy
from pagefold.kv.names import name_of, names_behind, root_digest
from pagefold.kv.writes import WRITE_POLICIES

NS = Namespace(tenant="t").key()
ROOT = root_digest(NS)
SIZE = 2
STRIDE = SIZE * 4
NUM_BLOCKS = 10


def pack(tokens):
    return array("i", tokens).tobytes()


def digests(tokens):
    return [name.digest for name in names_behind(ROOT, ROOT, pack(tokens), STRIDE)]


class World:
    """A core with slow tiers, a slab, an arena and a store whose blocks are bytes objects."""

    def __init__(self, policy, num_host):
        self.host = HostTier(num_host, notes_unsaved=True)
        arbiter = Arbiter(1, SIZE, compute_s_per_token=1.0)
        arbiter.links["disk"] = LinkModel(0.0, 1e9)
        self.slow = SlowTiers(self.host, policy, arbiter)
        self.core = KVCore(NUM_BLOCKS, block_size=SIZE, policy=make_policy("lru"), host=self.host, slow=self.slow)
        self.slab = [b"poison"] * NUM_BLOCKS
        self.arena = [b"poison"] * num_host
        self.store = {}
        self.fetches: list[Fetch] = []
        self.reading: list = []
        self.writing: list = []
        self.pending_writes = set()
        self.now = 0.0
        self.seen = Counter()

    def run(self, sequences, *, fails):  # noqa: C901, PLR0912 - one step, as it comes
        """Run a step of several sequences and end them; each finds what is there and computes the rest."""
        caches = []
        promises = []
        for tokens in sequences:
            hit = self.core.match(NS, pack(tokens), len(tokens) - 1)
            cache, num_found = self.core.acquire(hit)
            if not self.core.extend(cache, num_found, len(tokens)):
                self.core.release(cache)
                self.seen["no memory"] += 1
                continue
            caches.append((cache, tokens, num_found))
            promise = self.core.publishing.promise(cache, pack(tokens), len(tokens))
            if promise is not None:
                promises.append(promise)
        copies = self.core.moves.take_copies()
        if not caches:
            assert not copies
            return
        ops = self.core.moves.take_host_ops()
        self.move(ops)
        for copy in copies:
            self.slab[copy.dst] = self.slab[copy.src]
        for cache, tokens, num_found in caches:
            for index, digest in enumerate(digests(tokens)):
                if (index + 1) * SIZE <= num_found:
                    assert self.slab[cache.only_table.block_ids[index]] == digest, "a sequence found a wrong block"
                    self.seen["found"] += 1
                else:
                    self.slab[cache.only_table.block_ids[index]] = digest
            if len(tokens) % SIZE:
                self.slab[cache.only_table.block_ids[len(tokens) // SIZE]] = b"half a block"
        if fails:
            self.core.moves.copies_failed(copies)
            self.core.moves.host_failed(ops)
            for promise in reversed(promises):
                self.core.publishing.abandon(promise)
        else:
            for promise in promises:
                self.core.publishing.commit(promise)
            self.core.moves.copies_done(copies)
            self.core.moves.host_done(ops)
        for cache, _, num_found in caches:
            for origin, num in cache.num_loaded_tokens.items():
                self.seen[f"loaded from {origin}"] += num
            assert sum(cache.num_loaded_tokens.values()) <= num_found
            if not fails:
                self.core.moves.write_through(cache)
            self.core.release(cache)

    def move(self, ops):
        for store in ops.stores:
            self.arena[store.host_id] = self.slab[store.block_id]
            self.seen["live store"] += store.is_live
        for load in ops.loads:
            self.slab[load.block_id] = self.arena[load.host_id]

    def store_pending(self):
        ops = self.core.moves.take_host_ops()
        assert not ops.loads, "nobody waits for a load outside a step"
        self.move(ops)
        self.core.moves.host_done(ops)

    def fetch(self, tokens):
        names = self.core.missing(NS, pack(tokens), len(tokens) - 1).names
        num = next((at for at, name in enumerate(names) if name.digest not in self.store), len(names))
        if not num:
            return
        fetch = self.slow.fetches.begin([("disk", name) for name in names[:num]], 5.0, self.now)
        if fetch is None:
            self.seen["no room"] += 1
            return
        self.fetches.append(fetch)
        self.reading += fetch.ops.get("disk", [])
        self.seen["joined"] += len(fetch.blocks) - len(fetch.ops.get("disk", []))

    def arrive(self, at, kind):
        if not self.reading:
            return
        op = self.reading.pop(at % len(self.reading))
        content = self.store.get(op.name.digest)
        is_good = kind != 0 and content is not None
        self.arena[op.host_id] = content if is_good else b"garbage"
        self.slow.fetches.arrived(op.host_id, self.now, is_good=is_good)
        self.seen["arrived" if is_good else "lost"] += 1

    def end(self, at):
        if self.fetches:
            fetch = self.fetches.pop(at % len(self.fetches))
            if not fetch.is_over:
                self.seen["left early"] += 1
            self.slow.fetches.end(fetch)

    def write(self, *, is_flush):
        ops = self.slow.writes.take(is_flush=is_flush)
        if ops:
            self.writing.append((ops, [self.arena[op.host_id] for op in ops]))

    def written(self, at, num_lost):
        if not self.writing:
            return
        ops, contents = self.writing.pop(at % len(self.writing))
        for op, content in zip(ops, contents, strict=True):
            assert self.arena[op.host_id] == content == op.name.digest, "a block changed while it was being written"
        kept = ops[num_lost:]
        for op in kept:
            self.store[op.name.digest] = op.name.digest
        self.slow.writes.written(ops, len(kept))
        self.seen["written"] += len(kept)

    def reset(self):
        self.core.reset()
        self.store.clear()  # as Tiering does, behind what is being written
        for ops, _ in self.writing:
            self.slow.writes.written(ops, 0)
        self.writing.clear()
        assert not self.host.blocks.num_held
        assert self.core.num_available == NUM_BLOCKS, "a block that is forgotten waits for a store that nobody needs"
        self.seen["reset"] += 1

    def check(self):
        audit(self.core)
        unwritten = {store.host_id for store in self.host.pending.stores}
        busy = {op.host_id for op in self.reading}
        for held in self.host.blocks.all():
            if self.host.blocks.get(held.name.digest) is held:
                assert held.host_id not in busy, "a block is found that has not arrived"
                assert held.host_id in unwritten or self.arena[held.host_id] == held.name.digest, "wrong bytes"
        for node in self.core.tree.nodes():
            assert self.slab[node.blocks[0].block_id] == name_of(node).digest, "wrong bytes on the device"

    def finish(self):
        while self.reading:
            self.arrive(0, 1)
        while self.fetches:
            self.end(0)
        for _ in range(100):
            self.store_pending()
            self.write(is_flush=True)
            while self.writing:
                self.written(0, 0)
        self.check()
        assert self.slow.is_quiet
        assert not list(self.slow.pins())
        assert not self.host.blocks.unsaved
        assert self.core.num_available == NUM_BLOCKS


SEQUENCES = st.lists(st.integers(0, 1), min_size=3, max_size=13)


class SlowTiersMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(WRITE_POLICIES), num_host=st.sampled_from((1, 4, 12)))
    def start(self, policy, num_host):
        self.world = World(policy, num_host)

    @rule(sequences=st.lists(SEQUENCES, min_size=1, max_size=2), fails=st.integers(0, 5))
    def run(self, sequences, fails):
        self.world.run(sequences, fails=fails == 0)

    @rule(tokens=SEQUENCES)
    def fetch(self, tokens):
        self.world.fetch(tokens)

    @rule(at=st.integers(0, 20), kind=st.integers(0, 4))
    def arrive(self, at, kind):
        self.world.arrive(at, kind)

    @rule(at=st.integers(0, 5))
    def end(self, at):
        self.world.end(at)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds):
        self.world.now += seconds
        self.world.slow.fetches.late(self.world.now)

    @rule()
    def store_pending(self):
        self.world.store_pending()

    @rule(is_flush=st.booleans())
    def write(self, is_flush):
        self.world.write(is_flush=is_flush)

    @rule(at=st.integers(0, 3), num_lost=st.integers(0, 2))
    def written(self, at, num_lost):
        self.world.written(at, num_lost)

    @rule(chance=st.integers(0, 9))
    def reset(self, chance):
        if chance == 0:
            self.world.reset()

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


def test_random_operations():
    run_state_machine_as_test(
        SlowTiersMachine,
        settings=settings(
            max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def walk(seed, num_operations, policy, num_host):  # noqa: C901 - a choice of operations
    """Choose operations at random, quickly: return what happened."""
    random = Random(seed)
    world = World(policy, num_host)
    streams = [[random.randrange(2) for _ in range(13)] for _ in range(6)]

    def tokens():
        stream = list(random.choice(streams))
        for _ in range(random.randrange(2)):
            stream[random.randrange(13)] ^= 1
        return stream[: random.randint(3, 13)]

    for _ in range(num_operations):
        world.now += random.random()
        match random.randrange(12):
            case 0 | 1 | 2:
                world.run([tokens() for _ in range(random.randint(1, 2))], fails=random.random() < 0.1)
            case 3 | 4:
                world.fetch(tokens())
            case 5 | 6:
                for _ in range(random.randrange(4)):
                    world.arrive(random.randrange(20), random.randrange(6))
            case 7:
                world.end(random.randrange(5))
            case 8:
                world.write(is_flush=random.random() < 0.2)
            case 9:
                world.written(random.randrange(3), random.randrange(2))
            case 10:
                world.store_pending()
            case _:
                world.slow.fetches.late(world.now)
                if random.random() < 0.03:
                    world.reset()
        world.check()
    world.finish()
    return world.seen


def waiting_for_a_store():
    """Return a world, and a fetch in it of what another request computed meanwhile: that is to be stored."""
    world = World("write_through", 6)
    tokens = [0, 1, 0, 1, 1]
    world.run([tokens], fails=False)
    names = names_behind(ROOT, ROOT, pack(tokens), STRIDE)
    fetch = world.slow.fetches.begin([("disk", name) for name in names], 5.0, 0.0)
    assert fetch is not None
    assert [held.num_pins for held in fetch.blocks] == [2, 2], "the store's, and the one of who waits"
    return world, fetch


def test_who_needs_all_memory_gets_blocks_that_are_to_be_stored_and_that_somebody_waits_for():
    """No step would be planned without it, and so nothing stored."""
    world, fetch = waiting_for_a_store()
    cache, _ = world.core.acquire(world.core.match(NS, pack([1] * 20), 19))
    assert world.core.extend(cache, 0, NUM_BLOCKS * SIZE)
    world.check()
    assert not world.host.has_live_stores
    world.core.release(cache)
    world.slow.fetches.end(fetch)
    world.finish()


def test_a_reset_frees_a_block_that_is_to_be_stored_and_that_somebody_waits_for():
    world, fetch = waiting_for_a_store()
    world.reset()
    world.check()
    world.slow.fetches.end(fetch)
    world.finish()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_of_a_tier_that_hangs_no_more_is_remembered_than_the_arena_could_hold(policy):
    """And when it answers again, all that the arena still has is written."""
    world = World(policy, 4)
    most = 0
    for number in range(400):
        tokens = [(number >> bit) & 1 for bit in range(9)]
        world.run([tokens], fails=False)
        world.run([tokens], fails=False)  # found once
        world.store_pending()
        world.write(is_flush=False)  # nothing is ever said to be written
        world.check()
        most = max(most, world.slow.writes.num_early)
        assert most <= world.slow.writes.max_early
    assert most >= world.host.blocks.num_blocks, "the bound was never near"
    assert world.host.blocks.num_dropped > 10 * world.slow.writes.max_early
    early = {held.name.digest for held in world.slow.writes._early if world.slow.writes._is_unsaved(held)}
    assert early == world.host.blocks.unsaved.keys(), "who can still be written is not forgotten"
    while world.host.blocks.unsaved:
        world.written(0, 0)
        world.write(is_flush=False)
    world.finish()


EVENTS = {
    "found",
    "arrived",
    "lost",
    "written",
    "joined",
    "left early",
    "no room",
    "reset",
    "loaded from host",
    "loaded from disk",
}


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_random_walks_meet_everything(policy):
    seen = Counter()
    for seed, num_host in enumerate((2, 6, 12, 20)):
        seen.update(walk(seed, 700, policy, num_host))
    missing = EVENTS - seen.keys()
    assert not missing, f"never seen: {missing}"
    assert (seen["live store"] > 0) == (policy != "write_back")


@pytest.mark.long
@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_random_walks_for_long(policy):
    for seed in range(60):
        walk(seed, 5000, policy, (2, 6, 12, 20)[seed % 4])


def arena(num_held, policy="write_back"):
    """SlowTiers over a host of so many blocks, and names."""
    host = HostTier(num_held, notes_unsaved=True)
    arbiter = Arbiter(1, SIZE, compute_s_per_token=1.0)
    arbiter.links["disk"] = LinkModel(0.0, 1e9)
    return SlowTiers(host, policy, arbiter), names_behind(ROOT, ROOT, pack(range(2 * num_held * SIZE)), STRIDE)


def test_as_much_may_be_on_its_way_as_is_said_and_no_more():
    slow, names = arena(8)
    assert slow.fetches.max_waited == 4
    first = slow.fetches.begin([("disk", name) for name in names[:3]], 9.0, 0.0)
    assert slow.fetches.begin([("disk", name) for name in names[4:6]], 9.0, 0.0) is None
    last = slow.fetches.begin([("disk", name) for name in names[4:5]], 9.0, 0.0)
    assert (len(first.blocks), len(last.blocks)) == (3, 1)
    assert slow.fetches.begin([("disk", names[6])], 9.0, 0.0) is None


def test_write_back_writes_as_much_as_room_is_short_of_and_nothing_before():
    slow, names = arena(8)
    host = slow.host
    num_spare = 4
    for index, name in enumerate(names[:8]):
        assert host.keep(name, index)
        host.done(host.take())
        writes = slow.writes.take()
        num_held = index + 1
        assert len(writes) == (num_held > 8 - num_spare), f"{num_held} are held"
        slow.writes.written(writes, len(writes))
    assert slow.writes.take() == []
