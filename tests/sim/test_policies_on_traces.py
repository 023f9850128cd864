"""Policies on traces: the published table, Belady's bound against trying everything, and the default against LRU."""

from __future__ import annotations

from functools import cache
from itertools import product
from random import Random
from typing import TYPE_CHECKING

import pytest

from pagefold.errors import ConfigError
from pagefold.kv import POLICIES, make_policy
from pagefold.sim.belady import BeladyCache, next_uses
from pagefold.sim.cache_only import BELADY, replay_cache_only, reuse_oracle
from pagefold.sim.traces import TraceRequest, parse_workload, read_trace, traces_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACE = "mooncake_conversation.jsonl"

PUBLISHED = [
    # By an independent replay: cache tokens, then token hit ratios of LRU, LFU and Belady with bypass.
    (510_000, 0.045, 0.084, 0.194),
    (1_540_000, 0.067, 0.120, 0.300),
    (3_000_000, 0.139, 0.155, 0.360),
    (5_100_000, 0.216, 0.192, 0.3736),
    (10_200_000, 0.294, 0.254, 0.3736),
]

GOLDEN = {
    # "shared:num_requests=600,num_prompts=60" with 30,000 tokens in blocks of 64
    "lru": 0.4828,
    "lfu": 0.6045,
    "fifo": 0.4828,
    "slru": 0.5895,
    "2q": 0.537,
    "s3-fifo": 0.5893,
    "weighted": 0.4828,
    "cost-aware": 0.5846,
    "learned": 0.5782,
    "auto": 0.5927,
    "belady": 0.6842,
}


@cache
def real_trace() -> Sequence[TraceRequest]:
    folder = traces_folder()
    if folder is None or not (folder / TRACE).is_file():
        pytest.skip(f"{TRACE} is not here: set PAGEFOLD_TRACES")
    return read_trace(folder / TRACE).requests


def ratio(requests: Sequence[TraceRequest], policy: str, cache_tokens: int, block_size: int = 64) -> float:
    report = replay_cache_only(requests, policy=policy, block_size=block_size, cache_tokens=cache_tokens)
    return report.token_hit_ratio


@pytest.mark.parametrize("row", [PUBLISHED[2]], ids=str)
def test_the_published_table(row: tuple[float, ...]) -> None:
    size, *published = row
    for policy, expected in zip(("lru", "lfu", BELADY), published, strict=True):
        assert ratio(real_trace(), policy, int(size), 512) == pytest.approx(expected, abs=0.005), policy


@pytest.mark.long
@pytest.mark.parametrize("row", PUBLISHED, ids=str)
def test_all_of_the_published_table(row: tuple[float, ...]) -> None:
    test_the_published_table(row)


@pytest.mark.long
@pytest.mark.parametrize("block_size", [64, 128, 512])
def test_no_block_size_changes_what_an_endless_cache_finds(block_size: int) -> None:
    requests = real_trace()[:3000]
    asked = sum(request.prompt_tokens for request in requests)
    assert ratio(requests, "lru", 2 * asked, block_size) == pytest.approx(
        ratio(requests, "lru", 2 * asked, 512), abs=2e-3
    )


def test_the_default_on_a_part_of_the_real_trace() -> None:
    """A quarter of it, so less than what the benchmark shows of all."""
    requests = real_trace()[:3000]
    assert ratio(requests, "default", 1_540_000, 512) > 1.5 * ratio(requests, "lru", 1_540_000, 512)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    "workload",
    [
        "chat:num_chats=400",
        "chat:num_chats=300,turn_gap_s=5-120",
        "shared:num_requests=500,num_prompts=60",
        "agents:num_tasks=50",
        "retrieval:num_requests=500,num_documents=300",
        "bursts:num_bursts=20",
    ],
)
def test_the_default_is_never_much_worse_than_lru(workload: str) -> None:
    requests = parse_workload(workload).trace().requests
    asked = sum(request.prompt_tokens for request in requests)
    for share in (0.02, 0.1):
        size = int(share * asked)
        default, lru, best = (ratio(requests, policy, size) for policy in ("default", "lru", BELADY))
        assert 0.99 * lru <= default <= best + 1e-9, (share, default, lru)


