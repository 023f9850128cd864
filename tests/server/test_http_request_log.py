"""One line for each request, and the id that it goes by."""

from __future__ import annotations

import json
import logging
import signal
from typing import TYPE_CHECKING

import openai
import pytest
from local_server import PATIENCE_S, ProcessServer, error_of, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = {"temperature": 0, "ignore_eos": True}
SECRET = "xyzzy-secret"


@pytest.fixture
def lines(caplog) -> Iterator[Lines]:
    caplog.set_level(logging.DEBUG, logger="pagefold")
    return Lines(caplog)


class Lines:
    """The lines of requests in the log of a server in this process."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def of(self, request_id: str) -> logging.LogRecord:
        """Wait for the line of that request; it comes after the answer."""
        until(lambda: self._found(request_id), "the line")
        (record,) = self._found(request_id)
        return record

    def _found(self, request_id: str) -> list[logging.LogRecord]:
        records = [record for record in self._caplog.records if record.name == "pagefold.request"]
        return [record for record in records if record.request_id == request_id]


def test_a_client_s_id_comes_back_and_names_the_line(tiny, lines):
    body = {"prompt": [5] * 20, "max_tokens": 7, **GREEDY}
    response = tiny.http.post("/v1/completions", json=body, headers={"X-Request-Id": "my-id.7:a_b"})
    assert response.headers["x-request-id"] == "my-id.7:a_b"
    line = lines.of("my-id.7:a_b")
    assert line.levelname == "INFO"
    usage = response.json()["usage"]
    assert line.response_id == response.json()["id"]
    assert (line.method, line.path, line.status) == ("POST", "/v1/completions", 200)
    assert (line.finish_reason, line.tenant) == ("length", None)
    assert (line.prompt_tokens, line.output_tokens) == (20, 7) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= line.queue_s <= line.ttft_s <= line.e2e_s


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "é", "-a", 'a"b', "a\tb", "{}", "a,b", "../a", "$(x)", "%0a"])
def test_an_id_that_is_not_sane_is_replaced(tiny, given):
    response = tiny.http.get("/version", headers=[(b"X-Request-Id", given.encode())])
    made = response.headers["x-request-id"]
    assert len(made) == 32
    assert made.isalnum()


def test_two_ids_are_none(tiny):
    response = tiny.http.get("/version", headers=[("X-Request-Id", "one"), ("X-Request-Id", "two")])
    assert response.headers["x-request-id"] not in ("one", "two")


def test_requests_may_share_an_id(tiny):
    """An id is for people: two requests under way with the same one do not get into each other's way."""
    tiny.runner.close_gate()
    body = {"prompt": "a", "max_tokens": 3, "stream": True, **GREEDY}
    headers = {"X-Request-Id": "same"}
    with (
        tiny.http.stream("POST", "/v1/completions", json=body, headers=headers) as one,
        tiny.http.stream("POST", "/v1/completions", json=body, headers=headers) as two,
    ):
        tiny.runner.allow()
        assert [b"[DONE]" in stream.read() for stream in (one, two)] == [True, True]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/nothing", 404), ("/v1/completions", 405), ("/v1/models/other", 404), ("/reset_prefix_cache", 405)],
)
def test_every_answer_has_an_id(tiny, path, status):
    response = tiny.http.get(path)
    assert response.status_code in (status, 403)
    assert response.headers["x-request-id"]


def test_openai_s_client_tells_the_id_of_an_error(tiny, lines):
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=-1)
    assert caught.value.request_id is not None
    line = lines.of(caught.value.request_id)
    assert line.status == 400
    assert not hasattr(line, "finish_reason")


def test_an_unforeseen_error_names_the_request_in_answer_and_log(tiny, monkeypatch, caplog, lines):
    def surprise(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tiny.client, "submit", surprise)
    response = tiny.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "unlucky"})
    assert "unlucky" in error_of(response, 500)["message"]
    assert response.headers["x-request-id"] == "unlucky"
    assert lines.of("unlucky").levelname == "WARNING"


