"""Shedding: requests that would come too late are refused in time, by what is before them; and nobody else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.events import RequestRefused, ignore
from pagefold.kv import KVCore, make_policy
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import SCHEDULING_POLICIES, Guardrails, Rates, Scheduler, SchedulerLimits, Targets
from pagefold.scheduler.guardrails.landed_step import LandedStep
from pagefold.scheduler.guardrails.shedding import NO_SHEDDER, Shedding
from pagefold.scheduler.guardrails.wait_correction import WaitCorrection
from pagefold.scheduler.queue_ahead import Ahead
from pagefold.sim.clock import VirtualClock
from pagefold.sim.null_runner import NullRunner

SAMPLING = SamplingParams(max_tokens=None)
RATES = Rates(prompt_tokens=1000, prompt_s=1, num_finished=2, contended_s=1)
"""1,000 prompt tokens and 2 requests a second."""


def shedding(target_s=10.0, **changes):
    return replace(Shedding(WaitCorrection(target_s), RATES), **changes)


def ahead(num_tokens=0, num_to_leave=0.0, *, is_idle=False):
    return Ahead(num_tokens, num_to_leave, is_idle)


# The controller.


@pytest.mark.parametrize(
    ("num_tokens", "num_to_leave", "own", "is_refused"),
    [
        (8_900, 0, 0, False),
        (9_100, 0, 0, True),
        (8_000, 0, 900, False),
        (8_000, 0, 1_100, True),
        (0, 17, 0, False),
        (0, 19, 0, True),
        (8_000, 16, 0, False),  # both at once
    ],
)
def test_it_begins_at_nine_tenths_of_the_target(num_tokens, num_to_leave, own, is_refused):
    judged = shedding().judged(own, ahead(num_tokens, num_to_leave))
    assert (judged.refusal is not None) == is_refused == judged.shedding.is_on


def test_it_goes_on_until_four_fifths_of_the_target():
    on = shedding(is_on=True)
    refusal = on.judged(0, ahead(8_500)).refusal
    assert refusal is not None
    assert refusal.goes_on
    assert (refusal.threshold_s, refusal.target_s) == (8.0, 10.0)
    assert on.judged(0, ahead(7_900)).refusal is None
    assert on.looked(ahead(8_500)).is_on
    assert not on.looked(ahead(7_900)).is_on
    assert not shedding().looked(ahead(90_000)).is_on, "nobody has been refused"


def test_a_refusal_says_what_when_and_why():
    refusal = shedding().judged(0, ahead(20_000)).refusal
    assert refusal is not None
    assert not refusal.goes_on
    assert (refusal.expected_s, refusal.threshold_s, refusal.target_s) == (20.0, 9.0, 10.0)
    assert refusal.retry_after_s == 12, "20 s of work, of which 8 may be left"
    assert shedding(target_s=0.01).judged(0, ahead(100)).refusal.retry_after_s == 1
    assert shedding().judged(0, ahead(10**12)).refusal.retry_after_s == 600


def test_a_server_with_nothing_to_do_refuses_nobody():
    judged = shedding(target_s=1e-6, is_on=True).judged(10**6, ahead(is_idle=True))
    assert judged.refusal is None
    assert not judged.shedding.is_on


def test_a_prompt_that_is_late_even_alone_is_judged_by_its_wait():
    assert shedding().judged(50_000, ahead(100)).refusal is None
    assert shedding().judged(50_000, ahead(9_500)).refusal is not None


def test_before_anything_was_measured_nobody_is_refused():
    unmeasured = replace(shedding(), rates=Rates())
    assert unmeasured.judged(10**6, ahead(10**9, 10**6)).refusal is None


def test_waits_are_corrected_by_what_was_really_waited():
    correction = WaitCorrection(10.0)
    assert correction.factor == 1.0
    for _ in range(40):
        correction = correction.after(4.0, 8.0)
    assert correction.factor == pytest.approx(2.0, abs=0.1)
    for _ in range(60):
        correction = correction.after(4.0, 2.0)
    assert correction.factor == pytest.approx(0.5, abs=0.1)
    assert WaitCorrection(10.0).after(1e-9, 1e12).factor <= 4.0, "a clock that jumped"
    assert WaitCorrection(10.0).after(0.0, -5.0).factor == 1.0


def test_a_swinging_wait_between_the_thresholds_switches_nothing():
    state, rng = shedding(), Random(0)
    seen = []
    for number in range(2000):
        level = 8_500 + rng.randrange(-400, 400) + (3_000 if number == 100 else 0)
        state = state.judged(0, ahead(level)).shedding.looked(ahead(level))
        seen.append(state.is_on)
    assert sum(before != after for before, after in pairwise(seen)) == 1


# Rates.


def test_only_steps_that_leave_prompts_say_how_fast_these_are_computed():
    rates = Rates().after(LandedStep(took_s=1.0, num_prompt_tokens=3))
    assert rates.prompt_tokens_per_s is None, "three tokens were all there was to do"
    rates = rates.after(LandedStep(took_s=1.0, num_prompt_tokens=500, leaves_prompts=True))
    assert rates.prompt_tokens_per_s == 500
    for _ in range(50):
        rates = rates.after(LandedStep(took_s=1.0, num_prompt_tokens=3))
        rates = rates.after(LandedStep(took_s=0.5, num_prompt_tokens=500, leaves_prompts=True))
    assert rates.prompt_tokens_per_s == pytest.approx(1000, rel=0.05)


def test_only_who_leaves_while_others_wait_says_how_fast_they_do():
    rates = Rates()
    for _ in range(20):
        rates = rates.after(LandedStep(took_s=100.0, num_finished=1))
    assert rates.finished_per_s is None, "one came each 100 s, and left"
    for _ in range(40):
        rates = rates.after(LandedStep(took_s=1.0, is_contended=True))
        rates = rates.after(LandedStep(took_s=1.0, is_contended=True, num_finished=4))
    assert rates.finished_per_s == pytest.approx(2.0, rel=0.1)


def test_a_step_that_hung_is_soon_forgotten():
    rates = Rates()
    for number in range(60):
        took_s = 1e9 if number == 30 else 1.0
        rates = rates.after(LandedStep(took_s=took_s, num_prompt_tokens=500, leaves_prompts=True))
    assert rates.prompt_tokens_per_s == pytest.approx(500, rel=0.3)


@given(
    events=st.lists(
        st.tuples(
            st.floats(0, 1e12), st.integers(0, 10**6), st.booleans(), st.booleans(), st.integers(0, 50), st.floats(0, 9)
        ),
        max_size=60,
    )
)
def test_whatever_is_measured_a_refusal_can_be_told(events):
    state = shedding(target_s=0.5)
    for took_s, num, leaves, is_contended, num_finished, waited_s in events:
        step = LandedStep(
            took_s=took_s,
            num_prompt_tokens=num,
            leaves_prompts=leaves,
            is_contended=is_contended,
            num_finished=num_finished,
        )
        state = replace(state, rates=state.rates.after(step), correction=state.correction.after(waited_s, took_s))
        judged = state.judged(num, ahead(num, num_finished))
        state = judged.shedding.looked(ahead(num))
        if judged.refusal is not None:
            assert 1 <= judged.refusal.retry_after_s <= 600
            assert judged.refusal.expected_s > judged.refusal.threshold_s
        assert judged.computed_wait_s >= 0
        assert 0.25 <= state.correction.factor <= 4


# In the scheduler.


class Server:
    """The real scheduler under guardrails, on a virtual clock, with a runner that computes nothing."""

    def __init__(self, targets, *, rates=RATES, policy="fcfs", max_num_seqs=4, num_blocks=2000, emit=ignore):
        core = KVCore(num_blocks, block_size=16, policy=make_policy("lru"))
        limits = SchedulerLimits(max_num_seqs, 256)
        self.guardrails = Guardrails.of(targets, max_num_batched_tokens=256, block_size=16, rates=rates)
        order = SCHEDULING_POLICIES[policy](60.0)
        self.scheduler = Scheduler(core, limits, policy=order, guardrails=self.guardrails, emit=emit)
        self.clock, self.runner, self.num_made = VirtualClock(), NullRunner(), 0

    def request(self, num_tokens=100, num_output=50, priority=0):
        self.num_made += 1
        return Request(
            f"r{self.num_made}",
            [1000 * self.num_made + number for number in range(num_tokens)],
            SAMPLING,
            stop=StopRule(frozenset(), num_tokens + num_output),
            namespace=b"n",
            seed=self.num_made,
            arrival_s=self.clock(),
            priority=priority,
        )

    def offer(self, **how):
        """Return whether a request that comes is taken; then it is added."""
        request = self.request(**how)
        is_taken = self.scheduler.judge(request) is None
        if is_taken:
            self.scheduler.add(request)
        return is_taken

    def step(self):
        plan = self.scheduler.schedule(self.clock())
        self.clock.advance(0.02 + 1e-3 * len(plan.token_ids))
        return self.scheduler.apply(self.runner.run(plan), self.clock())


def test_a_burst_is_taken_as_far_as_it_can_be_served_in_time():
    events = []
    server = Server(Targets(ttft_s=2.0), max_num_seqs=64, emit=events.append)
    taken = [server.offer(num_output=5) for _ in range(50)]
    num_taken = sum(taken)
    assert taken == [True] * num_taken + [False] * (50 - num_taken)
    assert 15 <= num_taken <= 19, "of 100 tokens each, 1,000 a second, in 1.8 s"
    refused = [event for event in events if isinstance(event, RequestRefused)]
    assert len(refused) == 50 - num_taken
    assert {event.reason for event in refused} == {"ttft_target"}
    assert server.guardrails.status().shedding.is_on
    while server.scheduler.has_work:
        server.step()
    assert not server.guardrails.status().shedding.is_on
    assert server.offer()


def test_who_goes_first_is_not_refused_for_those_behind():
    server = Server(Targets(ttft_s=2.0), policy="priority", max_num_seqs=64)
    while server.offer(priority=5):
        pass
    assert server.guardrails.status().shedding.is_on
    assert server.offer(priority=0)
    assert server.guardrails.status().shedding.is_on, "the others are late all the same"
    assert not server.offer(priority=5)


def test_a_full_house_refuses_by_how_fast_it_empties():
    server = Server(Targets(ttft_s=2.0), rates=Rates(num_finished=1, contended_s=1), max_num_seqs=2)
    assert [server.offer(num_tokens=1) for _ in range(5)] == [True, True, True, False, False]


def test_memory_that_is_short_refuses_by_how_fast_it_empties():
    server = Server(Targets(ttft_s=1.1), rates=Rates(num_finished=1, contended_s=1), num_blocks=20, max_num_seqs=64)
    assert server.offer(num_tokens=150)
    server.step()
    assert server.offer(num_tokens=100)
    assert not server.offer(num_tokens=200, num_output=1), "who runs must leave"


def test_a_request_on_an_idle_server_is_taken_whatever_the_target():
    server = Server(Targets(ttft_s=1e-9))
    assert server.offer(num_tokens=20_000)


def test_under_overload_those_who_are_taken_come_in_time():
    server, rng = Server(Targets(ttft_s=1.0, itl_s=0.2), rates=None, max_num_seqs=16), Random(3)
    first, is_late, next_s, on = {}, [], 0.0, []
    for _ in range(900):
        while next_s <= server.clock():
            next_s += rng.expovariate(12.0)  # some 3 times what it can do
            server.offer(num_tokens=rng.randrange(50, 250), num_output=rng.randrange(5, 40))
            on.append(server.guardrails.status().shedding.is_on)
        if not server.scheduler.has_work:
            server.clock.advance_to(next_s)
            continue
        for request in server.step():
            if request.request_id not in first:
                first[request.request_id] = server.clock() - request.arrival_s
                is_late.append(first[request.request_id] > 1.0)
    behind = is_late[len(is_late) // 4 :]  # when something has been measured
    assert sum(behind) <= 0.1 * len(behind)
    assert 0.2 * len(on) < sum(on), "most are refused"


def test_prefills_get_smaller_where_those_that_decode_wait_too_long():
    server = Server(Targets(itl_s=0.15), max_num_seqs=8)
    assert server.offer(num_output=400)
    for _ in range(120):
        if len(server.scheduler.waiting) < 2:
            server.offer(num_tokens=600, num_output=2)
        server.step()
    cap = server.guardrails.status().pacing.prefill_cap_tokens
    assert 60 <= cap <= 130, "a step of 130 tokens takes 0.15 s"
    assert max(server.scheduler.schedule(server.clock()).num_tokens) <= cap
    assert server.guardrails.status().shedding is None


class Heard:
    """Pacing that notes what it is told."""

    prefill_cap_tokens = 256
    allows_drafts = True

    def __init__(self):
        self.steps = []

    def landed(self, step):
        self.steps.append(step)

    def status(self):
        return None


def test_gaps_are_booked_to_the_step_that_ran_though_another_was_planned_since():
    server = Server(Targets())
    heard = Heard()
    server.scheduler.guardrails = Guardrails(heard, NO_SHEDDER)
    server.scheduler._rows._guardrails = server.scheduler.guardrails
    scheduler, runner = server.scheduler, server.runner
    scheduler.add(server.request(num_tokens=10, num_output=50))
    scheduler.add(server.request(num_tokens=600, num_output=5))
    first = scheduler.schedule(0.0)
    second = scheduler.schedule_ahead(0.5)
    scheduler.apply(runner.run(first), 1.0)
    third = scheduler.schedule_ahead(1.1)
    scheduler.apply(runner.run(second), 3.0)
    fourth = scheduler.schedule_ahead(3.1)
    scheduler.apply(runner.run(third), 3.5)
    told = [(step.gap_s, step.num_prompt_tokens, step.took_s, step.leaves_prompts) for step in heard.steps]
    assert [len(plan.token_ids) for plan in (first, second, third)] == [256, 256, 100]
    assert told == [(None, 256, 1.0, True), (2.0, 255, 2.0, True), (0.5, 99, 0.5, False)]
    scheduler.abandon("a step that fails counts for nothing")
    assert fourth is not None
    scheduler.apply(runner.run(scheduler.schedule(9.0)), 9.5)
    assert heard.steps[3].gap_s is None
    assert heard.steps[3].took_s == 0.5
    scheduler.apply(runner.run(scheduler.schedule(9.5)), 9.0)
    assert heard.steps[4].gap_s is None, "the clock went back"
    scheduler.apply(runner.run(scheduler.schedule(9.5)), 9.0)
    assert heard.steps[5].gap_s == 0.0
