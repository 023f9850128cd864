"""What each event adds to the metrics, without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.engine.status import EngineStatus, KindCount
from pagefold.events import (
    BlockEvicted,
    BlocksReused,
    CacheConfigured,
    EvictionCause,
    FetchEnded,
    FirstToken,
    NextTokens,
    OutputFinished,
    PathSuperseded,
    PinCause,
    PinDropped,
    PreemptionCause,
    PrefixLookup,
    PrefixMissed,
    PromptFinished,
    RequestFinished,
    RequestPreempted,
    SessionClosed,
    StepAbandoned,
    StepApplied,
    StepPlanned,
    SupersedeCause,
    TierRead,
    TierWritten,
    WaitCause,
    length_class,
)
from pagefold.memory.cache_size import CacheSize
from pagefold.observe.metrics import Metrics
from pagefold.observe.misses import Cause
from pagefold.request import FinishReason


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})


def counted(metrics: Metrics) -> list[bytes]:
    """What metrics say of all but the process."""
    return [line for line in metrics.render().splitlines() if not line.startswith(b"process_")]


def histogram(metrics: Metrics, name: str) -> tuple[float | None, float | None]:
    return value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")


def finished(reason: str = "stop", **fields) -> OutputFinished:
    told = {"e2e_s": 9.0, "queue_s": 1.0, "prefill_s": 2.0, "decode_s": 6.0, "num_output_tokens": 4} | fields
    return OutputFinished("a", reason, num_prompt_tokens=100, num_cached_tokens=30, **told)


def test_lookups_after_a_preemption_are_no_hits(metrics):
    metrics.emit(PrefixLookup("a", 100, 32, after_preemption=False))
    metrics.emit(PrefixLookup("a", 120, 96, after_preemption=True))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 100
    assert value(metrics, "vllm:prefix_cache_hits_total") == 32


def test_preemptions_count_by_cause_beside_all(metrics):
    for cause in ("memory", "share", "share"):
        metrics.emit(RequestPreempted("a", 10, 1.0, 0.5, cause_request_id="b", cause=cause))
    assert value(metrics, "vllm:num_preemptions_total") == 3
    by_cause = [value(metrics, "pagefold:preemptions_by_cause_total", cause=one) for one in get_args(PreemptionCause)]
    assert by_cause == [1, 2]


def test_steps_count_by_what_the_next_request_waits_for(metrics):
    for number, cause in enumerate(("growth", None, "growth", "seats")):
        metrics.emit(StepPlanned(number, 0.0, num_rows=1, num_tokens=1, num_read=1, waits_for=cause))
    told = {one: value(metrics, "pagefold:steps_with_waiting_total", cause=one) for one in get_args(WaitCause)}
    assert told == dict.fromkeys(get_args(WaitCause), 0) | {"growth": 2, "seats": 1}


def test_what_sessions_give_up_is_counted(metrics):
    metrics.emit(PathSuperseded(3, "edited"))
    metrics.emit(PathSuperseded(4, "ended"))
    metrics.emit(SessionClosed(b"t", b"s", num_sessions=2, num_blocks=4, num_running=0))
    by_cause = [value(metrics, "pagefold:blocks_superseded_total", cause=one) for one in get_args(SupersedeCause)]
    assert by_cause == [3, 4]
    assert value(metrics, "pagefold:sessions_ended_total") == 2


def test_prompts_count_at_their_first_token(metrics):
    metrics.emit(FirstToken("a", 0.03, num_prompt_tokens=100, num_cached_tokens=35, num_copied_tokens=3))
    assert value(metrics, "vllm:prompt_tokens_total") == 100
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 35
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 65
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 35
    assert value(metrics, "pagefold:prompt_tokens_copied_total") == 3
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.02") == 0


def test_steps(metrics):
    metrics.emit(RequestPreempted("a", 10, 1.0, 0.5, cause_request_id="b"))
    metrics.emit(StepAbandoned(3, 2, "error"))
    metrics.emit(
        StepApplied(4, 1, 0, num_prompt_tokens=20, num_output_tokens=3, num_recomputed_tokens=5, num_tokens=22)
    )
    metrics.emit(NextTokens({0.02: 2, 0.5: 1}))
    assert value(metrics, "vllm:num_preemptions_total") == 1
    assert value(metrics, "pagefold:steps_failed_total") == 1
    assert value(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "pagefold:tokens_recomputed_total") == 5
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 22
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 3
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.54)
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.025") == 2


@pytest.mark.parametrize("cause", get_args(EvictionCause))
def test_every_cause_of_an_eviction_has_a_series(metrics, cause):
    assert value(metrics, "pagefold:blocks_evicted_total", cause=cause) == 0
    metrics.emit(BlockEvicted(0, 0, cause))
    assert value(metrics, "pagefold:blocks_evicted_total", cause=cause) == 1


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_every_reason_to_end_has_a_series(metrics, reason):
    assert value(metrics, "vllm:request_success_total", finished_reason=reason) == 0
    metrics.emit(finished(reason))
    assert value(metrics, "vllm:request_success_total", finished_reason=reason) == 1


def test_the_times_of_a_request(metrics):
    metrics.emit(finished())
    sums = {
        "vllm:e2e_request_latency_seconds": 9,
        "vllm:request_queue_time_seconds": 1,
        "vllm:request_prefill_time_seconds": 2,
        "vllm:request_decode_time_seconds": 6,
        "vllm:request_inference_time_seconds": 8,
        "vllm:request_time_per_output_token_seconds": 2,
        "vllm:request_prompt_tokens": 100,
        "vllm:request_generation_tokens": 4,
        "vllm:request_prefill_kv_computed_tokens": 70,
    }
    assert {name: value(metrics, f"{name}_sum") for name in sums} == sums
    assert {value(metrics, f"{name}_count") for name in sums} == {1}


def test_a_request_that_got_no_token_only_waited(metrics):
    metrics.emit(finished("timeout", queue_s=9.0, prefill_s=None, decode_s=None, num_output_tokens=0))
    counts = {
        "vllm:e2e_request_latency_seconds": 1,
        "vllm:request_queue_time_seconds": 1,
        "vllm:request_prompt_tokens": 1,
        "vllm:request_generation_tokens": 1,
        "vllm:request_prefill_time_seconds": 0,
        "vllm:request_decode_time_seconds": 0,
        "vllm:request_inference_time_seconds": 0,
        "vllm:request_time_per_output_token_seconds": 0,
        "vllm:request_prefill_kv_computed_tokens": 0,
    }
    assert {name: value(metrics, f"{name}_count") for name in counts} == counts


def test_one_token_has_no_time_between_tokens(metrics):
    metrics.emit(finished(num_output_tokens=1, decode_s=0.0))
    assert value(metrics, "vllm:request_decode_time_seconds_count") == 1
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0


def test_events_that_nobody_counts_do_no_harm(metrics):
    before = counted(metrics)
    metrics.emit(RequestFinished("a", "length", 10, 5))
    metrics.emit(object())
    assert counted(metrics) == before


def test_what_tiers_had_is_no_hit_of_the_device(metrics):
    metrics.emit(PrefixLookup("a", 100, 32, after_preemption=False))
    assert value(metrics, "vllm:external_prefix_cache_queries_total") == 0, "there are no tiers"
    lookup = PrefixLookup(
        "b", 100, 80, after_preemption=False, num_loaded_tokens=48, has_tiers=True, num_lost_tokens=16
    )
    metrics.emit(lookup)
    metrics.emit(PrefixLookup("b", 110, 96, after_preemption=True, num_loaded_tokens=48, has_tiers=True))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 200
    assert value(metrics, "vllm:prefix_cache_hits_total") == 64
    assert value(metrics, "vllm:external_prefix_cache_queries_total") == 68
    assert value(metrics, "vllm:external_prefix_cache_hits_total") == 48
    assert value(metrics, "pagefold:prefix_cache_lost_windows_tokens_total") == 16
    metrics.emit(FirstToken("b", 0.1, 100, 80, 0, num_loaded_tokens=48))
    by_source = {"local_cache_hit": 32, "external_kv_transfer": 48}
    for source, num in by_source.items():
        assert value(metrics, "vllm:prompt_tokens_cached_by_source_total", source=source) == num


def test_what_requests_asked_for(metrics):
    metrics.emit(finished(num_allowed_tokens=16, num_preemptions=2))
    metrics.emit(finished(num_allowed_tokens=100))
    metrics.emit(finished(num_allowed_tokens=1, num_preemptions=7, is_warm_up=True))
    metrics.emit(PromptFinished("a", 3, 40))
    assert histogram(metrics, "vllm:request_params_max_tokens") == (2, 116)
    assert histogram(metrics, "vllm:request_num_preemptions") == (2, 2)
    assert value(metrics, "vllm:request_num_preemptions_bucket", le="0.0") == 1
    assert histogram(metrics, "vllm:request_params_n") == (1, 3)
    assert histogram(metrics, "vllm:request_max_num_generation_tokens") == (1, 40)


def test_how_long_blocks_live(metrics):
    metrics.emit(BlockEvicted(0, 0, "allocation", lifetime_s=90.0, idle_s=4.0))
    metrics.emit(BlockEvicted(1, 0, "reset", lifetime_s=70.0, idle_s=3.0))  # nobody was short of memory
    metrics.emit(BlocksReused({0.5: 256, 60.0: 2}))
    assert histogram(metrics, "vllm:kv_block_lifetime_seconds") == (1, 90)
    assert histogram(metrics, "vllm:kv_block_idle_before_evict_seconds") == (1, 4)
    assert histogram(metrics, "vllm:kv_block_reuse_gap_seconds") == (258, 248)
    assert value(metrics, "vllm:kv_block_reuse_gap_seconds_bucket", le="0.5") == 256


def test_who_waits_and_what_for(metrics):
    metrics.watch(lambda: EngineStatus(num_waiting=7, num_deferred=3))
    assert value(metrics, "vllm:num_requests_waiting") == 7
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 4
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="deferred") == 3


def test_caches_are_told_beside_their_bounds(metrics):
    metrics.watch(lambda: EngineStatus(caches=(CacheSize("words", 5, 10), CacheSize("grammars", 0, 99))))
    for cache, num_bytes, max_bytes in (("words", 5, 10), ("grammars", 0, 99)):
        assert value(metrics, "pagefold:cache_bytes", cache=cache) == num_bytes
        assert value(metrics, "pagefold:cache_max_bytes", cache=cache) == max_bytes


def test_blocks_are_told_by_how_they_were_made(metrics):
    metrics.watch(lambda: EngineStatus(kinds=(KindCount("exact", "", 5, 0), KindCount("keep 0.5", "int8", 2, 7))))
    for kind, codec, num_pinned, num_packed in (("exact", "none", 5, 0), ("keep 0.5", "int8", 2, 7)):
        assert value(metrics, "pagefold:num_pinned_blocks_by_kind", kind=kind, codec=codec) == num_pinned
        assert value(metrics, "pagefold:num_packed_blocks", kind=kind, codec=codec) == num_packed


def test_the_cache_s_settings_are_labels(metrics):
    metrics.watch(EngineStatus)
    assert not [line for line in counted(metrics) if line.startswith(b"vllm:cache_config_info")]
    metrics.emit(CacheConfigured({"block_size": "16", "num_gpu_blocks": "40"}))
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="40") == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Prometheus reads what Linux tells of a process")
def test_the_process_is_told_of(metrics):
    told = {family.name: family for family in metrics.read()}
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds"} <= set(told)
    (sample,) = told["process_resident_memory_bytes"].samples
    assert sample.value > 2**20


def test_gauges_are_of_the_moment(metrics):
    assert "vllm:num_requests_running" not in metrics.render().decode()
    status = EngineStatus(num_running=3)
    metrics.watch(lambda: status)
    assert value(metrics, "vllm:num_requests_running") == 3
    status = EngineStatus(num_running=2, num_wasted_slots=7)
    assert value(metrics, "vllm:num_requests_running") == 2
    assert value(metrics, "pagefold:num_wasted_slots") == 7


def test_nothing_is_kept_for_single_requests(metrics):
    """A thousand other requests leave as many series as one."""

    def life(index: int) -> None:
        name = f"request-{index}"
        metrics.emit(PrefixLookup(name, 10, 0, after_preemption=False))
        metrics.emit(FirstToken(name, 0.1 * index, 10, 0, 0))
        metrics.emit(NextTokens({0.01 * index: 1}))
        metrics.emit(OutputFinished(name, "abort", 10, 0, 2, e2e_s=index, queue_s=0.0, prefill_s=0.1, decode_s=0.1))

    life(1)
    before = metrics.render().count(b"\n")
    for index in range(1000):
        life(index)
    assert metrics.render().count(b"\n") == before


def test_two_of_them_share_nothing(metrics):
    metrics.emit(finished())
    assert value(Metrics("m"), "vllm:request_success_total", finished_reason="stop") == 0


def test_observing_needs_no_torch():
    code = "import sys, pagefold.observe.metrics, pagefold.observe.logs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Warm-ups and pins.


def test_warm_ups_count_with_their_tokens_and_in_no_histogram(metrics):
    metrics.emit(FirstToken("w", 0.5, 100, 30, 14, is_warm_up=True))
    metrics.emit(finished("length", is_warm_up=True))
    assert value(metrics, "vllm:prompt_tokens_total") == 100
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 30
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 0
    series = [sample for family in metrics.registry.collect() for sample in family.samples]
    counts = {sample.name: sample.value for sample in series if sample.name.endswith("_count")}
    assert counts
    assert not any(counts.values()), counts


@pytest.mark.parametrize("cause", get_args(PinCause))
def test_every_cause_of_the_end_of_a_pin_has_a_series(metrics, cause):
    assert value(metrics, "pagefold:pins_dropped_total", cause=cause) == 0
    metrics.emit(PinDropped("p", 3, cause))
    assert value(metrics, "pagefold:pins_dropped_total", cause=cause) == 1


# By what, where and when.


@given(st.integers(1, 2**23))
def test_classes_of_lengths_double(num_tokens):
    number, most = 0, 512
    while num_tokens > most:
        number, most = number + 1, most * 2
    assert length_class(num_tokens) == number


def test_tokens_are_timed_by_their_position(metrics):
    metrics.emit(NextTokens({0.02: 3, 0.5: 1}, {0: {0.02: 1}, 1: {0.02: 2}, 40: {0.5: 1}}))
    name = "pagefold:inter_token_latency_by_position_seconds"
    assert value(metrics, f"{name}_count", position="512") == 1
    assert value(metrics, f"{name}_sum", position="1k") == pytest.approx(0.04)
    assert value(metrics, f"{name}_count", position="2k") == 0
    assert value(metrics, f"{name}_count", position="+Inf") == 1  # whatever comes has a place
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4


@pytest.mark.parametrize(
    ("num_ahead", "label"), [(0, "0"), (1, "1-2"), (2, "1-2"), (3, "3-8"), (8, "3-8"), (9, "9-32"), (32, "9-32")]
)
def test_first_tokens_are_timed_by_the_queue_that_their_requests_met(metrics, num_ahead, label):
    metrics.emit(FirstToken("a", 0.3, 10, 0, 0, num_ahead=num_ahead))
    metrics.emit(FirstToken("b", 0.7, 10, 0, 0, num_ahead=10**6))
    name = "pagefold:time_to_first_token_by_queue_depth_seconds"
    assert value(metrics, f"{name}_sum", queue_depth=label) == 0.3
    assert value(metrics, f"{name}_sum", queue_depth="33+") == 0.7


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_of_a_miss_has_a_series(metrics, cause):
    assert value(metrics, "pagefold:prefix_cache_missed_tokens_total", cause=cause.value) == 0
    metrics.emit(PrefixMissed("a", {cause.value: 5}))
    assert value(metrics, "pagefold:prefix_cache_missed_tokens_total", cause=cause.value) == 5


def test_hits_are_told_by_the_tier_that_had_them(metrics):
    of_tiers = {"host": 16, "disk": 32}
    metrics.emit(PrefixLookup("a", 100, 60, after_preemption=False, num_loaded_tokens=48, loaded_by_tier=of_tiers))
    hits = {
        tier: value(metrics, "pagefold:prefix_cache_hit_tokens_total", tier=tier)
        for tier in ("device", "host", "disk", "remote")
    }
    assert hits == {"device": 12, **of_tiers, "remote": 0}


def test_tiers_have_a_bandwidth_in_both_directions(metrics):
    metrics.emit(TierRead("disk", 2, 2000, 0.5, {}))
    metrics.emit(TierWritten(3, 3, {"disk": 3000, "remote": 0}, {"disk": 0.25, "remote": 1.0}))
    assert value(metrics, "vllm:kv_offload_tiering_read_bytes_total", tier="disk") == 2000
    assert value(metrics, "vllm:kv_offload_tiering_read_time_total", tier="disk") == 0.5
    assert value(metrics, "vllm:kv_offload_tiering_write_bytes_total", tier="disk") == 3000
    assert value(metrics, "vllm:kv_offload_tiering_write_time_total", tier="remote") == 1


def test_waiting_for_a_tier_is_gain_or_regret(metrics):
    metrics.emit(FetchEnded("won", "brought", 100, waited_s=0.2, expected_s=0.1, saved_s=1.0))
    metrics.emit(FetchEnded("lost", "late", 50, waited_s=0.5, expected_s=0.3))
    metrics.emit(FetchEnded("declined", "slow", 70, waited_s=0.0))
    assert value(metrics, "pagefold:fetch_gain_seconds_total") == pytest.approx(0.8)
    assert value(metrics, "pagefold:fetch_regret_seconds_total") == 0.5
    assert value(metrics, "pagefold:fetch_waited_seconds_total") == pytest.approx(0.7)
    assert value(metrics, "pagefold:fetch_expected_seconds_total") == pytest.approx(0.4)
    assert value(metrics, "pagefold:fetch_tokens_total", outcome="slow") == 70
    assert value(metrics, "pagefold:fetches_total", outcome="late") == 1
