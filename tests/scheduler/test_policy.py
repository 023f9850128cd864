"""Scheduling policies: who goes first, who gives way, and that nobody waits for ever."""

from __future__ import annotations

from itertools import permutations

import pytest
from test_scheduler import House, new_request

from pagefold.kv import audit
from pagefold.scheduler import SCHEDULING_POLICIES, Scheduler, SchedulerLimits
from pagefold.sim.shadow_runner import ShadowRunner, alone


class PriorityHouse(House):
    """A house whose scheduler looks at priorities; ten seconds are worth a level."""

    def __init__(self, num_blocks: int = 64, *, seqs: int = 1, budget: int = 64):
        super().__init__(num_blocks, seqs=seqs, budget=budget)
        limits = SchedulerLimits(seqs, budget)
        policy = SCHEDULING_POLICIES["priority"](10.0)
        self.scheduler = Scheduler(self.core, limits, policy=policy, emit=self.events.append)


def finished(house: House) -> list[str]:
    """Run everything; return the ids in the order in which they ended."""
    ended: list[str] = []
    while house.scheduler.has_work:
        before = [*house.scheduler.running, *house.scheduler.waiting]
        house.step()
        ended += [request.request_id for request in before if request.finish_reason is not None]
    return ended


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_smallest_priority_goes_first(order):
    house = PriorityHouse()
    for priority in order:
        house.add(f"p{priority}", [1, 2, priority], priority=priority - 2)
    assert finished(house) == ["p0", "p1", "p2", "p3"]


def test_equals_go_in_order_of_arrival():
    house = PriorityHouse()
    for index in range(4):
        house.add(f"r{index}", [1, 2, index], priority=7)
    assert finished(house) == ["r0", "r1", "r2", "r3"]


def test_first_come_first_served_looks_at_no_priority():
    house = House(seqs=1)
    for index, priority in enumerate((5, 0, -5)):
        house.add(f"r{index}", [1, 2, index], priority=priority)
    assert finished(house) == ["r0", "r1", "r2"]


@pytest.mark.parametrize(("waited_s", "first"), [(9.0, "urgent"), (11.0, "old")])
def test_ten_seconds_of_waiting_are_worth_a_level(waited_s, first):
    house = PriorityHouse()
    house.add("old", [1, 2], priority=1, arrival_s=100.0)
    house.add("urgent", [3, 4], priority=0, arrival_s=100.0 + waited_s)
    assert finished(house)[0] == first


def test_a_stream_of_urgent_requests_starves_nobody():
    house = PriorityHouse()
    house.add("patient", [1, 2, 3], 2, priority=3, arrival_s=0.0)
    for second in range(1000):
        house.add(f"u{second}", [2, second % 3], 2, priority=0, arrival_s=float(second))
        house.step()
        if house.scheduler.get("patient") is None:
            break
    assert 30 <= second <= 70, "three levels of ten seconds, and a queue of those that came before"


def test_the_least_urgent_gives_way_and_comes_back():
    house = PriorityHouse(num_blocks=8, seqs=3)
    runner = ShadowRunner(house.scheduler)
    low = house.add("low", [1, 0, 2, 2], 16, priority=9)
    house.step(runner)
    high = house.add("high", [2, 2, 0, 1], 16, priority=0)
    middle = house.add("middle", [0, 1, 2, 0], 16, priority=5)
    expected = [alone(request) for request in (low, high, middle)]
    house.run(runner)
    assert [request.output_token_ids for request in (low, high, middle)] == expected
    assert high.num_preemptions == 0
    assert low.num_preemptions > 0


def test_what_a_failed_step_admitted_waits_in_its_place():
    house = PriorityHouse(seqs=2)
    old = house.add("old", [1, 2], 9, priority=3)
    house.step()
    house.add("later", [1, 2, 0], priority=4)
    house.scheduler.schedule(0.0)
    house.add("sooner", [2, 1, 0], priority=1)
    house.scheduler.abandon("it died")
    assert [request.request_id for request in house.scheduler.waiting] == ["sooner", "later"]
    assert house.scheduler.running == [old]
    audit(house.core)


# Deadlines.


def test_a_request_ends_when_its_time_is_up():
    house = House(seqs=1)
    running = house.add("running", [1, 2], 50, deadline_s=5.0)
    waiting = house.add("waiting", [1, 3], 50, deadline_s=5.0)
    house.add("patient", [1, 4], 3)
    house.step()
    plan = house.scheduler.schedule(5.0)
    assert house.scheduler.timed_out == [running, waiting]
    assert {request.finish_reason for request in (running, waiting)} == {"timeout"}
    assert plan.num_rows == 1
    house.scheduler.apply(ShadowRunner(house.scheduler).run(plan))
    assert house.scheduler.schedule(6.0).num_rows == 1
    assert house.scheduler.timed_out == []


def test_who_has_finished_is_not_late():
    house = House()
    request = house.add("a", [1, 2], 1, deadline_s=5.0)
    house.step()
    again = new_request("a", [1, 2], 3, deadline_s=9.0)
    house.scheduler.add(again)
    house.scheduler.schedule(7.0)
    assert house.scheduler.timed_out == []
    assert (request.finish_reason, again.finish_reason) == ("length", None)
    house.scheduler.abandon("it died")
    house.scheduler.schedule(9.0)
    assert house.scheduler.timed_out == [again]
    assert house.core.num_active == 0
