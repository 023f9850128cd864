"""Who is let in beside the growth of those that run, beside how many prompts, and how long anybody is overtaken."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_growth import End, most_at_once
from test_scheduler import House, new_request

from pagefold.events import OutputForecastChecked, RequestPreempted, StepPlanned
from pagefold.kv import KVCore
from pagefold.scheduler import ADMISSION_RULES, SCHEDULING_POLICIES, PrefillLimits, Scheduler, SchedulerLimits
from pagefold.scheduler.expected_growth import ExpectedGrowth
from pagefold.scheduler.forecast import LONGEST
from pagefold.scheduler.needs import Needs
from pagefold.scheduler.overtaking import MAX_OVERTAKEN
from pagefold.scheduler.victims import MOST_PREEMPTIONS
from pagefold.sim import NullRunner, hashed_token


class LoadedHouse(House):
    """A house with a rule of admission, limits of prefills and a policy."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        admission: str = "prompt",
        policy: str = "fcfs",
        prefills: PrefillLimits | None = None,
        seqs: int = 8,
        budget: int = 64,
    ):
        super().__init__(num_blocks, seqs=seqs, budget=budget)
        self.scheduler = Scheduler(
            self.core,
            SchedulerLimits(seqs, budget, prefills or PrefillLimits()),
            policy=SCHEDULING_POLICIES[policy](10.0),
            admission=admission,
            emit=self.events.append,
        )

    @property
    def waits_for(self) -> str | None:
        """What the last step says of those that wait."""
        return self.events_of(StepPlanned)[-1].waits_for


def test_the_rules_let_in_what_fits_by_their_measure():
    """Blocks of 4, two of 40 tokens to come each: by their prompts both fit in 12 blocks, at their ends one does."""
    running = {}
    for admission in ADMISSION_RULES:
        house = LoadedHouse(12, admission=admission)
        for place in range(3):
            house.add(f"r{place}", [100 * place + at for at in range(8)], 20)
        house.step()
        running[admission] = (len(house.scheduler.running), house.waits_for)
        house.run()
        assert bool(house.events_of(RequestPreempted)) == (admission == "prompt")
    assert running == {"prompt": (3, None), "max_tokens": (1, "growth"), "predicted": (1, "growth")}


def test_what_was_learned_lets_more_in():
    house = LoadedHouse(12, admission="predicted")
    for place in range(10):
        house.add(f"early{place}", [1000 * place + at for at in range(8)], 20, stops=[hashed_token(0, 2)])
    house.run()
    for place in range(3):
        house.add(f"r{place}", [100 * place + at for at in range(8)], 20, stops=[hashed_token(0, 2)])
    house.step()
    assert house.waits_for is None


