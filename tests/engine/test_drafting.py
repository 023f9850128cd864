"""Drafting: who gets drafts, how many, and what is forgotten."""

from __future__ import annotations

from array import array

import pytest

from pagefold.engine.drafting import Drafting
from pagefold.kv import KVCore
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Guardrails, Scheduler, SchedulerLimits
from pagefold.scheduler.guardrails import GivenCap
from pagefold.sim import NullRunner
from pagefold.speculation import Draft, SpeculativeParams, StepCosts
from pagefold.steps import TokenLogprobs

FREE, DEAR = StepCosts((1, 2), (1.0, 1.0)), StepCosts((1, 2), (1.0, 2.0))
PARAMS = SpeculativeParams(num_speculative_tokens=4)


class CountingUp:
    """Guesses numbers that go on from the last token; remembers whom it was asked for."""

    def __init__(self, costs=None):
        self.costs, self.unread = costs, 0
        self.asked, self.forgotten = [], []

    def draft(self, requests, num_tokens):
        self.asked.append([request.request_id for request in requests])
        return [
            Draft(array("i", range(request.token_ids[-1] + 1, request.token_ids[-1] + 1 + most)), 3)
            for request, most in zip(requests, num_tokens, strict=True)
        ]

    def num_unread(self, request):
        return self.unread

    def forget(self, request_id):
        self.forgotten.append(request_id)


class Loop:
    """Scheduler, runner and drafting, as an engine has them. Every output counts up from its seed."""

    def __init__(self, costs=FREE, max_drafts=64, num_blocks=256):
        self.scheduler = Scheduler(KVCore(num_blocks, block_size=4), SchedulerLimits(4, 32))
        self.drafter = CountingUp()
        self.drafting = Drafting(self.scheduler, PARAMS, lambda _: self.drafter, costs, max_drafts)
        self.runner = NullRunner(lambda seed, draw: seed + draw)

    def add(self, name, prompt, num_out=12, speculation=PARAMS, seed=None):
        how = SamplingParams(max_tokens=None)
        stop = StopRule(frozenset(), len(prompt) + num_out)
        seed = prompt[-1] + 1 if seed is None else seed
        request = Request(name, prompt, how, stop=stop, seed=seed, speculation=speculation)
        self.scheduler.add(request)
        return request

    def step(self):
        self.drafting.prepare()
        plan = self.scheduler.schedule(0.0)
        self.scheduler.apply(self.runner.run(plan))
        return plan


def test_who_decodes_gets_drafts_and_who_is_asked_for_nothing_none():
    loop = Loop()
    drafted, plain = loop.add("drafted", [1, 2, 3]), loop.add("plain", [7, 8], speculation=None)
    loop.step()
    assert loop.drafter.asked == [], "prompts are computed first"
    plan = loop.step()
    assert loop.drafter.asked == [["drafted"]]
    assert [(one.row, one.num_drafts) for one in plan.drafted] == [(0, 4)]
    assert drafted.output_token_ids == [4, 5, 6, 7, 8, 9]
    assert plain.output_token_ids == [9, 10]
    assert (drafted.num_draft_tokens, drafted.num_accepted_tokens) == (4, 4)


def test_nobody_gets_drafts_while_the_guardrails_allow_none():
    loop = Loop()
    loop.scheduler.guardrails = Guardrails(pacing := GivenCap())
    loop.add("drafted", [1, 2, 3])
    loop.step()
    assert loop.drafting.drafts_for_any
    pacing.allows_drafts = False
    assert not loop.step().drafted
    assert not loop.drafting.drafts_for_any, "so steps may be planned ahead"
    pacing.allows_drafts = True
    assert loop.step().drafted


def test_who_takes_time_is_asked_for_as_many_as_pay():
    """One that takes as long as a step never pays, but is tried now and then; one that takes little makes all."""
    loop = Loop()
    loop.drafter.costs = StepCosts((1, 2), (1.0, 1.0))
    request = loop.add("one", [1, 2, 3], num_out=100)
    loop.step()
    for _ in range(64):
        loop.step()
    assert loop.drafter.asked == []
    loop.step()
    assert loop.drafter.asked == [["one"]]
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (1, 1)
    loop.drafter.costs = StepCosts((1, 2), (1e-9, 1e-9))
    loop.step()
    assert request.num_draft_tokens == 1 + 4


def test_what_must_be_read_first_should_pay_within_what_is_left():
    making = StepCosts((1, 2), (1e-3, 2e-3))  # a millisecond a token, where a step takes a second
    for num_unread, num_out, pays in ((100, 100, True), (100, 4, True), (10_000, 100, True), (30_000, 8, False)):
        loop = Loop()
        loop.drafter.costs, loop.drafter.unread = making, num_unread
        loop.add("one", [1, 2, 3], num_out=num_out)
        loop.step()
        loop.step()
        assert bool(loop.drafter.asked) == pays, (num_unread, num_out)
    loop.drafter.unread = None
    for _ in range(5):
        loop.step()
    assert not loop.drafter.asked, "who gets none now is not asked for"


def test_no_more_drafts_than_tokens_may_come():
    loop = Loop()
    request = loop.add("short", [1], num_out=3)
    loop.step()
    plan = loop.step()
    assert [one.num_drafts for one in plan.drafted] == [1]
    assert request.output_token_ids == [2, 3, 4]
    assert request.finish_reason == "length"


def test_no_more_drafts_than_a_step_may_have():
    loop = Loop(max_drafts=3)
    loop.add("a", [1])
    loop.add("b", [51])
    loop.step()
    assert sum(one.num_drafts for one in loop.step().drafted) == 3


