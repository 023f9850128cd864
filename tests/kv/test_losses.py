"""What giving up a sequence's blocks would come to. Sequences of schedulers are weighed in the machine's test."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from pagefold.kv import Arbiter, HostTier, KVCore, LinkModel
from pagefold.kv.losses import Loss

if TYPE_CHECKING:
    from pagefold.kv import SequenceCache

BLOCK_SIZE = 4


def computed(core: KVCore, num_tokens: int, first: int = 0) -> SequenceCache:
    """Return a cache of so many tokens, which are computed and published as far as they fill blocks."""
    packed = array("i", range(first, first + num_tokens)).tobytes()
    cache, start = core.acquire(core.match(b"", packed, num_tokens - 1))
    assert core.extend(cache, start, num_tokens)
    promise = core.publishing.promise(cache, packed, num_tokens)
    if promise is not None:
        core.publishing.commit(promise)
    core.moves.take_copies()
    return cache


def test_what_is_computed_is_lost_with_its_blocks():
    core = KVCore(20, block_size=BLOCK_SIZE)
    assert core.losses.of([computed(core, 10)], [10]) == Loss(10, 3)
    assert core.losses.of([computed(core, 8, 100)], [6]) == Loss(6, 2), "two tokens of it are not computed yet"


def test_how_far_the_last_block_is_filled_tells_nothing():
    assert Loss(9, 3).in_blocks(BLOCK_SIZE) == Loss(18, 5).in_blocks(BLOCK_SIZE) == 1
    assert Loss(40, 2).in_blocks(BLOCK_SIZE) == 5
    assert Loss(0.5, 5).in_blocks(BLOCK_SIZE) == 0


def test_what_another_one_has_too_is_found_again():
    core = KVCore(20, block_size=BLOCK_SIZE)
    one, other = computed(core, 10), computed(core, 11)
    assert core.losses.of([one], [10]) == Loss(2, 1)
    core.release(other)
    assert core.losses.of([one], [10]) == Loss(10, 3)


def test_what_a_pin_keeps_is_neither_freed_nor_lost():
    core = KVCore(20, block_size=BLOCK_SIZE)
    cache = computed(core, 10)
    core.pins.add("pin", cache.tail, 0.0, ttl_s=None, priority=1)
    assert core.losses.of([cache], [10]) == Loss(2, 1)


def test_what_is_not_published_is_lost_though_another_one_has_it():
    core = KVCore(20, block_size=BLOCK_SIZE, enable_prefix_caching=False)
    cache = computed(core, 10)
    twin = core.fork(cache)
    loss = core.losses.of([cache], [10])
    assert loss == Loss(10, 0)
    assert loss.in_blocks(BLOCK_SIZE) == float("inf")
    assert core.losses.of([cache, twin], [10, 10]) == Loss(10, 3), "all go at once"


def test_those_that_go_together_lose_what_each_has_alone():
    core = KVCore(20, block_size=BLOCK_SIZE)
    cache = computed(core, 10)
    twin = core.fork(cache)
    assert core.extend(cache, 10, 11), "its tail becomes its own"
    assert core.extend(twin, 10, 14)
    core.moves.take_copies()
    assert core.losses.of([cache, twin], [11, 14]) == Loss(11 + (12 - 8) + 2, 5)


@pytest.mark.parametrize(
    ("bytes_per_s", "share"), [(None, 0.01), (4000.0, 0.25), (1.0, 1.0)], ids=["a copy", "a link", "a slow link"]
)
def test_what_the_host_gets_costs_as_much_as_the_arbiter_says(bytes_per_s, share):
    arbiter = Arbiter(1000, BLOCK_SIZE, compute_s_per_token=0.25)
    if bytes_per_s is not None:
        arbiter.links["host"] = LinkModel(0.0, bytes_per_s)
    core = KVCore(20, block_size=BLOCK_SIZE, host=HostTier(20), arbiter=arbiter)
    num_tokens, num_blocks = core.losses.of([computed(core, 10)], [10])
    assert num_blocks == 3
    assert num_tokens == pytest.approx(2 + 8 * share)
