"""Nobody joins a block that a request has filled in the very step in which the model computed no numbers for it."""

from __future__ import annotations

import pytest

from pagefold.kv import KVCore, audit
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.steps import StepResult

SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def _scheduler(num_requests: int, prompt: list[int]) -> tuple[Scheduler, list[Request]]:
    """Return a scheduler with requests of one prompt."""
    scheduler = Scheduler(KVCore(64, block_size=SIZE), SchedulerLimits(8, 64))
    requests = [
        Request(f"r{at}", list(prompt), GREEDY, stop=StopRule(frozenset(), 40), namespace=b"n", seed=0)
        for at in range(num_requests)
    ]
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("length", [3, 6])  # what is filled is the first block of all, and one behind it
def test_who_fills_the_same_block_keeps_its_own(length, looks_ahead):
    scheduler, (bad, good, late) = _scheduler(3, list(range(1, length + 1)))
    core, filled = scheduler.core, -(-length // SIZE) * SIZE
    scheduler.schedule(0.0)
    while True:
        behind = scheduler.schedule_ahead(0.0) if looks_ahead else None
        plan_of_all = scheduler.in_step if behind is None else scheduler._flight.first.requests
        rows = list(plan_of_all)
        starts, tokens = scheduler._flight.first.plan.starts, scheduler._flight.first.plan.num_tokens
        ends = [start + num for start, num in zip(starts, tokens, strict=True)]
        num_sampled = len(scheduler._flight.first.plan.sampling_rows)
        if min(ends) >= filled:
            break
        scheduler.apply(StepResult([0] * num_sampled))
        audit(core)
        if behind is None:
            scheduler.schedule(0.0)
    assert rows == [bad, good, late], "all fill the block in one step"
    assert ends == [filled] * 3
    at = filled // SIZE - 1
    own = [request.cache.only_table.block_ids[at] for request in rows]
    assert len(set(own)) == 3, "each has filled a block of its own"
    scheduler.apply(StepResult([0] * num_sampled, corrupted=[0]))
    audit(core)
    assert bad.finish_reason == "error"
    if behind is not None:
        scheduler.apply(StepResult([0] * len(behind.sampling_rows)))
        audit(core)
    assert good.cache.only_table.block_ids[at] != own[0]
    assert late.cache.only_table.block_ids[at] != own[0]
    assert good.finish_reason is late.finish_reason is None
    for _ in range(2 * SIZE):
        plan = scheduler.schedule(0.0)
        assert own[0] not in {ids for row in plan.block_ids for ids in row[: at + 1]}
        scheduler.apply(StepResult([0] * len(plan.sampling_rows)))
        audit(core)
    hit = core.match(b"n", good.packed(), filled)
    assert len(hit.nodes) == (filled // SIZE if length < SIZE else 0), "only who began without it is found"
