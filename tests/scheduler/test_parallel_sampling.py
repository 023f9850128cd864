"""Several samples of one prompt: computed once, sampled once for each, and then requests like all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_scheduler import House

from pagefold.events import PrefixLookup, RequestFinished, StepApplied
from pagefold.kv import audit
from pagefold.request import Request, RequestStatus, StopRule
from pagefold.sampling import SamplingParams
from pagefold.sim import NullRunner, hashed_token
from pagefold.sim.shadow_runner import ShadowRunner, alone
from pagefold.steps import StepResult, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagefold.steps import StepPlan


def add(
    house: House,
    name: str,
    tokens: Sequence[int],
    num_samples: int,
    num_new: int = 4,
    *,
    stops: Iterable[int] = (),
    sampling: SamplingParams | None = None,
    **settings: object,
) -> list[Request]:
    """Add a prompt with its samples, whose seeds count up from ``seed``; return them all."""
    seed = settings.pop("seed", 0)
    samples = [
        Request(
            f"{name}/{index}" if index else name,
            tokens,
            sampling or SamplingParams(n=num_samples),
            stop=StopRule(frozenset(stops), len(tokens) + num_new),
            seed=seed + index,
            parent_id=name,
            sample_index=index,
            **settings,
        )
        for index in range(num_samples)
    ]
    first, *first.forks = samples
    house.scheduler.add(first)
    return samples


def test_the_policy_is_told_once_that_somebody_asked(monkeypatch):
    """However many samples let go of the prompt's blocks, and how often: preempted, failed and at its end."""
    house = House(12, seqs=6, budget=32)
    told: list[tuple[int, bool]] = []
    monkeypatch.setattr(house.core.policy, "on_release", lambda tail, facts: told.append((tail.depth, facts.is_repeat)))
    add(house, "a", range(9), 3, num_new=6)
    add(house, "b", range(100, 109), 1, num_new=20)
    house.scheduler.schedule(0.0)
    house.scheduler.abandon("it died")  # nothing of it was published: nobody is told
    assert told == []
    plans = house.run(ShadowRunner(house.scheduler))
    assert len(plans) > 6
    assert len(told) >= 4
    assert [is_repeat for _, is_repeat in told].count(False) == 2


def run(house: House, samples: list[Request]) -> list[StepPlan]:
    """Run everything, and hold each sample to what it is alone."""
    expected = [alone(sample) for sample in samples]
    plans = house.run(ShadowRunner(house.scheduler))
    assert [sample.output_token_ids for sample in samples] == expected
    assert house.core.num_active == 0
    return plans


def test_one_row_is_sampled_once_for_each_and_then_each_has_a_row():
    house = House(size=4)
    add(house, "a", range(10), 3, seed=7)
    first, second = house.step(), house.step()
    assert (first.num_rows, first.sampling_rows, first.seeds, first.draws) == (1, [0, 0, 0], [7, 8, 9], [0, 0, 0])
    assert (second.num_rows, second.sampling_rows, second.seeds) == (3, [0, 1, 2], [7, 8, 9])
    assert second.starts == [10, 10, 10]
    assert [block_ids[:2] for block_ids in second.block_ids] == [second.block_ids[0][:2]] * 3
    assert len({block_ids[2] for block_ids in second.block_ids}) == 3
    assert [copy.num_tokens for copy in second.copies] == [2, 2], "the last one keeps the block"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("length", range(1, 13))
def test_prompts_of_every_length_are_copied_where_they_end_in_a_block(length, budget, caching):
    house = House(size=4, seqs=4, budget=budget, caching=caching)
    prompt = [1, 2, 0, 0, 2, 1, 1, 1, 0, 2, 2, 0][:length]
    plans = run(house, add(house, "a", prompt, 3, 9))
    assert sum(len(plan.copies) for plan in plans) == (2 if length % 4 else 0)
    assert sum(event.num_prompt_tokens for event in house.events_of(StepApplied)) == length
    assert house.events_of(PrefixLookup) == [PrefixLookup("a", length, 0, after_preemption=False)]


def test_each_ends_by_itself_and_tells_so():
    house = House()
    samples = add(house, "a", range(6), 4, 5, stops=[hashed_token(1, 0), hashed_token(2, 2)])
    house.run()
    assert [sample.finish_reason for sample in samples] == ["length", "stop", "stop", "length"]
    assert [sample.num_output_tokens for sample in samples] == [5, 1, 3, 5]
    assert [(event.sample_index, event.num_output_tokens) for event in house.events_of(RequestFinished)] == [
        (1, 1),
        (2, 3),
        (0, 5),
        (3, 5),
    ]


def test_one_token_each_needs_no_block_more():
    house = House(num_blocks=3, size=4)
    samples = add(house, "a", range(10), 8, 1)
    (plan,) = house.run()
    assert plan.copies == []
    assert [sample.output_token_ids for sample in samples] == [[hashed_token(seed, 0)] for seed in range(8)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [8, 9, 11, 14])
