"""Simulations of models with windows: the cache groups of a server, tiers behind them, and what is refused."""

import pytest

from pagefold.errors import BudgetTooSmallError
from pagefold.kv import KEEP_ALL, KeepRule
from pagefold.sim import SimConfig, simulate
from pagefold.sim.tiers import TierModel
from pagefold.sim.traces import parse_workload

RULES = (KEEP_ALL, *[KeepRule(512)] * 5)
CHATS = "chat:num_chats=16,seed=3"


def run(rules, num_tokens, **settings):
    requests = parse_workload(CHATS).generate()
    return simulate(requests, SimConfig(num_blocks=num_tokens // 16 * len(rules), rules=rules, **settings))


def test_a_pool_that_never_fills_finds_the_same_with_windows():
    windows, full = run(RULES, 200_000), run((KEEP_ALL,), 200_000)
    assert windows.num_hit_tokens == full.num_hit_tokens > 0
    assert windows.num_output_tokens == full.num_output_tokens


def test_windows_find_more_in_the_same_bytes():
    windows, full = run(RULES, 4_000), run((KEEP_ALL,), 4_000)
    assert full.num_evictions["allocation"] > 0
    assert windows.num_hit_tokens >= full.num_hit_tokens


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("disk_tokens", [0, 100_000])
def test_what_is_evicted_comes_back_from_tiers(disk_tokens):
    tiers = TierModel(host_tokens=2_500, disk_tokens=disk_tokens)
    alone, with_tiers = run(RULES, 3_000), run(RULES, 3_000, tiers=tiers)
    assert with_tiers.num_host_loaded > 0
    assert with_tiers.num_hit_tokens > alone.num_hit_tokens
    assert bool(with_tiers.num_disk_written) == bool(disk_tokens)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("disk_tokens", [0, 100_000])
@pytest.mark.parametrize("rules", [(KeepRule(512),), (KeepRule(512, num_sinks=4), KeepRule(256))])
def test_tiers_take_no_group_that_keeps_all(rules, disk_tokens):
    alone, with_tiers = (
        run(rules, 2_000),
        run(rules, 2_000, tiers=TierModel(host_tokens=2_500, disk_tokens=disk_tokens)),
    )
    assert with_tiers.num_host_loaded > 0
    assert with_tiers.num_hit_tokens > alone.num_hit_tokens
    assert bool(with_tiers.num_disk_written) == bool(disk_tokens)


def test_a_request_that_can_never_fit_is_refused_by_what_windows_take():
    with pytest.raises(BudgetTooSmallError, match="needs"):
        run(RULES, 320)
    assert run((KeepRule(64),), 1_200, max_num_batched_tokens=64, max_num_seqs=4).num_requests > 0
