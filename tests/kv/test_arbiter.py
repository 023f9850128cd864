"""Arbiter: what it learns of a link, when it loads, and how long it waits."""

from __future__ import annotations

import pytest

from pagefold.kv import Arbiter, LinkModel

MIB = 2**20


def arbiter_of(**links: LinkModel) -> Arbiter:
    """Return one for blocks of 1 MiB that take 16 ms to compute."""
    arbiter = Arbiter(MIB, 16, compute_s_per_token=1e-3)
    arbiter.links.update(links)
    return arbiter


def each(num_blocks: int) -> int:
    """Of one group, each block is a place."""
    return num_blocks


@pytest.mark.parametrize("sizes", [[8 * MIB], [MIB, 8 * MIB, 3 * MIB]])
def test_a_steady_link_is_known_for_what_it_is_however_long(sizes):
    link = LinkModel(1e-4, 1e9)
    for number in range(2000):
        num_bytes = sizes[number % len(sizes)]
        link.learn(num_bytes, 1e-4 + num_bytes / 2e9)
    for num_bytes in (MIB // 4, MIB, 64 * MIB):
        assert link.seconds(num_bytes) == pytest.approx(1e-4 + num_bytes / 2e9, rel=0.05)


def test_what_is_sooner_brought_is_brought_and_the_rest_is_computed():
    arbiter = arbiter_of(disk=LinkModel(1e-4, 1e9), remote=LinkModel(1e-3, 1e7))
    assert arbiter.weigh(["disk"] * 10, {}, each).num_blocks == 10
    assert arbiter.weigh(["remote"] * 10, {}, each).num_blocks == 0
    assert arbiter.weigh(["disk"] * 4 + ["remote"] * 10, {}, each).num_blocks == 4
    assert arbiter.weigh(["disk"] * 2, {"disk": 2**30}, each).num_blocks == 0, "others are in front"


def test_patience_is_that_of_the_tiers_it_waits_for():
    arbiter = arbiter_of(disk=LinkModel(1e-4, 1e9), remote=LinkModel(1e-3, 1e9))
    alone = arbiter.weigh(["disk"] * 100, {"disk": 100 * MIB}, each).patience_s
    both = arbiter.weigh(["disk"] * 99 + ["remote"], {"disk": 100 * MIB}, each).patience_s
    assert both == pytest.approx(alone, rel=0.02)
    assert alone <= 0.25 * arbiter.compute_s(100)


def test_a_tier_that_was_slow_for_a_moment_is_tried_again():
    arbiter = arbiter_of(disk=LinkModel(1e-4, 1e9))
    for _ in range(20):
        arbiter.links["disk"].learn(8 * MIB, 5.0)
    assert not arbiter.pays("disk")
    assert any(arbiter.pays("disk") for _ in range(500))


@pytest.mark.parametrize("bytes_per_s", [1e3, 1e7, 8e7])
def test_a_tier_that_was_slow_when_it_was_measured_first_is_tried_in_time(bytes_per_s):
    arbiter = arbiter_of(disk=LinkModel(1e-4, bytes_per_s))
    assert not arbiter.is_fast("disk")
    waits = next(number for number in range(1000) if arbiter.pays("disk"))
    assert waits > 5, "one request does not pay for all"
    assert arbiter.is_fast("disk")
    arbiter.links["disk"].learn(8 * MIB, 8 * MIB / 1e9)
    assert arbiter.pays("disk")
    assert arbiter.weigh(["disk"] * 10, {}, each).num_blocks == 10


def test_a_tier_that_is_always_slow_is_tried_seldom():
    arbiter = arbiter_of(disk=LinkModel(1e-4, 1e7))
    num_tried = 0
    for _ in range(5000):
        if arbiter.pays("disk"):
            num_tried += 1
            arbiter.links["disk"].learn(8 * MIB, 8 * MIB / 1e7)
    assert 1 <= num_tried < 150


def test_forgiving_never_takes_from_what_was_learnt():
    link = LinkModel(1e-4, 1e7)
    for _ in range(50):
        link.learn(8 * MIB, 8 * MIB / 1e9)
    before = link.bytes_per_s
    link.recover()
    assert link.bytes_per_s == before


def test_a_drip_is_left_as_soon_as_computing_is_sooner():
    arbiter = arbiter_of(disk=LinkModel(1e-4, 1e9))
    assert arbiter.goes_on(0, 10, 1.0, 10), "patience bounds that"
    assert arbiter.goes_on(5, 5, 5 * 0.015, 5)
    assert not arbiter.goes_on(5, 5, 5 * 0.017, 5)


def test_a_restore_is_weighed_where_its_link_is_known():
    assert arbiter_of().restores("host", 1, 1), "as on a CPU"
    assert arbiter_of(host=LinkModel(1e-5, 2e10)).restores("host", 1, 1)
    assert not arbiter_of(host=LinkModel(1e-5, 7e7)).restores("host", 100, 100), "15 ms a block, and 16 to compute it"
    slow_start = arbiter_of(host=LinkModel(0.1, 2e10))
    assert not slow_start.restores("host", 2, 2)
    assert slow_start.restores("host", 20, 20)
    assert slow_start.num_unrestored == 1


def test_a_link_that_was_slow_for_a_moment_is_tried_again():
    arbiter = arbiter_of(host=LinkModel(1e-5, 2e10))
    for _ in range(60):
        arbiter.links["host"].learn(8 * MIB, 5.0)
    assert not arbiter.restores("host", 4, 4)
    assert any(arbiter.restores("host", 4, 4) for _ in range(500))


def test_what_computing_takes_is_learnt_of_steps_that_mostly_prefill():
    arbiter = arbiter_of()
    arbiter.learn_compute(63, 1, 1.0)
    arbiter.learn_compute(100, 50, 1.0)
    assert arbiter.compute_s_per_token == 1e-3
    arbiter.learn_compute(100, 2, 1.0)
    assert arbiter.compute_s_per_token == pytest.approx(1e-3 + 0.2 * (1e-2 - 1e-3))


# Several cache groups: a place of a path has several blocks.


def test_windows_are_loaded_for_what_they_save_and_not_for_what_they_weigh():
    """A group that keeps all and 6 windows: of 32 places 224 blocks, which take 1.5 s, and computing takes 0.5."""
    num_blocks, num_places = 7 * 32, 32

    def whole(num):
        return num_places if num == num_blocks else 0

    arbiter = arbiter_of(disk=LinkModel(0.0, num_blocks * MIB / 1.5))
    assert arbiter.weigh(["disk"] * num_blocks, {}, each).num_blocks == num_blocks, "were each of them computed"
    assert arbiter.num_loaded == 1
    refused = arbiter.weigh(["disk"] * num_blocks, {}, whole)
    assert refused.num_blocks == 0
    assert (arbiter.num_loaded, arbiter.num_refused) == (1, 1)
    arbiter.links["disk"].bytes_per_s *= 6
    taken = arbiter.weigh(["disk"] * num_blocks, {}, whole)
    assert taken.num_blocks == num_blocks
    assert taken.compute_s == arbiter.compute_s(num_places)
    assert taken.load_s < taken.compute_s
    assert taken.patience_s <= 0.2 * taken.compute_s
    assert (arbiter.num_loaded, arbiter.num_refused) == (2, 1)


def test_of_two_groups_that_keep_all_whole_places_are_loaded():
    arbiter = arbiter_of(disk=LinkModel(1e-4, 1e9))
    verdict = arbiter.weigh(["disk"] * 9, {}, lambda num: num // 2)
    assert verdict.num_blocks == 8
    assert verdict.compute_s == arbiter.compute_s(4)


def test_a_tier_is_fast_if_it_brings_all_blocks_of_a_place_sooner():
    bytes_per_s = 1.5 * MIB / 0.016 / 0.8
    for blocks_per_place, is_fast in ((1, True), (2, False)):
        arbiter = Arbiter(MIB, 16, compute_s_per_token=1e-3, blocks_per_place=blocks_per_place)
        arbiter.links["disk"] = LinkModel(1e-4, bytes_per_s)
        assert arbiter.is_fast("disk") == is_fast


def test_who_waits_for_several_blocks_a_place_goes_on_when_computing_the_places_is_sooner():
    arbiter = arbiter_of()
    assert arbiter.goes_on(5, 5, 5 * 0.015, 5)
    assert not arbiter.goes_on(5, 5, 5 * 0.015, 2), "5 blocks of 2 places"
    assert arbiter_of(host=LinkModel(1e-5, 1e8)).restores("host", 10, 10)
    assert not arbiter_of(host=LinkModel(1e-5, 1e8)).restores("host", 10, 2)
