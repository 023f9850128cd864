"""Failures inside: steps that fail, an engine that dies, a server that shuts down. Nothing hangs, nobody is misled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from local_server import PATIENCE_S, LocalServer, error_of, finish_reasons, joined, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def mortal(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """A server that does not survive its test."""
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**21, max_num_seqs=4, max_num_batched_tokens=64)
    yield server
    server.close()


def test_a_step_that_fails_once_is_run_again(tiny, caplog):
    expected = tiny.complete("again", **GREEDY)["choices"]
    tiny.runner.fail(2)
    assert tiny.complete("again", **GREEDY)["choices"] == expected
    assert tiny.metric("pagefold:steps_failed_total") >= 2


def test_a_step_that_keeps_failing_is_a_500(tiny, caplog):
    tiny.runner.fail(3)
    response = tiny.http.post("/v1/completions", json={"prompt": "no", **GREEDY})
    error = error_of(response, 500)
    assert (error["type"], error["code"]) == ("server_error", "step_failed")
    assert tiny.complete("yes", **GREEDY)


def test_an_error_in_a_stream_is_an_event(narrow, caplog):
    body = {"prompt": [9] * 10, "max_tokens": 100, **GREEDY}
    narrow.runner.script = narrow.tokenizer.encode("one two three four five six")
    narrow.runner.close_gate()
    narrow.runner.allow(3)
    events = []
    for event in narrow.iter_events("/v1/completions", body):
        events.append(event)
        if "choices" in event and joined(events) == "one two three":  # in as many events as it likes
            narrow.runner.wait_in_step()
            narrow.runner.fail(3)
            narrow.runner.allow()
    *texts, last = events
    assert joined(texts) == "one two three"
    assert finish_reasons(texts) == []
    assert set(last) == {"error"}
    assert last["error"]["code"] == "step_failed"
    assert "Traceback" not in last["error"]["message"]


def test_openai_s_client_raises_the_error_of_a_stream(narrow, caplog):
    narrow.runner.fail(3)
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5, stream=True
        )
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert caught.value.code == "step_failed"


def test_an_unforeseen_error_is_a_500(tiny, monkeypatch, caplog):
    def surprise(*_: object) -> None:
        msg = "secret /home/path.py"
        raise ZeroDivisionError(msg)

    monkeypatch.setattr(tiny.client, "submit", surprise)
    error = error_of(tiny.http.post("/v1/completions", json={"prompt": "x"}), 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in error["message"]


def test_an_engine_that_dies_tells_everybody(mortal, monkeypatch, caplog):
    """Those who run, those who wait, those who come later, and whoever asks for its health."""
    mortal.runner.close_gate()
    responses: list[httpx.Response] = []

    def post(stream: bool) -> None:
        body = {"prompt": [5] * 10, "max_tokens": 50, "stream": stream, **GREEDY}
        responses.append(httpx.post(f"{mortal.url}/v1/completions", json=body, timeout=PATIENCE_S))

    clients = [threading.Thread(target=post, args=(index % 2 == 0,)) for index in range(8)]
    for client in clients:
        client.start()
    mortal.runner.wait_in_step()
    until(lambda: mortal.metric("vllm:num_requests_running") + mortal.client._commands.qsize() == 8, "all to come")

    def dies(*_: object) -> None:
        msg = "our bug"
        raise AssertionError(msg)

    monkeypatch.setattr(mortal.engine.scheduler, "apply", dies)
    mortal.runner.allow()
    for client in clients:
        client.join(PATIENCE_S)
    assert len(responses) == 8
    streamed = [response for response in responses if response.status_code == 200]
    assert len(streamed) == 4
    assert all('"engine_unavailable"' in response.text and "[DONE]" in response.text for response in streamed)
    for response in responses:
        if response not in streamed:
            assert error_of(response, 503)["code"] == "engine_unavailable"
    error_of(mortal.http.get("/health"), 503)
    error_of(mortal.http.get("/ready"), 503)
    error_of(mortal.http.post("/v1/completions", json={"prompt": "x"}), 503)
    assert mortal.http.get("/metrics").status_code == 200


def test_what_still_runs_when_time_is_up_is_told(mortal):
    """Draining ends with an error in the stream and a 503 for who waits for a whole answer."""
    mortal.runner.close_gate()
    responses: list[httpx.Response] = []

    def post(stream: bool) -> None:
        body = {"prompt": [5] * 10, "max_tokens": 1900, "stream": stream, **GREEDY}
        responses.append(httpx.post(f"{mortal.url}/v1/completions", json=body, timeout=PATIENCE_S))

    clients = [threading.Thread(target=post, args=(stream,)) for stream in (True, False)]
    for client in clients:
        client.start()
    mortal.runner.wait_in_step()
    until(lambda: mortal.metric("vllm:num_requests_running") + mortal.client._commands.qsize() == 2, "both to come")
    draining = threading.Thread(target=mortal.client.drain, args=(0.1,))
    draining.start()
    until(lambda: mortal.http.get("/ready").status_code == 503, "the drain to begin")
    error_of(mortal.http.post("/v1/completions", json={"prompt": "x"}), 503)
    assert mortal.http.get("/health").status_code == 200
    assert mortal.http.get("/v1/models").status_code == 200
    draining.join(0.2)
    mortal.runner.allow()
    for thread in (draining, *clients):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    whole, streamed = sorted(responses, key=lambda response: response.headers["content-type"])
    assert error_of(whole, 503)["code"] == "engine_unavailable"
    assert '"engine_unavailable"' in streamed.text
    assert streamed.text.rstrip().endswith("data: [DONE]")
    mortal.check_pool()
