"""Quotas in the scheduler: who waits for whose cap, who keeps what behind a burst, who is preempted for whom."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from test_scheduler import House

from pagefold.events import PinDropped, PrefixLookup, RequestPreempted, StepPlanned
from pagefold.kv import NO_QUOTAS, KVQuota, PinLimits, Quotas, audit, make_policy
from pagefold.request import RequestStatus, WarmUp
from pagefold.scheduler import SCHEDULING_POLICIES, Scheduler, SchedulerLimits
from pagefold.sim.shadow_runner import ShadowRunner, alone

if TYPE_CHECKING:
    from pagefold.request import Request

SIZE = 4
POLICIES = ["fcfs", "fair", "lpm", "priority"]


class QuotaHouse(House):
    """A house whose tenants have quotas; each tenant's cache is its own."""

    def __init__(
        self, num_blocks: int, quotas: dict[str, KVQuota], *, scheduling: str = "fcfs", seqs: int = 8, **parts
    ) -> None:
        core_quotas = Quotas() if quotas else NO_QUOTAS
        make = partial(make_policy, "lru")
        super().__init__(
            num_blocks, size=SIZE, seqs=seqs, quotas=core_quotas, policy=core_quotas.policy(make(), make), **parts
        )
        self.quotas = quotas
        limits, policy = SchedulerLimits(seqs, 64), SCHEDULING_POLICIES[scheduling](1.0)
        self.scheduler = Scheduler(self.core, limits, policy=policy, emit=self.events.append)
        self.num_sent = 0

    def send(self, tenant: str, num_prompt: int, num_new: int = 4, first: int | None = None, **more) -> Request:
        """Add a request whose prompt is its own, unless ``first`` says which."""
        self.num_sent += 1
        begin = 1000 * self.num_sent if first is None else first
        name = f"{tenant}{self.num_sent}"
        tokens = range(begin, begin + num_prompt)
        return self.add(
            name, tokens, num_new, tenant=tenant, namespace=tenant.encode(), quota=self.quotas.get(tenant), **more
        )

    def num_steps_until_first_token(self, request: Request) -> int:
        for number in range(1, 500):
            self.step()
            if request.num_output_tokens:
                return number
        pytest.fail(f"{request} never gets a token")

    def num_found(self, request: Request) -> int:
        return next(
            each.num_hit_tokens for each in self.events_of(PrefixLookup) if each.request_id == request.request_id
        )

    @property
    def preempted(self) -> list[tuple[str, str]]:
        return [(each.request_id, each.cause_request_id) for each in self.events_of(RequestPreempted)]


# A cap.


@pytest.mark.parametrize("scheduling", POLICIES)
def test_a_tenant_at_its_cap_does_not_delay_another(scheduling: str) -> None:
    """Its burst has a quarter of the memory; who comes behind it is let in with the next step, as alone."""
    house = QuotaHouse(40, {"burst": KVQuota(0, 10)}, scheduling=scheduling)
    for _ in range(20):
        house.send("burst", 16, 12)
    for _ in range(3):
        house.step()
    other = house.send("other", 16)
    assert house.num_steps_until_first_token(other) == 1
    told = [event for event in house.events_of(StepPlanned) if event.waits_for is not None]
    assert told[0].waits_for == "kv_cap"
    assert told[0].capped == {"burst"}
    house.run()
    assert other.status is RequestStatus.FINISHED
    assert all(victim[:5] == cause[:5] == "burst" for victim, cause in house.preempted), "its own, when they grow"


def test_without_a_cap_it_does() -> None:
    """A control: the same burst, and who comes behind it waits."""
    house = QuotaHouse(40, {})
    for _ in range(20):
        house.send("burst", 16, 12)
    for _ in range(3):
        house.step()
    assert house.num_steps_until_first_token(house.send("other", 16)) > 10


@pytest.mark.parametrize("scheduling", POLICIES)
def test_every_request_of_a_capped_tenant_ends_as_it_does_alone(scheduling: str) -> None:
    house = QuotaHouse(30, {"a": KVQuota(2, 7), "b": KVQuota(6, 12)}, scheduling=scheduling)
    requests = [house.send("abc"[number % 3], 5 + number % 9, 2 + number % 14, seed=number) for number in range(30)]
    expected = [alone(request) for request in requests]
    runner = ShadowRunner(house.scheduler)
    num_steps = 0
    while house.scheduler.has_work:
        house.step(runner)
        num_steps += 1
        assert num_steps < 2000
        assert house.core.quotas.of("a").num_blocks <= 7
        assert house.core.quotas.of("b").num_blocks <= 12
    assert [request.output_token_ids for request in requests] == expected


