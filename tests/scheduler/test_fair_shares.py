"""Fair shares: tags against a slow twin, how much service may differ, who makes way for whom, what deciding costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import permutations
from math import inf
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import House, new_request

from pagefold.events import RequestPreempted
from pagefold.kv import KEEP_ALL, KeepRule, audit
from pagefold.request import RequestStatus
from pagefold.scheduler import SCHEDULING_POLICIES, PrefillLimits, Scheduler, SchedulerLimits
from pagefold.scheduler.fair_shares import OUTPUT_WEIGHT, FairShares
from pagefold.scheduler.guardrails import NO_GUARDRAILS, GivenCap, Guardrails
from pagefold.scheduler.making_way import MOST_WAYS_MADE
from pagefold.scheduler.prefill_limits import NO_PREFILL_LIMITS
from pagefold.sim import NullRunner
from pagefold.sim.shadow_runner import ShadowRunner, alone

if TYPE_CHECKING:
    from pagefold.request import Request
    from pagefold.steps import Runner, StepPlan

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
OUTPUTS = {"a": 5, "b": 9, "c": 2}
"""A tenant's outputs are of one length, where what is expected is to be what comes."""


class FairHouse(House):
    """A house whose tenants have shares."""

    def __init__(
        self,
        num_blocks: int = 256,
        *,
        seqs: int = 4,
        budget: int = 64,
        prefills: PrefillLimits = NO_PREFILL_LIMITS,
        admission: str = "prompt",
        guardrails: Guardrails = NO_GUARDRAILS,
        **parts,
    ):
        super().__init__(num_blocks, seqs=seqs, budget=budget, **parts)
        policy, limits = SCHEDULING_POLICIES["fair"](1.0), SchedulerLimits(seqs, budget, prefills)
        rules = {"policy": policy, "admission": admission, "guardrails": guardrails}
        self.scheduler = Scheduler(self.core, limits, **rules, emit=self.events.append)
        self.num_sent: Counter[str] = Counter()

    @property
    def shares(self) -> FairShares:
        assert self.scheduler.policy.shares is not None
        return self.scheduler.policy.shares

    def send(self, tenant: str, num_prompt: int = 8, num_new: int = 4, weight: float = 1.0, **more) -> Request:
        """Add a request of a tenant that shares nothing with any other."""
        index = sum(self.num_sent.values())
        self.num_sent[tenant] += 1
        tokens = [(index * 7 + at) % 97 for at in range(num_prompt)]
        name = f"{tenant}{self.num_sent[tenant]}"
        return self.add(name, tokens, num_new, tenant=tenant, weight=weight, namespace=name.encode(), **more)

    def step(self, runner: Runner | None = None) -> StepPlan:
        """Run a step, and look at nothing: there are many, and the scheduler's machine looks at each of its."""
        plan = self.scheduler.schedule(0.0)
        if plan.num_rows:
            self.scheduler.apply((runner or NullRunner()).run(plan))
        return plan

    @property
    def made_way(self) -> list[str]:
        return [event.request_id for event in self.events_of(RequestPreempted) if event.cause == "share"]

    def names(self, queue) -> str:
        return " ".join(request.request_id for request in queue)


# Tags.


def test_a_burst_stands_behind_itself_and_others_before_it():
    house = FairHouse(seqs=1)
    for _ in range(4):
        house.send("a")
    house.step()
    house.send("b")
    house.send("a")
    assert house.names(house.scheduler.waiting) == "b1 a2 a3 a4 a5"


def test_twice_the_weight_is_twice_the_turns():
    house = FairHouse(seqs=1)
    for _ in range(12):
        house.send("a")
        house.send("b", weight=2.0)
    begun: list[str] = []
    while len(begun) < 12:
        house.step()
        begun += [request.tenant for request in house.scheduler.running if request.num_output_tokens == 1]
    assert Counter(begun)["b"] == 8


def test_who_was_idle_has_earned_nothing():
    house = FairHouse(seqs=1)
    for _ in range(50):
        house.send("a")
    for _ in range(4 * 30):
        house.step()
    for _ in range(10):
        house.send("b")
    head = [request.tenant for request in list(house.scheduler.waiting)[:8]]
    assert head.count("a") >= 3, "b is served for the time that it was not there"


