"""A queue with an end, requests with a deadline, and requests that may go first."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from local_server import PATIENCE_S, LocalServer, error_of, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = {"prompt": [5] * 10, "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def full(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """A server with one place and two chairs, by priority, where a request has 100 s."""
    server = LocalServer(
        tiny_chat_model,
        kv_cache_memory_bytes=2**22,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_requests=3,
        scheduling_policy="priority",
        request_timeout_s=100.0,
    )
    yield server
    server.runner.allow()
    server.check_pool()
    server.close()


class Clients:
    """Clients that wait for their answers, each on a thread."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._threads: list[threading.Thread] = []
        self.answers: list[tuple[str, httpx.Response]] = []

    def send(self, name: str, **fields: object) -> None:
        """Send, and wait until the engine has it."""
        before = self._server.client._queue.num_requests
        thread = threading.Thread(target=self._post, args=(name, {**LONG, **fields}))
        thread.start()
        self._threads.append(thread)
        until(lambda: self._server.client._queue.num_requests > before, f"{name} to come")

    def wait(self) -> list[tuple[str, httpx.Response]]:
        """Wait for all answers; return them in the order in which they came."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return self.answers

    def _post(self, name: str, body: dict) -> None:
        response = httpx.post(f"{self._server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        self.answers.append((name, response))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("stream", [False, True])
def test_one_too_many_is_told_when_to_come_again(full, stream):
    before = full.metric("pagefold:requests_refused_total", "queue_full")
    full.runner.close_gate()
    clients = Clients(full)
    for index in range(3):
        clients.send(str(index), stream=index == 1)
    refused = full.http.post("/v1/completions", json={**LONG, "stream": stream})
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert not re.search(r"\d+ requests|%", error["message"])  # it may be another tenant who fills the queue
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert full.http.get("/ready").status_code == 200
    full.runner.allow()
    assert [response.status_code for _, response in clients.wait()] == [200] * 3
    assert full.complete("there is room again", max_tokens=3)["choices"]
    assert full.metric("pagefold:requests_refused_total", "queue_full") > before


def test_prompts_of_one_request_come_in_together_or_not_at_all(full):
    full.runner.close_gate()
    clients = Clients(full)
    clients.send("first")
    error_of(full.http.post("/v1/completions", json={**LONG, "prompt": [[1], [2], [3]]}), 429)
    until(lambda: full.client._commands.qsize() >= 5, "two to come and to be taken back, and one to be refused")
    full.runner.allow()
    clients.wait()
    full.check_pool()
    assert full.client._queue.num_requests == 0


def test_openai_s_client_raises_its_rate_limit_error(full):
    full.runner.close_gate()
    clients = Clients(full)
    for index in range(3):
        clients.send(str(index))
    with openai.OpenAI(base_url=f"{full.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="x", stream=True)
        full.runner.allow()
    assert caught.value.response.headers["retry-after"]
    clients.wait()


def test_a_client_that_leaves_makes_room(full):
    full.runner.close_gate()
    clients = Clients(full)
    clients.send("first")
    leaving = [full.post_raw("/v1/completions", {**LONG, "stream": index == 0}) for index in range(2)]
    until(lambda: full.client._queue.num_requests == 3, "all to come")
    for connection in leaving:
        connection.close()
    until(lambda: full.client._commands.qsize() >= 4, "the server to notice")
    full.runner.allow()
    until(lambda: full.client._queue.num_requests <= 1, "room")
    clients.wait()
    assert full.client._queue.num_requests == 0


def test_the_smallest_priority_is_served_first(full):
    full.runner.close_gate()
    clients = Clients(full)
    clients.send("running")
    full.runner.wait_in_step()
    clients.send("later", priority=5, prompt=[6] * 10)
    clients.send("sooner", priority=-5, prompt=[7] * 10)
    full.runner.allow()
    assert [name for name, _ in clients.wait()] == ["running", "sooner", "later"]


def test_a_priority_is_refused_where_none_counts(tiny):
    error = error_of(tiny.http.post("/v1/completions", json={"prompt": "x", "priority": 3}), 400)
    assert error["param"] == "priority"
    assert "fcfs looks at none" in error["message"]
    assert tiny.complete("x", priority=0, max_tokens=2)["choices"]


def test_a_request_has_until_its_deadline(full):
    """What runs and what waits; whole and streamed. Its text so far has been sent, its blocks come back."""
    now = 1000.0
    full.engine._clock = lambda: now
    full.runner.close_gate()
    clients = Clients(full)
    clients.send("whole")
    full.runner.allow(4)
    full.runner.wait_in_step(starts=[13])
    clients.send("streamed, waiting", stream=True)
    full.runner.allow(1)
    full.runner.wait_in_step(starts=[14])
    now += 99.0
    clients.send("patient")
    full.runner.allow(1)
    full.runner.wait_in_step(starts=[15])
    now += 2.0
    full.runner.allow()
    answers = dict(clients.wait())
    error = error_of(answers["whole"], 504)
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert "after 7 tokens: its 100 s are up" in error["message"]
    assert '"request_timeout"' in answers["streamed, waiting"].text
    assert "while it waited" in answers["streamed, waiting"].text
    assert answers["streamed, waiting"].text.rstrip().endswith("data: [DONE]")
    assert answers["patient"].status_code == 200
    assert full.metric("vllm:request_success_total", "timeout") == 2
