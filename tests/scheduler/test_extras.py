"""What a plan carries for requests that ask for more than a token: for them only, and only what they ask for."""

from __future__ import annotations

from pagefold.kv import KVCore
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.steps import StepResult, TokenLogprobs

TOLD = TokenLogprobs(-1.0, 1, ())


def make(*, budget=64, num_blocks=16):
    return Scheduler(KVCore(num_blocks, block_size=4), SchedulerLimits(4, budget))


def add(scheduler, request_id, prompt, **fields):
    request = Request(request_id, prompt, SamplingParams(**fields), stop=StopRule(frozenset({7}), 40))
    scheduler.add(request)
    return request


def step(scheduler):
    """Run a step that samples 5 everywhere; return its plan and what its histories were."""
    plan = scheduler.schedule(0.0)
    histories = [list(history) for history in plan.histories]
    told = [[TOLD] * len(part.token_ids) for part in plan.prompt_parts]
    scheduler.apply(StepResult([5] * len(plan.sampling_rows), [TOLD] * len(plan.logprob_rows), told))
    return plan, histories


def test_plain_requests_carry_nothing():
    scheduler = make()
    add(scheduler, "a", [1, 2], temperature=0.5, min_p=0.5, top_k=3)
    for _ in range(3):
        plan, _ = step(scheduler)
        assert plan.sampling_rows == [0]
        assert not any((plan.adjusted, plan.histories, plan.banned, plan.logprob_rows, plan.prompt_parts))


def test_rows_that_ask_are_named_by_their_place_and_bring_their_tokens():
    scheduler = make()
    add(scheduler, "plain", [1])
    add(scheduler, "bias", [2, 2], logit_bias={3: 1.0})
    add(scheduler, "penalty", [3, 3, 3], presence_penalty=1.0, logprobs=2)
    add(scheduler, "wait", [4], min_tokens=2)
    first, histories = step(scheduler)
    assert (first.adjusted, histories) == ([1, 2, 3], [[], [3, 3, 3], []])
    assert (first.banned, first.logprob_rows) == ([frozenset(), frozenset(), frozenset({7})], [2])
    second, histories = step(scheduler)
    assert (second.adjusted, histories, second.draws[2]) == ([1, 2, 3], [[], [3, 3, 3, 5], []], 1)
    third, _ = step(scheduler)
    assert third.adjusted == [1, 2], "min_tokens are there: nothing is banned any more"


def test_a_prompt_is_told_chunk_by_chunk_and_nothing_of_it_is_found_in_the_cache():
    scheduler = make(budget=4)
    prompt = list(range(10, 21))
    add(scheduler, "before", prompt, max_tokens=1)
    while scheduler.has_work and scheduler.get("before").num_output_tokens < 1:
        step(scheduler)
    scheduler.finish("before", "abort")
    request = add(scheduler, "told", prompt, prompt_logprobs=3)
    parts = []
    while not request.num_output_tokens:
        parts += step(scheduler)[0].prompt_parts
    assert request.num_cached_tokens == 0
    assert [list(part.token_ids) for part in parts] == [prompt[1:5], prompt[5:9], prompt[9:11]]
    assert {(part.row, part.offset, part.num_top) for part in parts} == {(0, 0, 3)}
    assert len(request.prompt_logprobs) == 10
    assert not step(scheduler)[0].prompt_parts


def test_a_failed_step_tells_nothing_and_a_preempted_prompt_only_what_is_missing():
    scheduler = make(budget=4)
    request = add(scheduler, "told", list(range(10, 21)), prompt_logprobs=0)
    scheduler.schedule(0.0)
    scheduler.abandon("injected")
    assert not request.prompt_logprobs
    for _ in range(2):
        step(scheduler)
    assert len(request.prompt_logprobs) == 8
    scheduler._leaving.wait_again(scheduler.running.pop(), is_preempted=True)
    (part,) = step(scheduler)[0].prompt_parts
    assert list(part.token_ids) == [19, 20]
    assert len(request.prompt_logprobs) == 10