def test_one_request_split_into_many_costs_as_much():
    whole, parts = FairShares(), FairShares()
    one = new_request("one", range(80), 20, tenant="a")
    one.index = 0
    one.order = whole.key(one)
    whole.arrived(one)
    for index in range(10):
        part = new_request(f"part{index}", range(8), 2, tenant="a")
        part.index = index
        part.order = parts.key(part)
        parts.arrived(part)
    assert whole.tenants["a"].finish == pytest.approx(parts.tenants["a"].finish)


def test_what_an_output_was_shorter_is_given_back():
    house = FairHouse(seqs=1)
    long = house.send("a", num_new=400, stops=[5])
    expected = house.shares.tenants["a"].finish
    house.run(NullRunner(lambda _seed, _draw: 5))
    assert long.finish_reason == "stop"
    assert house.shares.tenants["a"].finish == pytest.approx(expected - OUTPUT_WEIGHT * 399)
    house.send("a", num_new=400)
    assert house.shares.tenants["a"].finish == pytest.approx(expected - OUTPUT_WEIGHT * 399 + 8 + OUTPUT_WEIGHT)


def test_who_is_cancelled_before_it_runs_pays_nothing():
    house = FairHouse(seqs=1)
    house.send("a")
    house.step()
    before = house.shares.tenants["a"].finish
    late = house.send("a")
    house.scheduler.finish(late.request_id, "abort")
    assert house.shares.tenants["a"].finish == before


@dataclass
class Twin:
    """The same tags by what is written in the module, from all that has happened, without any sum kept."""

    requests: list[Request] = field(default_factory=list)
    starts: dict[Request, float] = field(default_factory=dict)
    finishes: dict[str, float] = field(default_factory=dict)
    dispatched: dict[str, float] = field(default_factory=dict)
    begun: list[Request] = field(default_factory=list)
    gone: list[Request] = field(default_factory=list)
    virtual: float = 0.0

    @staticmethod
    def cost(request: Request) -> float:
        """No output ends before its length."""
        return request.num_prompt_tokens + OUTPUT_WEIGHT * (request.stop.max_total_tokens - request.num_prompt_tokens)

    def came(self, request: Request) -> float:
        start = max([self.virtual - 1, self.finishes.get(request.tenant, -inf)])
        self.starts[request] = start
        self.requests.append(request)
        self.finishes[request.tenant] = start + self.cost(request) / request.weight
        return start

    def let_in(self, request: Request) -> None:
        if request not in self.begun:
            self.begun.append(request)
            finish = self.starts[request] + self.cost(request) / request.weight
            self.dispatched[request.tenant] = max(self.dispatched.get(request.tenant, -inf), finish)
            self.look(request)

    def ended(self, request: Request) -> None:
        self.gone.append(request)
        if request in self.begun:
            self.look(request)

    def look(self, request: Request) -> None:
        still = [one for one in self.begun if one not in self.gone and one.tenant == request.tenant]
        left = sum(self.cost(one) for one in still) / request.weight
        self.virtual = max(self.virtual, self.dispatched[request.tenant] - left)


ARRIVAL = st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(0, 6))


@settings(max_examples=25, deadline=None)
@given(st.lists(ARRIVAL, min_size=1, max_size=20))
def test_tags_are_those_of_a_slow_twin(coming: list[tuple[str, int, int]]):
    house, twin = FairHouse(seqs=3, budget=16), Twin()
    expected: list[Request] = []
    known: dict[str, RequestStatus] = {}
    for tenant, num_prompt, num_steps in [*coming, ("a", 1, 400)]:
        request = house.send(tenant, num_prompt, OUTPUTS[tenant], WEIGHTS[tenant])
        assert request.order.tag == pytest.approx(twin.came(request), abs=1e-6)
        expected.append(request)
        for _ in range(num_steps):
            house.scheduler.schedule(0.0)
            for one in expected:
                if one.status is RequestStatus.RUNNING and known.get(one.request_id) is not RequestStatus.RUNNING:
                    twin.let_in(one)
                known[one.request_id] = one.status
            if not house.scheduler.in_step:
                break
            plan_of = house.scheduler.in_step
            house.scheduler.apply(NullRunner().run(house.scheduler._flight.newest.plan))
            for one in plan_of:
                if one.status is RequestStatus.FINISHED:
                    twin.ended(one)
    assert not house.scheduler.has_requests


