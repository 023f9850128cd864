"""The log of uses: against a twin that keeps everything and filters it, and how it forgets."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.events import CacheConfigured
from pagefold.observe.block_uses import BlockUses
from pagefold.observe.use_log import UseLog
from pagefold.observe.whatif import TIMES, ghost_ratios, lru_curve_of

KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=9)


def fill(log: UseLog, paths: list[list[int]]) -> None:
    for at, path in enumerate(paths):
        log.look_up(path, len(path), 4 * len(path) + 1, float(at))


@settings(max_examples=200, deadline=None)
@given(st.lists(KEYS, max_size=40), st.integers(8, 60))
def test_it_has_what_a_log_of_all_has_below_its_bound(paths, most):
    """Until uses are forgotten: a block is in it whenever it was used, and every lookup is counted."""
    log = UseLog(most)
    fill(log, paths)
    uses = log.uses()
    kept = [key for use in uses.uses for key in use.keys]
    assert kept == [key for path in paths for key in path if key < log.bound]
    assert sum(use.num_blocks for use in uses.uses) == sum(map(len, paths))
    assert sum(use.num_tokens for use in uses.uses) == sum(4 * len(path) + 1 for path in paths)
    assert uses.counted == uses.uses
    assert log.num_keys == len(kept) <= most or len(uses.uses) == 1
    assert all(use.keys for use in uses.uses[1:])


@settings(max_examples=100, deadline=None)
@given(st.lists(KEYS.filter(len), min_size=1, max_size=200), st.integers(9, 60))
def test_where_it_samples_no_less_the_oldest_go(paths, most):
    log = UseLog(most, least_rate=1.0)
    fill(log, paths)
    uses = log.uses()
    kept = [list(use.keys) for use in uses.uses]
    assert log.rate == 1.0
    assert kept == paths[len(paths) - len(kept) :]
    assert sum(map(len, kept)) <= most
    has_dropped = len(kept) < len(paths)
    assert log.has_dropped == has_dropped
    if has_dropped:
        assert sum(map(len, kept)) + len(paths[len(paths) - len(kept) - 1]) > most
        num_warm = sum(len(use.keys) for use in uses.uses[: uses.num_warm])
        assert num_warm >= 0.25 * sum(map(len, kept))
    else:
        assert uses.num_warm == 0
    copied = log.copy()
    assert copied.uses() == uses
    fill(log, [[1]])
    assert copied.uses() == uses


def test_it_is_bounded_whatever_comes():
    random = Random(0)
    log = UseLog(1000, least_rate=0.1)
    for at in range(20_000):
        path = array("Q", (random.randrange(2**64) for _ in range(random.randrange(12))))
        log.look_up(path, len(path), 1, float(at))
        log.use_again(path, float(at))
    assert log.num_keys <= 1000
    assert 0.05 < log.rate <= 0.1
    assert log.num_bytes < 2 * 1000 * (8 + 25)


def test_what_was_generated_is_used_and_not_looked_up():
    log = UseLog(100)
    log.look_up([1, 2], 2, 9, 0.0)
    log.use_again([1, 2, 3], 1.0)
    log.look_up([], 0, 3, 2.0)
    first, again = log.uses().uses
    assert (first.is_lookup, list(first.keys), first.num_blocks, first.num_tokens) == (True, [1, 2], 2, 9)
    assert (again.is_lookup, list(again.keys), again.num_blocks, again.num_tokens) == (False, [1, 2, 3], 0, 3)


def test_a_smaller_sample_of_a_sample():
    random = Random(1)
    log = UseLog(10_000)
    paths = [[random.randrange(2**64) for _ in range(5)] for _ in range(400)]
    fill(log, paths)
    fewer = log.uses().sampled(0.25, 10_000)
    assert [key for use in fewer.uses for key in use.keys] == [key for path in paths for key in path if key < 2**62]
    assert (fewer.rate, fewer.num_warm) == (0.25, 0)
    last = log.uses().sampled(1.0, 100)
    assert [list(use.keys) for use in last.uses] == paths[-20:]
    assert last.num_warm == 5
    assert sum(use.num_blocks for use in last.counted) == 75


def test_many_tokens_without_a_block_in_the_sample_are_counted() -> None:
    """A server whose prompts are all shorter than a block counts for years."""
    log = UseLog(100, 1.0)
    for at_s in range(3):
        log.look_up([], 0, 2**31, float(at_s))
    assert sum(use.num_tokens for use in log.uses().uses) == 3 * 2**31


def test_each_answer_has_a_path_of_its_own_and_what_is_published_again_counts_once() -> None:
    uses = BlockUses(lambda: 0.0)
    uses.begin(CacheConfigured({}, num_blocks=64, block_size=4))
    uses.look_up(1, "acme", [1, 2], 8)
    for answer, keys in (("a", [3]), ("b", [5, 6]), ("a", [3, 4])):
        uses.publish(1, answer, 2, keys)
    uses.end(1)
    assert [list(use.keys) for use in uses.told(None).uses.uses[1:]] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    uses.look_up(2, "acme", [1, 2, 5, 6, 7], 20)  # goes on from the second answer
    told = uses.told(None).uses
    curve = lru_curve_of(told, 4)
    assert curve.at(64 * 4) == pytest.approx(4 / 7)
    for policy, found in ghost_ratios(told, curve, ["lru", "lfu"], 64).items():
        assert found == pytest.approx([4 / 7] * len(TIMES)), policy


def test_of_many_answers_the_first_are_noted() -> None:
    """Each is noted with its whole prompt: copies of it do not drive out what others used."""
    uses = BlockUses(lambda: 0.0)
    uses.begin(CacheConfigured({}, num_blocks=64, block_size=4))
    uses.look_up(1, "acme", [1, 2], 8)
    for answer in range(128):
        uses.publish(1, f"r-{answer}", 2, [100 + answer])
    uses.end(1)
    assert [list(use.keys) for use in uses.told(None).uses.uses[1:]] == [[1, 2, 100 + answer] for answer in range(8)]
