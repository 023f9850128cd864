"""Packed chunks behind slow tiers: what a request has of its older tokens is what was kept of its own path.

A scheduler with a disk and a pool in virtual time, and a device that writes down what each block holds: of whole ones
the path of their tokens, of those of a packed chunk the path up to the chunk's end and which of its blocks they are.
Every row's blocks are looked at before they are read. Some blocks are lost or damaged on their way, some notes are
those of another chunk, some requests keep all, and now and then all that is near is forgotten, as by a restart.
"""

from __future__ import annotations

from array import array
from collections import Counter
from functools import partial
from hashlib import blake2b
from random import Random

import pytest
from until_seen import IN_FULL, until_seen

from pagefold.events import TierRead
from pagefold.kv import NO_MASK, Arbiter, ChunkNotes, HostTier, KeepRule, KVCore, LinkModel, Packed, SlowTiers, audit
from pagefold.kv.transfers import Found
from pagefold.request import Request, RequestStatus, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits, Tiering
from pagefold.sim.clock import VirtualClock
from pagefold.sim.tiers import DISK, SimTransfers, TierModel
from pagefold.steps import StepPlan, StepResult

SIZE, POOL = 2, "remote"
PACKS = KeepRule(8, is_chunked=True, num_before=1, packs=True)
RULES = {
    "alone": (PACKS,),
    "one chunk": (KeepRule(4, is_chunked=True, packs=True),),
    "beside a window": (KeepRule(4, is_chunked=True, num_before=2, packs=True), KeepRule(5)),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


class Counts:
    """Counts are a number, which says how many blocks are filled."""

    def __init__(self, chunk_blocks: int, *, empties: bool) -> None:
        self.chunk_blocks, self.empties = chunk_blocks, empties

    def of(self, tokens) -> int:
        return int.from_bytes(blake2b(array("i", tokens).tobytes(), digest_size=3).digest(), "little")

    def encode(self, counts: object) -> bytes:
        return counts.to_bytes(3, "little")

    def decode(self, raw: bytes) -> object | None:
        return int.from_bytes(raw, "little") if len(raw) == 3 else None

    def num_blocks(self, counts: object) -> int:
        """From none on; from one on where chunks of which nothing is kept would end all paths in slow tiers."""
        return counts % (self.chunk_blocks + 1) if self.empties else 1 + counts % self.chunk_blocks


class DiskAndPool(SimTransfers):
    """What is kept lies in the pool, and on the disk if its digest says so; some notes are of another chunk."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tiers = [DISK, POOL]
        self.answers = Random(7)
        self.wrong_notes = 0.0

    def count(self, tier, names):
        there = [name.digest in self._kept and (tier == POOL or name.digest[1] % 8 > 0) for name in names]
        return next((at for at, is_there in enumerate(there) if not is_there), len(there))

    def look(self, tier, names, ticket):
        self._free_s["look"] = 0.0  # nobody's question waits for another's
        self._begin("look", self.answers.choice((0.0, 0.0, 2.0)), None, Found(tier, ticket, self.count(tier, names)))

    def write(self, ops):
        noted = []
        for op in ops:
            note = op.note
            if note and self.answers.random() < self.wrong_notes:
                note = bytes([note[0] + 1]) + note[1:]
            noted.append(op._replace(note=note))
        super().write(noted)


class House:
    """All of it.

    Args:
        rules: of the groups.
        random: decides.
        num_blocks, num_held: of the device and the host.
        empties: whether nothing is kept of some chunks.
        policy: of writing.
        faults: share of blocks, and of notes, that come back wrong.
    """

    def __init__(self, rules, random, num_blocks, num_held, *, empties=False, policy="write_through", faults=0.0):
        self.random, self.clock = random, VirtualClock()
        self.rule = next(rule for rule in rules if rule.packs)
        self.chunk_blocks = self.rule.chunk_blocks(SIZE)
        self.counts = Counts(self.chunk_blocks, empties=empties)
        notes = ChunkNotes(len(rules), self.chunk_blocks, self.counts)
        self.host = HostTier(num_held, notes_unsaved=True, notes=notes)
        arbiter = Arbiter(100, SIZE, compute_s_per_token=1.0)
        arbiter.links = {DISK: LinkModel(0.02, 1e6), POOL: LinkModel(0.005, 1e6)}
        self.core = KVCore(
            num_blocks, block_size=SIZE, rules=rules, host=self.host, slow=SlowTiers(self.host, policy, arbiter)
        )
        self.events: list[object] = []
        self.scheduler = Scheduler(self.core, SchedulerLimits(4, 24), emit=self.events.append)
        model = TierModel(host_tokens=1000, disk_tokens=20_000, token_bytes=50, disk_latency_s=0.02, fault_rate=faults)
        self.transfers = DiskAndPool(model, SIZE, self.clock)
        self.transfers.wrong_notes = faults
        self.holds: dict[int, object] = {}
        self.arena: dict[int, object] = {}
        self.stored: dict[bytes, object] = {}
        write = self.transfers.write

        def keep(ops):
            new = [op for op in ops if op.name.digest not in self.transfers._kept]  # what is known is not rewritten
            self.stored |= {op.name.digest: self.arena[op.host_id] for op in new}
            write(ops)

        self.transfers.write = keep
        slow = self.core.slow
        emit = self.events.append
        self.tiering = Tiering(self.scheduler, slow, self.transfers, self, self.move, emit=emit, clock=self.clock)
        self.streams = [[random.randrange(3) for _ in range(60)] for _ in range(3)]
        self.num_added = 0
        self.seen: Counter[str] = Counter()

    # The arena, and what a step moves.

    def arrived(self, host_id, _checksum):
        self.arena[host_id] = self.stored[self.host.blocks.at(host_id).name.digest]

    def move(self, ops):
        self.arena |= {store.host_id: self.holds[store.block_id] for store in ops.stores}
        self.holds |= {load.block_id: self.arena[load.host_id] for load in ops.loads}

    # The device.

    def run(self, plan: StepPlan) -> StepResult:
        self.move(plan.host_ops)
        for copy in plan.copies:
            self.holds[copy.dst] = self.holds[copy.src]
        for row, request in enumerate(self.scheduler.in_step):
            self.read(plan, row, request)
            self.write(plan, row, request)
        packed = [self.pack(plan, row, granted) for row, granted in zip(plan.packing_rows, plan.granted, strict=True)]
        requests = self.scheduler.in_step
        return StepResult([sum(requests[row].token_ids) % 3 for row in plan.sampling_rows], packed=packed)

    def read(self, plan, row, request):
        start = plan.starts[row]
        for group, rule in enumerate(self.core.rules.of(request.mask)):
            for place in range(rule.first_seen(start) // SIZE, -(-start // SIZE)):
                expected = tuple(request.token_ids[: min((place + 1) * SIZE, start)])
                found_group, tokens = self.holds[plan.tables[row][group].at(place)]
                assert (found_group, tokens[: len(expected)]) == (group, expected), "a row reads what is not its own"
        if request.mask == NO_MASK:
            assert not plan.chunks[row]
            return
        assert len(plan.chunks[row]) == self.rule.num_packed(start)
        for at, chunk in enumerate(plan.chunks[row]):
            tokens = tuple(request.token_ids[: (at + 1) * self.rule.window])
            assert chunk.counts == self.counts.of(tokens), "what was kept of another chunk"
            assert len(chunk.blocks) == self.counts.num_blocks(chunk.counts)
            for part, block in enumerate(chunk.blocks):
                assert self.holds[block.block_id] == ("packed", tokens, part), "a row reads what is not its own"

    def write(self, plan, row, request):
        start = plan.starts[row]
        end = start + plan.num_tokens[row]
        for group, table in enumerate(plan.tables[row]):
            for place in range(start // SIZE, -(-end // SIZE)):
                self.holds[table.at(place)] = group, tuple(request.token_ids[: min((place + 1) * SIZE, end)])

    def pack(self, plan, row, granted):
        request, packed = self.scheduler.in_step[row], []
        for at in range(0, len(granted), self.chunk_blocks):
            number = len(plan.chunks[row]) + at // self.chunk_blocks
            tokens = tuple(request.token_ids[: (number + 1) * self.rule.window])
            counts = self.counts.of(tokens)
            packed.append(Packed(self.counts.num_blocks(counts), counts))
            for part, block in enumerate(granted[at : at + packed[-1].num_blocks]):
                self.holds[block.block_id] = "packed", tokens, part
        return packed

    # Operations.

    def add(self, tokens, num_new=3, mask=0, returns_in_s=None) -> Request:
        self.num_added += 1
        request = Request(
            f"r{self.num_added}", list(tokens), GREEDY, stop=StopRule(frozenset(), len(tokens) + num_new),
            namespace=b"exact" if mask == NO_MASK else b"kept", seed=0, mask=mask, arrival_s=self.clock(),
        )  # fmt: skip
        request.returns_in_s = returns_in_s
        self.scheduler.add(request)
        self.tiering.begin(request, self.clock())
        self.seen["waited for"] += request.status is RequestStatus.FETCHING
        return request

    def add_some(self):
        random = self.random
        tokens = random.choice(self.streams)[: random.randrange(1, 60)]
        tokens = [*tokens, *(random.randrange(3) for _ in range(random.randrange(6)))]
        mask = NO_MASK if random.random() < 0.2 else 0
        self.add(tokens, random.randrange(1, 14), mask, random.choice((None, 0.0, 0.05)))

    def step(self):
        self.clock.advance(0.01)
        if not self.scheduler.has_work:
            self.tiering.store_pending()
            due_s = min(self.tiering.next_due_s(), self.transfers.next_due_s)
            assert due_s < float("inf") or not self.scheduler.fetching, "nothing will wake whoever waits"
            if due_s < float("inf"):
                self.clock.advance_to(max(due_s, self.clock()))
        self.tiering.poll(self.clock())
        plan = self.scheduler.schedule(self.clock())
        if not plan.num_rows:
            return
        for request in self.scheduler.in_step:
            self.seen.update(request.cache.num_loaded_tokens.keys())
        requests = list(self.scheduler.in_step)
        self.scheduler.apply(self.run(plan))
        for request in requests:
            if request.finish_reason is not None:
                self.tiering.expect(request, self.clock())

    def drain(self):
        for _ in range(5000):
            if not self.scheduler.has_requests:
                return
            self.step()
            audit(self.core)
        pytest.fail("somebody waits for ever")

    def operate(self, num_operations):
        for _ in range(num_operations):
            draw = self.random.random()
            if draw < 0.25 and len(self.scheduler.waiting) + len(self.scheduler.fetching) < 5:
                self.add_some()
            elif draw < 0.27 and self.scheduler.running:
                self.scheduler.finish(self.random.choice(self.scheduler.running).request_id, "abort")
            elif draw < 0.275:
                self.core.forgetting.reset()
            else:
                self.step()
            audit(self.core)
        self.drain()
        for event in self.events:
            if isinstance(event, TierRead):
                self.seen[f"read from {event.tier}"] += event.num_blocks
                self.seen.update(event.num_missed)


def _random_house(seed: str, name: str) -> House:
    random, num_least = Random(f"{seed} {name}"), 45 if len(RULES[name]) == 1 else 60  # whoever keeps all must fit
    return House(
        RULES[name], random, random.choice((num_least, 90)), random.choice((20, 60, 400)),
        empties=random.random() < 0.3,
        policy=random.choice(("write_back", "write_through", "write_through_selective")),
        faults=random.choice((0.0, 0.05)),
    )  # fmt: skip


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", RULES)
@IN_FULL
def test_random_operations(name, in_full):
    seen: Counter[str] = Counter()
    asked = {DISK, "waited for", f"read from {DISK}"}
    for seed in until_seen(range(8), seen, asked, in_full=in_full):
        house = _random_house(seed, name)
        house.operate(300)
        seen += house.seen
    missing = asked - seen.keys()
    assert not missing, f"never seen: {missing} in {seen}"


@pytest.mark.long
@pytest.mark.parametrize("name", RULES)
def test_many_random_operations(name):
    seen: Counter[str] = Counter()
    for seed in range(1000, 1040):
        house = _random_house(seed, name)
        house.operate(1500)
        seen += house.seen
    missing = {"host", DISK, POOL, "waited for", f"read from {POOL}", "damaged"} - seen.keys()
    assert not missing, f"never seen: {missing} in {seen}"


# By hand.


def _left_behind(house: House, tokens) -> None:
    """Have the slow tiers keep all of a path, and nobody else."""
    house.add(tokens, 1)
    house.drain()
    house.tiering.store_pending()
    for _ in range(50):
        house.clock.advance(0.1)
        house.step()
    house.core.forgetting.reset()


@pytest.mark.parametrize("num_tiers", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_after_a_restart_all_of_a_path_comes_back(name, num_tiers):
    house = House(RULES[name], Random(0), 90, 400)
    house.transfers.tiers = [POOL, DISK][:num_tiers]
    tokens = house.streams[0]
    _left_behind(house, tokens)
    again = house.add([*tokens, 1], 4)
    assert again.status is RequestStatus.FETCHING
    house.drain()
    assert again.num_cached_tokens == len(tokens) // SIZE * SIZE
    assert house.core.slow.arbiter.regret_s == 0


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", RULES)
def test_where_one_block_of_a_chunk_is_gone_what_lies_before_it_is_found(name):
    house = House(RULES[name], Random(0), 90, 400)
    house.transfers.tiers = [DISK]
    house.transfers.count = partial(SimTransfers.count, house.transfers)
    tokens = house.streams[0]
    _left_behind(house, tokens)
    num_groups = len(RULES[name])
    digests = list(house.transfers._kept)
    parts: Counter[bytes] = Counter(digest[:-1] for digest in digests)
    assert max(parts.values()) > num_groups, "some chunk has several blocks"
    for digest in digests:
        kept = dict(house.transfers._kept)
        del house.transfers._kept[digest]
        again = house.add([*tokens, 1], 4)
        house.drain()
        assert again.finish_reason == "length"
        house.seen["less"] += again.num_cached_tokens < len(tokens) // SIZE * SIZE
        house.core.forgetting.reset()
        house.tiering.store_pending()
        house.transfers._kept.clear()
        house.transfers._kept.update(kept)
    assert house.seen["less"]


def _restarted(before: House, num_held: int = 400, tiers=(DISK,), num_blocks: int = 90) -> House:
    """Return a house that has what another one's slow tiers hold, and nothing else; its disk has all of that."""
    house = House(before.core.rules, Random(0), num_blocks, num_held)
    house.transfers.tiers = list(tiers)
    house.transfers._kept, house.stored = before.transfers._kept.copy(), before.stored
    house.transfers.count = lambda _, names: SimTransfers.count(house.transfers, DISK, names)
    return house


@pytest.mark.parametrize(("num_held", "waits"), [(400, True), (40, False)])
def test_nobody_waits_for_chunks_that_the_arena_has_no_room_for(num_held, waits):
    """Only when their first blocks have come is it known how many there are: room is asked for all that may be."""
    before = House(RULES["alone"], Random(0), 90, 400)
    tokens = before.streams[0]
    _left_behind(before, tokens)
    house = _restarted(before, num_held)
    again = house.add([*tokens, 1], 4)
    assert (again.status is RequestStatus.FETCHING) == waits
    house.drain()
    assert (again.num_cached_tokens == len(tokens)) == waits


def test_two_that_fit_alone_wait_for_each_other_and_not_in_vain():
    before = House(RULES["alone"], Random(0), 180, 400)
    for tokens in before.streams[:2]:
        _left_behind(before, tokens)
    house = _restarted(before, 66, num_blocks=180)
    both = [house.add([*tokens, 1], 4) for tokens in before.streams[:2]]
    house.drain()
    assert [one.num_cached_tokens for one in both] == [60, 60]


@pytest.mark.parametrize("tiers", [(DISK,), (DISK, POOL)])
def test_a_pool_is_not_asked_for_what_a_disk_has_all_of(tiers):
    before = House(RULES["alone"], Random(0), 90, 400)
    tokens = before.streams[0]
    _left_behind(before, tokens)
    house = _restarted(before, tiers=tiers)
    house.transfers.look = lambda *_: pytest.fail("a pool was asked")
    again = house.add([*tokens, 1], 4)
    house.drain()
    assert again.num_cached_tokens == len(tokens)


def test_blocks_of_two_packings_come_once_and_are_forgotten():
    before = House(RULES["alone"], Random(0), 90, 400)
    tokens = before.streams[0]
    _left_behind(before, tokens)
    house = _restarted(before)
    kept = house.transfers._kept
    parts: dict[bytes, list[bytes]] = {}
    for digest, note in kept.items():
        if note:
            parts.setdefault(digest[:-1], []).append(digest)
    victim = next(digests for digests in parts.values() if len(digests) > 2)[-1]
    counts = int.from_bytes(kept[victim][6:], "little") + house.chunk_blocks  # another number of as many blocks
    kept[victim] = kept[victim][:6] + counts.to_bytes(3, "little")
    found = []
    for _ in range(2):
        again = house.add([*tokens, 1], 4)
        house.drain()
        found.append(again.num_cached_tokens)
        house.core.blocks.reclaim(90)
        for _ in range(50):
            house.clock.advance(0.1)
            house.step()
        house.core.forgetting.reset()
    assert found[0] < found[1] == len(tokens)
    assert house.core.slow.arbiter.regret_s > 0


def test_what_has_come_before_it_was_asked_for_is_not_waited_for():
    """A conversation is brought that is expected, and its request comes meanwhile: the pool answers too late."""
    before = House(RULES["alone"], Random(0), 180, 400)
    tokens = before.streams[0]
    before.add(tokens, 1, NO_MASK)
    before.drain()
    for _ in range(50):
        before.clock.advance(0.1)
        before.step()
    house = _restarted(before, tiers=(POOL,), num_blocks=180)
    transfers, delays = house.transfers, iter((0.0, 1.0))
    transfers.look = lambda tier, names, ticket: transfers._begin(
        "look", next(delays), None, Found(tier, ticket, transfers.count(tier, names))
    )
    house.tiering._returning.add(0.0, b"exact", array("i", [*tokens, 1]).tobytes(), NO_MASK)
    house.tiering.poll(0.0)
    again = house.add([*tokens, 2], 4, NO_MASK)
    house.drain()
    assert again.num_cached_tokens == len(tokens)


@pytest.mark.parametrize("note", [b"", b"\0", bytes(9), b"\1\0\0\0\1\0abc", b"\0\0\0\0\xff\xff\0\0\0"])
def test_a_note_that_no_chunk_has_is_a_miss(note):
    house = House(RULES["alone"], Random(0), 90, 400)
    house.transfers.tiers = [DISK]
    tokens = house.streams[0]
    _left_behind(house, tokens)
    for digest, old in house.transfers._kept.items():
        house.transfers._kept[digest] = note if old else old
    again = house.add([*tokens, 1], 4)
    house.drain()
    assert again.num_cached_tokens < 3 * RULES["alone"][0].window
    assert again.finish_reason == "length"
