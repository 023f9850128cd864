"""What /metrics says beside what clients counted themselves, over HTTP."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from local_server import PATIENCE_S, LocalServer, ProcessServer, error_of, until
from typer.testing import CliRunner

from pagefold.cli import app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = {"temperature": 0, "ignore_eos": True}

LATENCIES = (
    *("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"),
    *("request_prefill_time", "request_decode_time", "request_inference_time", "request_time_per_output_token"),
)


@pytest.fixture
def small(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """Memory for 40 blocks, 12 of which a request may fill."""
    server = LocalServer(
        tiny_chat_model,
        kv_cache_memory_bytes=40 * 2**13,
        max_model_len=192,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        admission="prompt",  # so that requests are preempted
    )
    assert server.num_blocks == 40
    yield server
    server.runner.allow()
    server.check_pool()
    server.close()


class Client:
    """Sends one request, and counts what comes back."""

    def __init__(self, server: LocalServer, prompt: list[int], **fields: Any) -> None:
        self.num_prompt_tokens = len(prompt)
        self.usage: dict[str, Any] | None = None
        self.reason: str | None = None
        self.status = 0
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": prompt, **GREEDY, **fields}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        response = httpx.post(self._url, json=self._body, timeout=PATIENCE_S)
        self.status = response.status_code
        if response.status_code == 200:
            self.usage = response.json()["usage"]
            self.reason = response.json()["choices"][0]["finish_reason"]


def test_counts_are_those_of_the_clients(small):
    """Shared prompts, preemption, clients that vanish, a step that fails: sums and counts are exact."""
    shared = [700 + index for index in range(50)]
    clients = [
        Client(small, [*shared[: 7 * (index % 8)], *([index] * (index % 5 + 1))], max_tokens=60 + index)
        for index in range(24)
    ]
    small.runner.fail(1)
    body = {"prompt": [9] * 20, "max_tokens": 150, "stream": True, "cache_salt": "gone", **GREEDY}
    for _ in range(3):
        with small.post_raw("/v1/completions", body) as connection:
            connection.recv(1)
    for client in clients:
        client.wait()
    until(small.is_idle, "the vanished to end")
    after = small.metrics()
    assert all(client.usage is not None for client in clients)
    usages = [client.usage for client in clients]
    num_gone = after["vllm:request_success_total", "abort"]
    assert num_gone + after["vllm:request_success_total", "length"] == 27
    assert after["vllm:request_success_total", "length"] >= 24
    assert after["vllm:num_preemptions_total", ""] > 0, "memory was not short"
    assert after["pagefold:steps_failed_total", ""] == 1
    # How far the engine came with those that vanished, no client can say: of each, its whole prompt counts or nothing.
    num_served = after["vllm:time_to_first_token_seconds_count", ""]
    assert 24 <= num_served <= 27
    of_gone = (num_served - 24) * 20
    assert after["vllm:prompt_tokens_total", ""] == sum(usage["prompt_tokens"] for usage in usages) + of_gone
    num_cached = after["vllm:prompt_tokens_cached_total", ""]
    of_clients = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert of_clients <= num_cached <= of_clients + of_gone
    assert after["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == num_cached > 0
    by_source = [after["vllm:prompt_tokens_by_source_total", source] for source in ("local_compute", "local_cache_hit")]
    assert sum(by_source) == after["vllm:prompt_tokens_total", ""]
    # Whatever was not found at a first lookup has a cause, and the causes are those that are explained.
    missed = {cause: num for (name, cause), num in after.items() if name == "pagefold:prefix_cache_missed_tokens_total"}
    not_found = after["vllm:prefix_cache_queries_total", ""] - after["vllm:prefix_cache_hits_total", ""]
    assert sum(missed.values()) - missed["preempted"] == not_found
    assert missed["preempted"] > 0
    assert missed["never_seen"] > 0
    assert {cause: num for cause, num in missed.items() if num} == dict(_explained(small))
    num_gaps = after["vllm:inter_token_latency_seconds_count", ""]
    assert after["pagefold:inter_token_latency_by_position_seconds_count", "512"] == num_gaps
    depths = ("0", "1-2", "3-8", "9-32", "33+")
    by_depth = [after["pagefold:time_to_first_token_by_queue_depth_seconds_count", depth] for depth in depths]
    assert sum(by_depth) == num_served
    assert sum(by_depth[1:]) > 0, "nobody waited"
    num_generated = after["vllm:generation_tokens_total", ""]
    assert num_generated == after["vllm:request_generation_tokens_sum", ""]
    assert num_generated >= sum(usage["completion_tokens"] for usage in usages)
    assert num_generated == num_served + after["vllm:inter_token_latency_seconds_count", ""]
    ended = after["vllm:e2e_request_latency_seconds_count", ""]
    assert ended == 27 == after["vllm:request_queue_time_seconds_count", ""]
    assert after["vllm:request_prompt_tokens_sum", ""] == sum(client.num_prompt_tokens for client in clients) + 60
    for name in ("prefill_time_seconds", "decode_time_seconds", "prefill_kv_computed_tokens"):
        assert after[f"vllm:request_{name}_count", ""] == num_served
    assert after["pagefold:kv_waste_perc", ""] == 0 == after["pagefold:num_wasted_slots", ""]


def _explained(server: LocalServer) -> Counter[str]:
    """Tokens by cause, as the ledger has them of each request."""
    counts: Counter[str] = Counter()
    for record in server.ledger.all_records():
        for miss in (*(record.misses or ()), *record.recomputed):
            counts[miss.cause.value] += miss.num_tokens
    return counts


def test_every_way_to_end_is_counted_once(narrow):
    before = narrow.metrics()
    narrow.runner.script = narrow.tokenizer.encode("one two three")
    num = len(narrow.runner.script)
    stopped = narrow.complete("a", max_tokens=num, stop="three", **GREEDY)  # by its very last token
    assert stopped["choices"][0]["finish_reason"] == "stop"
    narrow.complete("b", max_tokens=2, **GREEDY)
    narrow.runner.fail(3)
    assert narrow.http.post("/v1/completions", json={"prompt": "c", **GREEDY}).status_code == 500
    narrow.runner.close_gate()
    connection = narrow.post_raw("/v1/completions", {"prompt": "d", "max_tokens": 500, **GREEDY})
    narrow.runner.wait_in_step()
    connection.close()
    until(lambda: not narrow.client._commands.empty(), "the server to notice")
    narrow.runner.allow()
    narrow.check_pool()
    ended = narrow.metrics()
    reasons = ("stop", "length", "error", "abort", "timeout")
    told = {reason: ended["vllm:request_success_total", reason] for reason in reasons}
    told = {reason: num - before["vllm:request_success_total", reason] for reason, num in told.items()}
    assert told == {"stop": 1, "length": 1, "error": 1, "abort": 1, "timeout": 0}


def test_refusals_are_no_requests_but_responses(narrow):
    before = narrow.metrics()
    assert narrow.http.post("/v1/completions", json={"prompt": []}).status_code == 400
    assert narrow.http.post("/v1/completions", json={"prompt": "a", "model": "other"}).status_code == 404
    after = narrow.metrics()
    grown = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    grown = {key: num for key, num in grown.items() if not key[0].endswith("_created") and key[1] != "/metrics200"}
    grown = {key: num for key, num in grown.items() if not key[0].startswith("process_")}
    assert grown == {
        ("pagefold:http_responses_total", "/v1/completions400"): 1,
        ("pagefold:http_responses_total", "/v1/completions404"): 1,
    }


def test_what_requests_asked_for_is_counted_once_a_prompt(small):
    """n and the longest output once a prompt; what each sample was allowed, once a sample."""
    prompts = [[5] * 20, [6] * 20]
    small.runner.script = None
    answer = small.complete(prompts, n=3, max_tokens=9, seed=1, temperature=1.0, stop_token_ids=list(range(0, 4000, 9)))
    small.complete([7] * 100, temperature=0)
    gone = {"prompt": [9] * 20, "max_tokens": 150, "stream": True, **GREEDY}
    with small.post_raw("/v1/completions", gone) as connection:
        connection.recv(1)
    until(lambda: small.metrics()["vllm:request_params_n_count", ""] == 4, "the one who went away to be counted")
    small.check_pool()
    after = small.metrics()

    def told(name: str) -> tuple[float, float]:
        return after[f"vllm:{name}_count", ""], after[f"vllm:{name}_sum", ""]

    assert told("request_params_n") == (4, 3 + 3 + 1 + 1)
    assert told("request_params_max_tokens") == (8, 6 * 9 + 16 + 150)
    assert told("request_num_preemptions") == (8, 0)
    assert answer["usage"]["completion_tokens"] <= 54
    num_ended, num_longest = told("request_max_num_generation_tokens")
    assert num_ended == 4
    assert num_longest <= 9 + 9 + 16 + 150


def test_what_the_host_had_is_told_apart_from_what_the_device_had(tiny_chat_model):
    """Prompts go to the host's memory and come back; usage says to each client what came from where."""
    server = LocalServer(
        tiny_chat_model, kv_cache_memory_bytes=40 * 2**13, max_model_len=192, max_num_seqs=2, kv_offloading_size=0.01
    )
    try:
        num_cached = num_loaded = num_asked = 0
        for number in (1, 2, 3, 4, 5, 1, 1, 2, 3):
            prompt = [number * 100 + at for at in range(150)]
            details = server.complete(prompt, max_tokens=2, **GREEDY)["usage"]["prompt_tokens_details"]
            num_asked += len(prompt)
            num_cached += details["cached_tokens"]
            num_loaded += sum(n for tier, n in details.get("cached_tokens_by_tier", {}).items() if tier != "device")
        after = server.metrics()
        assert 0 < num_loaded < num_cached
        assert after["vllm:prefix_cache_queries_total", ""] == num_asked
        assert after["vllm:prefix_cache_hits_total", ""] == num_cached - num_loaded
        assert after["vllm:external_prefix_cache_hits_total", ""] == num_loaded
        assert after["vllm:external_prefix_cache_queries_total", ""] == num_asked - (num_cached - num_loaded)
        assert after["vllm:prompt_tokens_cached_by_source_total", "external_kv_transfer"] == num_loaded
        assert after["vllm:prompt_tokens_cached_by_source_total", "local_cache_hit"] == num_cached - num_loaded
        num_evicted = after["pagefold:blocks_evicted_total", "allocation"]
        assert num_evicted > 0
        for name in ("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds"):
            assert after[f"vllm:{name}_count", ""] == num_evicted
        assert after["vllm:kv_block_idle_before_evict_seconds_sum", ""] > 0
        server.check_pool()
    finally:
        server.close()


