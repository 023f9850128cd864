"""SlowTiers under random operations, beside bytes that can be checked: wherever a block lies, its content is its name.

With one cache group and with several: then a block's name says its group too. Held after every operation: ``audit``
passes; what the host is said to hold has the right bytes; what a sequence finds has the right bytes; a block that a
transfer reads or writes belongs to nobody else; nothing that was in a slow tier before a reset is found after it,
unless it was written anew; of a sequence that is corrupted no block stays in a slow tier, of whatever group; nobody
waits for a part that is of no use.
"""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from until_seen import IN_FULL, until_seen

from pagefold.kv import (
    KEEP_ALL,
    Arbiter,
    Fetch,
    HostTier,
    KeepRule,
    KVCore,
    LinkModel,
    Namespace,
    SlowTiers,
    audit,
    make_policy,
)
from pagefold.kv.missing import NOTHING_MISSING, Missing
from pagefold.kv.names import in_group, name_of, names_behind, root_digest
from pagefold.kv.writes import WRITE_POLICIES

NS = Namespace(tenant="t").key()
ROOT = root_digest(NS)
SIZE = 2
STRIDE = SIZE * 4
NUM_BLOCKS = 10
PLAIN = (KEEP_ALL,)
GROUPS = {
    "a window first": (KeepRule(5), KEEP_ALL),
    "a window behind": (KEEP_ALL, KeepRule(3)),
    "two windows first": (KeepRule(3), KeepRule(7), KEEP_ALL),
    "chunks first": (KeepRule(4, is_chunked=True), KEEP_ALL),
    "two that keep all": (KEEP_ALL, KEEP_ALL),
    "windows alone": (KeepRule(3), KeepRule(6)),
    "sinks": (KeepRule(3, num_sinks=1), KEEP_ALL),
    "sinks alone": (KeepRule(4, num_sinks=3),),
    "two that keep all around a window": (KEEP_ALL, KeepRule(4), KEEP_ALL),
}


def pack(tokens):
    return array("i", tokens).tobytes()


def digests(tokens):
    return [name.digest for name in names_behind(ROOT, ROOT, pack(tokens), STRIDE)]


