"""Clients that go away: in every state, streaming or not, their requests end and their blocks come back."""

from __future__ import annotations

import contextlib
import threading
import uuid

import pytest
from local_server import PATIENCE_S, LocalServer, post_head, until


def _long(**fields: object) -> dict:
    """A request longer than any of these tests, which ends because it is ended; no other shares its prefix."""
    return {"max_tokens": 1500, "temperature": 0, "ignore_eos": True, "cache_salt": uuid.uuid4().hex, **fields}


@pytest.fixture(autouse=True)
def _goes_on(narrow: LocalServer):
    yield
    narrow.check_pool()
    assert narrow.complete("and on", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.fixture
def ends_by_abort(narrow: LocalServer, _goes_on):
    """A request of the test is ended from outside."""
    before = narrow.metric("vllm:request_success_total", "abort")
    yield
    narrow.check_pool()
    assert narrow.metric("vllm:request_success_total", "abort") > before


def _leave(connection, narrow: LocalServer) -> None:
    """Close the connection, wait until the server has told the engine, and only then let the engine go on."""
    connection.close()
    until(lambda: not narrow.client._commands.empty(), "the server to notice")
    narrow.runner.allow()


@pytest.mark.usefixtures("ends_by_abort")
@pytest.mark.parametrize("stream", [True, False])
def test_while_prefilling(narrow, stream):
    narrow.runner.close_gate()
    connection = narrow.post_raw("/v1/completions", _long(prompt=[5] * 200, stream=stream))
    narrow.runner.allow(2)
    plan = narrow.runner.wait_in_step(starts=[32])
    assert plan.num_tokens == [16]
    assert not plan.sampling_rows
    _leave(connection, narrow)


@pytest.mark.usefixtures("ends_by_abort")
@pytest.mark.parametrize("stream", [True, False])
def test_while_decoding(narrow, stream):
    narrow.runner.close_gate()
    connection = narrow.post_raw("/v1/completions", _long(prompt=[6] * 10, stream=stream))
    narrow.runner.allow(4)
    narrow.runner.wait_in_step(starts=[13])
    if stream:
        received = b""
        while b"data: " not in received:
            received += connection.recv(4096)
    _leave(connection, narrow)


@pytest.mark.usefixtures("ends_by_abort")
@pytest.mark.parametrize("stream", [True, False])
def test_while_queued(narrow, stream):
    """The one place is taken: who leaves the queue never runs, and who runs is not touched."""
    narrow.runner.close_gate()
    running = threading.Thread(target=narrow.complete, args=([7] * 10,), kwargs={"max_tokens": 5, "ignore_eos": True})
    running.start()
    narrow.runner.wait_in_step()
    connection = narrow.post_raw("/v1/completions", _long(prompt=[8] * 10, stream=stream))
    until(lambda: not narrow.client._commands.empty(), "the request to come")
    narrow.runner.allow(1)
    narrow.runner.wait_in_step(starts=[10])
    num_admitted = narrow.metric("vllm:prefix_cache_queries_total")
    assert narrow.metric("vllm:num_requests_waiting") == 1
    _leave(connection, narrow)
    running.join(PATIENCE_S)
    assert not running.is_alive()
    narrow.check_pool()
    assert narrow.metric("vllm:prefix_cache_queries_total") == num_admitted


@pytest.mark.usefixtures("ends_by_abort")
@pytest.mark.parametrize("stream", [True, False])
def test_with_several_prompts(narrow, stream):
    """One runs, the others wait; all end."""
    before = narrow.metric("vllm:request_success_total", "abort")
    narrow.runner.close_gate()
    connection = narrow.post_raw("/v1/completions", _long(prompt=[[n] * 20 for n in range(5)], stream=stream))
    narrow.runner.wait_in_step()
    until(lambda: narrow.client._commands.qsize() + narrow.metric("vllm:num_requests_waiting") == 4, "all to come")
    narrow.runner.allow(2)
    narrow.runner.wait_in_step(starts=[20])
    assert narrow.metric("vllm:num_requests_waiting") == 4
    _leave(connection, narrow)
    narrow.check_pool()
    assert narrow.metric("vllm:request_success_total", "abort") == before + 5


@pytest.mark.usefixtures("ends_by_abort")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_stops_reading_a_stream(narrow, path):
    """As a program does that breaks out of its loop."""
    body = _long(prompt="go", messages=[{"role": "user", "content": "go"}])
    with contextlib.closing(narrow.iter_events(path, body)) as events:
        for _ in range(4):
            next(events)


@pytest.mark.usefixtures("ends_by_abort")
def test_many_at_once(narrow):
    """Twenty that leave at any moment, some before they are read at all, but not all of them."""
    connections = [
        narrow.post_raw("/v1/completions", _long(prompt=[n] * (10 + 7 * n), stream=n % 2 == 0)) for n in range(20)
    ]
    for connection in connections[10:]:
        connection.close()
    until(lambda: not narrow.is_idle(), "a request to run")
    for connection in connections[:10]:
        connection.close()


ROUTES = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 1500},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go"}], "max_tokens": 1500},
    "/v1/responses": {"input": "go", "max_output_tokens": 1500},
}


