"""Who made a step fail ends, and nobody else: one culprit, several, all, and those that fail in company only."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import pytest
from test_parallel_sampling import add as add_samples
from test_scheduler import House

from pagefold.kv import audit
from pagefold.request import RequestStatus, WarmUp
from pagefold.scheduler.suspicion import MAX_FAILED_ALONE, MAX_FAILED_IN_A_ROW, MAX_FAILED_IN_COMPANY
from pagefold.sim.shadow_runner import ShadowRunner, alone

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.request import Request

NUM_REQUESTS = 128


class Course(NamedTuple):
    """What came of it: for each step its requests by name, and whether it failed."""

    steps: list[tuple[list[str], bool]]

    @property
    def num_failed(self) -> int:
        return sum(has_failed for _, has_failed in self.steps)

    def longest_wait(self, request_id: str) -> int:
        """The most steps in a row, from its first to its last, that had no row of it."""
        planned = [index for index, (names, _) in enumerate(self.steps) if request_id in names]
        return max((b - a - 1 for a, b in pairwise(planned)), default=0)


def run(
    house: House,
    is_poisonous: Callable[[set[str]], bool],
    *,
    before: Callable[[int], None] = lambda _: None,
    during: Callable[[int], None] = lambda _: None,
    looks_ahead: bool = False,
) -> Course:
    """Run to the end; a step fails if its requests are poisonous, half of what it was to write written."""
    scheduler, runner, course = house.scheduler, runner_of(house), Course([])
    while scheduler.has_work:
        before(len(course.steps))
        plan = scheduler.schedule(0.0)
        names = [request.request_id for request in scheduler.in_step]
        assert names, "there is work, and nothing is planned"
        if looks_ahead:
            behind = scheduler.schedule_ahead(0.0)
            assert behind is None or not scheduler.suspicion.is_on
        during(len(course.steps))
        has_failed = is_poisonous(set(names))
        course.steps.append((names, has_failed))
        if has_failed:
            runner.spoil(plan, plan.num_rows // 2)
            scheduler.abandon("it died")
        else:
            scheduler.apply(runner.run(plan))
            if looks_ahead and behind is not None:
                names = [request.request_id for request in scheduler.in_step]
                has_failed = is_poisonous(set(names))
                course.steps.append((names, has_failed))
                scheduler.abandon("it died") if has_failed else scheduler.apply(runner.run(behind))
        if has_failed:
            audit(house.core)
        assert len(course.steps) < 5_000, "it does not end"
    audit(house.core)
    assert house.core.num_active == 0
    return course


def runner_of(house: House) -> ShadowRunner:
    """The house's runner, which has the slab."""
    house.runner = getattr(house, "runner", None) or ShadowRunner(house.scheduler)
    return house.runner


