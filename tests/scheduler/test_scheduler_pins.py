"""Warm-ups and pins in the scheduler: who gives way for whom. Random orders are test_scheduler_machine.py's."""

from __future__ import annotations

from pagefold.events import RequestPreempted
from pagefold.kv import KVCore, Namespace, PinLimits, audit
from pagefold.request import Request, StopRule, WarmUp
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim.shadow_runner import ShadowRunner

NS = Namespace(model="m").key()
SAMPLING = SamplingParams(temperature=0.0, max_tokens=None)


class World:
    """Sixteen blocks of four tokens, all of which may be pinned."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.events = []
        limits = PinLimits(max_share=1.0, half_life_s=100.0)
        self.core = KVCore(num_blocks, block_size=4, pin_limits=limits, emit=self.events.append)
        self.scheduler = Scheduler(self.core, SchedulerLimits(4, 64), emit=self.events.append)
        self.runner = ShadowRunner(self.scheduler)
        self.now = 0.0

    def add(self, name: str, tokens: range, num_output: int, warm_up: WarmUp | None = None) -> Request:
        stop = StopRule(frozenset(), len(tokens) + num_output)
        request = Request(name, tokens, SAMPLING, stop=stop, namespace=NS, warm_up=warm_up)
        self.scheduler.add(request)
        return request

    def pin(self, name: str, tokens: range, **terms) -> Request:
        request = self.add(name, tokens, 1, WarmUp(pin=True, **terms))
        self.run()
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now)
        audit(self.core)
        if plan.num_rows:
            self.scheduler.apply(self.runner.run(plan))
            audit(self.core)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    @property
    def pinned(self) -> list[str]:
        return [pin.pin_id for pin in self.core.pins]


def test_a_warm_up_pins_the_whole_blocks_of_its_prompt() -> None:
    world = World()
    world.pin("p", range(10, 21))
    (pin,) = world.core.pins
    assert (pin.pin_id, pin.num_blocks, pin.namespace) == ("p", 2, NS)


def test_a_warm_up_without_a_pin_pins_nothing() -> None:
    world = World()
    world.add("w", range(10, 21), 1, WarmUp())
    world.run()
    assert not world.pinned
    assert world.core.pool.num_cached == 2


def test_a_warm_up_that_is_cancelled_pins_nothing() -> None:
    world = World()
    world.add("p", range(10, 21), 1, WarmUp(pin=True))
    plan = world.scheduler.schedule(0.0)
    world.scheduler.finish("p", "abort")
    world.scheduler.apply(world.runner.run(plan))
    assert not world.pinned
    audit(world.core)


def test_pins_expire_with_the_steps() -> None:
    world = World()
    world.pin("p", range(10, 21), ttl_s=5.0)
    world.now = 4.9
    world.step()
    assert world.pinned == ["p"]
    world.now = 5.0
    world.step()
    assert not world.pinned


def test_of_pins_those_go_that_help() -> None:
    """What waits would use one pin's blocks itself: letting go of those is no gain, however little they are worth."""
    world = World()
    world.pin("own", range(100, 116), retention_priority=1.0)
    world.pin("other", range(200, 232), retention_priority=99.0)
    request = world.add("r", range(100, 134), 1)  # four blocks are there, four of five more are free
    world.step()
    assert request.num_cached_tokens == 16
    assert world.pinned == ["own"]


def test_no_more_pins_go_than_needed() -> None:
    world = World()
    for at, worth in enumerate((30.0, 10.0, 20.0)):
        world.pin(f"p{at}", range(100 * at, 100 * at + 16), retention_priority=worth)
    world.add("r", range(900, 928), 1)
    world.step()
    assert world.pinned == ["p0", "p2"]


def test_where_all_pins_would_not_do_none_goes() -> None:
    world = World()
    world.pin("p", range(100, 116))
    runs = world.add("r", range(200, 236), 2)  # nine blocks, of twelve that are left
    world.step()
    waits = world.add("w", range(300, 332), 1)  # nine more: neither three nor seven are enough
    world.step()
    assert world.pinned == ["p"]
    assert waits.cache is None
    assert runs.finish_reason == "length"
    world.run()
    assert waits.finish_reason == "length"
    assert world.pinned == ["p"]  # alone it fits beside the pin


def test_who_runs_takes_pins_before_places() -> None:
    world = World()
    world.pin("p", range(100, 132))
    for name in ("a", "b"):
        world.add(name, range(ord(name), ord(name) + 12), 16)
    world.run()
    assert not world.pinned
    assert not [event for event in world.events if isinstance(event, RequestPreempted)]


def test_a_pin_that_keeps_everything_keeps_nobody_out() -> None:
    world = World()
    world.pin("p", range(100, 163))
    assert world.core.pins.num_blocks == 15
    request = world.add("r", range(500, 560), 4)
    world.run()
    assert request.finish_reason == "length"
    assert not world.pinned
