"""The small routes, and the metrics."""

from __future__ import annotations

import socket

from pagefold.server.listener import listen

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


def test_what_is_written_is_sent_at_once():
    """Connections inherit it. Else the second write of an answer waits for the client's delayed ACK, 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
