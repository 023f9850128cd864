"""KeepRule against a look at every position: which blocks whoever goes on needs, and how many are held at most."""

from __future__ import annotations

from random import Random

import pytest

from pagefold.kv import KEEP_ALL, KeepRule
from pagefold.kv.keep_rules import KeepRules

RULES = [
    KEEP_ALL,
    *(KeepRule(window, num_sinks=num_sinks) for window in (1, 2, 5, 8, 9) for num_sinks in (0, 1, 3, 4, 5, 9)),
    *(KeepRule(window, is_chunked=True) for window in (1, 3, 4, 8, 10)),
    *(KeepRule(window, is_chunked=True, num_before=num) for window in (1, 3, 4) for num in (1, 2)),
]
SIZES = (1, 3, 4)


def is_seen(rule: KeepRule, at: int, position: int) -> bool:
    """Whether the token at ``position`` sees the one at ``at``: masks as the papers have them."""
    if rule.window is None:
        return at <= position
    if rule.is_chunked:
        return 0 <= position // rule.window - at // rule.window <= rule.num_before
    return at < rule.num_sinks or at > position - rule.window


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_places_are_those_of_all_that_is_seen_and_the_last(rule, size):
    for num_blocks in range(12):
        position = num_blocks * size
        seen = {at // size for at in range(position) if is_seen(rule, at, position)}
        places = list(rule.places(num_blocks, size))
        first, num_sink_blocks = rule.first_block(num_blocks, size), rule.num_sink_blocks(size)
        assert seen | set(range(max(0, num_blocks - 1), num_blocks)) <= set(places)
        assert places == sorted(set(places))
        assert first == 0 or first > num_sink_blocks, "sinks are apart only where there is something between"
        extra = set(places) - seen - {num_blocks - 1}
        assert extra <= {num_sink_blocks} if first == 0 else not extra


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_is_seen_from_a_position_on_is_kept(rule, size):
    for position in range(40):
        first = rule.first_kept(position, size)
        for later in range(position, 44):
            seen = {at // size for at in range(position) if is_seen(rule, at, later)}
            assert seen <= {*range(rule.num_sink_blocks(size)), *range(first, position // size + 1)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_more_blocks_are_held_than_is_said(rule, size):
    for num_new in (1, 3, 7):
        for start in range(40):
            end = start + num_new
            first = min(rule.first_kept(start, size), rule.first_block(start // size, size))
            num_sink_blocks = rule.num_sink_blocks(size) if first else 0
            num_held = -(-end // size) - first + num_sink_blocks
            assert num_held <= rule.num_blocks_for(end, num_new, size)


def test_sinks_are_there_beside_a_window_that_slides_alone():
    wrong_ones = ({"num_sinks": 2}, {"window": 4, "is_chunked": True, "num_sinks": 1}, {"window": 4, "num_before": 1})
    for wrong in (*wrong_ones, {"window": 4, "packs": True}):
        with pytest.raises(AssertionError):
            KeepRule(**wrong)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize(
    "rules", [[KEEP_ALL, KeepRule(5)], [KeepRule(5, num_sinks=3)], [KeepRule(9), KeepRule(2, num_sinks=5)]]
)
def test_the_last_whole_place_is_found_and_each_block_of_a_window_is_looked_at_once(rules, seed):
    size, num_places = 2, 14
    random, known = Random(seed), KeepRules(rules, size)
    share = random.choice((0.6, 0.8, 0.95))
    there = {
        (at, group): not rule.trims or random.random() < share
        for at in range(num_places)
        for group, rule in enumerate(rules)
    }
    asked: list[tuple[int, int]] = []

    def has(at: int, group: int) -> bool:
        asked.append((at, group))
        return there[at, group]

    whole = (
        end
        for end in range(num_places, 0, -1)
        if all(there[at, group] for group, rule in enumerate(rules) for at in rule.places(end, size))
    )
    assert known.last_whole(num_places, has) == next(whole, 0)
    windows = [one for one in asked if not known.is_sink(*one)]
    assert len(windows) == len(set(windows))
