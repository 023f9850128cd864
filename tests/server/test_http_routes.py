"""The small routes, and the metrics."""

from __future__ import annotations

import sys

import pytest

from pagefold.events import (
    BlockEvicted,
    FirstToken,
    PrefixLookup,
    RequestFinished,
    RequestPreempted,
    StepAbandoned,
    StepApplied,
)
from pagefold.observe.metrics import Metrics

GREEDY = {"temperature": 0, "ignore_eos": True}


def test_models(tiny):
    (model,) = tiny.http.get("/v1/models").json()["data"]
    assert model == {
        "id": "tiny",
        "object": "model",
        "created": model["created"],
        "owned_by": "pagefold",
        "max_model_len": 2048,
    }
    assert tiny.http.get("/v1/models/tiny").json() == model
    assert tiny.http.get("/v1/models/org/other").status_code == 404


def test_health_and_readiness(tiny):
    assert tiny.http.get("/health").json() == {"status": "ok"}
    assert tiny.http.get("/ready").json() == {"status": "ready"}


def test_the_api_describes_itself(tiny):
    description = tiny.http.get("/openapi.json").json()
    paths = description["paths"]
    assert "429" in paths["/v1/completions"]["post"]["responses"]
    assert "Retry-After" in paths["/v1/completions"]["post"]["responses"]["429"]["headers"]
    assert not any("422" in operation["responses"] for methods in paths.values() for operation in methods.values())
    assert not {"HTTPValidationError", "ValidationError"} & set(description["components"]["schemas"])
    temperature = description["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]
    assert {"type": "null"} in temperature["anyOf"]
    assert temperature["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics"} <= set(paths)


def test_metrics_count_what_happened(tiny):
    prompt = [30_000 + i for i in range(50)]
    names = (
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total"),
        *("vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"),
    )
    labelled = (
        ("vllm:request_success_total", "length"),
        ("vllm:prompt_tokens_by_source_total", "local_compute"),
        ("vllm:prompt_tokens_by_source_total", "local_cache_hit"),
    )
    keys = [*((name, "") for name in names), *labelled]
    before = tiny.metrics()
    tiny.complete(prompt, max_tokens=10, **GREEDY)
    tiny.complete(prompt, max_tokens=10, **GREEDY)
    after = tiny.metrics()
    assert [after[key] - before[key] for key in keys] == [100, 48, 100, 48, 20, 2, 2, 52, 48]


def test_metrics_are_prometheus_text_with_vllm_s_labels(tiny):
    response = tiny.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in _sorted_labels(response.text)
    for name in ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "pagefold:num_free_blocks"):
        assert f"# TYPE {name} gauge" in response.text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in response.text
    assert 'le="2560.0"' in response.text


def _sorted_labels(text: str) -> str:
    return text.replace('{model_name="tiny",engine="0"}', '{engine="0",model_name="tiny"}')


# Metrics without a server.


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})


def test_lookups_after_a_preemption_are_no_hits(metrics):
    metrics.emit(PrefixLookup("a", 100, 32, after_preemption=False))
    metrics.emit(PrefixLookup("a", 120, 96, after_preemption=True))
    assert _value(metrics, "vllm:prefix_cache_queries_total") == 100
    assert _value(metrics, "vllm:prefix_cache_hits_total") == 32
    assert _value(metrics, "vllm:prompt_tokens_total") == 100


def test_every_event_is_counted(metrics):
    metrics.emit(RequestPreempted("a", 10, 1.0, 0.5, cause_request_id="b"))
    metrics.emit(StepAbandoned(3, 2, "error"))
    metrics.emit(StepApplied(4, 1, 0, num_prompt_tokens=20, num_output_tokens=3, num_recomputed_tokens=5))
    metrics.emit(FirstToken("a", 0.03))
    for cause in ("allocation", "allocation", "reset"):
        metrics.emit(BlockEvicted(0, 0, cause))
    for reason in ("stop", "length", "abort", "error"):
        metrics.emit(RequestFinished("a", reason, 10, 5))
        assert _value(metrics, "vllm:request_success_total", finished_reason=reason) == 1
    assert _value(metrics, "vllm:num_preemptions_total") == 1
    assert _value(metrics, "pagefold:steps_failed_total") == 1
    assert _value(metrics, "vllm:generation_tokens_total") == 3
    assert _value(metrics, "vllm:prompt_tokens_recomputed_total") == 5
    assert _value(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 15
    assert _value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 1
    assert _value(metrics, "vllm:time_to_first_token_seconds_bucket", le="0.02") == 0
    assert _value(metrics, "pagefold:blocks_evicted_total", cause="allocation") == 2
    assert _value(metrics, "pagefold:blocks_evicted_total", cause="not_admitted") == 0


def test_events_that_nobody_counts_do_no_harm(metrics):
    metrics.emit(object())


def test_without_an_engine_there_are_no_gauges(metrics):
    text = metrics.render().decode()
    assert "vllm:num_requests_running" not in text
    assert "vllm:generation_tokens_total" in text


def test_observing_needs_no_torch():
    import subprocess

    code = "import sys, pagefold.observe.metrics; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