# How much service differs.


def served(request: Request) -> float:
    """Return what a request was served so far, in tokens; what is computed again counts once."""
    num_computed = max(request.num_computed_tokens, request.max_computed_tokens)
    return min(num_computed, request.num_prompt_tokens) + OUTPUT_WEIGHT * request.num_output_tokens


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=20, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys("abc", LENGTHS)), st.integers(1, 5), st.integers(0, 60))
def test_service_of_those_that_always_wait_differs_by_a_bound(lengths, seqs, num_warm_steps):
    """However each cuts its work into requests: SFQ(D)'s bound, with the most that a request of each costs."""
    house = FairHouse(seqs=seqs, budget=32)
    sent: dict[str, list[Request]] = {tenant: [] for tenant in lengths}
    most = {tenant: max(own) + OUTPUT_WEIGHT * OUTPUTS[tenant] for tenant, own in lengths.items()}

    def step() -> None:
        for tenant, own in lengths.items():
            while sum(one.status is RequestStatus.WAITING for one in sent[tenant][-2 * seqs - 2 :]) < seqs + 1:
                num_prompt = own[len(sent[tenant]) % len(own)]
                sent[tenant].append(house.send(tenant, num_prompt, OUTPUTS[tenant], WEIGHTS[tenant]))
        house.step()

    def totals() -> dict[str, float]:
        return {tenant: sum(map(served, own)) / WEIGHTS[tenant] for tenant, own in sent.items()}

    for _ in range(num_warm_steps):
        step()
    begun = totals()
    for _ in range(60):
        step()
        now = {tenant: total - begun[tenant] for tenant, total in totals().items()}
        for one, other in permutations(now, 2):
            bound = (2 * seqs + 1) * (most[one] / WEIGHTS[one] + most[other] / WEIGHTS[other])
            assert now[one] - now[other] <= bound, (lengths, seqs, num_warm_steps)
    assert all(count <= MOST_WAYS_MADE for count in Counter(house.made_way).values())


