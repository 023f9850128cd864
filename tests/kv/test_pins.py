"""PinTable, one behaviour a test: what a pin keeps, for how long, and who gives way. Random orders: test_machine.py."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from pagefold.kv import KVCore, PinLimits, audit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.events import Event
    from pagefold.kv.block import Node

NS = b"namespace"


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class Core(KVCore):
    """Sixteen blocks of four tokens, of which twelve may be pinned; audits itself."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        super().__init__(16, block_size=4, pin_limits=PinLimits(0.75, 10.0), emit=self.events.append)

    def fill(self, tokens: Sequence[int]) -> Node:
        """Compute ``tokens``, let go of them, and return the node of their last whole block."""
        cache, start = self.acquire(self.match(NS, pack(tokens), len(tokens) - 1))
        assert self.extend(cache, start, len(tokens))
        promise = self.publishing.promise(cache, pack(tokens), len(tokens))
        self.moves.copies_done(self.moves.take_copies())
        if promise is not None:
            self.publishing.commit(promise)
        tail = cache.tail
        assert tail is not None
        self.release(cache)
        audit(self)
        return tail

    def knows(self, tokens: Sequence[int]) -> int:
        """How many whole blocks of ``tokens`` are cached."""
        return len(self.match(NS, pack(tokens), len(tokens)).nodes)


def test_a_pinned_prefix_outlives_any_pressure() -> None:
    core = Core()
    assert core.pins.add("p", core.fill(range(8)), 0.0) is not None
    assert (core.pins.num_blocks, core.pool.num_cached, core.num_available) == (2, 2, 14)
    for first in range(100, 1000, 50):
        core.fill(range(first, first + 48))
    assert core.knows(range(8)) == 2
    core.blocks.reclaim(99)
    assert core.pool.num_free == 14
    audit(core)


def test_pinned_blocks_are_not_in_use() -> None:
    core = Core()
    core.pins.add("p", core.fill(range(8)), 0.0)
    assert core.usage == 0.0


def test_a_pin_ends_at_its_time_and_its_blocks_stay_cached() -> None:
    core = Core()
    core.pins.add("p", core.fill(range(8)), 5.0, ttl_s=2.0)
    core.pins.expire(6.99)
    assert [pin.pin_id for pin in core.pins] == ["p"]
    core.pins.expire(7.0)
    assert not list(core.pins)
    assert core.pins.dropped[-1] == ("p", 2, "expired")
    assert core.knows(range(8)) == 2
    assert core.num_available == 16
    audit(core)


def test_priority_halves_in_a_half_life() -> None:
    core = Core()
    pin = core.pins.add("p", core.fill(range(8)), 100.0, priority=80)
    assert pin is not None
    assert [core.pins.priority_at(pin, now) for now in (100.0, 110.0, 130.0)] == [80, 40, 10]
    assert core.pins.priority_at(pin, 1e9) == 0


def test_the_least_is_given_up_first_and_age_makes_less() -> None:
    core = Core()
    old = core.fill(range(8))
    new = core.fill(range(10, 18))
    core.pins.add("old", old, 0.0, priority=60)
    core.pins.add("new", new, 15.0, priority=40)  # at 15 s the old one is worth 60 / 2 ** 1.5 = 21
    assert core.pins.give_up(15.0)
    assert core.pins.dropped[-1].pin_id == "old"
    assert core.pins.give_up(15.0)
    assert not core.pins.give_up(15.0)


def test_of_equals_the_older_goes() -> None:
    core = Core()
    for index, pin_id in enumerate(("b", "a", "c")):
        core.pins.add(pin_id, core.fill(range(10 * index, 10 * index + 4)), 1000.0 * index, priority=0)
    assert core.pins.give_up(1e6)
    assert core.pins.dropped[-1].pin_id == "b"


