"""Tenants with quotas of KV over HTTP: what is refused, what stays, who waits for whom; a recording of it replayed."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, error_of, until

from pagefold.config import Account, EngineConfig, TenantQuota, quotas_of
from pagefold.engine.planning import plan_engine
from pagefold.errors import ConfigError
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces.read_recording import read_recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNTS = (
    Account(key="sk-kept", tenant="kept", kv_floor=0.25),
    Account(key="sk-small", tenant="small", kv_cap=0.25),
    Account(key="sk-any", tenant="any"),
)
BLOCK_BYTES = 2**13
NUM_BLOCKS = 40


def key_of(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}"}


def server_of(model: Path, record_trace: Path | None = None, **settings: object) -> LocalServer:
    return LocalServer(
        model,
        record_trace=record_trace,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_quotas=quotas_of(ACCOUNTS),
        door={"accounts": ACCOUNTS, "open_metrics": True, "admin_api_key": "sk-admin"},
        **settings,
    )


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = server_of(tiny_chat_model)
    yield server
    server.close()


def ask(server: LocalServer, tenant: str, prompt: list[int], max_tokens: int | None = 4, **fields: object):
    sent = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | fields
    return server.http.post("/v1/completions", json=sent, headers=key_of(tenant))


def num_found(response) -> int:
    return response.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def quotas(server: LocalServer) -> dict[str, dict[str, object]]:
    told = server.http.get("/v1/cache/quotas", headers=key_of("admin")).raise_for_status().json()
    return {each["tenant"]: each for each in told["data"]}


def test_what_never_fits_below_a_cap_is_refused_at_once(server):
    assert server.engine.scheduler.core.pool.num_blocks == NUM_BLOCKS
    error = error_of(ask(server, "small", [5] * 160), 400)
    assert error["param"] == "prompt"
    assert "The prompt has 160 tokens" in error["message"]
    assert "kv_cap is 0.25 of the cache, 160 tokens" in error["message"]
    error = error_of(ask(server, "small", [5] * 100, 61), 400)
    assert error["param"] == "max_tokens"
    assert "Ask for at most 60." in error["message"]
    assert ask(server, "small", [5] * 100, 60).status_code == 200
    assert ask(server, "any", [5] * 160).status_code == 200
    error = error_of(ask(server, "small", [5] * 60, 60, n=3, use_beam_search=True), 400)
    assert "kv_cap and kv_floor of tenants leave 10" in error["message"]


def test_a_prefix_below_the_floor_is_found_behind_anothers_burst(server):
    prompt = list(range(3, 153))
    ask(server, "kept", prompt).raise_for_status()
    for first in range(12):
        ask(server, "any", [200 + first] * 250).raise_for_status()
    assert num_found(ask(server, "kept", prompt)) == 144
    told = quotas(server)
    assert told["kept"]["floor_blocks"] == 10
    assert told["kept"]["num_blocks"] <= 10
    assert told["small"]["cap_blocks"] == 10
    assert set(told) == {"kept", "small"}
    assert server.http.get("/v1/cache/quotas", headers=key_of("kept")).status_code in (401, 403)


def test_who_waits_for_its_cap_is_passed_and_told_so(server):
    server.runner.close_gate()
    ended: list[str] = []

    def send(tenant: str, index: int) -> None:
        headers = {**key_of(tenant), "X-Request-Id": f"{tenant}-{index}"}
        sent = {"prompt": [300 + index] * 90, "max_tokens": 40, "ignore_eos": True}
        server.http.post("/v1/completions", json=sent, headers=headers).raise_for_status()
        ended.append(tenant)

    threads = [threading.Thread(target=send, args=("small", index)) for index in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: server.client._queue.num_requests == 4, "them to come")
    server.runner.allow(2)
    threads.append(threading.Thread(target=send, args=("any", 9)))
    threads[-1].start()
    until(lambda: server.client._queue.num_requests == 5, "another one to come")
    server.runner.allow()
    for thread in threads:
        thread.join()
    assert "any" in ended[:2]
    assert quotas(server)["small"]["num_blocks"] <= 10
    waits = []
    for index in range(4):
        told = server.http.get(f"/v1/explain/small-{index}", headers=key_of("small")).raise_for_status().json()
        waits += [wait["cause"] for wait in told["requests"][0]["waits"]]
    assert "kv_cap" in waits


@pytest.mark.long
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_recording_of_tenants_with_quotas_is_replayed_to_the_block(tiny_chat_model, tmp_path, policy):
    server = server_of(tiny_chat_model, tmp_path / "trace.jsonl", scheduling_policy=policy)

    warm = {"temperature": 1}

    def send(tenant: str, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(6):
            prompt = [rng.randrange(3, 6)] * rng.choice((5, 40, 80)) + [rng.randrange(3, 9) for _ in range(12)]
            ask(
                server, tenant, prompt, rng.randrange(2, 50), n=rng.choice((1, 1, 2)), seed=seed, **warm
            ).raise_for_status()

    senders = [("small", 1), ("small", 2), ("kept", 3), ("any", 4), ("any", 5)]
    threads = [threading.Thread(target=send, args=sender) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(server.is_idle, "all to end")
    server.close()
    recording = read_recording(tmp_path / "trace.jsonl")
    assert recording.settings.has_quotas
    assert "small" not in (tmp_path / "trace.jsonl").read_text()
    report = replay_recording(recording)
    assert report.first_difference == ""
    assert report.num_requests >= 30
    assert report.num_evictions > 0


# What is refused at the start.


@pytest.mark.parametrize(
    ("quotas", "settings", "said", "remedy"),
    [
        ([("a", 0.6, 1.0), ("b", 0.4, 1.0)], {}, "of all tenants together is 1 (a 0.6, b 0.4)", "below 1"),
        ([("a", 0.5, 0.25)], {}, "Tenant a has kv_floor 0.5, and kv_cap 0.25, which is less", "at most the cap"),
        ([("a", 0.0, 1.5)], {}, "Tenant a has kv_cap 1.5", "at most 1"),
        ([("a", 0.2, 1.0), ("a", 0.2, 1.0)], {}, "Tenant a has two quotas", "one for each"),
        ([("a", 0.7, 1.0)], {}, "leaves 12 of 40 blocks; one request of max_model_len = 256", "max_model_len=192"),
        ([("a", 0.0, 0.01)], {}, "Tenant a has kv_cap 0.01, which of 40 blocks holds no request", "at least 0.025"),
        ([("a", 0.5, 1.0)], {"enable_prefix_caching": False}, "without prefix caching nothing is kept", "Leave it out"),
        ([("a", 0.1, 1.0)], {"streaming_llm": 64}, "streaming_llm is set: quotas are not known there", "Leave out"),
        (
            [("a", 0.1, 1.0)],
            {"allow_streaming": True, "kv_offloading_size": 0.01},
            "allow_streaming is set: quotas are not known there",
            "Leave out",
        ),
    ],
)
def test_quotas_that_contradict_are_refused_at_the_start(tiny_chat_model, quotas, settings, said, remedy):
    with pytest.raises(ConfigError) as error:
        plan_engine(
            EngineConfig(
                model=str(tiny_chat_model),
                dtype="float64",
                attention_backend="reference",
                kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
                max_model_len=256,
                kv_quotas=tuple(TenantQuota(tenant=name, kv_floor=floor, kv_cap=cap) for name, floor, cap in quotas),
                **settings,
            )
        )
    assert said in error.value.message
    assert remedy in error.value.remedy