def test_memory_for_one_at_a_time_is_enough(num_blocks, caching):
    house = House(num_blocks=num_blocks, size=4, caching=caching)
    samples = add(house, "a", [1, 2, 0] * 5, 6, 17)
    samples += add(house, "b", [2, 2, 0] * 3, 3, 17, seed=20)
    run(house, samples)
    assert sum(sample.num_preemptions for sample in samples) > 0


def test_a_prompt_that_fills_the_pool_alone_gets_through_with_all_its_samples():
    house = House(num_blocks=8, size=4, seqs=8)
    run(house, add(house, "a", [1, 2, 0] * 10, 8, 2))


# Seats, memory, order.


def test_it_waits_for_as_many_seats_as_it_has_samples():
    house = House(seqs=4)
    house.add("a", [1, 2], 6)
    house.add("b", [1, 0], 3)
    house.step()
    add(house, "c", [2, 0], 3)
    house.add("d", [2, 1], 1)
    plan = house.step()
    assert plan.num_rows == 2, "two seats for three, and nobody overtakes"
    house.step()
    plan = house.step()
    assert (plan.num_rows, plan.sampling_rows) == (2, [0, 1, 1, 1])
    assert house.scheduler.waiting[0].request_id == "d"
    house.run()


def test_seats_are_kept_while_the_prompt_is_computed():
    house = House(seqs=4, budget=8)
    add(house, "a", range(20), 3, 2)
    for index in range(3):
        house.add(f"b{index}", [index], 9)
    assert house.step().num_rows == 1
    assert house.step().num_rows == 1
    assert house.step().num_rows == 2, "one seat was left beside the three"
    assert house.step().num_rows == 4
    assert [request.request_id for request in house.scheduler.running] == ["b0"]
    house.run()


def test_more_samples_than_seats_are_our_own_bug():
    house = House(seqs=2)
    with pytest.raises(AssertionError, match="seats"):
        add(house, "a", [1], 3)


def test_beside_others_it_waits_for_a_block_for_each_tail():
    for num_blocks, is_let_in in ((11, False), (12, True)):
        house = House(num_blocks=num_blocks, size=4)
        house.add("runs", range(100, 113), 9)  # four blocks
        house.step()
        add(house, "a", range(10), 6)  # three, and five tails
        assert (house.step().num_rows == 2) == is_let_in


def test_others_wait_for_the_tails_of_one_whose_prompt_is_computed():
    for num_blocks, is_let_in in ((10, False), (11, True)):
        house = House(num_blocks=num_blocks, size=4, budget=8)
        add(house, "a", range(10), 6)  # three blocks, and five tails
        house.step()
        house.add("b", range(100, 111), 2)  # three
        assert (house.step().num_rows == 2) == is_let_in


def test_what_was_found_of_the_prompt_is_told_of_all_samples():
    house = House(size=4)
    house.add("before", range(8), 1)
    house.run()
    samples = add(house, "a", range(10), 3)
    house.step()
    assert [sample.num_cached_tokens for sample in samples] == [8, 8, 8]


def test_they_keep_their_place_in_the_order():
    house = House(seqs=8)
    add(house, "a", [1, 2], 3)
    house.add("b", [1, 0], 3)
    house.step()
    assert [request.request_id for request in house.scheduler.running] == ["a", "a/1", "a/2", "b"]


# Cancelled, late, failed: before, while and after they fork.


def test_cancelled_while_it_waits_all_samples_end():
    house = House()
    samples = add(house, "a", [1, 2], 3)
    assert house.scheduler.finish("a", "abort") is samples[0]
    assert [sample.finish_reason for sample in samples] == ["abort"] * 3
    assert {sample.status for sample in samples} == {RequestStatus.FINISHED}
    assert len(house.events_of(RequestFinished)) == 3
    assert not house.scheduler.has_work


@pytest.mark.parametrize("fails", [True, False])
def test_cancelled_in_the_step_that_forks_no_sample_begins(fails):
    house = House()
    samples = add(house, "a", range(10), 3)
    plan = house.scheduler.schedule(0.0)
    house.scheduler.finish("a", "abort")
    if fails:
        assert house.scheduler.abandon("it died") == samples
    else:
        assert house.scheduler.apply(NullRunner().run(plan)) == []
    assert {(sample.finish_reason, sample.num_output_tokens) for sample in samples} == {("abort", 0)}
    assert len(house.events_of(RequestFinished)) == 3
    assert not house.scheduler.has_work
    assert house.core.num_active == 0
    audit(house.core)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_that_is_cancelled_later_leaves_the_others_alone(which):
    house = House()
    runner = ShadowRunner(house.scheduler)
    samples = add(house, "a", [1, 2, 0, 0, 1, 2], 3, 8)
    expected = [alone(sample) for sample in samples]
    for _ in range(3):
        house.step(runner)
    house.scheduler.finish(samples[which].request_id, "abort")
    house.run(runner)
    for index, sample in enumerate(samples):
        assert sample.output_token_ids == (expected[index][:3] if index == which else expected[index])
    assert house.core.num_active == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_all_are_late_together(num_steps):
    house = House(budget=8)
    samples = add(house, "a", range(10), 3, deadline_s=5.0)
    for _ in range(num_steps):
        house.step()
    house.scheduler.schedule(5.0)
    assert house.scheduler.timed_out == samples
    assert {sample.finish_reason for sample in samples} == {"timeout"}
    assert house.core.num_active == 0
    house.scheduler.schedule(6.0)
    assert house.scheduler.timed_out == []