def test_who_runs_beyond_its_cap_preempts_its_own_tenants_last() -> None:
    """Two that grow: when both no longer fit below the cap, the second goes, and the other tenant is let alone."""
    house = QuotaHouse(40, {"a": KVQuota(0, 6)})
    other = house.send("b", 8, 30)
    first, second = house.send("a", 8, 14), house.send("a", 8, 14)
    house.step()
    assert {one.status for one in (other, first, second)} == {RequestStatus.RUNNING}
    house.run()
    assert house.preempted[0] == (second.request_id, first.request_id)
    assert {victim for victim, _ in house.preempted} == {second.request_id}
    assert house.core.quotas.of("a").num_blocks <= 6


def test_who_runs_beyond_its_cap_has_its_own_cached_blocks_evicted_first() -> None:
    house = QuotaHouse(40, {"a": KVQuota(0, 6)})
    house.send("a", 8, 1)
    house.send("b", 8, 1)
    house.run()
    house.send("a", 8, 14)
    house.run()
    assert house.preempted == []
    again = house.send("b", 8, 1, first=2000)
    house.run()
    assert house.num_found(again) == 7, "another's stay"


def test_at_its_cap_a_tenant_gives_up_its_own_pins_and_nobody_elses() -> None:
    house = QuotaHouse(40, {"a": KVQuota(0, 6)}, pin_limits=PinLimits(0.9))
    for tenant in "ab":
        house.send(tenant, 16, 1, warm_up=WarmUp(pin=True))
    house.run()
    assert len(house.core.pins) == 2
    house.send("a", 16, 4)
    house.run()
    assert [event.pin_id for event in house.events_of(PinDropped)] == ["a1"]


def test_who_waits_for_its_cap_makes_nobody_make_way() -> None:
    """Where tenants have shares: the head is who could be let in."""
    house = QuotaHouse(24, {"small": KVQuota(0, 5)}, scheduling="fair", seqs=8)
    burst = [house.send("burst", 20, 20, weight=1.0) for _ in range(2)]
    house.send("small", 12, 6, weight=100.0)
    house.step()
    house.send("small", 12, 6, weight=100.0)
    for _ in range(3):
        house.step()
    assert house.preempted == []
    assert {one.status for one in burst} == {RequestStatus.RUNNING}
    house.run()


# A floor.


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("scheduling", POLICIES)
def test_a_tenant_with_a_floor_finds_its_prefix_behind_anothers_burst(scheduling: str) -> None:
    for quotas, num_found in (({"quiet": KVQuota(8)}, 28), ({}, 0)):
        house = QuotaHouse(40, quotas, scheduling=scheduling)
        house.send("quiet", 30, 1, first=7)
        house.run()
        for _ in range(30):
            house.send("burst", 40, 12)
        house.run()
        again = house.send("quiet", 30, 1, first=7)
        house.run()
        assert house.num_found(again) == num_found
        audit(house.core)


@pytest.mark.parametrize("has_floor", [True, False])
def test_who_has_no_more_than_its_floor_is_not_preempted_for_another(has_floor: bool) -> None:
    """It came last, and others grow: then one of them goes itself. Without a floor it is its turn."""
    house = QuotaHouse(12, {"kept": KVQuota(5)} if has_floor else {})
    _, second = house.send("other", 12, 8), house.send("other", 12, 8)
    kept = house.send("kept", 17, 3)
    house.step()
    assert kept.status is RequestStatus.RUNNING
    house.run()
    victim = second if has_floor else kept
    assert house.preempted[0] == (victim.request_id, second.request_id)
    assert bool(kept.num_preemptions) != has_floor


def test_pins_below_a_floor_are_not_given_up_for_another() -> None:
    """They would only make blocks evictable that it cannot have: its own go, or those of who has more."""
    house = QuotaHouse(16, {"kept": KVQuota(6)}, pin_limits=PinLimits(0.9))
    house.send("kept", 20, 1, warm_up=WarmUp(pin=True))
    house.send("other", 12, 1, warm_up=WarmUp(pin=True))
    house.run()
    house.send("third", 36, 2)
    house.run()
    assert [event.pin_id for event in house.events_of(PinDropped)] == ["other2"]
    assert house.core.quotas.of("kept").num_blocks == 5


def test_pinned_blocks_and_floors_do_not_lock_the_cache() -> None:
    """All that may be pinned is, beside floors: the largest request that fits beside the floors is served."""
    house = QuotaHouse(20, {"a": KVQuota(5), "b": KVQuota(5)}, pin_limits=PinLimits(1.0))
    for tenant in "abc":
        house.send(tenant, 24, 1, warm_up=WarmUp(pin=True))
    house.run()
    largest = house.send("c", 36, 4)
    house.run()
    assert largest.finish_reason == "length"
    assert house.core.quotas.of("a").num_blocks >= 5
    assert house.core.quotas.of("b").num_blocks >= 5
