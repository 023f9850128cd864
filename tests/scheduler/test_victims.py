"""Who is preempted for whom, how often, and when it comes back. A slow twin of the choice is in the machine's test."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.events import Event, RequestPreempted, StepPlanned
from pagefold.kv import NO_HOST, HostTier, KVCore, audit
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import SCHEDULING_POLICIES, PrefillLimits, Scheduler, SchedulerLimits
from pagefold.scheduler.prefill_limits import NO_PREFILL_LIMITS
from pagefold.scheduler.victims import MOST_PREEMPTIONS
from pagefold.sim import NullRunner

BLOCK_SIZE = 4
NEVER = 10**9


class House:
    """A scheduler in a tiny pool, and what it emitted."""

    def __init__(
        self,
        num_blocks: int,
        *,
        seqs: int = 8,
        budget: int = 64,
        policy: str = "fcfs",
        host: HostTier = NO_HOST,
        prefills: PrefillLimits = NO_PREFILL_LIMITS,
    ) -> None:
        self.events: list[Event] = []
        core = KVCore(num_blocks, block_size=BLOCK_SIZE, host=host, emit=self.events.append)
        order = SCHEDULING_POLICIES[policy](10.0)
        limits = SchedulerLimits(seqs, budget, prefills)
        self.scheduler = Scheduler(core, limits, policy=order, emit=self.events.append)
        self.num_added = 0

    def add(self, num_prompt: int, num_new: int, *, head: int = 0, priority: int = 0) -> Request:
        """Add a request whose prompt begins with ``head`` tokens that others begin with too."""
        own = range(1000 * (self.num_added + 1), 1000 * (self.num_added + 1) + num_prompt - head)
        request = Request(
            f"r{self.num_added}",
            [*range(head), *own],
            SamplingParams(temperature=0.0),
            stop=StopRule(frozenset({NEVER}), num_prompt + num_new),
            seed=self.num_added,
            arrival_s=float(self.num_added),
            priority=priority,
            tenant="abc"[self.num_added % 3],  # which counts where tenants have shares
        )
        self.num_added += 1
        self.scheduler.add(request)
        return request

    def step(self) -> int:
        """Run a step. Return how many tokens it computed."""
        plan = self.scheduler.schedule(0.0)
        if plan.num_rows:
            self.scheduler.apply(NullRunner().run(plan))
        audit(self.scheduler.core)
        return len(plan.token_ids)

    def run(self) -> list[RequestPreempted]:
        """Run to the end. Return who was preempted for whom."""
        num_steps = 0
        while self.scheduler.has_work:
            assert self.step() > 0, "there is work, and nothing was computed"
            num_steps += 1
            assert num_steps < 100_000
        return self.preempted()

    def preempted(self) -> list[RequestPreempted]:
        """Return who was preempted so far."""
        return [event for event in self.events if isinstance(event, RequestPreempted)]


def test_of_those_that_lose_alike_the_last_goes():
    """However full their last blocks are: of 9 tokens in 3 blocks, and of 18 in 5, a block is lost for each."""
    house = House(11)
    first = house.add(10, 20)
    house.add(8, 20)
    last = house.add(17, 20)
    preempted = house.run()
    assert (preempted[0].request_id, preempted[0].cause_request_id) == (last.request_id, first.request_id)


def test_who_loses_least_for_each_block_goes_though_it_is_not_the_last():
    """What is published is in the host's memory then; a request of less than a block has published nothing."""
    house = House(11, host=HostTier(40))
    house.add(12, 20)
    long = house.add(25, 4)
    short = house.add(3, 6)
    preempted = house.run()
    assert preempted[0].request_id == long.request_id
    assert short.num_preemptions == 0


def test_nobody_is_preempted_for_somebody_behind_it():
    house = House(8)
    first, second = house.add(8, 20), house.add(8, 20)
    preempted = house.run()
    assert {event.request_id for event in preempted} == {second.request_id}
    assert {event.cause_request_id for event in preempted} <= {first.request_id, second.request_id}


def test_of_those_behind_the_least_urgent_goes_whatever_it_loses():
    house = House(11, policy="priority")
    house.add(10, 20, priority=0)
    house.add(8, 20, priority=1)
    low = house.add(17, 20, priority=2)
    assert house.run()[0].request_id == low.request_id


def test_what_is_shared_is_neither_lost_nor_freed():
    """Two go on from a prompt of six blocks: giving one of them up frees its own block only."""
    house = House(20)
    one, other = house.add(26, 4, head=24), house.add(26, 4, head=24)
    alone = house.add(26, 4)
    for _ in range(2):
        house.step()
    core = house.scheduler.core

    def loss(request: Request) -> tuple[float, int]:
        assert request.cache is not None
        return tuple(core.losses.of([request.cache], [request.num_computed_tokens]))

    assert loss(one) == loss(other) == (27 - 24, 1)
    assert loss(alone) == (27, 7)
    house.scheduler.finish(other.request_id, "abort")
    assert loss(one) == (27, 7), "nobody else has it any more"


