"""Virtual time, the generated workload, and what a replay reports."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pagefold.errors import BudgetTooSmallError
from pagefold.kv import KVCore, audit
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import (
    ChatWorkload,
    LinearStepCost,
    NullRunner,
    SimConfig,
    Tally,
    VirtualClock,
    hashed_token,
    replay,
    simulate,
)
from pagefold.steps import StepPlan

SMALL = ChatWorkload(num_chats=30, chats_per_s=10.0)


def request_of(name: str, num_prompt: int, num_output: int, *, at_s: float = 0.0, first: int = 0) -> Request:
    stop = StopRule(frozenset(), num_prompt + num_output)
    return Request(name, range(first, first + num_prompt), SamplingParams(), stop=stop, arrival_s=at_s)


def one_second(plan: StepPlan) -> float:
    """Return what every step takes."""
    return 1.0


# Time and tokens.


def test_the_clock_goes_forward_only():
    clock = VirtualClock()
    assert clock() == 0.0
    clock.advance(1.5)
    clock.advance_to(1.0)
    assert clock() == 1.5
    clock.advance_to(2.0)
    assert clock() == 2.0
    with pytest.raises(AssertionError, match="back"):
        clock.advance(-1)


def test_the_null_runner_samples_by_seed_and_draw():
    plan = StepPlan(0, seeds=[3, 4], draws=[0, 9])
    assert NullRunner().run(plan).token_ids == [hashed_token(3, 0), hashed_token(4, 9)]
    assert NullRunner(lambda seed, draw: seed + draw).run(plan).token_ids == [3, 13]
    assert len({hashed_token(seed, draw) for seed in range(100) for draw in range(100)}) == 10_000
    assert all(0 <= hashed_token(seed, 5) < 2**30 for seed in (-(2**60), -1, 2**63))


def test_a_step_costs_its_tokens_and_its_context():
    plan = StepPlan(0, starts=[0, 100], num_tokens=[10, 1])
    plan.token_ids.extend(range(11))
    cost = LinearStepCost(step_s=1.0, token_s=0.1, context_token_s=0.01)
    assert cost(plan) == pytest.approx(1.0 + 11 * 0.1 + 111 * 0.01)


# The workload.


def test_equal_parameters_make_equal_requests():
    def facts(workload: ChatWorkload) -> list[tuple[object, ...]]:
        return [
            (request.request_id, request.arrival_s, request.seed, request.stop, request.packed())
            for request in workload.requests()
        ]

    assert facts(SMALL) == facts(SMALL)
    assert facts(SMALL) != facts(ChatWorkload(num_chats=30, chats_per_s=10.0, seed=1))


def test_a_turn_goes_on_from_what_the_null_runner_answered():
    requests = SMALL.requests()
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    chats: dict[str, list[Request]] = {}
    for request in requests:
        chats.setdefault(request.request_id.split("-turn-")[0], []).append(request)
    assert len(chats) == 30
    assert len({len(turns) for turns in chats.values()}) > 1
    for turns in chats.values():
        for before, after in pairwise(turns):
            num_answer = before.stop.max_total_tokens - before.num_tokens
            said = [*before.token_ids, *(hashed_token(before.seed, draw) for draw in range(num_answer))]
            assert list(after.token_ids[: len(said)]) == said
            assert 15 <= after.num_tokens - len(said) <= 120
            assert after.arrival_s > before.arrival_s
    assert len({bytes(turns[0].packed()[: 300 * 4]) for turns in chats.values()}) == SMALL.num_system_prompts


# The replay.


def test_a_replay_by_hand():
    """Two requests, 4 tokens a block, a second a step: every figure can be counted."""
    tally = Tally()
    core = KVCore(10, block_size=4, emit=tally)
    scheduler = Scheduler(core, SchedulerLimits(4, 64), emit=tally)
    requests = [request_of("late", 10, 2, at_s=10.0), request_of("early", 8, 3)]
    clock = VirtualClock()
    report = replay(requests, scheduler, NullRunner(), clock, one_second, tally=tally)
    audit(core)
    assert clock() == 12.0
    assert report.num_requests == 2
    assert report.num_steps == 5
    assert report.duration_s == 12.0
    assert report.num_asked_tokens == 18
    assert report.num_hit_tokens == 8
    assert report.hit_share == 8 / 18
    assert report.num_computed_tokens == 10
    assert report.num_recomputed_tokens == 0
    assert report.num_output_tokens == 5
    assert report.num_preemptions == 0
    assert report.num_evictions == {}
    # After the five steps: early has 8 of 8, then 9 of 12 positions, and ends; late has 10 of 12, and ends.
    assert report.mean_use == pytest.approx((2 + 3 + 0 + 3 + 0) / 5 / 10)
    assert report.peak_use == 0.3
    assert report.waste == pytest.approx((0 + 3 + 2) / (8 + 12 + 12))
    assert report.mean_resident_tokens == pytest.approx((8 + 9 + 10) / 3)
    assert (report.ttft_p50_s, report.ttft_p95_s) == (1.0, 1.0)
    assert [sample.num_active for sample in report.samples] == [2, 3, 0, 3, 0]
    assert all(sample[1] + sample[2] + sample[3] == 10 for sample in report.samples)


def test_time_to_first_token_counts_the_queue():
    requests = [request_of(f"r{index}", 4, 2, first=100 * index) for index in range(10)]
    report = simulate(requests, SimConfig(num_blocks=100, max_num_seqs=1), step_cost=one_second)
    assert report.ttft_p50_s == 9.0  # 1, 3, 5, ...: nearest rank
    assert report.ttft_p95_s == 19.0
    assert report.duration_s == 20.0


def test_the_same_replay_gives_the_same_report():
    config = SimConfig(num_blocks=300)
    assert simulate(SMALL.requests(), config) == simulate(SMALL.requests(), config)


def test_outputs_are_what_the_workload_said_they_would_be():
    requests = SMALL.requests()
    simulate(requests, SimConfig(num_blocks=150, max_num_seqs=16))
    for request in requests:
        num_answer = request.stop.max_total_tokens - request.num_prompt_tokens
        assert request.output_token_ids == [hashed_token(request.seed, draw) for draw in range(num_answer)]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_figures_agree_with_the_requests(policy):
    requests = SMALL.requests()
    report = simulate(requests, SimConfig(num_blocks=150, eviction_policy=policy))
    assert report.num_requests == len(requests)
    assert report.num_asked_tokens == sum(request.num_prompt_tokens for request in requests)
    assert report.num_hit_tokens == sum(request.num_cached_tokens for request in requests)
    assert report.num_output_tokens == sum(request.num_output_tokens for request in requests)
    assert report.num_preemptions == sum(request.num_preemptions for request in requests)
    assert 0 < report.mean_use <= report.peak_use <= 1
    assert report.num_evictions["allocation"] > 0
    if not report.num_preemptions:
        assert report.num_computed_tokens == report.num_asked_tokens - report.num_hit_tokens


def test_sharing_computes_less_and_holds_less():
    shared = simulate(SMALL.requests(), SimConfig(num_blocks=2000))
    alone = simulate(SMALL.requests(), SimConfig(num_blocks=2000, enable_prefix_caching=False))
    assert alone.num_hit_tokens == 0
    assert alone.num_computed_tokens == alone.num_asked_tokens
    assert shared.num_computed_tokens < 0.4 * alone.num_computed_tokens
    assert shared.mean_use < alone.mean_use
    assert shared.ttft_p95_s < alone.ttft_p95_s


def test_samples_are_thinned_out_evenly():
    report = simulate([request_of("long", 1, 5000)], SimConfig(num_blocks=400), step_cost=one_second)
    assert report.num_steps == 5000
    times = [sample.time_s for sample in report.samples]
    assert 512 <= len(times) <= 1024
    assert {after - before for before, after in pairwise(times)} == {8.0}


def test_a_request_that_can_never_fit_is_refused_before_anything_runs():
    requests = [request_of("fits", 10, 6), request_of("does not", 100, 29)]
    with pytest.raises(BudgetTooSmallError, match=r"129 tokens, needs 9\. Give at least 9 blocks"):
        simulate(requests, SimConfig(num_blocks=8))
    assert simulate(requests, SimConfig(num_blocks=9)).num_requests == 2


def test_nothing_to_replay_is_a_report_of_nothing():
    report = simulate([], SimConfig(num_blocks=8))
    assert report.num_requests == 0
    assert (report.hit_share, report.waste, report.mean_use, report.ttft_p95_s) == (0.0, 0.0, 0.0, 0.0)
