"""Guardrails over HTTP: who would come too late gets a 429 that says so, before anything else is sent."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest
from local_server import PATIENCE_S, LocalServer, error_of, until

from pagefold.engine.token_rates import TokenRate, TokenRates
from pagefold.scheduler import Rates
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces.read_recording import read_recording
from pagefold.sim.traces.recording import RecordedStep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = {"prompt": [5] * 10, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
BODIES = {
    "/v1/completions": {"prompt": [5] * 10, "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
}
SLOW = Rates(prompt_tokens=1e9, prompt_s=1, num_finished=1, contended_s=25)
"""A request leaves each 25 s."""


class GuardedServer(LocalServer):
    """A server of one seat with a target of 10 s, which it believes to keep for who finds an empty house alone."""

    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(
            folder,
            kv_cache_memory_bytes=2**22,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            target_ttft_ms=10_000,
            **settings,
        )
        self.threads: list[threading.Thread] = []
        self.answers: list[httpx.Response | Exception] = []

    def believe(self, rates: Rates) -> None:
        """Let it have measured these rates."""
        shedder = self.engine.scheduler.guardrails.shedder
        shedder.state = replace(shedder.state, rates=rates)

    def fill(self) -> None:
        """Let a long request run; its step stands at the gate."""
        self.runner.close_gate()
        self.send("/v1/completions", LONG)
        self.runner.wait_in_step()
        self.believe(SLOW)

    def send(self, path: str, body: dict) -> None:
        """Send, on a thread of its own."""
        thread = threading.Thread(target=self._post, args=(path, body))
        thread.start()
        self.threads.append(thread)

    def _post(self, path: str, body: dict) -> None:
        try:
            self.answers.append(httpx.post(self.url + path, json=body, timeout=PATIENCE_S))
        except httpx.HTTPError as error:
            self.answers.append(error)

    def judge(self, path: str, body: dict) -> httpx.Response:
        """Send to a server whose step stands at the gate, let it judge between two steps, and return the answer."""
        number = len(self.answers)
        self.send(path, body)
        until(lambda: not self.client._commands.empty(), "the request to reach the engine")
        self.runner.allow(1)
        until(lambda: len(self.answers) > number, "an answer")
        answer = self.answers[number]
        assert isinstance(answer, httpx.Response)
        return answer

    def close(self) -> None:
        self.runner.allow()
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        super().close()


def refusals(caplog) -> list[logging.LogRecord]:
    return [line for line in caplog.records if getattr(line, "refused_for", "")]


@pytest.fixture
def server(tiny_chat_model: Path) -> Iterator[GuardedServer]:
    server = GuardedServer(tiny_chat_model)
    yield server
    server.runner.allow()
    server.check_pool()
    server.close()


def test_who_would_come_too_late_is_told_before_a_stream_begins(server, caplog):
    caplog.set_level(logging.INFO, "pagefold.request")
    server.fill()
    for path, body in BODIES.items():
        for stream in (False, True):
            refused = server.judge(path, {**body, "stream": stream, "model": server.model})
            assert refused.status_code == 429, path
            assert refused.headers["content-type"] == "application/json"
            assert 1 <= int(refused.headers["retry-after"]) <= 25
            error = refused.json()["error"]
            assert error["type"] == "rate_limit_error"
            if path == "/v1/messages":
                assert refused.json()["type"] == "error"
            else:
                assert error["code"] == "ttft_target"
            assert "10000" in error["message"]
            assert "25" in error["message"]
    assert "others were refused" not in error["message"], "25 s are far too long in any case"
    assert server.metric("pagefold:requests_refused_total", "ttft_target") == 8
    assert server.metric("pagefold:shedding") == 1
    told = server.judge("/v1/completions", BODIES["/v1/completions"])
    assert told.status_code == 429
    # Each line comes after its answer, so that those before may come late too.
    until(lambda: len(refusals(caplog)) == 9, "a line in the log for each")
    line = refusals(caplog)[-1]
    assert (line.refused_for, line.status) == ("ttft_target", 429)
    assert line.expected_ttft_s >= 25 > line.most_ttft_s
    explained = server.http.get(f"/v1/explain/{told.headers['x-request-id']}")
    assert "overloaded" in explained.text
    server.runner.allow()
    until(server.is_idle, "the long request to end")
    assert server.metric("pagefold:shedding") == 0
    assert server.complete("there is room again", max_tokens=3)["choices"]


def test_who_is_taken_gets_a_stream_as_ever(server):
    server.fill()
    server.believe(Rates())
    for index, (path, body) in enumerate(BODIES.items(), start=1):
        server.send(path, {**body, "stream": True, "model": server.model})
        until(lambda index=index: server.client._queue.num_requests == index + 1, f"{path} to come")
    server.runner.allow()
    until(lambda: len(server.answers) == 5, "all answers")
    assert [answer.status_code for answer in server.answers] == [200] * 5
    streams = [answer for answer in server.answers if answer.headers["content-type"].startswith("text/event-stream")]
    assert len(streams) == 4


def test_an_idle_server_takes_anybody(server):
    server.believe(SLOW)
    assert server.complete("hello", max_tokens=3)["choices"]
    with server.http.stream("POST", "/v1/completions", json={**BODIES["/v1/completions"], "stream": True}) as response:
        assert response.status_code == 200
        response.read()


def test_prompts_of_one_request_are_judged_once(server):
    server.believe(SLOW)
    answer = server.complete([[1] * 9, [2] * 9, [3] * 9], max_tokens=2)
    assert len(answer["choices"]) == 3, "they are not refused since they are in each other's way"
    server.fill()
    refused = server.judge("/v1/completions", {"prompt": [[1], [2], [3]], "max_tokens": 2, "stream": True})
    error_of(refused, 429)
    assert server.metric("pagefold:requests_refused_total", "ttft_target") == 1
    server.runner.allow()
    server.check_pool()
    assert server.client._queue.num_requests == 0


def test_a_tenant_gets_back_what_a_request_would_have_cost_that_comes_too_late(server):
    rates = TokenRates({"": TokenRate(1e-3, 100.0)}, time.monotonic)
    server.fill()
    server.client._rates = rates
    refused = server.judge("/v1/completions", {"prompt": [[1] * 30, [2] * 30], "max_tokens": 2})
    assert error_of(refused, 429)["code"] == "ttft_target"
    assert rates._buckets[""].level == pytest.approx(100, abs=2), "but for a token of the one that runs"


def test_who_waits_to_be_judged_when_the_server_drains_is_judged(server):
    server.fill()
    number = len(server.answers)
    server.send("/v1/completions", {"prompt": [1] * 5, "max_tokens": 2, "stream": True})
    until(lambda: not server.client._commands.empty(), "the request to reach the engine")
    draining = threading.Thread(target=server.client.drain, args=(PATIENCE_S,))
    draining.start()
    until(lambda: server.client._commands.qsize() >= 2, "the engine to be told that it drains")
    server.runner.allow()
    draining.join(PATIENCE_S)
    until(lambda: len(server.answers) == 2, "both answers")
    assert sorted(answer.status_code for answer in server.answers[number:]) == [200, 429]


@pytest.mark.long
def test_a_client_that_leaves_before_it_is_judged_leaves_nothing_behind(server):
    server.fill()
    connection = server.post_raw("/v1/completions", {**LONG, "stream": True})
    until(lambda: not server.client._commands.empty(), "the request to reach the engine")
    connection.close()
    until(lambda: server.client._commands.qsize() >= 2, "the engine to be told that it left")
    server.runner.allow()
    server.check_pool()
    assert server.client._queue.num_requests == 0


def test_an_engine_that_dies_meanwhile_is_told_as_what_it_is(tiny_chat_model):
    server = GuardedServer(tiny_chat_model)
    try:
        _die(server)
    finally:
        server.close()


def _die(server):
    server.fill()
    server.send("/v1/completions", {**LONG, "stream": True})
    until(lambda: not server.client._commands.empty(), "the request to reach the engine")

    def dies(*_: object) -> None:
        msg = "the test ends the engine"
        raise ZeroDivisionError(msg)

    server.engine.scheduler.apply = dies
    server.runner.allow()
    until(lambda: len(server.answers) == 2, "both answers")
    assert [answer.status_code for answer in server.answers] == [503, 503]


def test_without_a_target_nothing_is_awaited(tiny_chat_model):
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**22)
    server.runner.close_gate()
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        assert response.status_code == 200, "its headers come before any step has ended"
        server.runner.allow()
        response.read()
    assert "pagefold:shedding" not in {name for name, _ in server.metrics()}
    assert "pagefold:prefill_cap_tokens" not in {name for name, _ in server.metrics()}
    server.close()


def test_caps_are_told_and_recorded_and_replayed(tiny_chat_model, tmp_path, caplog):
    file = tmp_path / "trace.jsonl"
    with caplog.at_level(logging.WARNING):
        server = LocalServer(
            tiny_chat_model,
            record_trace=file,
            kv_cache_memory_bytes=2**22,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            target_itl_ms=1e-6,
        )
    (told,) = [line.getMessage() for line in caplog.records if "--target-itl-ms" in line.getMessage()]
    assert "is 1e-06, which cannot be kept here" in told
    assert server.metric("pagefold:prefill_cap_tokens") == 64
    server.runner.close_gate()  # so that all prompts are computed beside one that decodes
    one = threading.Thread(target=server.complete, args=([9] * 3,), kwargs={"max_tokens": 80, "ignore_eos": True})
    others = [
        threading.Thread(target=server.complete, args=([number] * 200,), kwargs={"max_tokens": 2})
        for number in range(8)
    ]
    for number, thread in enumerate([one, *others]):
        thread.start()
        until(lambda number=number: server.client._queue.num_requests == number + 1, "it to come")
    server.runner.allow()
    for thread in (one, *others):
        thread.join(PATIENCE_S)
    cap = server.metric("pagefold:prefill_cap_tokens")
    assert 16 <= cap <= 0.75 * 0.75 * 64, "a block of tokens is the floor"
    assert server.metric("pagefold:drafts_allowed") == 1, "nobody drafts, so there is nothing to switch off"
    server.close()
    recording = read_recording(file)
    caps = [step.prefill_cap_tokens for step in recording.happened if isinstance(step, RecordedStep)]
    assert (caps[0], caps[-1]) == (64, cap)
    report = replay_recording(recording)
    assert not report.first_difference
    assert report.num_equal_steps == len(caps)