def test_a_stream_is_logged_when_it_has_ended(tiny, lines):
    body = {"prompt": [6] * 20, "max_tokens": 4, "stream": True, **GREEDY}
    with tiny.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "stream"}) as response:
        assert response.headers["x-request-id"] == "stream"
        response.read()
    line = lines.of("stream")
    assert (line.status, line.finish_reason, line.output_tokens) == (200, "length", 4)


@pytest.mark.parametrize("stream", [True, False])
def test_who_vanishes_is_logged_as_that(narrow, lines, stream):
    narrow.runner.close_gate()
    body = json.dumps({"prompt": [6] * 10, "max_tokens": 500, "stream": stream, **GREEDY}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: gone-{stream}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = narrow.raw(head.encode() + body)
    narrow.runner.wait_in_step()
    connection.close()
    line = lines.of(f"gone-{stream}")
    narrow.runner.allow()
    assert (line.status, line.finish_reason) == (200 if stream else 499, "abort")
    assert (line.prompt_tokens, line.output_tokens, line.ttft_s) == (10, 0, None)


def test_several_prompts_are_one_line(tiny, lines):
    body = {"prompt": [[7] * 20, [8] * 10], "max_tokens": 3, "cache_salt": "fresh", **GREEDY}
    tiny.http.post("/v1/completions", json=body, headers={"X-Request-Id": "two"})
    line = lines.of("two")
    assert (line.prompt_tokens, line.output_tokens, line.finish_reason) == (30, 6, "length")


def test_probes_are_quiet(tiny, caplog, lines):
    for path in ("/health", "/ready", "/metrics"):
        tiny.http.get(path, headers={"X-Request-Id": f"probe{path[1:]}"})
        assert lines.of(f"probe{path[1:]}").levelname == "DEBUG"


# A process.


def serve(folder: Path, *flags: str) -> ProcessServer:
    limits = ("--kv-cache-memory-bytes", "4M", "--max-model-len", "256", "--served-model-name", "tiny")
    return ProcessServer(str(folder), *limits, *flags)


def ended(server: ProcessServer) -> str:
    """End it, and return what it wrote."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    return server.output()


@pytest.fixture
def tell_secrets():
    def tell(server: ProcessServer) -> None:
        """Send a secret wherever a client can; some of it is refused."""
        headers = {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET, "Cookie": SECRET}
        bodies = (
            {"prompt": SECRET, "max_tokens": 2},
            {"prompt": SECRET, "max_tokens": SECRET},
            {"prompt": SECRET, "model": SECRET},
            {"prompt": {"a": SECRET}},
            {"prompt": SECRET, "stop": SECRET, "user": SECRET, "cache_salt": SECRET},
        )
        for body in bodies:
            server.http.post("/v1/completions", json=body, headers=headers, params={"key": SECRET})
        server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": SECRET}]})
        server.http.post("/v1/completions", content=SECRET)

    return tell


@pytest.mark.long
def test_json_is_all_that_a_server_says(tiny_chat_model, tell_secrets):
    server = serve(tiny_chat_model, "--log-format", "json", "--api-key", SECRET)
    try:
        tell_secrets(server)
        server.http.get("/version", headers={"X-Request-Id": "asked"})
        output = ended(server)
    finally:
        server.close()
    said = [json.loads(line) for line in output.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(one) for one in said)
    assert any(one["message"].startswith("ready on http") for one in said)
    requests = [one for one in said if one["logger"] == "pagefold.request"]
    assert [one["status"] for one in requests] == [200, 400, 404, 400, 200, 401, 401, 200]
    assert requests[-1]["request_id"] == "asked"
    assert requests[0]["output_tokens"] == 2
    assert SECRET not in output


@pytest.mark.parametrize("flags", [(), pytest.param(("--log-level", "warning"), marks=pytest.mark.long)], ids=str)
def test_text_is_a_line_for_each_request_unless_asked_otherwise(tiny_chat_model, tell_secrets, flags):
    server = serve(tiny_chat_model, *flags)
    try:
        tell_secrets(server)
        said = ended(server)
    finally:
        server.close()
    assert said.count(" INFO pagefold.request: request request_id=") == (0 if flags else 7)
    assert said.count(" path=/v1/completions status=200 ") == (0 if flags else 2)
    assert ("pagefold.request" in said) is not bool(flags)
    assert SECRET not in said
