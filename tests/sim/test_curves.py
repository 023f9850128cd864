"""Miss-ratio curves: stack distances against replays at every size, sampled ones against exact ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.sim import replay_cache_only
from pagefold.sim.curves import lru_curve, mean_error
from pagefold.sim.traces import TraceRequest, parse_workload, read_trace, traces_folder


@st.composite
def tree_traces(draw):
    """Prompts that are paths of a small tree: a node's id tells its parent's, as in a real trace."""
    names: dict[tuple[int, int], int] = {}
    requests = []
    for index in range(draw(st.integers(1, 25))):
        node = -1
        ids = []
        for _ in range(draw(st.integers(1, 6))):
            node = names.setdefault((node, draw(st.integers(0, 2))), len(names))
            ids.append(node)
        prompt_tokens = len(ids) * 8 - draw(st.integers(0, 7))
        requests.append(TraceRequest(float(index), prompt_tokens, 1, tuple(ids), 8))
    return requests


@settings(max_examples=60, deadline=None)
@given(tree_traces(), st.sampled_from([4, 8, 12, 16]), st.integers(1, 60))
def test_the_exact_curve_is_what_replays_find(requests, block_size, num_blocks):
    curve = lru_curve(requests, block_size=block_size)
    cache_tokens = num_blocks * block_size
    report = replay_cache_only(requests, policy="lru", block_size=block_size, cache_tokens=cache_tokens)
    assert curve.at(cache_tokens) == pytest.approx(report.token_hit_ratio)
    assert curve.at(cache_tokens + block_size - 1) == curve.at(cache_tokens)


@pytest.mark.parametrize("name", ["chat:num_chats=20", "agents:num_tasks=4", "retrieval:num_requests=25"])
def test_generated_workloads_too(name):
    requests = parse_workload(name).trace().requests
    curve = lru_curve(requests, block_size=16)
    for cache_tokens in (3_200, 20_000):
        report = replay_cache_only(requests, policy="lru", block_size=16, cache_tokens=cache_tokens)
        assert curve.at(cache_tokens) == pytest.approx(report.token_hit_ratio)
    assert curve.infinite == curve.at(10**9)
    assert curve.at(0) == 0.0


@pytest.mark.long
def test_a_sampled_curve_is_near_the_exact_one():
    requests = parse_workload("agents:num_tasks=80,num_levels=3-6").trace().requests
    exact = lru_curve(requests, block_size=16)
    sizes = [exact.largest * part // 20 for part in range(1, 21)]
    errors = [mean_error(lru_curve(requests, block_size=16, rate=0.05, seed=seed), exact, sizes) for seed in range(3)]
    assert max(errors) < 0.08
    sampled = lru_curve(requests, block_size=16, rate=0.05)
    assert sampled.num_blocks < 0.08 * exact.num_blocks
    assert sampled == lru_curve(requests, block_size=16, rate=0.05)
    assert mean_error(exact, exact, sizes) == 0
    assert mean_error(exact, exact, []) == 0


def test_prompts_that_nobody_knows_anything_of_share_nothing():
    curve = lru_curve([TraceRequest(0.0, 100, 1), TraceRequest(1.0, 100, 1)], block_size=16)
    assert (curve.infinite, curve.largest, curve.num_blocks) == (0.0, 0, 14)


def test_the_conversation_trace():
    folder = traces_folder()
    if folder is None:
        pytest.skip("no traces here: set PAGEFOLD_TRACES")
    curve = lru_curve(read_trace(folder / "mooncake_conversation.jsonl").requests, block_size=512)
    known = {510_000: 0.045, 1_540_000: 0.067, 3_000_000: 0.139, 5_100_000: 0.216, 10_200_000: 0.294}
    for cache_tokens, ratio in known.items():
        assert curve.at(cache_tokens) == pytest.approx(ratio, abs=0.005)
    assert curve.infinite == pytest.approx(0.3736, abs=0.0005)