def test_what_would_free_nothing_is_kept() -> None:
    """A pin of blocks that a sequence holds, or a longer pin, or that the caller is about to use."""
    core = Core()
    short, long = core.fill(range(8)), core.fill(range(12))
    core.pins.add("short", short, 0.0, priority=1)
    core.pins.add("long", long, 0.0, priority=9)
    hit = core.match(NS, pack(range(12)), 12)
    assert not core.pins.give_up(0.0, core.rules.blocks_of(hit))
    cache, _ = core.acquire(hit)
    assert not core.pins.give_up(0.0)
    core.release(cache)
    assert core.pins.give_up(0.0)
    assert core.pins.dropped[-1].pin_id == "long"
    audit(core)


def test_shared_blocks_count_once() -> None:
    core = Core()
    core.pins.add("one", core.fill([1, 2, 3, 4, 5, 6, 7, 8]), 0.0)
    core.pins.add("two", core.fill([1, 2, 3, 4, 9, 9, 9, 9]), 0.0)
    assert core.pins.num_blocks == 3
    core.pins.remove("one")
    assert core.pins.num_blocks == 2
    assert core.num_available == 14
    audit(core)


def test_the_quota_holds_and_nothing_is_lost() -> None:
    core = Core()
    core.pins.add("big", core.fill(range(40)), 0.0)
    tail = core.fill(range(100, 112))
    assert core.pins.add("more", tail, 0.0) is None
    assert core.pins.dropped[-1] == ("more", 3, "quota")
    assert [pin.pin_id for pin in core.pins] == ["big"]
    assert core.knows(range(100, 112)) == 3
    assert core.pins.add("less", tail.parent, 0.0) is not None  # just as many as are left
    audit(core)


def test_expired_pins_make_room_in_the_quota() -> None:
    core = Core()
    core.pins.add("big", core.fill(range(48)), 0.0, ttl_s=1.0)
    assert core.pins.add("more", core.fill(range(100, 112)), 2.0) is not None


def test_to_pin_again_renews() -> None:
    core = Core()
    tail = core.fill(range(8))
    core.pins.add("first", tail, 0.0, ttl_s=5.0, priority=10)
    core.pins.add("again", tail, 4.0, ttl_s=5.0, priority=20)
    assert core.pins.dropped[-1] == ("first", 2, "renewed")
    core.pins.expire(6.0)
    assert [(pin.pin_id, pin.expires_at_s, pin.priority) for pin in core.pins] == [("again", 9.0, 20)]
    audit(core)


def test_only_what_is_written_is_pinned() -> None:
    core = Core()
    core.fill(range(4))
    cache, start = core.acquire(core.match(NS, pack(range(12)), 11))
    assert core.extend(cache, start, 12)
    promise = core.publishing.promise(cache, pack(range(12)), 12)
    assert promise is not None
    pin = core.pins.add("p", cache.tail, 0.0)
    assert pin is not None
    assert pin.num_blocks == 1
    core.publishing.abandon(promise)
    audit(core)
    core.release(cache)
    assert core.pins.add("q", None, 0.0) is None
    assert core.pins.dropped[-1] == ("q", 0, "reset")


def test_a_reset_drops_pins() -> None:
    core = Core()
    core.pins.add("p", core.fill(range(8)), 0.0)
    assert core.forgetting.reset() == 2
    assert not list(core.pins)
    assert core.pool.num_free == 16
    assert core.pins.dropped[-1].cause == "reset"
    audit(core)


def test_a_policy_that_keeps_nothing_keeps_what_is_pinned() -> None:
    core = Core()
    tail = core.fill(range(8))
    core.pins.add("p", tail, 0.0)
    core.policy.admit = lambda _node: False
    cache, _ = core.acquire(core.match(NS, pack(range(9)), 9))
    core.release(cache)
    assert core.knows(range(8)) == 2
    audit(core)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_may_be_none_or_all(share: float) -> None:
    core = KVCore(4, block_size=4, pin_limits=PinLimits(max_share=share))
    assert core.pins.max_blocks == 4 * share