def test_drafts_that_do_not_pay_are_tried_again_after_a_while():
    loop = Loop(costs=DEAR)
    request = loop.add("long", [1], num_out=200)
    steps = [len(loop.step().drafted) for _ in range(135)]
    assert sum(steps) == 2
    assert request.num_draft_tokens == 2


def test_what_is_wrong_is_drafted_less_and_less():
    loop = Loop(costs=StepCosts((1, 2), (1.0, 1.2)))
    request = loop.add("wrong", [1], num_out=100, seed=1000)  # and the drafter counts up from where it is: one too far
    loop.runner = NullRunner(lambda seed, draw: seed + 7 * draw)
    numbers = [sum(one.num_drafts for one in loop.step().drafted) for _ in range(60)]
    assert numbers[1] >= 1
    assert numbers[-40:] == [0] * 40
    assert request.num_accepted_tokens == 0


def test_none_while_it_is_looked_for_who_makes_steps_fail():
    loop = Loop()
    loop.add("a", [1])
    loop.add("b", [51])
    loop.step()
    loop.drafting.prepare()
    assert loop.scheduler.schedule(0.0).drafted
    loop.scheduler.abandon("it died")
    assert loop.scheduler.suspicion.is_on
    assert not loop.step().drafted


def test_who_has_ended_is_forgotten_also_if_somebody_comes_by_the_same_name():
    loop = Loop()
    loop.add("name", [1], num_out=4)
    while loop.scheduler.has_work:
        loop.step()
    loop.add("name", [61], num_out=4)
    loop.step()
    loop.step()
    assert loop.drafter.forgotten == ["name"]
    loop.add("other", [31])
    while loop.scheduler.has_work:
        loop.step()
    loop.add("last", [11], num_out=30)
    for _ in range(3):
        loop.step()
    assert loop.drafter.forgotten == ["name", "name", "other"]


@pytest.mark.parametrize("forks", [1, 3])
def test_samples_of_a_prompt_are_drafted_each_for_itself(forks):
    loop = Loop()
    how = SamplingParams(max_tokens=None)
    samples = [
        Request(
            f"s{at}", [1, 2], how, stop=StopRule(frozenset(), 10), seed=10 * at, speculation=PARAMS, sample_index=at
        )
        for at in range(forks + 1)
    ]
    first, *first.forks = samples
    loop.scheduler.add(first)
    loop.step()
    plan = loop.step()
    assert [one.num_drafts for one in plan.drafted] == [4] * (forks + 1)
    assert [one.output_token_ids for one in samples] == [list(range(10 * at, 10 * at + 6)) for at in range(forks + 1)]


def test_prompts_come_first_those_that_will_be_let_in_too():
    loop = Loop()
    loop.add("decodes", [1], num_out=40)
    loop.step()
    loop.add("long", list(range(100, 130)), num_out=2)
    plan = loop.step()
    assert plan.num_tokens == [1 + 1, 30], "one draft is what the prompt leaves of 32 tokens"
    loop.add("longer", list(range(200, 260)), num_out=2)
    assert not loop.step().drafted


def test_who_waits_for_memory_does_not_keep_others_from_drafts():
    loop = Loop(num_blocks=8)
    running = loop.add("runs", [1], num_out=28)
    loop.step()
    loop.add("waits", list(range(100, 131)), num_out=1)
    assert not loop.step().drafted, "it may be let in"
    plan = loop.step()
    assert plan.num_rows == 1
    assert plan.drafted
    assert running.num_preemptions == 0


def test_trying_again_adds_no_more_drafts_than_a_step_may_have():
    loop = Loop(costs=DEAR, max_drafts=1)
    for at in range(4):
        loop.add(f"r{at}", [100 * at], num_out=120)
    assert max(sum(one.num_drafts for one in loop.step().drafted) for _ in range(80)) == 1


def test_what_is_cached_of_who_has_stop_strings_is_all_but_the_last_step():
    """Its text may have ended among the tokens of a step: they are published with the next one."""
    cached = {}
    for stop in ((), ("text",)):
        loop = Loop()
        request = loop.add("r", [1, 2, 3], num_out=40)
        request.sampling = SamplingParams(max_tokens=None, stop=stop)
        while loop.scheduler.has_work:
            loop.step()
        cached[stop] = loop.scheduler.core.pool.num_cached
    assert cached[()] == 10
    assert cached["text",] >= 9


def test_nobody_is_preempted_for_drafts():
    """Three blocks for two who need two each, by and by: the first one's drafts wait until the second has its own."""
    loop = Loop(num_blocks=3)
    first, second = loop.add("a", [1, 2], num_out=4, seed=900), loop.add("b", [51, 52, 53], num_out=3, seed=900)
    while loop.scheduler.has_work:
        loop.step()
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)


def test_a_text_that_ends_among_drafts_has_the_logprobs_and_counts_of_what_is_told():
    request = Request("r", [1], SamplingParams(max_tokens=None, logprobs=0), stop=StopRule(frozenset(), 40))
    for at in range(10):
        request.token_ids.append(at)
        request.add_logprobs(TokenLogprobs(-1.0, 1, ()))
    request.num_draft_tokens, request.num_accepted_tokens = 9, 8  # of two rows, the last of which brought 6
    request.cut(7)
    assert request.logprob_sums[-1] == -7.0
    assert (len(request.logprobs), request.num_output_tokens, request.num_accepted_tokens) == (7, 7, 6)