def test_who_came_back_has_room_for_a_while():
    """It is not sent away again at once, though its tokens would have fitted sooner."""
    house = House(12)
    house.add(16, 24)
    second = house.add(16, 12)
    while not second.num_preemptions:
        house.step()
    while second.cache is None:
        house.step()
    core, at = house.scheduler.core, second.num_output_tokens
    needed = sum(
        -(-min(one.stop.max_total_tokens, one.num_tokens + max(BLOCK_SIZE, at)) // BLOCK_SIZE)
        for one in house.scheduler.running
    )
    assert needed <= core.pool.num_blocks or len(house.scheduler.running) == 1
    house.run()
    assert second.num_preemptions == 1


def test_who_was_preempted_too_often_comes_back_when_nobody_before_it_runs():
    house = House(40)
    first = house.add(8, 60)
    second = house.add(8, 60)
    house.step()
    victim = house.scheduler.running.pop()
    victim.num_preemptions = MOST_PREEMPTIONS
    house.scheduler._leaving.wait_again(victim, is_preempted=True)
    third = house.add(4, 2)
    while first.finish_reason is None:
        assert house.step() > 0
        assert second.cache is None, "it waits for the first, though there is room"
        assert third.cache is None, "nobody overtakes it"
    house.step()
    assert second.cache is not None
    assert third.cache is not None, "it holds nobody back any more"
    house.run()
    assert second.num_preemptions == MOST_PREEMPTIONS + 1


def squeeze(house: House, lengths: list[tuple[int, int]], gaps: list[int], most_tokens: int) -> list[Request]:
    """Let requests come between steps, and run all to their ends. Return them."""
    requests = []
    for (length, num_new), gap in zip(lengths, gaps, strict=False):
        num_prompt = 1 + length % (most_tokens - 1)
        requests.append(house.add(num_prompt, 1 + num_new % (most_tokens - num_prompt), head=min(4, num_prompt - 1)))
        for _ in range(gap):
            if house.scheduler.has_work:
                assert house.step() > 0, "there is work, and nothing was computed"
    house.run()
    return requests


LENGTHS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=14)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(2, 30),
    seqs=st.integers(1, 8),
    budget=st.sampled_from((8, 16, 64)),
    lengths=LENGTHS,
    gaps=st.lists(st.integers(0, 12), min_size=14, max_size=14),
)
def test_nobody_is_preempted_more_often_than_that(
    num_blocks: int, seqs: int, budget: int, lengths: list[tuple[int, int]], gaps: list[int]
) -> None:
    """First come first served: however memory is squeezed, three times at most, and each step computes tokens."""
    house = House(num_blocks, seqs=seqs, budget=max(seqs, budget))
    requests = squeeze(house, lengths, gaps, num_blocks * BLOCK_SIZE - 1)
    assert max(request.num_preemptions for request in requests) <= MOST_PREEMPTIONS + 1
    assert requests[0].num_preemptions == 0
    assert all(request.finish_reason == "length" for request in requests)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "fair"])
@pytest.mark.parametrize("prefills", [NO_PREFILL_LIMITS, PrefillLimits(2, 1, 6)], ids=["no limits", "limits"])
@settings(max_examples=12, deadline=None)
@given(
    num_blocks=st.integers(8, 30),
    seqs=st.integers(2, 8),
    budget=st.sampled_from((8, 16, 64)),
    lengths=LENGTHS,
    gaps=st.lists(st.integers(0, 12), min_size=14, max_size=14),
)
def test_others_preempt_a_request_so_often_at_most_in_any_order(  # noqa: PLR0917 - what is drawn
    policy: str, prefills: PrefillLimits, num_blocks: int, seqs: int, budget: int, lengths: list, gaps: list[int]
) -> None:
    """Those that overtake, by their prefix or for a place among prompts, are in the way of nobody for good."""
    house = House(num_blocks, seqs=seqs, budget=max(seqs, budget), policy=policy, prefills=prefills)
    requests = squeeze(house, lengths, gaps, num_blocks * BLOCK_SIZE - 1)
    times = Counter(each.request_id for each in house.preempted() if each.cause_request_id != each.request_id)
    assert max(times.values(), default=0) <= MOST_PREEMPTIONS + 1
    assert all(request.finish_reason == "length" for request in requests)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("seed", range(2))
def test_many_long_outputs_in_little_memory(seed: int) -> None:
    """Much is preempted here; nobody more often than three times, and few more often than twice."""
    rng = Random(seed)
    house = House(40, seqs=12, budget=24)
    lengths = [(rng.randrange(60), rng.randrange(150)) for _ in range(40)]
    requests = squeeze(house, lengths, [rng.randrange(10) for _ in lengths], 150)
    counts = Counter(request.num_preemptions for request in requests)
    assert sum(counts[num] for num in counts if num) > 10
    assert max(counts) <= MOST_PREEMPTIONS + 1
    planned = [event for event in house.events if isinstance(event, StepPlanned)]
    assert all(event.num_tokens for event in planned)
