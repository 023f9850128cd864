"""Who waits is let in by what chunks of others have kept, and never waits for what nobody gives back."""

from __future__ import annotations

import pytest

from pagefold.events import ChunksPacked, RequestPreempted
from pagefold.kv import NO_MASK, KeepRule, KVCore, Packed, PinLimits, audit
from pagefold.request import Request, StopRule, WarmUp
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.steps import StepPlan, StepResult

SIZE, CHUNK = 16, 256
RULE = KeepRule(CHUNK, is_chunked=True, num_before=1, packs=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
AUDITS = pytest.mark.parametrize("audits_every", [8, pytest.param(1, marks=pytest.mark.long)])
"""Decorator of a test of many steps with many requests, whose audits take most of the time."""


class World:
    """A scheduler whose steps keep so many blocks of each chunk, and sample zeros.

    Args:
        num_blocks, budget: of the device, and tokens a step.
        num_kept: blocks of a chunk that stay, of 16; for each mask so many, where there are several.
        audits_every: so many steps the invariants are looked at, and behind the last one.
    """

    def __init__(self, num_blocks: int, budget: int, *num_kept: int, audits_every: int = 1) -> None:
        self.events: list[object] = []
        self.core = KVCore(num_blocks, block_size=SIZE, rules=[RULE], pin_limits=PinLimits(0.5))
        self.scheduler = Scheduler(self.core, SchedulerLimits(16, budget), emit=self.events.append)
        self.num_kept = num_kept
        self.num_added = 0
        self.audits_every, self.num_steps = audits_every, 0

    def add(self, length: int, num_outputs: int = 1, *, pins: bool = False, mask: int = 0) -> Request:
        self.num_added += 1
        tokens = [self.num_added, *range(100, 99 + length)]
        request = Request(
            f"r{self.num_added}", tokens, GREEDY, stop=StopRule(frozenset(), length + num_outputs),
            namespace=b"n%d" % mask, seed=0, mask=mask,
            warm_up=WarmUp(pin=True, ttl_s=None, retention_priority=1) if pins else None,
        )  # fmt: skip
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        if plan.num_rows:
            packed = [
                [Packed(self.num_kept[plan.mask_of[row]], None)] * (len(granted) * SIZE // CHUNK)
                for row, granted in zip(plan.packing_rows, plan.granted, strict=True)
            ]
            self.scheduler.apply(StepResult([0] * len(plan.sampling_rows), packed=packed))
        self.num_steps += 1
        if self.num_steps % self.audits_every == 0 or not self.scheduler.has_work:
            audit(self.core)
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            assert self.step().num_rows, "there is work, and nobody runs"


@pytest.mark.parametrize("budget", [512, 2048])
def test_nobody_waits_for_what_pins_keep(budget):
    """What is expected fits, and what the first step is granted does not, but for pins: these go."""
    world = World(300, budget, 4)
    for _ in range(3):
        world.add(2000)
        world.run()
    assert world.core.packing.expected_share(0) < 0.35
    world.core.forgetting.reset()
    for _ in range(4):
        world.add(480, pins=True)
        world.run()
    assert world.core.pool.num_pinned > 100
    world.add(2000)
    world.run()


@AUDITS
def test_more_run_where_little_is_kept(audits_every):
    most = {}
    for num_kept in (4, 16):
        world = World(700, 512, num_kept, audits_every=audits_every)
        for _ in range(12):
            world.add(1900, 100)
        most[num_kept] = 0
        while world.scheduler.has_work:
            world.step()
            most[num_kept] = max(most[num_kept], len(world.scheduler.running))
    assert most[4] > 1.5 * most[16]


@pytest.mark.parametrize(("num_blocks", "most"), [(170, CHUNK), (400, 2000)])
def test_where_memory_is_short_a_step_computes_one_chunk(num_blocks, most):
    """Beside 125 whole blocks, a step of 2,000 tokens would be granted 96 for what it packs."""
    world = World(num_blocks, 2048, 4)
    request, sizes = world.add(2000), []
    while world.scheduler.has_work:
        sizes += world.step().num_tokens
    assert request.finish_reason == "length"
    assert sizes[0] == most
    assert sum(sizes) == 2000


def test_admission_counts_no_more_than_such_a_step_takes():
    world = World(250, 2048, 4)
    for _ in range(2):  # it is known how much is kept
        world.add(2000)
        world.run()
    world.core.forgetting.reset()
    for _ in range(3):
        world.add(2000, 40)
    most = 0
    while world.scheduler.has_work:
        world.step()
        most = max(most, len(world.scheduler.running))
    assert most == 3


@AUDITS
def test_whoever_has_given_blocks_back_is_expected_to_take_no_others_for_them(audits_every):
    """What a request held whole and has packed since is no room that it takes yet: so many run as there is room for."""
    world, running = World(800, 512, 5, audits_every=audits_every), []
    for _ in range(2):  # it is known how much is kept
        world.add(2000)
        world.run()
    world.core.forgetting.reset()
    for _ in range(40):
        world.add(1900, 100)
    while world.scheduler.has_work:
        world.step()
        if world.scheduler.waiting:
            running.append(len(world.scheduler.running))
    holds = [-(-(num_tokens - 6 * CHUNK) // SIZE) + 6 * 5 for num_tokens in range(1900, 2000)]
    steady = running[len(running) // 3 :]
    assert sum(steady) / len(steady) > 0.85 * 800 / (sum(holds) / len(holds))
    assert sum(isinstance(event, RequestPreempted) for event in world.events) <= 2


@pytest.mark.parametrize("num_kept", [0, 9, 16])
def test_whoever_fits_alone_gets_on_whatever_it_copies(num_kept):
    """It begins inside a block of another, which cannot go while it is copied; and there is just room for it."""
    least = KVCore(1000, block_size=SIZE, rules=[RULE]).num_blocks_for(1303, 512)
    for num_blocks in range(least, least + 4):
        for common in (600, 1000, 1290):
            world = World(num_blocks, 512, num_kept)
            first, second = world.add(1300, 3), world.add(1300, 3)
            second.token_ids[:common] = first.token_ids[:common]
            world.run()
            assert {first.finish_reason, second.finish_reason} == {"length"}


def test_what_is_expected_of_one_mask_says_nothing_of_another():
    world = World(700, 512, 14, 4)
    for mask in (0, 1):
        world.add(2500, mask=mask)
        world.run()
    shares = [world.core.packing.expected_share(mask) for mask in (0, 1, 2, NO_MASK)]
    assert shares == [14 / 16 * 1.08, 4 / 16 * 1.08, 1.0, 1.0]
    needs = [world.core.num_blocks_for(2500, 512, is_expected=True, mask=mask) for mask in (0, 1, NO_MASK)]
    assert needs[1] < min(needs[0], needs[2]) < 700


@AUDITS
def test_who_runs_short_of_what_was_expected_is_preempted_and_ends(audits_every):
    world = World(300, 512, 2, audits_every=audits_every)
    for _ in range(2):
        world.add(2000)
        world.run()
    world.core.forgetting.reset()
    world.num_kept = (16,)  # and then all is kept, of those as well that are packed while they decode
    requests = [world.add(600, 800) for _ in range(4)]
    world.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(request.finish_reason == "length" for request in requests)


def test_it_is_told_how_much_was_kept():
    world = World(300, 512, 5)
    world.add(1100)
    world.run()
    told = [event for event in world.events if isinstance(event, ChunksPacked)]
    num_chunks = RULE.num_packed(1100)
    assert sum(event.num_chunks for event in told) == num_chunks
    assert sum(event.num_granted_blocks for event in told) == 16 * num_chunks
    assert sum(event.num_kept_blocks for event in told) == 5 * num_chunks


def test_what_is_corrupted_is_not_packed():
    world = World(300, 512, 5)
    request = world.add(1300)
    for _ in range(2):
        world.step()
    num_chunks = len(request.cache.chunks)
    plan = world.scheduler.schedule(0.0)
    assert plan.packing_rows
    packed = [[Packed(9, None)] * (len(granted) * SIZE // CHUNK) for granted in plan.granted]
    world.scheduler.apply(StepResult([0] * len(plan.sampling_rows), packed=packed, corrupted=[0]))
    audit(world.core)
    assert request.finish_reason == "error"
    assert num_chunks
    assert world.core.num_active == 0