def full_house(num_requests: int = NUM_REQUESTS, num_new: int = 7) -> tuple[House, list[Request]]:
    """A house in which so many requests run."""
    house = House(num_blocks=128 * (2 + num_new // 4), seqs=NUM_REQUESTS, budget=1024)
    requests = [house.add(f"r{index}", [1, 2, 0, index % 3, index // 3 % 5], num_new) for index in range(num_requests)]
    house.step(runner_of(house))
    assert len(house.scheduler.running) == num_requests
    return house, requests


def check_all_but(requests: list[Request], culprits: set[str]) -> None:
    for request in requests:
        if request.request_id in culprits:
            assert request.finish_reason == "error"
            assert request.error
        else:
            assert (request.finish_reason, request.error) == ("length", "")
            assert request.output_token_ids == alone(request)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("place", [0, 1, 42, 63, 64, 126, 127])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_one_among_127_ends_by_itself(place, looks_ahead):
    house, requests = full_house()
    course = run(house, lambda names: f"r{place}" in names, looks_ahead=looks_ahead)
    check_all_but(requests, {f"r{place}"})
    assert course.num_failed <= 11
    assert max(course.longest_wait(request.request_id) for request in requests) <= 16


def test_one_that_comes_to_127():
    house, requests = full_house(NUM_REQUESTS - 1)
    requests.append(house.add("new", [2, 2, 1], 7))
    course = run(house, lambda names: "new" in names)
    check_all_but(requests, {"new"})
    assert course.num_failed == 1 + MAX_FAILED_ALONE
    assert course.steps[1][0] == [f"r{index}" for index in range(NUM_REQUESTS - 1)], "without the newly admitted"


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    "places",
    [(0, 1, 2), (5, 64, 127), (125, 126, 127), (31, 32, 33), range(0, 128, 8), range(20)],
    ids=str,
)
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_several_at_once(places, looks_ahead):
    house, requests = full_house()
    culprits = {f"r{place}" for place in places}
    course = run(house, lambda names: not culprits.isdisjoint(names), looks_ahead=looks_ahead)
    check_all_but(requests, culprits)
    assert course.num_failed <= 1 + len(culprits) * (8 + MAX_FAILED_ALONE)


@pytest.mark.parametrize("num_requests", [1, 2, 3, 5, 8, 40, 128])
def test_a_device_that_is_dead_ends_all_after_16_steps(num_requests):
    house, requests = full_house(num_requests)
    waits = house.add("waits", [1, 1], 3) if num_requests == NUM_REQUESTS else None
    is_dead = True

    def comes_back(_: int) -> None:
        nonlocal is_dead
        is_dead = any(request.finish_reason is None for request in requests)

    course = run(house, lambda _: is_dead, before=comes_back)
    assert {request.finish_reason for request in requests} == {"error"}
    assert course.num_failed <= MAX_FAILED_IN_A_ROW
    if waits is not None:
        check_all_but([waits], set())
        assert requests[0].error == "16 steps in a row failed, whoever was in them"


def test_failed_steps_count_in_a_row_only():
    """One bad request after another, with good steps between: the device is never at fault."""
    house = House(num_blocks=64)
    for number in range(MAX_FAILED_IN_A_ROW):
        bad = house.add(f"bad {number}", [1, 2, 3], 4)
        run(house, lambda names, bad=bad: bad.request_id in names)
        assert bad.finish_reason == "error"
        good = house.add(f"good {number}", [4, 5, 6], 4)
        run(house, lambda _: False)
        assert good.finish_reason == "length"
        assert house.scheduler.suspicion.num_failed_in_a_row == 0


def test_two_mishaps_are_forgiven():
    house, requests = full_house(3)
    calls = iter([True, True, False, True, True, False])
    run(house, lambda _: next(calls, False))
    check_all_but(requests, set())


@pytest.mark.parametrize("pair", [("r0", "r127"), ("r3", "r4"), ("r90", "r20")])
def test_two_that_fail_only_together(pair):
    house, requests = full_house(num_new=40)
    course = run(house, lambda names: names.issuperset(pair))
    ended = {request.request_id for request in requests if request.finish_reason == "error"}
    assert len(ended) == 1
    assert ended < set(pair)
    check_all_but(requests, ended)
    (loser,) = (request for request in requests if request.request_id in ended)
    assert "and others" in loser.error
    assert MAX_FAILED_IN_COMPANY < course.num_failed <= 7 + 2 * MAX_FAILED_IN_COMPANY


def test_several_pairs_and_a_culprit_at_once():
    house, requests = full_house(num_new=90)
    pairs = [("r1", "r100"), ("r2", "r50"), ("r70", "r71")]
    course = run(house, lambda names: "r33" in names or any(names.issuperset(pair) for pair in pairs))
    ended = {request.request_id for request in requests if request.finish_reason == "error"}
    assert len(ended) == 4
    assert "r33" in ended
    check_all_but(requests, ended)
    assert course.num_failed <= 60


def test_who_comes_during_the_search_is_admitted_when_it_is_over():
    house, requests = full_house(100)

    def before(num_steps: int) -> None:
        if num_steps in {1, 3, 5}:
            requests.append(house.add(f"new{num_steps}", [3, num_steps % 5], 4))

    course = run(house, lambda names: "r7" in names, before=before)
    check_all_but(requests, {"r7"})
    firsts = [next(i for i, (names, _) in enumerate(course.steps) if f"new{n}" in names) for n in (1, 3, 5)]
    lasts = [index for index, (names, _) in enumerate(course.steps) if "r7" in names]
    assert min(firsts) > lasts[-1]


def test_a_search_goes_on_without_who_is_cancelled():
    """The culprit before it is found; who is held back, during a step that has no row of it; and who is tried."""
    house, requests = full_house(16)
    cancelled = set()

    def during(num_steps: int) -> None:
        set_aside = [request for request in house.scheduler.running if request not in house.scheduler.in_step]
        victims = [*set_aside[-1:], *house.scheduler.in_step[:1]] if num_steps == 1 else []
        for victim in victims:
            house.scheduler.finish(victim.request_id, "abort")
            cancelled.add(victim.request_id)
            assert victim.is_aborted == (victim in house.scheduler.in_step)
            assert (victim.status is RequestStatus.FINISHED) == (victim not in house.scheduler.in_step)

    run(house, lambda names: "r9" in names, during=during)
    assert len(cancelled) == 2
    check_all_but([request for request in requests if request.request_id not in cancelled], {"r9"})
    assert {request.finish_reason for request in requests if request.request_id in cancelled} == {"abort"}


def test_a_culprit_that_is_cancelled_ends_the_search():
    house, requests = full_house(16)

    def before(num_steps: int) -> None:
        if num_steps == 3:
            house.scheduler.finish("r9", "abort")

    course = run(house, lambda names: "r9" in names, before=before)
    check_all_but([request for request in requests if request.request_id != "r9"], set())
    assert not house.scheduler.suspicion.is_on
    assert course.num_failed <= 3


@pytest.mark.parametrize("num_blocks", [9, 12, 16, 24])
def test_where_memory_is_short_people_are_preempted_in_the_search_too(num_blocks):
    house = House(num_blocks=num_blocks, seqs=6, budget=32)
    requests = [house.add(f"r{index}", [index % 3, 1, index], 20) for index in range(6)]
    run(house, lambda names: "r2" in names or "r5" in names)
    check_all_but(requests, {"r2", "r5"})


def test_samples_are_forked_in_the_search_and_suspected_one_by_one():
    house = House(num_blocks=256, seqs=16)
    requests = [house.add(f"r{index}", [index % 3, 1, 2], 9) for index in range(4)]
    house.step(runner_of(house))
    samples = add_samples(house, "s", range(10), 3)
    others = add_samples(house, "t", [1, 2, 2], 3)
    run(house, lambda names: "s/1" in names or "r0" in names)
    check_all_but([*requests, *samples, *others], {"s/1", "r0"})


def test_samples_of_a_poisonous_prompt_all_end():
    house = House(num_blocks=256, seqs=16)
    requests = [house.add(f"r{index}", [index % 3, 1, 2], 9) for index in range(4)]
    house.step(runner_of(house))
    samples = add_samples(house, "s", range(10), 3)
    run(house, lambda names: "s" in names)
    check_all_but([*requests, samples[0]], {"s"})
    assert {sample.finish_reason for sample in samples} == {"error"}


def test_who_leans_on_the_promise_of_a_culprit_computes_it():
    house = House(num_blocks=256, seqs=16)
    prompt = [1, 2, 0, 1, 2, 2, 0, 0, 1, 1]
    requests = [house.add(f"r{index}", [*prompt, index], 6) for index in range(6)]
    plan = house.scheduler.schedule(0.0)
    assert plan.starts[1:] == [8] * 5
    house.scheduler.abandon("it died")
    run(house, lambda names: "r0" in names)
    check_all_but(requests, {"r0"})


def test_warm_ups_are_suspected_like_others():
    house = House(num_blocks=256, seqs=16)
    requests = [
        house.add(f"r{index}", [index % 3, index // 3, 2, 2, 1], 1, warm_up=WarmUp(pin=True)) for index in range(6)
    ]
    run(house, lambda names: "r3" in names)
    check_all_but(requests, {"r3"})
    assert {pin.pin_id for pin in house.core.pins} == {request.request_id for request in requests} - {"r3"}


def test_damage_and_interrupts_are_nobodys_fault_and_the_search_goes_on_behind_them():
    house, requests = full_house(8)
    scheduler, runner = house.scheduler, runner_of(house)
    for _ in range(MAX_FAILED_IN_A_ROW + 1):
        scheduler.schedule(0.0)
        assert scheduler.abandon("KeyboardInterrupt", is_blamed=False) == []
        assert not scheduler.suspicion.is_on
    scheduler.schedule(0.0)
    scheduler.abandon("it died")
    tried = None
    for _ in range(MAX_FAILED_IN_A_ROW + 1):
        scheduler.schedule(0.0)
        assert tried in {None, *map(tuple, [scheduler.in_step])}
        tried = tuple(scheduler.in_step)
        assert scheduler.abandon("damaged", frozenset({0})) == []
    assert tried == tuple(requests[:4])
    runner.run(scheduler.schedule(0.0))
    scheduler.abandon("", is_blamed=False)
    run(house, lambda _: False)
    check_all_but(requests, set())


def test_slots_of_who_is_held_back_count_as_wasted():
    house, requests = full_house(8)
    scheduler = house.scheduler
    scheduler.schedule(0.0)
    scheduler.abandon("it died")
    scheduler.schedule(0.0)
    assert len(scheduler.in_step) == 4
    ends = {request: request.num_computed_tokens + (request in scheduler.in_step) for request in requests}
    assert scheduler.num_wasted_slots == sum(request.cache.capacity - end for request, end in ends.items())
