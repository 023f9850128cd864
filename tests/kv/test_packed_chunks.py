"""Packed chunks: whatever happens, a sequence has what was kept of its own path, and nobody else's."""

from __future__ import annotations

from random import Random

import pytest
from packed_chunks_driver import RULES, PackingDriver

from pagefold.kv import KeepRule


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RULES)
def test_every_block_holds_what_it_must(name, seed):
    driver = PackingDriver(RULES[name], Random(seed), num_blocks=Random(seed).choice([30, 60, 200]))
    driver.run(120)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", RULES)
def test_every_block_holds_what_it_must_for_long(name, seed):
    random = Random(1000 + seed)
    size = random.choice([1, 2, 4])
    num_host_blocks = random.choice([0, 20, 100, 1000])
    driver = PackingDriver(RULES[name], random, size, random.choice([40, 80, 300]), num_host_blocks=num_host_blocks)
    driver.run(800)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RULES)
def test_what_comes_back_from_the_host_holds_what_it_must(name, seed):
    random = Random(seed)
    num_blocks, num_host_blocks = random.choice([30, 60]), random.choice([7, 40, 400])
    driver = PackingDriver(RULES[name], random, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    driver.run(120)


@pytest.mark.parametrize("name", RULES)
def test_nothing_is_published_where_caching_is_off(name):
    driver = PackingDriver(RULES[name], Random(3), caches_prefixes=False)
    driver.run(200)
    assert driver.num_packed > 5
    assert driver.num_hits == 0


@pytest.mark.long
def test_random_operations_meet_what_matters():
    """Else the tests above would show nothing."""
    hits = packed = short = joined = alone = 0
    for seed in range(12):
        driver = PackingDriver(RULES["alone"], Random(seed), num_blocks=Random(seed).choice([30, 60, 200]))
        driver.run(150)
        alone += driver.num_alone
        hits, packed = hits + driver.num_hits, packed + driver.num_packed
        short, joined = short + driver.num_short, joined + driver.num_joined
    assert min(hits, packed, short) > 10
    assert joined > 0
    assert alone > 0


def test_a_row_with_drafts_packs_nothing():
    driver = PackingDriver(RULES["alone"], Random(0), num_blocks=200)
    core, rule = driver.core, driver.rule
    cache, _ = core.acquire(core.match(b"n", b"", 0))
    for start in range(40):
        for wanted in (1, 5, 30):
            num = core.packing.draft_limit(cache, start, wanted)
            assert 1 <= num <= wanted
            packs = rule.num_packed(start + num) > len(cache.chunks)
            assert not packs or num == 1
            if num < wanted:
                assert rule.num_packed(start + num + 1) > len(cache.chunks)


@pytest.mark.parametrize(
    "rule", [KeepRule(8, is_chunked=True, num_before=1, packs=True), KeepRule(4, is_chunked=True, packs=True)]
)
def test_chunks_are_packed_when_nobody_sees_all_of_them(rule):
    for end in range(60):
        expected = 0
        while all(
            (position // rule.window - rule.num_before) * rule.window > expected * rule.window
            for position in range(end, end + 20)
        ):
            expected += 1
        assert rule.num_packed(end) == expected
        num = rule.num_packed(end)
        assert rule.reach(num) >= end
        assert num == 0 or rule.reach(num - 1) < end


@pytest.mark.long
def test_packed_chunks_come_back_from_the_host_whole_or_not_at_all():
    """Else what is done at random with a host would show nothing."""
    loaded = damaged = 0
    for name in RULES:
        for seed in range(4):
            driver = PackingDriver(RULES[name], Random(seed), num_blocks=60, num_host_blocks=200)
            driver.run(400)
            loaded, damaged = loaded + driver.num_loaded_chunks, damaged + driver.num_damaged
    assert loaded > 10
    assert damaged > 5
