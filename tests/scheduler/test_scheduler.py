"""The scheduler's promises, one by one."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from pagefold.events import Event, PrefixLookup, RequestFinished, RequestPreempted, StepAbandoned, StepApplied
from pagefold.kv import KEEP_ALL, Arbiter, HostTier, KeepRule, KVCore, LinkModel, Namespace, audit
from pagefold.request import Request, RequestStatus, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner, hashed_token
from pagefold.sim.shadow_runner import VOCAB_SIZE, ShadowRunner, alone

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagefold.steps import Runner, StepPlan


class House:
    """A scheduler with its core, and everything that it emitted."""

    def __init__(
        self, num_blocks: int = 64, *, seqs: int = 8, budget: int = 64, size: int = 4, caching: bool = True, **parts
    ):
        self.events: list[Event] = []
        emit = self.events.append
        self.core = KVCore(num_blocks, block_size=size, enable_prefix_caching=caching, emit=emit, **parts)
        self.scheduler = Scheduler(self.core, SchedulerLimits(seqs, budget), emit=emit)

    def add(self, request_id: str, tokens: Sequence[int], num_new: int = 4, **settings: object) -> Request:
        request = new_request(request_id, tokens, num_new, **settings)
        self.scheduler.add(request)
        return request

    def step(self, runner: Runner | None = None) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        if plan.num_rows:
            self.scheduler.apply((runner or NullRunner()).run(plan))
        audit(self.core)
        return plan

    def run(self, runner: Runner | None = None) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step(runner))
            assert len(plans) < 10_000
        return plans

    def events_of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def new_request(
    request_id: str, tokens: Sequence[int], num_new: int = 4, *, stops: Iterable[int] = (), **settings: object
) -> Request:
    stop = StopRule(frozenset(stops), len(tokens) + num_new)
    return Request(request_id, tokens, SamplingParams(temperature=0.0), stop=stop, **settings)


def outputs_of(*requests: Request) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


# One request.


def test_a_request_runs_to_its_length():
    house = House()
    request = house.add("a", range(10), 5, seed=7)
    plans = house.run()
    assert request.output_token_ids == [hashed_token(7, draw) for draw in range(5)]
    assert request.finish_reason == "length"
    assert request.status is RequestStatus.FINISHED
    assert [(plan.starts, plan.num_tokens) for plan in plans] == [
        ([0], [10]),
        ([10], [1]),
        ([11], [1]),
        ([12], [1]),
        ([13], [1]),
    ]
    assert house.events_of(RequestFinished) == [RequestFinished("a", "length", 10, 5)]
    assert house.core.num_active == 0


def test_a_stop_token_ends_it_and_is_kept():
    house = House()
    request = house.add("a", range(10), 50, seed=7, stops=[hashed_token(7, 2)])
    house.run()
    assert request.finish_reason == "stop"
    assert request.output_token_ids == [hashed_token(7, draw) for draw in range(3)]


def test_a_long_prompt_is_computed_in_chunks():
    house = House(budget=16)
    house.add("a", range(40), 2)
    plans = house.run()
    assert [(plan.starts, plan.num_tokens, plan.sampling_rows) for plan in plans] == [
        ([0], [16], []),
        ([16], [16], []),
        ([32], [8], [0]),
        ([40], [1], [0]),
    ]
    assert list(plans[2].token_ids) == list(range(32, 40))


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 17, 512])
def test_chunk_sizes_change_nothing(budget):
    house = House(budget=budget, seqs=1, num_blocks=40)
    requests = [house.add(f"r{i}", [1, 2, 0, 1] * 5 + [i], 20, seed=i) for i in range(3)]
    expected = [alone(request) for request in requests]
    house.run(ShadowRunner(house.scheduler))
    assert outputs_of(*requests) == expected


# Several requests.


def test_nothing_to_do_is_an_empty_plan():
    house = House()
    plan = house.scheduler.schedule(0.0)
    assert plan.num_rows == 0
    assert not house.scheduler.has_work
    house.scheduler.schedule(0.0)  # and nothing is in flight


def test_those_that_decode_go_on_beside_a_long_prompt():
    house = House(budget=8, num_blocks=200)
    short = house.add("short", [1, 2], 30)
    house.step()
    house.add("long", range(100), 1)
    for _ in range(10):
        plan = house.step()
        assert plan.num_tokens == [1, 7]
    assert short.num_output_tokens == 11


def test_the_head_of_the_queue_is_never_overtaken():
    house = House(num_blocks=10)
    house.add("runs", range(20), 8)
    house.step()
    house.add("big", range(100, 130), 8)
    house.add("small", [5], 1)
    plan = house.step()
    assert plan.num_rows == 1
    assert [request.request_id for request in house.scheduler.waiting] == ["big", "small"]
    house.run()
    assert [event.request_id for event in house.events_of(RequestFinished)] == ["runs", "small", "big"]
    assert [event.request_id for event in house.events_of(PrefixLookup)] == ["runs", "big", "small"]


def test_what_waits_for_memory_is_weighed_once():
    """A link that is thought too slow is forgiven for each request that could have used it, not for each step."""
    arbiter = Arbiter(1000, 4, compute_s_per_token=1e-3)
    house = House(num_blocks=12, host=HostTier(16), arbiter=arbiter)
    arbiter.links["host"] = LinkModel(0.0, 1e4)
    house.add("first", range(30), 1)
    house.run()
    house.core.blocks.reclaim(12)
    house.add("runs", range(100, 120), 8)
    house.step()
    house.add("waits", range(30), 1)
    house.step()
    house.step()
    assert arbiter.num_unrestored == 0
    house.run()
    assert arbiter.num_unrestored == 1


def test_seats_are_limited():
    house = House(seqs=2)
    for index in range(5):
        house.add(f"r{index}", [index], 3)
    plans = house.run()
    assert max(plan.num_rows for plan in plans) == 2


def test_rows_carry_their_own_seed_and_draw():
    house = House()
    house.add("a", [1, 2, 3], 3, seed=11)
    house.step()
    house.add("b", [4, 5], 3, seed=22)
    plan = house.step()
    assert (plan.sampling_rows, plan.seeds, plan.draws) == ([0, 1], [11, 22], [1, 0])


# Sharing.


@pytest.mark.parametrize("budget", [512, 8192, 100, 577])
def test_a_cold_burst_computes_its_shared_prefix_once(budget):
    house = House(num_blocks=1000, seqs=32, budget=budget, size=16)
    shared = list(range(512))
    for index in range(32):
        house.add(f"r{index}", shared + [10_000 + 100 * index + i for i in range(64)], 4, seed=index)
    house.run()
    computed = sum(event.num_prompt_tokens for event in house.events_of(StepApplied))
    assert computed == 512 + 32 * 64
    assert computed <= 512 + 32 * 64 + 32 * 16


def test_a_burst_of_equal_prompts_computes_one_token_each_at_most_a_block():
    house = House(num_blocks=1000, seqs=32, budget=8192, size=16)
    for index in range(32):
        house.add(f"r{index}", range(512), 4, seed=index)
    plan = house.step()
    assert (
        plan.num_tokens == [512] + [16] * 31
    )  # a whole block is promised, a part of one is not copied before it is written


def test_requests_of_one_step_read_what_the_first_of_them_writes():
    house = House(budget=64)
    shared = [1, 0, 2, 2, 1, 0, 0, 1, 2]
    requests = [house.add(f"r{index}", [*shared, index], 6, seed=index) for index in range(3)]
    expected = [alone(request) for request in requests]
    runner = ShadowRunner(house.scheduler)
    plan = house.step(runner)
    assert plan.starts == [0, 8, 8]
    house.run(runner)
    assert outputs_of(*requests) == expected


def test_a_part_of_a_block_is_copied_and_gone_on_from():
    house = House()
    runner = ShadowRunner(house.scheduler)
    house.add("first", [1, 0, 2, 2, 1, 0, 0, 1], 1)
    house.run(runner)
    second = house.add("second", [1, 0, 2, 2, 1, 0, 2, 2, 1], 5)
    expected = alone(second)
    plan = house.step(runner)
    assert plan.starts == [6]
    assert [copy.num_tokens for copy in plan.copies] == [2]
    house.run(runner)
    assert second.output_token_ids == expected
    assert second.num_cached_tokens == 6


def test_outputs_are_shared_too():
    house = House()
    first = house.add("first", range(10), 6)
    house.run()
    second = house.add("second", [*first.token_ids, 99], 1)
    house.run()
    assert second.num_cached_tokens == 12  # whole blocks of what was computed: the last token of an output has no KV


@pytest.mark.parametrize("field", ["model", "layout", "dtype", "adapter", "tenant", "cache_salt"])
def test_namespaces_separate_and_equal_ones_share(field):
    house = House(size=4)
    one, same, other = Namespace(**{field: "x"}), Namespace(**{field: "x"}), Namespace(**{field: "y"})
    house.add("one", range(20), 1, namespace=one.key())
    house.run()
    shares = house.add("same", range(20), 1, namespace=same.key())
    separate = house.add("other", range(20), 1, namespace=other.key())
    house.run()
    assert shares.num_cached_tokens == 19
    assert separate.num_cached_tokens == 0


def test_with_caching_off_nothing_is_shared():
    house = House(caching=False)
    for name in "ab":
        assert house.add(name, range(20), 3).num_cached_tokens == -1
        house.run()
    assert [event.num_hit_tokens for event in house.events_of(PrefixLookup)] == [0, 0]
    assert house.core.pool.num_free == house.core.pool.num_blocks


def test_a_reset_between_and_during_steps_changes_no_output():
    house = House(budget=9)
    runner = ShadowRunner(house.scheduler)
    requests = [house.add(f"r{index}", [1, 0, 2] * 5 + [index], 12, seed=index % 2) for index in range(6)]
    expected = [alone(request) for request in requests]
    rng = Random(3)
    while house.scheduler.has_work:
        plan = house.scheduler.schedule(0.0)
        if rng.random() < 0.3:
            house.core.forgetting.reset()
        house.scheduler.apply(runner.run(plan))
        if rng.random() < 0.3:
            house.core.forgetting.reset()
        audit(house.core)
    assert outputs_of(*requests) == expected


# Memory is short.


def test_the_last_to_come_is_preempted_and_what_the_tree_keeps_is_not_computed_again():
    house = House(num_blocks=12)
    first = house.add("first", range(16), 16)
    second = house.add("second", range(100, 116), 12)
    house.run()
    preempted = house.events_of(RequestPreempted)
    assert [event.request_id for event in preempted] == ["second"]
    assert preempted[0].cause_request_id == "first"
    assert preempted[0].usage_before == 1.0
    assert preempted[0].usage_after < 1.0
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    back = house.events_of(PrefixLookup)[-1]
    assert back.after_preemption
    assert back.num_hit_tokens > 0
    assert second.num_cached_tokens == 0, "of its first admission; its own blocks are no saving"
    recomputed = sum(event.num_recomputed_tokens for event in house.events_of(StepApplied))
    assert recomputed == preempted[0].num_computed_tokens - back.num_hit_tokens
    assert (first.num_output_tokens, second.num_output_tokens) == (16, 12)


def test_many_preemptions_change_no_output_and_nobody_starves():
    house = House(num_blocks=16, seqs=8)
    requests = [house.add(f"r{index}", [index % VOCAB_SIZE, 1], 60, seed=index) for index in range(20)]
    expected = [alone(request) for request in requests]
    plans = house.run(ShadowRunner(house.scheduler))
    assert outputs_of(*requests) == expected
    assert sum(request.num_preemptions for request in requests) >= 30
    assert requests[0].num_preemptions == 0
    assert len(plans) <= sum(request.num_tokens + 1 for request in requests)


def test_a_request_that_fills_the_pool_alone_gets_through():
    house = House(num_blocks=8, budget=9)
    runner = ShadowRunner(house.scheduler)
    house.add("before", [1, 0, 2] * 8, 8)
    house.run(runner)  # the pool is full of cached blocks now
    request = house.add("all", [1, 0, 2] * 7 + [0], 10)
    expected = alone(request)
    house.run(runner)
    assert request.output_token_ids == expected


def test_a_copy_is_given_up_where_its_source_would_take_the_last_block():
    house = House(num_blocks=8)
    runner = ShadowRunner(house.scheduler)
    known = [1, 0, 2] * 7
    house.add("before", known, 1)
    house.run(runner)
    request = house.add("all", [*known[:18], *[0] * 12], 2)  # 30 tokens: all 8 blocks, two of them a hit
    expected = alone(request)
    plan = house.step(runner)
    assert (plan.starts, plan.copies) == ([16], [])
    house.run(runner)
    assert request.output_token_ids == expected


def test_wasted_slots_are_what_rounding_leaves():
    house = House(size=16)
    house.add("a", range(20), 9)
    house.add("b", range(100, 132), 9)
    assert house.scheduler.num_wasted_slots == 0
    house.step()
    assert house.scheduler.num_wasted_slots == 12
    house.step()
    assert house.scheduler.num_wasted_slots == 11 + 15


def test_a_running_request_is_reserved_no_more_of_a_window_than_it_will_write():
    """What decodes writes a token at a time, however many a step may compute: the rest is for those that wait."""
    num_each = KeepRule(8).num_blocks_for(40, 1, 4) + -(-40 // 4)
    house = House(3 * num_each + 2, budget=64, rules=(KeepRule(8), KEEP_ALL), caching=False)
    for number in range(3):
        house.add(f"{number}", range(100 * number, 100 * number + 28), 12)
        house.step()
        house.step()
    assert len(house.scheduler.running) == 3
    house.run()
    assert not house.events_of(RequestPreempted)


# Cancelled.


def test_finish_while_it_waits():
    house = House(seqs=1)
    house.add("a", [1], 3)
    b = house.add("b", [2], 3)
    house.step()
    assert house.scheduler.finish("b", "abort") is b
    assert b.finish_reason == "abort"
    assert not house.scheduler.waiting
    assert house.scheduler.finish("b", "abort") is None


def test_finish_between_steps_frees_its_blocks_at_once():
    house = House()
    house.add("a", range(30), 3)
    house.step()
    assert house.core.num_active == 8
    house.scheduler.finish("a", "abort")
    assert house.core.num_active == 0
    assert not house.scheduler.has_work


def test_finish_during_a_step_frees_its_blocks_when_the_step_ends():
    house = House()
    a, b = house.add("a", range(30), 3), house.add("b", range(100, 110), 3)
    plan = house.scheduler.schedule(0.0)
    assert house.scheduler.finish("a", "abort") is a
    assert a.cache is not None, "the runner still writes it"
    assert house.scheduler.apply(NullRunner().run(plan)) == [b]
    assert a.status is RequestStatus.FINISHED
    assert a.num_output_tokens == 0
    assert house.scheduler.running == [b]
    audit(house.core)


def test_finish_during_a_step_that_fails():
    house = House()
    a, b = house.add("a", range(30), 3), house.add("b", range(100, 110), 3)
    house.scheduler.schedule(0.0)
    house.scheduler.finish("a", "abort")
    assert house.scheduler.abandon("it died") == [a]
    assert list(house.scheduler.waiting) == [b]
    assert house.core.num_active == 0
    audit(house.core)


def test_who_leaned_on_a_cancelled_request_keeps_what_it_wrote():
    house = House()
    runner = ShadowRunner(house.scheduler)
    house.add("writes", [1, 0, 2, 2, 1, 0, 0, 1, 2], 4)
    leans = house.add("leans", [1, 0, 2, 2, 1, 0, 0, 1, 0], 4)
    expected = alone(leans)
    plan = house.scheduler.schedule(0.0)
    assert plan.starts == [0, 8]
    house.scheduler.finish("writes", "abort")
    house.scheduler.apply(runner.run(plan))
    house.run(runner)
    assert leans.output_token_ids == expected


# Failed.


def test_after_a_failed_step_the_admitted_wait_again_in_order():
    house = House()
    runner = ShadowRunner(house.scheduler)
    old = house.add("old", [1, 0, 2, 2, 1], 6)
    house.step(runner)
    new = [house.add(f"n{index}", [1, 0, 2, 2, 1, 0, 0, 1, index], 6) for index in range(3)]
    expected = [alone(request) for request in [old, *new]]
    plan = house.scheduler.schedule(0.0)
    runner.spoil(plan, plan.num_rows)
    assert house.scheduler.abandon("it died") == []
    assert house.scheduler.running == [old]
    assert list(house.scheduler.waiting) == new
    assert {request.status for request in new} == {RequestStatus.WAITING}
    assert house.events_of(StepAbandoned) == [StepAbandoned(plan.step_id, 4, "it died")]
    audit(house.core)
    house.run(runner)
    assert outputs_of(old, *new) == expected


def test_three_failed_steps_in_a_row_end_a_request():
    house = House()
    request = house.add("a", [1, 2, 3], 9)
    for failures in (2, 2):  # one that works between forgives
        for _ in range(failures):
            house.scheduler.schedule(0.0)
            assert house.scheduler.abandon("it died") == []
        house.step()
    for _ in range(2):
        house.scheduler.schedule(0.0)
        house.scheduler.abandon("it died")
    house.scheduler.schedule(0.0)
    assert house.scheduler.abandon("it died") == [request]
    assert request.finish_reason == "error"
    assert not house.scheduler.has_work
    assert house.core.num_active == 0


# Everything together, and our own bugs.


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "seqs", "budget"), [(24, 6, 17), (40, 3, 512), (200, 16, 16)])
def test_outputs_are_those_of_each_request_alone(num_blocks, seqs, budget, caching):
    rng = Random(num_blocks)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    prompts += [[*prompts[i % 6][: rng.randint(1, 40)], i % VOCAB_SIZE] for i in range(18)]
    expected = []
    for index, prompt in enumerate(prompts):
        house = House(num_blocks=200, seqs=1, budget=4096, caching=False)
        request = house.add("alone", prompt, 25, seed=index % 3)
        house.run(ShadowRunner(house.scheduler))
        assert request.output_token_ids == alone(request), "the twin of the twin"
        expected.append(request.output_token_ids)
    together = House(num_blocks=num_blocks, seqs=seqs, budget=budget, caching=caching)
    requests = [together.add(f"r{index}", prompt, 25, seed=index % 3) for index, prompt in enumerate(prompts)]
    together.run(ShadowRunner(together.scheduler))
    assert outputs_of(*requests) == expected


def test_our_own_bugs_are_asserted():
    house = House()
    house.add("a", [1], 3)
    with pytest.raises(AssertionError, match="in use"):
        house.add("a", [1], 3)
    house.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="one step at a time"):
        house.scheduler.schedule(0.0)
    house.scheduler.abandon("it died")
    with pytest.raises(AssertionError, match="no step is in flight"):
        house.scheduler.abandon("it died")
    with pytest.raises(AssertionError, match="needs a token"):
        Scheduler(house.core, SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=7))


def test_deadlines_of_requests_that_have_ended_are_forgotten():
    house = House()
    for number in range(500):
        house.add(str(number), [1, 2, 3], 1, deadline_s=1e9)
        house.run()
    assert len(house.scheduler._queues.deadlines) < 100
    late = house.add("late", [1, 2, 3], 1, deadline_s=0.0)
    assert house.scheduler.schedule(0.0).num_rows == 0
    assert house.scheduler.timed_out == [late]