class World:
    """A core with slow tiers, a slab, an arena and a store whose blocks are bytes objects.

    Of several groups slab and arena have as many times the blocks.
    """

    def __init__(self, policy, num_host, rules=PLAIN):
        self.rules = rules
        self.num_blocks = NUM_BLOCKS * len(rules)
        num_host *= len(rules)
        self.host = HostTier(num_host, notes_unsaved=True)
        arbiter = Arbiter(1, SIZE, compute_s_per_token=1.0)
        arbiter.links["disk"] = LinkModel(0.0, 1e9)
        self.slow = SlowTiers(self.host, policy, arbiter)
        self.core = KVCore(
            self.num_blocks, block_size=SIZE, rules=rules, policy=make_policy("lru"), host=self.host, slow=self.slow
        )
        self.slab = [b"poison"] * self.num_blocks
        self.arena = [b"poison"] * num_host
        self.store = {}
        self.fetches: list[Fetch] = []
        self.sought: list = []  # by the last of them
        self.reading: list = []
        self.writing: list = []
        # Who waits for one of these hears that it has gone when all others came: its step failed, or it came when
        # another of its name was there, which may make room.
        self.unheard = set()
        self.now = 0.0
        self.seen = Counter()

    def run(self, sequences, *, fails, corrupted=-1):  # noqa: C901, PLR0912 - one step, as it comes
        """Run a step of several sequences and end them; each finds what is there and computes the rest.

        One of them may be ``corrupted``.
        """
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
            for group, table in enumerate(cache.tables):
                self.compute(group, table, tokens, num_found)
        if fails:
            self.core.moves.copies_failed(copies)
            self.unheard.update(self.host.blocks.at(store.host_id) for store in ops.stores)
            self.core.moves.host_failed(ops)
            for promise in reversed(promises):
                self.core.publishing.abandon(promise)
        else:
            for promise in promises:
                self.core.publishing.commit(promise)
            self.core.moves.copies_done(copies)
            self.core.moves.host_done(ops)
        for at, (cache, tokens, num_found) in enumerate(caches):
            for origin, num in cache.num_loaded_tokens.items():
                self.seen[f"loaded from {origin}"] += num
            assert sum(cache.num_loaded_tokens.values()) <= num_found
            if not fails:
                num_held = len(list(cache.all_block_ids()))
                self.core.trim(cache, len(tokens))
                self.seen["trimmed"] += len(list(cache.all_block_ids())) < num_held
                if at == corrupted:
                    self.distrust(cache, tokens)
                self.core.moves.write_through(cache)
            self.core.release(cache)

    def compute(self, group, table, tokens, num_found):
        """Look at what a table found, and write the rest of it."""
        names = [in_group(digest, group) for digest in digests(tokens)]
        names += [b"half a block"] * (len(tokens) % SIZE > 0)
        assert table.num_trimmed <= self.rules[group].first_seen(num_found) // SIZE
        places = [*range(len(table.sink_ids)), *range(table.num_trimmed, table.end)]
        for index, block_id in zip(places, table.all_ids(), strict=True):
            if (index + 1) * SIZE <= num_found:
                assert self.slab[block_id] == names[index], "a sequence found a wrong block"
                self.seen["found"] += 1
            else:
                self.slab[block_id] = names[index]

    def distrust(self, cache, tokens):
        """Drop what a sequence has, as if its logits had been no numbers: here, and as tiers are told, behind them."""
        own = {in_group(digest, group) for digest in digests(tokens) for group in range(len(self.rules))}
        self.seen["corrupted, and in a tier"] += not own.isdisjoint(self.store)
        forgotten = self.core.forgetting.distrust(cache, NS, pack(tokens))
        for digest in forgotten:
            self.store.pop(digest, None)
        for _, _, doomed in self.writing:
            doomed.update(forgotten)
        assert own.isdisjoint(self.store), "what is corrupted stays in a tier"
        assert not any(held.name.digest in own for held in self.host.blocks.found())

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
        missing = self.core.missing(NS, pack(tokens), len(tokens) - 1)
        num = self.count(missing.names)
        if missing.needs_windows:
            missing = missing.with_windows(num, lambda name: name.digest in self.store)
            num = self.count(missing.names)
        if not num or not missing.gain(num):
            self.seen["a part, of no use"] += num > 0
            return None
        found = [("disk", name) for name in missing.names[:num]]
        fetch = self.slow.fetches.begin(found, 5.0, self.now, missing)
        if fetch is None:
            self.seen["no room"] += 1
            return None
        if missing.is_whole_or_nothing:
            assert len(fetch.blocks) == len(missing.names), "a part of it is brought, which is of no use"
            self.seen["whole"] += 1
        self.sought = tokens
        self.fetches.append(fetch)
        self.reading += fetch.ops.get("disk", [])
        self.seen["joined"] += len(fetch.blocks) - len(fetch.ops.get("disk", []))
        return fetch

    def bring(self, tokens):
        """Fetch at once what is missing: then as much more is found as was said."""
        num_near = self.core.match(NS, pack(tokens), len(tokens) - 1).num_blocks
        num_dropped = self.host.blocks.num_dropped
        fetch = self.fetch(tokens)
        while self.reading:
            self.arrive(0, 1)
        if fetch is None or num_dropped != self.host.blocks.num_dropped:
            return  # what was near may have made room
        if all(self.host.blocks.is_found(held) for held in fetch.blocks):
            num_gained = fetch.missing.gain(len(fetch.blocks))
            num_found = self.core.match(NS, pack(tokens), len(tokens) - 1).num_blocks
            assert num_found >= num_near + num_gained, "what was brought does not help as much as was said"
            self.seen["as much as was said"] += num_gained > 0

    def count(self, names):
        return next((at for at, name in enumerate(names) if name.digest not in self.store), len(names))

    def arrive(self, at, kind):
        if not self.reading:
            return
        op = self.reading.pop(at % len(self.reading))
        content = self.store.get(op.name.digest)
        is_good = kind != 0 and content is not None
        self.arena[op.host_id] = content if is_good else b"garbage"
        held = self.host.blocks.at(op.host_id)
        self.slow.fetches.arrived(op.host_id, self.now, is_good=is_good)
        if is_good and self.host.blocks.get(op.name.digest) is not held:
            self.unheard.add(held)
        self.seen["arrived" if is_good else "lost"] += 1

    def go_on(self, next_token):
        """Who waited last runs with what has come."""
        if self.sought:
            self.run([[*self.sought, next_token]], fails=False)
            self.sought = []

    def end(self, at):
        if self.fetches:
            fetch = self.fetches.pop(at % len(self.fetches))
            if not fetch.is_over:
                self.seen["left early"] += 1
            self.slow.fetches.end(fetch)

    def write(self, *, is_flush):
        ops = self.slow.writes.take(is_flush=is_flush)
        if ops:
            self.writing.append((ops, [self.arena[op.host_id] for op in ops], set()))

    def written(self, at, num_lost):
        if not self.writing:
            return
        ops, contents, doomed = self.writing.pop(at % len(self.writing))
        for op, content in zip(ops, contents, strict=True):
            assert self.arena[op.host_id] == content == op.name.digest, "a block changed while it was being written"
        kept = ops[num_lost:]
        for op in kept:
            if op.name.digest not in doomed:
                self.store[op.name.digest] = op.name.digest
        self.slow.writes.written(ops, len(kept))
        self.seen["written"] += len(kept)

    def reset(self):
        self.core.forgetting.reset()
        self.store.clear()  # as Tiering does, behind what is being written
        for ops, _, _ in self.writing:
            self.slow.writes.written(ops, 0)
        self.writing.clear()
        assert not self.host.blocks.num_held
        assert self.core.num_available == self.num_blocks, (
            "a block that is forgotten waits for a store that nobody needs"
        )
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
            for group, block in enumerate(node.blocks):
                right = block is None or self.slab[block.block_id] == name_of(node, group).digest
                assert right, "wrong bytes on the device"
        for fetch in self.fetches:
            if fetch.missing.is_whole_or_nothing and not fetch.is_over:
                blocks = set(fetch.blocks) - self.unheard
                is_coming = [held.host_id in busy or self.host.blocks.get(held.name.digest) for held in blocks]
                assert all(is_coming), "a part is waited for, which is of no use"

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
        assert self.core.num_available == self.num_blocks