def test_a_failed_step_forks_nothing_and_is_run_again():
    house = House(budget=8)
    runner = ShadowRunner(house.scheduler)
    samples = add(house, "a", [1, 2, 0, 0, 1, 2, 2, 2, 0, 1], 3, 8)
    expected = [alone(sample) for sample in samples]
    for num_good in (0, 1, 2, 3):  # the first chunk, the one that forks, the one that copies, one later
        plan = house.scheduler.schedule(0.0)
        runner.copy(plan)
        runner.spoil(plan, plan.num_rows)
        assert house.scheduler.abandon("it died") == []
        audit(house.core)
        assert len(house.scheduler.running) == (0, 1, 3, 3)[num_good]
        house.step(runner)
    house.run(runner)
    assert [sample.output_token_ids for sample in samples] == expected


def test_three_failed_steps_end_all_samples():
    house = House()
    samples = add(house, "a", range(10), 3)
    for _ in range(3):
        house.scheduler.schedule(0.0)
        ended = house.scheduler.abandon("it died")
    assert ended == samples
    assert [sample.finish_reason for sample in samples] == ["error"] * 3
    assert house.core.num_active == 0


def test_preempted_before_it_forks_it_begins_again_with_all_samples():
    house = House(num_blocks=9, budget=8, size=4)
    runner = ShadowRunner(house.scheduler)
    first = house.add("first", [1, 2, 0, 1] * 2, 20)
    house.step(runner)
    samples = add(house, "a", [2, 2, 0, 1] * 3, 2, 8)
    expected = [alone(first), *(alone(sample) for sample in samples)]
    house.step(runner)
    assert [request.request_id for request in house.scheduler.running] == ["first", "a"]
    house.scheduler._leaving.wait_again(house.scheduler.running.pop(), is_preempted=True)
    assert samples[0].status is RequestStatus.PREEMPTED
    house.run(runner)
    assert [request.output_token_ids for request in (first, *samples)] == expected
    lookups = [(event.request_id, event.after_preemption) for event in house.events_of(PrefixLookup)]
    assert lookups[:3] == [("first", False), ("a", False), ("a", True)]
    assert ("a/1", False) not in lookups, "its prompt is counted once"


# What a plan carries for them.

TOLD = TokenLogprobs(-1.5, 1, ())


def step(house: House) -> StepPlan:
    """Run a step that tells all that it is asked for."""
    plan = house.scheduler.schedule(0.0)
    told = [[TOLD] * len(part.token_ids) for part in plan.prompt_parts]
    house.scheduler.apply(StepResult([5] * len(plan.sampling_rows), [TOLD] * len(plan.logprob_rows), told))
    return plan


def test_each_sample_is_penalized_and_told_by_itself():
    house = House()
    house.add("plain", [1], 9)
    how = SamplingParams(n=2, presence_penalty=1.0, logprobs=1, min_tokens=1)
    samples = add(house, "a", [3, 3], 2, 9, stops=[7], sampling=how)
    plan = step(house)
    assert (plan.sampling_rows, plan.adjusted, plan.logprob_rows) == ([0, 1, 1], [1, 2], [1, 2])
    assert plan.banned == [frozenset({7})] * 2
    plan = step(house)
    assert (plan.sampling_rows, plan.adjusted, plan.logprob_rows) == ([0, 1, 2], [1, 2], [1, 2])
    assert plan.histories[0] is not plan.histories[1]
    assert [len(sample.logprobs) for sample in samples] == [2, 2]
    assert [sample.logprob_sums[-1] for sample in samples] == [-3.0, -3.0]


def test_a_prompt_is_told_once_and_not_again_to_one_that_was_preempted():
    house = House(seqs=2, budget=4)
    samples = add(house, "a", range(10), 2, 9, sampling=SamplingParams(n=2, prompt_logprobs=0))
    parts = [part for _ in range(3) for part in step(house).prompt_parts]
    assert [token for part in parts for token in part.token_ids] == list(range(1, 10))
    victim = house.scheduler.running.pop()
    assert victim is samples[1]
    house.scheduler._leaving.wait_again(victim, is_preempted=True)
    while victim.num_output_tokens < 3:
        assert step(house).prompt_parts == []
    assert len(victim.prompt_logprobs) == 9


def test_samples_that_will_be_ranked_are_told_though_nobody_asked():
    house = House()
    samples = add(house, "a", [1, 2], 3, 9, sampling=SamplingParams(n=1, best_of=3))
    assert step(house).logprob_rows == [0, 1, 2]
    step(house)
    assert [sample.logprob_sums[-1] for sample in samples] == [-3.0] * 3