def test_true_hints_bring_the_default_near_the_bound_and_lies_cost_little() -> None:
    requests = parse_workload("chat:num_chats=400,turn_gap_s=5-120").trace().requests
    size = sum(request.prompt_tokens for request in requests) // 100
    truth = reuse_oracle(requests, block_size=64)
    rng = Random(0)
    noise = [[rng.random() < 0.5 for _ in each] for each in truth]
    found = {}
    for name, hints in (("none", None), ("true", truth), ("noise", noise)):
        report = replay_cache_only(requests, policy="default", block_size=64, cache_tokens=size, hints=hints)
        found[name] = report.token_hit_ratio
    assert found["true"] > found["none"] + 0.015
    assert found["noise"] > 0.97 * found["none"]


def request(*ids: int, tokens: int = 0) -> TraceRequest:
    return TraceRequest(0.0, tokens or 4 * len(ids), 1, ids, 4)


def test_hits_count_no_more_than_the_prompt_has() -> None:
    """The last id of a prompt may stand for part of a block; it is found again as what it is."""
    requests = [request(1, 2, 3, tokens=9), request(1, 2, 3, tokens=9), request(1, 2, 4, tokens=10)]
    for block_size in (1, 2, 4):
        report = replay_cache_only(requests, policy="lru", block_size=block_size, cache_tokens=64)
        assert report.num_asked_tokens == 28
        assert report.num_hit_tokens == 9 + 8
        assert report.num_evictions == 0
        assert report.token_hit_ratio == 17 / 28


def test_what_ids_do_not_cover_is_a_prompts_own() -> None:
    requests = [request(1, tokens=12), request(1, tokens=12), TraceRequest(0.0, 12, 1), TraceRequest(0.0, 12, 1)]
    report = replay_cache_only(requests, policy="lru", block_size=4, cache_tokens=64)
    assert report.num_hit_tokens == 4


def test_the_running_request_has_room_of_its_own() -> None:
    report = replay_cache_only([request(1, 2, 3, 4)] * 2, policy="lru", block_size=4, cache_tokens=8)
    assert report.num_blocks == 2
    assert report.num_hit_blocks == 2


def test_what_cannot_be_replayed_is_said() -> None:
    with pytest.raises(ConfigError, match="There is no eviction policy 'best'"):
        replay_cache_only([request(1)], policy="best", block_size=4, cache_tokens=8)
    with pytest.raises(ConfigError, match="holds no block of 4"):
        replay_cache_only([request(1)], policy="lru", block_size=4, cache_tokens=3)


def test_progress_is_told_after_each_request() -> None:
    for policy in ("lru", BELADY):
        told: list[int] = []
        replay_cache_only([request(1)] * 3, policy=policy, block_size=4, cache_tokens=8, progress=told.append)
        assert told == [1, 2, 3]


@pytest.mark.parametrize("seed", range(8))
def test_belady_finds_as_much_as_any_choice_of_victims(seed: int) -> None:
    """Against trying, after each request, every set of blocks that could be kept."""
    rng = Random(seed)
    paths = []
    for _ in range(6):
        first, second = rng.randrange(2), rng.randrange(2)
        paths.append([first, 10 + 2 * first + second][: rng.randint(1, 2)])
    capacity = 2
    cache = BeladyCache(capacity)
    found = sum(cache.use(path, uses) for path, uses in zip(paths, next_uses(paths), strict=True))
    best = {frozenset[int](): 0}
    for path in paths:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            num_hits = next((index for index, block in enumerate(path) if block not in kept), len(path))
            there = sorted(kept | set(path))
            for keep in product((False, True), repeat=len(there)):
                chosen = frozenset(block for block, is_kept in zip(there, keep, strict=True) if is_kept)
                whole = all(block < 10 or (block - 10) // 2 in chosen for block in chosen)
                if len(chosen) <= capacity and whole:
                    after[chosen] = max(after.get(chosen, -1), hits + num_hits)
        best = after
    assert found == max(best.values())


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("policy", [*POLICIES, BELADY])
def test_golden_hit_ratios(policy: str) -> None:
    """What each finds of one generated workload, to the block: a change of a policy shows here."""
    requests = parse_workload("shared:num_requests=600,num_prompts=60").trace().requests
    assert ratio(requests, policy, 30_000) == pytest.approx(GOLDEN[policy], abs=5e-5)


def test_a_policy_that_has_been_used_goes_on_as_it_is() -> None:
    policy = make_policy("learned")
    requests = parse_workload("chat:num_chats=30").trace().requests
    report = replay_cache_only(requests, policy=policy, block_size=64, cache_tokens=100_000)
    assert report.policy == "Learned"
    assert policy.accuracy().num_hit_blocks == report.num_hit_blocks
