"""What is dropped with a sequence whose logits were no numbers: all that begins as it does, on device and host."""

from __future__ import annotations

from array import array

import pytest

from pagefold.events import BlockEvicted, PinDropped
from pagefold.kv import NO_HOST, HostTier, KVCore, audit
from pagefold.kv.policies import make_policy

NS, OTHER = b"one", b"other"
SHARED = [1, 2, 3, 4, 5, 6, 7, 8]


def pack(tokens):
    return array("i", tokens).tobytes()


class House:
    """A core, and what it told."""

    def __init__(self, num_held=0):
        self.events = []
        host = HostTier(num_held) if num_held else NO_HOST
        self.core = KVCore(24, block_size=4, policy=make_policy("lru"), host=host, emit=self.events.append)

    def serve(self, tokens, namespace=NS):
        """A table whose tokens are all computed, and which runs."""
        cache, start = self.core.acquire(self.core.match(namespace, pack(tokens), len(tokens) - 1))
        assert self.core.extend(cache, start, len(tokens))
        self.copy()
        promise = self.core.publishing.promise(cache, pack(tokens), len(tokens))
        if promise is not None:
            self.core.publishing.commit(promise)
        return cache

    def grow(self, cache, tokens):
        """Compute the rest of ``tokens``."""
        assert self.core.extend(cache, cache.capacity, len(tokens))
        promise = self.core.publishing.promise(cache, pack(tokens), len(tokens))
        if promise is not None:
            self.core.publishing.commit(promise)

    def copy(self):
        self.core.moves.copies_done(self.core.moves.take_copies())
        self.core.moves.host_done(self.core.moves.take_host_ops())

    def num_found(self, tokens, namespace=NS):
        hit = self.core.match(namespace, pack(tokens), len(tokens))
        return 4 * (len(hit.nodes) + len(hit.held))

    def distrust(self, cache, tokens, namespace=NS):
        found = self.core.forgetting.distrust(cache, namespace, pack(tokens))
        audit(self.core)
        return found


def test_all_that_begins_with_its_first_block_goes_and_nothing_else():
    house = House()
    for tokens in ([*SHARED, 9, 9, 9, 9], [1, 2, 3, 4, 7, 7, 7, 7], [1, 2, 3, 5, 1, 1, 1, 1]):
        house.core.release(house.serve(tokens))
    house.core.release(house.serve(SHARED, OTHER))
    bad = house.serve([*SHARED, 5, 5, 5, 5, 5])
    assert house.distrust(bad, [*SHARED, 5, 5, 5, 5, 5]) == set(), "no tier behind the device"
    assert house.num_found([*SHARED, 9, 9, 9, 9]) == house.num_found([1, 2, 3, 4, 7, 7, 7, 7]) == 0
    assert house.num_found([1, 2, 3, 5, 1, 1, 1, 1]) == 8
    assert house.num_found(SHARED, OTHER) == 8
    evicted = [event.cause for event in house.events if isinstance(event, BlockEvicted)]
    assert evicted == ["corrupted"] * 2, "those that were cached; what it holds itself was not"


def test_who_runs_on_it_goes_on_and_publishes_no_more_and_others_do():
    house = House()
    beside, apart = house.serve([*SHARED, 9, 9, 9, 9]), house.serve([5, 5, 5, 5])
    bad = house.serve([*SHARED, 5])
    house.distrust(bad, [*SHARED, 5])
    assert (beside.tail, beside.num_published, len(beside.only_table.block_ids)) == (None, 0, 3)
    house.grow(beside, [*SHARED, 9, 9, 9, 9, 1, 1, 1, 1])
    house.grow(apart, [5, 5, 5, 5, 6, 6, 6, 6])
    audit(house.core)
    assert house.num_found([*SHARED, 9, 9, 9, 9]) == 0
    assert house.num_found([5, 5, 5, 5, 6, 6, 6, 6]) == 8
    for cache in (bad, beside, apart):
        house.core.release(cache)
    audit(house.core)
    assert house.core.num_active == 0


def test_one_that_has_no_whole_block_takes_nothing_along():
    house = House()
    house.core.release(house.serve(SHARED))
    bad = house.serve([7, 7])
    house.distrust(bad, [7, 7])
    assert bad.tail is None, "what it goes on with is not published"
    assert house.num_found(SHARED) == 8


@pytest.mark.parametrize("by", ["itself", "a fork"])
def test_what_it_took_a_part_of_goes_with_all_behind_it(by):
    house = House()
    house.core.release(house.serve(SHARED))
    bad = house.serve([1, 2, 9, 9, 9])
    if by == "a fork":
        first, bad = bad, house.core.fork(bad)
        house.core.release(first)
    assert house.num_found(SHARED) == 8
    house.distrust(bad, [1, 2, 9, 9, 9])
    assert house.num_found(SHARED) == 0


def test_what_it_took_a_part_of_goes_from_the_host_too_where_the_device_has_it_no_more():
    house = House(num_held=8)
    house.core.release(house.serve(SHARED))
    bad = house.serve([1, 2, 9, 9, 9])
    assert house.core.blocks.reclaim(2) == 2
    house.copy()
    assert house.num_found(SHARED) == 8
    found = house.distrust(bad, [1, 2, 9, 9, 9])
    assert house.num_found(SHARED) == 0
    assert len(found) == 3, "its own block, and both of the other's"


def test_what_it_took_a_part_of_goes_where_it_has_left_the_device_and_come_back():
    """Its node is another one then."""
    house = House(num_held=8)
    house.core.release(house.serve(SHARED))
    bad = house.serve([1, 2, 9, 9, 9])
    assert house.core.blocks.reclaim(2) == 2
    house.copy()
    house.core.release(house.serve([*SHARED, 0]))
    assert bad.copied_from is not None
    assert not bad.copied_from.attached
    assert house.num_found(SHARED) == 8
    house.distrust(bad, [1, 2, 9, 9, 9])
    assert house.num_found(SHARED) == 0


def test_pins_on_it_are_dropped_and_say_why():
    house = House()
    pinned, kept = house.serve(SHARED), house.serve([5, 5, 5, 5])
    for name, cache in (("bad", pinned), ("good", kept)):
        assert house.core.pins.add(name, cache.tail, 0.0) is not None
    house.distrust(pinned, SHARED)
    assert [pin.pin_id for pin in house.core.pins] == ["good"]
    assert [(event.pin_id, event.cause) for event in house.events if isinstance(event, PinDropped)] == [
        ("bad", "corrupted")
    ]


def test_a_promise_that_is_open_comes_to_nothing():
    """As of a step that was planned behind the one whose logits were no numbers."""
    house = House()
    bad = house.serve(SHARED)
    tokens = [*SHARED, 1, 1, 1, 1]
    leaning = house.serve([*SHARED, 2])
    assert house.core.extend(bad, 8, 12)
    promise = house.core.publishing.promise(bad, pack(tokens), 12)
    house.distrust(bad, SHARED)
    house.core.publishing.commit(promise)
    audit(house.core)
    assert house.num_found(tokens) == 0
    for cache in (bad, leaning):
        house.core.release(cache)
    assert house.core.pool.num_free == 24