def test_what_the_cache_is(small):
    text = small.http.get("/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    for label in ('num_gpu_blocks="40"', 'block_size="16"', 'enable_prefix_caching="True"', 'num_cpu_blocks="0"'):
        assert label in line
    assert line.endswith(" 1.0")


def test_every_cache_of_the_server_is_within_its_bound(small):
    """Also after grammars, words and salts without number."""
    for number in range(12):
        small.complete("a", max_tokens=2, structured_outputs={"regex": f"[ab]{{{number + 1}}}"}, cache_salt=f"{number}")
    small.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1}).raise_for_status()
    after = small.metrics()
    names = {label for name, label in after if name == "pagefold:cache_bytes"}
    assert names == {"grammars", "responses", "vetted_grammars", "words"}
    for name in names:
        assert 0 < after["pagefold:cache_bytes", name] <= after["pagefold:cache_max_bytes", name]
    assert after["pagefold:cache_bytes", "grammars"] > 0.8 * after["pagefold:cache_max_bytes", "grammars"]


def test_a_salt_is_kept_with_its_blocks_so_it_is_short(small):
    small.complete("a", max_tokens=1, cache_salt="s" * 256)
    response = small.http.post("/v1/completions", json={"prompt": "a", "cache_salt": "s" * 257})
    assert error_of(response, 400)["param"] == "cache_salt"