@pytest.mark.parametrize("admission", sorted(ADMISSION_RULES))
def test_who_would_run_alone_is_let_in(admission):
    house = LoadedHouse(6, admission=admission)
    request = house.add("long", range(20), 4)
    house.run()
    assert request.num_output_tokens == 4


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(0, 8),
    st.integers(1, 25),
    st.integers(1, 3),
)
@settings(max_examples=200)
def test_sums_by_lots_are_what_the_formula_says(ends, now, to_come, num_seqs):
    core = KVCore(1000, block_size=4)
    rule = ExpectedGrowth(core, Needs(core, 64), LONGEST, "max_tokens", leaves=True)
    for place, (lot, num_blocks) in enumerate(ends):
        request = new_request(f"r{place}", [1], 1)
        expected = rule._running.setdefault(request, type("Expected", (), {"num_blocks": num_blocks, "lot": -1})())
        rule._put_in(expected, lot)
    request = new_request("next", [1, 2, 3], to_come)
    request.forks = [new_request(f"next/{index}", [1, 2, 3], to_come) for index in range(1, num_seqs)]
    coming = End((4 * now + to_come) // 4, 40)
    slow = most_at_once([End(*end) for end in ends], coming, num_seqs, 1, now)
    assert rule._most_at_once(40, request, 4 * now) == slow


def test_few_are_preempted_at_more_than_can_be_served():
    """At 1.2 times what the machine can do, with lengths of a long tail, once they are known."""
    shares = {}
    for admission in ("prompt", "predicted"):
        rng, preempted, checked = Random(3), set(), []

        def note(event: object, preempted: set[str] = preempted, checked: list[bool] = checked) -> None:
            if isinstance(event, RequestPreempted):
                preempted.add(event.request_id)
            elif isinstance(event, OutputForecastChecked):
                checked.append(event.is_within)

        core = KVCore(150, block_size=16)
        scheduler = Scheduler(core, SchedulerLimits(64, 256), admission=admission, emit=note)
        num_added, left = 0, {}
        while num_added < 600 or scheduler.has_work:
            while num_added < 600 and len(scheduler.waiting) < 10:
                length = max(1, min(400, round(rng.lognormvariate(3.5, 1.0))))
                prompt = [rng.randrange(10**6) for _ in range(max(1, min(600, round(rng.lognormvariate(4, 1.0)))))]
                request = new_request(f"r{num_added}", prompt, 400)
                left[request] = length
                scheduler.add(request)
                num_added += 1
            scheduler.apply(NullRunner().run(scheduler.schedule(0.0)))
            for request in list(scheduler.running):
                if request.num_output_tokens >= left[request]:
                    scheduler.finish(request.request_id, "stop")
        shares[admission] = len(preempted) / 600
    assert shares["prompt"] > 0.05
    assert shares["predicted"] < 0.01
    assert 0.75 <= sum(checked) / len(checked) <= 0.85


# Prefills.


def test_no_step_computes_more_than_the_threshold_of_any_prompt():
    house = LoadedHouse(200, prefills=PrefillLimits(long_threshold=10))
    house.add("long", range(45), 1)
    house.add("short", [1000, 1001], 1)
    assert [plan.num_tokens for plan in house.run()] == [[10, 2], [10], [10], [10], [5]]


def test_so_many_prompts_are_partly_computed_at_once():
    house = LoadedHouse(200, prefills=PrefillLimits(max_num_partial=2, long_threshold=8))
    for place in range(4):
        house.add(f"r{place}", [100 * place + at for at in range(20)], 1)
    house.step()
    assert (len(house.scheduler.running), house.waits_for) == (2, "prefills")
    house.run()


def test_short_prompts_overtake_a_long_one_that_has_no_place():
    house = LoadedHouse(200, prefills=PrefillLimits(max_long_partial=1, long_threshold=8))
    house.add("long", range(40), 1)
    house.add("other", range(100, 140), 1)
    house.add("short", [1000, 1001], 1)
    plan = house.step()
    assert plan.num_tokens == [8, 2]
    assert [request.request_id for request in house.scheduler.waiting] == ["other"]
    house.run()


def test_none_that_overtakes_takes_the_memory_that_the_first_waits_for():
    prefills = PrefillLimits(max_long_partial=1, long_threshold=8)
    house = LoadedHouse(19, prefills=prefills)  # 8 blocks of the first and 10 of the second leave one
    house.add("long", range(32), 1)
    house.add("other", range(100, 136), 1)
    house.add("short", range(1000, 1007), 1)
    house.step()
    assert [request.request_id for request in house.scheduler.waiting] == ["other", "short"]
    assert house.waits_for == "prefills"
    house.run()


def test_a_long_prompt_is_overtaken_by_so_many_at_most():
    """Short prompts come while it waits; each begins when it comes, until so many have."""
    prefills = PrefillLimits(max_long_partial=1, long_threshold=4)
    house = LoadedHouse(200, prefills=prefills, budget=64, seqs=16)
    house.add("long", range(400), 1)
    house.step()
    other = house.add("other", range(2000, 2040), 1)
    num_passed = 0
    for place in range(90):
        short = house.add(f"s{place}", [10_000 + 3 * place, 1, 2], 1)
        house.step()
        num_passed += other.num_computed_tokens == 0 and short.num_computed_tokens > 0
    assert not other.num_computed_tokens, "the first long one runs still, and has its place"
    assert num_passed == MAX_OVERTAKEN


# The longest prefix.


def test_lpm_lets_the_longest_prefix_go_first():
    house = LoadedHouse(200, policy="lpm", seqs=1)
    house.add("first", range(40), 1)
    house.run()
    house.add("runs", [9000], 3)
    house.step()
    for name, num_common in (("none", 0), ("some", 16), ("most", 36)):
        house.add(name, [*range(num_common), *range(5000, 5040 - num_common)], 1)
    order = []
    while house.scheduler.has_work:
        waiting = list(house.scheduler.waiting)
        house.step()
        order += [one.request_id for one in waiting if one not in house.scheduler.waiting]
    assert order == ["most", "some", "none"]


def test_with_lpm_nobody_overtakes_who_has_waited_long_enough():
    """Those with a prefix come without end, and the one without any is let in when its time has come."""
    house = LoadedHouse(200, policy="lpm", seqs=1)
    house.add("first", range(40), 1)
    house.run()
    now, num_passed = 0.0, 0
    cold = new_request("cold", range(5000, 5020), 1, arrival_s=0.0)
    house.scheduler.add(cold)
    for place in range(100):
        house.scheduler.add(new_request(f"warm{place}", [*range(36), 7000 + place], 1, arrival_s=now))
        plan = house.scheduler.schedule(now)
        house.scheduler.apply(NullRunner().run(plan))
        if cold.num_computed_tokens:
            break
        num_passed += 1
        now += 1.0
    assert num_passed == 10  # one a second, and ten seconds are the bound


# Nobody starves.


@pytest.mark.parametrize("admission", sorted(ADMISSION_RULES))
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("prefills", [PrefillLimits(), PrefillLimits(2, 1, 8)], ids=["no limits", "limits"])
def test_every_wait_ends_while_others_come_without_end(admission, policy, prefills):
    """The worst for each rule: a long prompt of nobody's prefix among short ones that all have one.

    Every step computes something. The long one is let in when what ran before it has ended, at most ``MAX_OVERTAKEN``
    others have overtaken it by places, and the aging of ``lpm`` is over.
    """
    house = LoadedHouse(40, admission=admission, policy=policy, prefills=prefills, seqs=4, budget=24)
    rng = Random(1)
    now, long = 0.0, None
    for place in range(400):
        if place == 10:
            long = new_request("long", range(8000, 8100), 20, arrival_s=now)
            house.scheduler.add(long)
        if len(house.scheduler.waiting) < 6:
            prompt = [*range(rng.randrange(1, 30)), 10_000 + place]
            house.scheduler.add(new_request(f"r{place}", prompt, rng.randrange(1, 20), arrival_s=now))
        plan = house.scheduler.schedule(now)
        assert plan.num_rows, "work, and nothing is computed"
        house.scheduler.apply(NullRunner().run(plan))
        now += 0.5
        if long is not None and long.times.scheduled_s is not None:
            break
    assert long.times.scheduled_s is not None
    # 6 that came before and 32 that overtake, of 20 steps at most, two at least at a time; and 10 s of aging
    assert long.times.scheduled_s - long.arrival_s <= 10.0 + (6 + MAX_OVERTAKEN) * 20 * 0.5 / 2


def test_a_reservation_holds_back_nobody_that_came_before():
    """With lpm, most is cached of whoever was preempted; while that lacks room for a while, the head goes."""
    house = LoadedHouse(200, policy="lpm", seqs=2)
    shared = list(range(40))
    house.add("warm", shared, 1)
    house.step()
    house.add("long", [7] * 8, 400)
    house.add("short", [8] * 8, 3)
    house.step()
    head = house.add("head", range(500, 520), 4)
    victim = house.add("victim", [*shared, 99], 50)
    while victim.num_output_tokens < 2:
        house.step()
    house.scheduler._queues.take_out(victim)
    house.scheduler._rows._relief.preempt(victim, house.scheduler.running[0], "memory")
    victim.num_preemptions = MOST_PREEMPTIONS + 1
    house.step()
    assert head in house.scheduler.running