ADVERSARY = st.lists(
    st.lists(st.tuples(st.sampled_from("bcdef"), st.integers(1, 30)), max_size=6),
    min_size=1,
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(ADVERSARY, st.integers(1, 4), st.integers(0, 20))
def test_everybody_is_let_in_before_a_stated_service(waves, seqs, num_steps):
    """Whoever sends what meanwhile: what is ahead of it by tags, and what ran when it came."""
    house = FairHouse(seqs=seqs, budget=16)
    everybody: list[Request] = []

    def wave() -> None:
        for tenant, num_prompt in waves[len(everybody) % len(waves)]:
            num_new = OUTPUTS.get(tenant, 6)
            everybody.append(house.send(tenant, num_prompt, num_new, WEIGHTS.get(tenant, 1.0)))

    for _ in range(num_steps):
        wave()
        house.step()
    patient = [house.send("a", 10, OUTPUTS["a"], WEIGHTS["a"]) for _ in range(3)]
    most, most_patient = 30 + OUTPUT_WEIGHT * 10, 10 + OUTPUT_WEIGHT * OUTPUTS["a"]
    weights = [WEIGHTS.get(tenant, 1.0) for tenant in "abcdef"]
    begun = sum(map(served, everybody))
    for place, request in enumerate(patient):
        ahead = place * most_patient / WEIGHTS["a"] + most / min(weights)
        bound = sum(weight * ahead + most for weight in weights) + seqs * most
        num_waited = 0
        while request.num_cached_tokens < 0:
            wave()
            house.step()
            num_waited += 1
            assert sum(map(served, everybody)) - begun <= bound, "it waits for ever"
            assert num_waited < 2000


# Making way.


def test_a_burst_that_has_all_places_makes_way():
    house = FairHouse(seqs=4)
    for _ in range(10):
        house.send("a", num_new=50)
    house.step()
    house.send("b", num_new=50)
    house.step()
    assert house.names(house.scheduler.running) == "a1 a2 a3 b1"
    assert house.made_way == ["a4"]
    house.send("b", num_new=50)
    house.step()
    assert house.made_way == ["a4", "a3"]
    house.send("b", num_new=50)
    house.step()
    assert house.made_way == ["a4", "a3"], "each has two of four seats"
    for _ in range(20):
        house.step()
    assert house.made_way == ["a4", "a3"], "nobody takes back what he gave"


def test_a_larger_weight_has_more_places():
    house = FairHouse(seqs=4)
    for _ in range(10):
        house.send("a", num_new=50)
    house.step()
    for _ in range(8):
        house.send("b", num_new=50, weight=3.0)
    for _ in range(4):
        house.step()
    assert Counter(request.tenant for request in house.scheduler.running) == {"a": 1, "b": 3}


def test_a_burst_that_has_all_blocks_makes_way():
    house = FairHouse(num_blocks=24, seqs=8, budget=128)
    runner = ShadowRunner(house.scheduler)
    burst = [house.send("a", 24, 8) for _ in range(6)]
    house.step(runner)
    assert len(house.scheduler.running) == 3
    quiet = house.send("b", 24, 8)
    house.step(runner)
    assert quiet.status is RequestStatus.RUNNING
    assert house.made_way == ["a3"]
    house.run(runner)
    assert [one.output_token_ids for one in (*burst, quiet)] == [alone(one) for one in (*burst, quiet)]


def test_nobody_makes_way_in_vain():
    house = FairHouse(num_blocks=24, seqs=8, budget=128)
    house.send("a", 24, 60)
    house.send("a", 24, 60)
    house.step()
    house.send("b", 88, 2)  # more than there is but for all of a's
    for _ in range(5):
        house.step()
    assert house.made_way == []


def test_each_makes_way_so_often_at_most():
    house = FairHouse(seqs=2)
    for _ in range(2):
        house.send("a", num_new=60)
    house.step()
    for _ in range(6):
        quiet = house.send("b", num_new=1)
        while quiet.status is not RequestStatus.FINISHED:
            house.step()
        house.step()
    assert Counter(house.made_way) == {"a2": MOST_WAYS_MADE}, "nor does the first of all"
    house.run()


def test_several_samples_get_their_places_at_once():
    house = FairHouse(seqs=4)
    for _ in range(6):
        house.send("a", num_new=50)
    house.step()
    request = new_request("b1", range(8), 8, tenant="b", weight=3.0)
    fork = new_request("b1/1", range(8), 8, tenant="b", weight=3.0, sample_index=1, parent_id="b1")
    request.forks = [fork]
    house.scheduler.add(request)
    house.step()
    assert request.status is RequestStatus.RUNNING
    assert len(house.made_way) == 2
    house.run()
    assert house.shares.num_seats == 0


@pytest.mark.parametrize(("rules", "num_blocks"), [((KEEP_ALL,), 24), ((KEEP_ALL, KeepRule(window=8)), 42)])
def test_samples_that_have_not_forked_yet_make_way_together(rules: tuple[KeepRule, ...], num_blocks: int):
    house = FairHouse(num_blocks, seqs=8, budget=32, rules=rules)
    runner = ShadowRunner(house.scheduler)
    first = house.send("a", 40, 8)
    both, fork = (
        new_request(f"a2/{index}", range(100, 140), 4, tenant="a", weight=1.0, sample_index=index, parent_id="a2")
        for index in range(2)
    )
    both.forks = [fork]
    house.scheduler.add(both)
    house.step(runner)
    house.step(runner)
    assert 0 < both.num_computed_tokens < 40, "it forks when its prompt has been computed"
    quiet = house.send("b", 24, 8)
    while quiet.status is not RequestStatus.RUNNING:
        house.step(runner)
    assert house.made_way == ["a2/0"]
    house.run(runner)
    assert all(one.output_token_ids == alone(one) for one in (first, both, fork, quiet))


def test_long_prompts_leave_tokens_for_who_is_before_them():
    house = FairHouse(seqs=8, budget=16)
    house.send("a", 8, 1)
    for _ in range(3):
        house.send("a", 100, 2)
    for _ in range(2):
        house.step()
    quiet = house.send("b", 12, 2)
    plan = house.step()
    assert quiet.num_output_tokens == 1, "let in, and computed at once"
    assert len(plan.token_ids) == 16


def test_what_a_step_may_compute_of_prompts_is_left_to_who_is_before_them():
    house = FairHouse(seqs=8, budget=64, guardrails=Guardrails(GivenCap(16)))
    house.send("a", 8, 1)
    house.send("a", 100, 2)
    for _ in range(2):
        house.step()
    quiet = house.send("b", 12, 2)
    plan = house.step()
    assert quiet.num_output_tokens == 1, "let in, and computed at once"
    assert len(plan.token_ids) == 16, "and a's prompt has the rest"


def test_tokens_are_left_to_nobody_who_cannot_be_let_in():
    house = FairHouse(num_blocks=30, seqs=8, budget=16)
    house.send("a", 100, 2)
    house.step()
    house.send("b", 90, 2)
    plan = house.step()
    assert len(plan.token_ids) == 16, "all are a's"
    assert house.made_way == []


def test_a_step_behind_another_is_not_planned_where_somebody_makes_way():
    house = FairHouse(seqs=2)
    for _ in range(4):
        house.send("a", num_new=20)
    plan = house.scheduler.schedule(0.0)
    house.send("b")
    assert house.scheduler.schedule_ahead(0.0) is None
    house.scheduler.apply(NullRunner().run(plan))
    house.step()
    assert house.made_way == ["a2"]


# What deciding costs, by counting.


def test_a_head_that_nobody_makes_way_for_is_looked_at_once():
    """Hundreds run and wait, of fifty tenants, and steps look at none of them while nothing changes."""
    house = FairHouse(2**12, seqs=250, budget=10_000)
    for index in range(500):
        house.send(f"t{index % 50}-", 2, 60)
    house.step()
    assert len(house.scheduler.running) == 250
    making_way = house.scheduler._making_way
    before, matches = making_way.num_looked_at, Counter()
    house.core.match = lambda *args, **named: (
        matches.update(["match"]) or type(house.core).match(house.core, *args, **named)
    )
    for _ in range(8):
        plan = house.scheduler.schedule(0.0)
        house.scheduler.apply(NullRunner().run(plan))
    assert making_way.num_looked_at == before
    assert not matches
    audit(house.core)


def test_who_is_spared_is_not_asked_again_while_nothing_changes():
    house = FairHouse(2**12, seqs=250, budget=10_000)
    for _ in range(250):
        house.send("a", 2, 60)
    house.step()
    for request in house.scheduler.running:
        house.shares._num_made_way[request] = MOST_WAYS_MADE
    house.send("b", 8, 2)
    making_way = house.scheduler._making_way
    for _ in range(8):
        house.scheduler.apply(NullRunner().run(house.scheduler.schedule(0.0)))
    assert making_way.num_looked_at == 250
    assert house.made_way == []


@pytest.mark.parametrize(
    ("prefills", "num_steps"), [(PrefillLimits(max_num_partial=1), 10), (PrefillLimits(2, 1, 32), 18)], ids=str
)
def test_nothing_is_kept_free_for_a_head_that_lacks_a_place_among_prompts(prefills, num_steps):
    """The prompt that is in work gets all tokens of a step, or its threshold, as if nobody waited."""
    house = FairHouse(2048, prefills=prefills)
    house.send("a", 8, 200)
    for _ in range(3):
        house.step()
    house.send("a", 512, 4)
    house.step()
    head = house.send("b", 256, 4)
    house.step()
    assert head.status is RequestStatus.WAITING
    for _ in range(num_steps):
        house.step()
    assert head.num_computed_tokens > 0


def test_nobody_makes_way_for_a_head_that_lacks_a_place_among_prompts():
    house = FairHouse(2048, prefills=PrefillLimits(None, 1, 16))
    begun = house.send("a", 600, 4)
    for _ in range(3):
        house.send("a", 8, 200)
    for _ in range(3):
        house.step()
    head = house.send("b", 300, 4)
    while begun.num_computed_tokens < 600 - 16:
        house.step()
        assert house.made_way == []
    for _ in range(4):
        house.step()
    assert len(house.made_way) <= 1
    assert head.status is RequestStatus.RUNNING