@pytest.mark.quick(every=2)
@pytest.mark.usefixtures("ends_by_abort")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ROUTES)
def test_on_every_route(narrow, path, stream):
    narrow.runner.close_gate()
    body = {"temperature": 0, "ignore_eos": True, "cache_salt": uuid.uuid4().hex, "stream": stream, **ROUTES[path]}
    connection = narrow.post_raw(path, body)
    narrow.runner.wait_in_step()
    _leave(connection, narrow)


@pytest.mark.parametrize("sent", [0, 10, 60, -1])
def test_while_the_head_or_the_body_is_sent(narrow, sent):
    """Nothing has begun, so nothing is to be ended."""
    before = narrow.metric("vllm:prefix_cache_queries_total")
    content = b'{"prompt": "x", "max_tokens": 3}'
    head = post_head("/v1/completions", len(content))
    whole = head + content
    for cut in (whole[:sent], head, head + content[:5]):
        narrow.raw(cut).close()
    narrow.check_pool()
    assert narrow.metric("vllm:prefix_cache_queries_total") == before


@pytest.mark.parametrize("stream", [True, False])
def test_while_its_prompt_is_tokenized(narrow, monkeypatch, stream):
    """A long text is tokenized on another thread; who has left meanwhile never comes to the engine."""
    begun, goes_on = threading.Event(), threading.Event()
    encode = narrow.tokenizer.encode

    def slowly(text: str, **how: bool) -> list[int]:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        return encode(text, **how)

    def num_left() -> float:
        return narrow.metrics().get(("pagefold:http_responses_total", "/v1/completions499"), 0)

    monkeypatch.setattr(narrow.tokenizer, "encode", slowly)
    monkeypatch.setattr(narrow.client, "submit", lambda *_: pytest.fail("it came to the engine"))
    before = num_left()
    connection = narrow.post_raw("/v1/completions", _long(prompt="word " * 1000, max_tokens=900, stream=stream))
    assert begun.wait(PATIENCE_S)
    connection.close()
    until(lambda: num_left() > before, "the server to notice")
    goes_on.set()


@pytest.mark.parametrize("stream", [True, False])
def test_at_the_last_token(narrow, stream):
    """While it is computed, and when it is there but not read."""
    for leaves_first in (True, False):
        narrow.runner.close_gate()
        body = _long(prompt=[9] * 10, max_tokens=5, stream=stream)
        connection = narrow.post_raw("/v1/completions", body)
        narrow.runner.allow(4)
        narrow.runner.wait_in_step(starts=[13])
        if leaves_first:
            connection.close()
            until(lambda: not narrow.client._commands.empty(), "the server to notice")
        narrow.runner.allow()
        narrow.check_pool()
        connection.close()