SEQUENCES = st.lists(st.integers(0, 1), min_size=3, max_size=13)


class SlowTiersMachine(RuleBasedStateMachine):
    groups = st.just(PLAIN)

    @initialize(policy=st.sampled_from(WRITE_POLICIES), num_host=st.sampled_from((1, 4, 12)), data=st.data())
    def start(self, policy, num_host, data):
        self.world = World(policy, num_host, data.draw(self.groups))

    @rule(sequences=st.lists(SEQUENCES, min_size=1, max_size=2), fails=st.integers(0, 5), corrupted=st.integers(-9, 1))
    def run(self, sequences, fails, corrupted):
        self.world.run(sequences, fails=fails == 0, corrupted=corrupted)

    @rule(tokens=SEQUENCES)
    def fetch(self, tokens):
        self.world.fetch(tokens)

    @rule(tokens=SEQUENCES)
    def bring(self, tokens):
        self.world.bring(tokens)

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


class GroupsMachine(SlowTiersMachine):
    groups = st.sampled_from(list(GROUPS.values()))


def test_random_operations_with_several_groups():
    run_state_machine_as_test(
        GroupsMachine,
        settings=settings(
            max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def walk(seed, num_operations, policy, num_host, rules=PLAIN):  # noqa: C901, PLR0912 - a choice of operations
    """Choose operations at random, quickly: return what happened."""
    random = Random(seed)
    world = World(policy, num_host, rules)
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
                sequences = [tokens() for _ in range(random.randint(1, 2))]
                world.run(sequences, fails=random.random() < 0.1, corrupted=random.randrange(-50, 2))
            case 3 | 4:
                sought = world.sought if world.sought and random.random() < 0.4 else tokens()
                if random.random() < 0.7:
                    world.fetch(sought)
                else:
                    world.bring(sought)
                    world.go_on(random.randrange(2))
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
    fetch = world.slow.fetches.begin([("disk", name) for name in names], 5.0, 0.0, NOTHING_MISSING)
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
    "as much as was said",
    "corrupted, and in a tier",
    "loaded from host",
    "loaded from disk",
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("policy", WRITE_POLICIES)
@IN_FULL
def test_random_walks_meet_everything(policy, in_full):
    seen = Counter()
    asked = EVENTS if policy == "write_back" else {*EVENTS, "live store"}
    for seed in until_seen(range(4), seen, asked, in_full=in_full):
        seen.update(walk(seed, 700, policy, (2, 6, 12, 20)[seed]))
    missing = EVENTS - (+seen).keys()
    assert not missing, f"never seen: {missing}"
    assert (seen["live store"] > 0) == (policy != "write_back")


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("name", GROUPS)
@IN_FULL
def test_random_walks_with_several_groups_meet_everything(name, in_full):
    seen, trims = Counter(), any(rule.trims for rule in GROUPS[name])
    asked = EVENTS | {"trimmed", "whole", "a part, of no use"} if trims else EVENTS
    for seed in until_seen(range(3), seen, asked, in_full=in_full):
        seen.update(walk(seed, 1000, WRITE_POLICIES[seed], (2, 6, 12)[seed], GROUPS[name]))
    missing = asked - (+seen).keys()
    assert not missing, f"never seen: {missing}"


@pytest.mark.long
@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_random_walks_for_long(policy):
    for seed in range(12):
        walk(seed, 5000, policy, (2, 6, 12, 20)[seed % 4])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GROUPS)
def test_random_walks_with_several_groups_for_long(name):
    for seed in range(6):
        walk(seed, 3000, WRITE_POLICIES[seed % 3], (2, 6, 12, 20)[seed % 4], GROUPS[name])


def arena(num_held, policy="write_back"):
    """SlowTiers over a host of so many blocks, and names."""
    host = HostTier(num_held, notes_unsaved=True)
    arbiter = Arbiter(1, SIZE, compute_s_per_token=1.0)
    arbiter.links["disk"] = LinkModel(0.0, 1e9)
    return SlowTiers(host, policy, arbiter), names_behind(ROOT, ROOT, pack(range(2 * num_held * SIZE)), STRIDE)


def test_as_much_may_be_on_its_way_as_is_said_and_no_more():
    slow, names = arena(8)
    assert slow.fetches.max_waited == 4
    first = slow.fetches.begin([("disk", name) for name in names[:3]], 9.0, 0.0, NOTHING_MISSING)
    assert slow.fetches.begin([("disk", name) for name in names[4:6]], 9.0, 0.0, NOTHING_MISSING) is None
    last = slow.fetches.begin([("disk", name) for name in names[4:5]], 9.0, 0.0, NOTHING_MISSING)
    assert (len(first.blocks), len(last.blocks)) == (3, 1)
    assert slow.fetches.begin([("disk", names[6])], 9.0, 0.0, NOTHING_MISSING) is None


class Whole(Missing):
    """Of which a part is of no use."""

    is_whole_or_nothing = True


def held_of(slow, names):
    """Have the host hold these."""
    for index, name in enumerate(names):
        assert slow.host.keep(name, index)
    slow.host.done(slow.host.take())


def test_a_part_is_begun_where_it_is_of_use_and_nothing_where_it_is_not():
    for kind, num_begun in ((Missing, 3), (Whole, None)):
        slow, names = arena(8)
        held_of(slow, names[8:13])
        pinned = slow.host.blocks.pin([slow.host.blocks.get(name.digest) for name in names[8:13]])
        sought = [("disk", name) for name in names[:4]]
        fetch = slow.fetches.begin(sought, 9.0, 0.0, kind(names[:4]))
        assert (fetch and len(fetch.blocks)) == num_begun
        assert len(slow.host.blocks.free_ids()) == (3 if fetch is None else 0)
        slow.host.blocks.unpin(pinned)
        if fetch is None:
            assert len(slow.fetches.begin(sought, 9.0, 0.0, kind(names[:4])).blocks) == 4, "now there is room"


def test_room_is_not_made_by_what_is_sought_itself():
    slow, names = arena(8)
    held_of(slow, names[:8])
    pinned = slow.host.blocks.pin([slow.host.blocks.get(name.digest) for name in names[2:8]])
    sought = [names[8], names[9], names[1]]
    assert slow.fetches.begin([("disk", name) for name in sought], 9.0, 0.0, Whole(sought)) is None
    assert slow.host.blocks.get(names[0].digest), "nothing was lost for it"
    slow.host.blocks.unpin(pinned[:1])
    assert len(slow.fetches.begin([("disk", name) for name in sought], 9.0, 0.0, Whole(sought)).blocks) == 3


def test_who_waits_for_the_whole_goes_on_when_a_part_is_lost_and_others_wait_for_what_comes_before_it():
    for kind, waits in ((Missing, True), (Whole, False)):
        slow, names = arena(8)
        fetch = slow.fetches.begin([("disk", name) for name in names[:3]], 9.0, 0.0, kind(names[:3]))
        slow.fetches.arrived(fetch.ops["disk"][2].host_id, 1.0, is_good=False)
        assert fetch.is_over is not waits


def test_who_waits_for_the_whole_goes_on_when_a_part_is_distrusted():
    for kind, waits in ((Missing, True), (Whole, False)):
        slow, names = arena(8)
        fetch = slow.fetches.begin([("disk", name) for name in names[:3]], 9.0, 0.0, kind(names[:3]))
        slow.fetches.distrust({names[1].digest})
        assert fetch.is_over is not waits


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
