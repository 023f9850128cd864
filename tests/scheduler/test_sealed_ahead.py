"""Steps planned ahead where blocks are sealed: whose seat is free when, what is lost; and how a step is committed."""

from __future__ import annotations

from array import array

import pytest

from pagefold.kv import NO_RESIDUALS, KVCore, Namespace, Residuals, audit
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.scheduler.committing import commit
from pagefold.steps import StepResult

NAMESPACE = Namespace("m", "l", "d").key()
SIZE = 4


def scheduler_of(max_num_seqs, *, seals):
    core = KVCore(32, block_size=SIZE, residuals=Residuals(max_num_seqs, SIZE) if seals else NO_RESIDUALS)
    return Scheduler(core, SchedulerLimits(max_num_seqs, 16))


def add(scheduler, request_id, num_prompt_tokens, num_new):
    stop = StopRule(frozenset(), num_prompt_tokens + num_new)
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    tokens = list(range(num_prompt_tokens))
    request = Request(request_id, tokens, sampling, stop=stop, namespace=NAMESPACE, arrival_s=0.0)
    scheduler.add(request)
    return request


@pytest.mark.parametrize("seals", [False, True])
def test_a_seat_is_free_ahead_unless_a_residual_goes_with_it(seals):
    scheduler = scheduler_of(2, seals=seals)
    add(scheduler, "stays", 3, 9)
    add(scheduler, "leaves", 3, 1)
    waits = add(scheduler, "waits", 3, 1)
    assert scheduler.schedule(0.0).num_rows == 2
    ahead = scheduler.schedule_ahead(0.0)
    assert ahead is not None
    assert ahead.num_rows == (1 if seals else 2)
    assert (waits in scheduler.waiting) is seals
    scheduler.apply(StepResult([7, 7]))
    scheduler.apply(StepResult([8] * ahead.num_rows))
    scheduler.schedule(0.0)
    assert waits not in scheduler.waiting
    audit(scheduler.core)


@pytest.mark.parametrize(("num_prompt_tokens", "left"), [(SIZE + 1, SIZE + 1), (SIZE + 2, SIZE + 2), (SIZE + 3, SIZE)])
def test_only_who_has_begun_the_next_block_begins_the_last_one_again(num_prompt_tokens, left):
    """A step fails that writes one token, and one behind it."""
    scheduler = scheduler_of(1, seals=True)
    request = add(scheduler, "r", num_prompt_tokens, 9)
    scheduler.schedule(0.0)
    scheduler.apply(StepResult([7]))
    scheduler.schedule(0.0)
    assert scheduler.schedule_ahead(0.0) is not None
    scheduler.abandon("it died")
    assert request.num_computed_tokens == left
    assert request in scheduler.running
    assert request.num_preemptions == 0
    audit(scheduler.core)


def test_a_table_joins_what_is_promised_later_in_the_step():
    """Its first block is another's; its second is promised by who was planned behind it."""
    core = KVCore(32, block_size=SIZE)
    tokens = array("i", range(9)).tobytes()

    def begin(num_tokens):
        cache, start = core.acquire(core.match(NAMESPACE, tokens, num_tokens))
        assert core.extend(cache, start, 2 * SIZE)
        return cache

    first, late = begin(SIZE), begin(SIZE)
    promise = core.publishing.promise(first, tokens, SIZE)
    commit(core, [promise], None)
    promises = [core.publishing.promise(late, tokens, 2 * SIZE)]
    behind = begin(SIZE)
    promises.append(core.publishing.promise(behind, tokens, 2 * SIZE))
    commit(core, promises, None)
    assert late.num_published == 2
    assert late.only_table.block_ids == behind.only_table.block_ids
    audit(core)


def test_who_asks_for_no_output_keeps_its_seat_until_its_prompt_is_computed():
    scheduler = scheduler_of(2, seals=False)
    add(scheduler, "stays", 3, 9)
    long = add(scheduler, "long", 40, 0)
    add(scheduler, "waits", 3, 1)
    scheduler.schedule(0.0)
    for num_tokens in (15, 12):  # behind 13, in steps of 16 together with who stays
        ahead = scheduler.schedule_ahead(0.0)
        assert ahead.num_tokens == [1, num_tokens]
        assert scheduler.in_step[1] is long
        scheduler.apply(StepResult([7]))
    scheduler.apply(StepResult([7, 7]))
    assert long.finish_reason == "length"
    assert long.output_token_ids == []
    audit(scheduler.core)
