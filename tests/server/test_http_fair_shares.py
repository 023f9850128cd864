"""Tenants with weights and token rates over HTTP: who goes first, who is refused, a recording of it replayed."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import TYPE_CHECKING, get_args

import pytest
from local_server import LocalServer, error_of, post_head, until

from pagefold.config import Account
from pagefold.errors import InvalidRequestError
from pagefold.events import RefusalReason
from pagefold.request import Caller
from pagefold.sampling import SamplingParams
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces.read_recording import read_recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNTS = (
    Account(key="sk-burst", tenant="burst"),
    Account(key="sk-quiet", tenant="quiet", weight=3.0),
    Account(key="sk-slow", tenant="slow", tokens_per_s=0.01, burst_tokens=40.0),
)
BLOCK_BYTES = 2**13


def key_of(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}"}


def body(num_tokens: int = 8, **fields: object) -> dict[str, object]:
    return {"prompt": [5] * num_tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


def fair_server(model: Path, record_trace: Path | None = None) -> LocalServer:
    return LocalServer(
        model,
        record_trace=record_trace,
        kv_cache_memory_bytes=40 * BLOCK_BYTES,
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        scheduling_policy="fair",
        door={"accounts": ACCOUNTS, "open_metrics": True, "admin_api_key": "sk-admin"},
    )


@pytest.fixture
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = fair_server(tiny_chat_model)
    yield server
    server.close()


def test_a_quiet_tenant_does_not_wait_for_a_burst(server):
    server.runner.close_gate()
    ended: list[str] = []

    def ask(tenant: str, index: int) -> None:
        sent = body(seed=index, max_tokens=12, cache_salt=f"{tenant} {index}")
        response = server.http.post("/v1/completions", json=sent, headers=key_of(tenant))
        assert response.status_code == 200, response.text
        ended.append(tenant)

    threads = [threading.Thread(target=ask, args=("burst", index)) for index in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: server.client._queue.num_requests == 6, "the burst to come")
    server.runner.allow(3)
    threads.append(threading.Thread(target=ask, args=("quiet", 0)))
    threads[-1].start()
    until(lambda: server.client._queue.num_requests == 7, "the quiet one to come")
    server.runner.allow()
    for thread in threads:
        thread.join()
    assert "quiet" in ended[:3], "two of the burst run, and one of them makes way"
    assert server.engine.scheduler.policy.shares.tenants["quiet"].weight == 3.0


def test_who_has_used_up_his_tokens_is_told_when_to_come_again(server):
    def ask(num_tokens: int, tenant: str = "slow"):
        return server.http.post("/v1/completions", json=body(num_tokens), headers=key_of(tenant))

    assert ask(30).status_code == 200
    until(server.is_idle, "it to end")  # 34 are charged
    response = ask(10)
    error = error_of(response, 429)
    assert error["code"] == "rate_limit_exceeded"
    assert error["type"] == "rate_limit_error"
    for said in ("10 tokens", "6 are left", "0.01 a second", "at most 40 at once"):
        assert said in error["message"]
    assert 300 < int(response.headers["Retry-After"]) <= 401
    assert ask(5).status_code == 200, "that much is left"
    assert ask(30, "quiet").status_code == 200, "others are not held back"
    counts = {reason: server.metric("pagefold:requests_refused_total", reason) for reason in get_args(RefusalReason)}
    assert counts == {"token_rate": 1, "ttft_target": 0, "queue_full": 0}


def level(server: LocalServer, tenant: str = "slow") -> float:
    """What is left for a tenant, but for what comes while the test runs."""
    return server.client._rates._buckets[tenant].level


def test_prompts_of_one_request_are_charged_together_or_not_at_all(server):
    def ask(prompt: list, **fields: object):
        sent = {**body(), "prompt": prompt, **fields}
        return server.http.post("/v1/completions", json=sent, headers=key_of("slow"))

    sent = ask([[5] * 15] * 5, max_tokens=1)
    assert sent.status_code == 200, "the bucket is full, though it holds less"
    until(server.is_idle, "them to end")
    assert level(server) == pytest.approx(40 - 75 - 5, abs=5)
    server.client._rates._buckets["slow"].level = 39.0
    error = error_of(ask([[5] * 15] * 5), 429)
    assert "75 tokens" in error["message"]
    assert level(server) == pytest.approx(39, abs=0.9), "nothing is charged"
    assert ask([[5] * 15] * 2, max_tokens=1).status_code == 200, "they would pass at once"


def test_a_request_that_is_refused_for_another_reason_gets_all_back(server):
    server.client._queue._max_requests = 2
    response = server.http.post("/v1/completions", json={**body(), "prompt": [[5] * 9] * 3}, headers=key_of("slow"))
    assert error_of(response, 429)["code"] == "queue_full"
    until(lambda: server.client._queue.num_requests == 0, "the first two to be ended")
    assert level(server) >= 40 - 2 * 4, "at most what was made meanwhile is charged"


def test_a_prompt_that_nobody_computed_is_given_back(server):
    server.runner.close_gate()
    connections = []
    for index, tenant in enumerate(("quiet", "slow")):
        content = json.dumps(body(20, stream=True, max_tokens=100 if tenant == "quiet" else 4)).encode()
        head = post_head("/v1/completions", len(content), f"Authorization: Bearer sk-{tenant}")
        connections.append(server.raw(head + content))
        until(lambda index=index: server.client._queue.num_requests == index + 1, "it to come")
        if tenant == "quiet":
            server.runner.wait_in_step()
    assert level(server) == pytest.approx(20, abs=1)
    connections[1].close()
    until(lambda: server.client._commands.qsize() >= 2, "the engine to be told that it left")
    server.runner.allow()
    until(lambda: server.client._queue.num_requests <= 1, "it to be ended")
    assert level(server) == pytest.approx(40, abs=0.1)
    connections[0].close()


def test_what_could_not_be_queued_is_given_back_and_is_no_end(server):
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    slow = Caller(tenant="slow")

    async def run() -> None:
        server.runner.close_gate()
        taken, refused = (server.client.submit("same", [5] * 10, sampling, slow) for _ in range(2))
        server.runner.allow(1)  # the second one comes to the engine before the first has ended
        with pytest.raises(InvalidRequestError):
            await anext(refused)
        server.runner.allow()
        async for _ in taken:
            pass

    asyncio.run(run())
    assert level(server) == pytest.approx(40 - 10 - 4, abs=1)
    assert server.client._queue.num_requests == 0
    assert len(server.client._queue._ends_s) == 1, "a refusal says nothing of when room will be"


def test_warm_ups_leave_weights_alone_and_are_not_charged(server):
    def warm(tenant: str, num_tokens: int) -> None:
        sent = {"prompt": list(range(3, 3 + num_tokens)), "tenant": tenant}
        response = server.http.post("/v1/cache/warm", json=sent, headers=key_of("admin"))
        assert response.status_code == 200, response.text

    server.http.post("/v1/completions", json=body(), headers=key_of("quiet")).raise_for_status()
    warm("quiet", 40)
    assert server.engine.scheduler.policy.shares.tenants["quiet"].weight == 3.0
    for _ in range(2):
        warm("slow", 60)
    assert level(server) == 40


def test_priorities_count_for_nothing_and_are_refused(server):
    response = server.http.post("/v1/completions", json=body(priority=-1), headers=key_of("quiet"))
    assert "fair looks at none" in error_of(response, 400)["message"]


@pytest.mark.long
def test_a_recording_of_tenants_is_replayed_to_the_block(tiny_chat_model, tmp_path):
    server = fair_server(tiny_chat_model, tmp_path / "trace.jsonl")

    def ask(tenant: str, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(5):
            sent = body(rng.choice((5, 20, 60)), max_tokens=rng.randrange(2, 40), seed=seed, temperature=1)
            sent["n"] = rng.choice((1, 1, 2))
            sent["prompt"] = [rng.randrange(3, 9) for _ in sent["prompt"]]
            if rng.random() < 0.2:
                content = json.dumps({**sent, "stream": True, "n": 1}).encode()
                head = post_head("/v1/completions", len(content), f"Authorization: Bearer sk-{tenant}")
                server.raw(head + content).close()
            else:
                server.http.post("/v1/completions", json=sent, headers=key_of(tenant)).raise_for_status()

    threads = [
        threading.Thread(target=ask, args=(tenant, seed))
        for tenant, seed in (("burst", 1), ("burst", 2), ("burst", 3), ("quiet", 4))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(server.is_idle, "all to end")
    server.close()
    recording = read_recording(tmp_path / "trace.jsonl")
    assert recording.settings.scheduling_policy == "fair"
    report = replay_recording(recording)
    assert report.first_difference == ""
    assert report.num_requests >= 10