def test_no_client_makes_a_series(narrow):
    """Paths, models, ids, salts, methods: whatever a client sends, there is no new label."""

    def everything(index: int) -> None:
        name = f"x{index}"
        headers = {"X-Request-Id": name, "User-Agent": name, "Authorization": f"Bearer {name}"}
        fields = {"user": name, "cache_salt": name, "max_tokens": 1, **GREEDY}
        narrow.http.post("/v1/completions", json={"prompt": name, **fields}, headers=headers)
        narrow.http.post("/v1/completions", json={"prompt": name, "model": name, **fields})
        narrow.http.post("/v1/completions", json={"prompt": name, "max_tokens": name})
        narrow.http.get(f"/v1/models/{name}")
        narrow.http.get(f"/{name}", params={name: name})
        narrow.http.request(f"M{name}", "/v1/completions")

    everything(0)
    narrow.check_pool()
    before = set(narrow.metrics())
    for index in range(1, 4):
        everything(index)
    narrow.check_pool()
    assert set(narrow.metrics()) == before


@pytest.mark.long
def test_warming_up_is_counted_nowhere(tiny_chat_model):
    """At the moment when a server is ready, nothing has been counted but what was asked over HTTP."""
    server = ProcessServer(str(tiny_chat_model), "--kv-cache-memory-bytes", "4M", "--max-model-len", "256")
    try:
        metrics = server.metrics()
        said = {key: value for key, value in metrics.items() if not key[0].endswith("_created")}
        others = ("pagefold:http_", "process_")
        counted = {name for (name, _), value in said.items() if value and not name.startswith(others)}
        assert counted == {
            *("pagefold:num_blocks", "pagefold:num_free_blocks", "vllm:cache_config_info"),
            *("pagefold:cache_bytes", "pagefold:cache_max_bytes"),
        }
        assert {(f"vllm:{name}_seconds_count", "") for name in LATENCIES} <= set(metrics)
        reply = server.complete([1, 2, 3], max_tokens=2, **GREEDY)
        assert reply["usage"]["completion_tokens"] == 2
        assert server.metric("vllm:generation_tokens_total") == 2
        assert server.metric("vllm:time_to_first_token_seconds_count") == 1
    finally:
        server.close()


def test_the_planner_says_of_a_running_server_what_it_has(smol):
    """``pagefold plan --from-server``: to the block."""
    result = CliRunner().invoke(app, ["plan", "smollm2-135m", "--from-server", smol.url, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["engine"] == "pagefold"
    assert {row["what"]: row["ratio"] for row in found["rows"]} == {"num_blocks": 1.0}
    assert found["now"]["requests that run"] == 0
