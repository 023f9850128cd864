"""Connections: what raw sockets may do, for how long, and how they are told."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from local_server import PATIENCE_S, LocalServer, post_head, until

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.fixture(scope="module")
def strict(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """A server with little patience and few places."""
    server = LocalServer(
        tiny_chat_model,
        door={
            "http_header_timeout_s": 0.5,
            "http_body_timeout_s": 0.7,
            "timeout_keep_alive_s": 0.6,
            "max_connections": 8,
        },
        kv_cache_memory_bytes=2**21,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    yield server
    server.runner.allow()
    server.check_pool()
    server.close()


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def refused(answer: bytes, status: int) -> str:
    """The message of an answer that must be an error in OpenAI's form, and the last of its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"content-type: application/json" in head.lower()
    assert b"x-request-id: " in head.lower()
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


def test_a_silent_connection_is_closed(strict):
    with strict.raw(b"") as connection:
        assert read_all(connection) == b""


def test_a_head_that_drips_is_given_up(strict):
    """However regularly it drips."""
    with strict.raw(GET[:-2]) as connection:
        began = time.monotonic()
        answer = b""
        while not answer and time.monotonic() - began < PATIENCE_S:
            connection.settimeout(0.1)
            try:
                connection.sendall(b"a: b\r\n")
                answer = connection.recv(65536)
            except TimeoutError:
                continue
    assert "0.5 s" in refused(answer, 408)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("path", ["/v1/completions", "/no/such/route"])
def test_a_body_that_drips_is_given_up(strict, path):
    """Also one that nobody reads, of a request that is answered already."""
    with strict.raw(post_head(path, 10_000)) as connection:
        connection.settimeout(0.1)
        began = time.monotonic()
        answer, is_open = b"", True
        while is_open and time.monotonic() - began < PATIENCE_S:
            try:
                connection.sendall(b"{")
                piece = connection.recv(65536)
                answer += piece
                is_open = bool(piece)
            except TimeoutError:
                continue
            except OSError:  # closed while it was still sending
                is_open = False
    assert not is_open
    assert answer.startswith(b"HTTP/1.1 408 " if path.startswith("/v1") else b"HTTP/1.1 404 ")
    if path.startswith("/v1"):
        assert "not complete after 0.7 s" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_an_idle_connection_is_closed(strict):
    with strict.raw(GET) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_stream_is_ended_by_none_of_this(strict):
    """It takes longer than every limit, and its client sends nothing meanwhile."""
    strict.runner.close_gate()
    with strict.post_raw("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True}) as it:
        strict.runner.allow(2)
        time.sleep(1.5)
        strict.runner.allow()
        answer = b""
        while b"[DONE]" not in answer:
            piece = it.recv(65536)
            assert piece
            answer += piece


def test_a_connection_too_many_takes_the_place_of_an_idle_one(strict):
    """The one that has been idle for longest; those with requests stay."""
    strict.runner.close_gate()
    body = {"prompt": "a", "max_tokens": 1}
    with strict.post_raw("/v1/completions", body) as busy:
        strict.runner.wait_in_step()
        idle = [strict.raw(b"") for _ in range(12)]
        for connection in idle[:3]:
            assert read_all(connection) == b""
        with strict.raw(GET) as new:
            assert new.recv(4096).startswith(b"HTTP/1.1 200 ")
        strict.runner.allow()
        assert busy.recv(4096).startswith(b"HTTP/1.1 200 ")
        for connection in idle:
            connection.close()


def test_where_all_are_busy_one_more_is_refused(strict):
    strict.http.close()
    strict.runner.close_gate()
    busy = [strict.post_raw("/v1/completions", {"prompt": "a", "max_tokens": 1}) for _ in range(8)]
    try:
        until(lambda: strict.client._queue.num_requests == 8, "all to come")
        with strict.raw(GET) as new:
            assert "in use" in refused(read_all(new), 503)
    finally:
        strict.runner.allow()
        answers = [connection.recv(4096) for connection in busy]
        for connection in busy:
            connection.close()
        strict.open_http()
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"nonsense\r\n\r\n", 400, "request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400, "HTTP"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n", 400, "Content-Length"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 400, "Transfer-Encoding"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "16384"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 10_000, 431, "16384"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * 17_000 + b"\r\n\r\n", 431, "16384"),
        (post_head("/v1/completions", 0, "Transfer-Encoding: chunked") + b"zz\r\n", 400, "chunk"),
    ],
    ids=[
        "nonsense",
        "no host",
        "no colon",
        "no length",
        "no such coding",
        "long path",
        "many headers",
        "head of two reads",
        "bad chunk",
    ],
)
def test_what_is_no_http_is_told_in_openai_s_form(tiny, sent, status, said):
    counted = ("pagefold:http_responses_total", "")
    before = sum(value for (name, _), value in tiny.metrics().items() if name == counted[0])
    with tiny.raw(sent) as connection:
        answer = read_all(connection)
    assert said.lower() in refused(answer, status).lower()
    assert sum(value for (name, _), value in tiny.metrics().items() if name == counted[0]) > before


def test_a_request_with_length_and_chunks_is_the_last_of_its_connection(tiny):
    """What follows may be somebody else's request, to whoever believed in the length."""
    head = post_head("/v1/completions", 5, "Transfer-Encoding: chunked")
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    with tiny.raw(head + chunk + GET) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1 ") == 1


def test_pipelined_requests_are_answered_in_order(tiny):
    with tiny.raw(GET * 300) as connection:
        answer = b""
        while answer.count(b"HTTP/1.1 200 ") < 300:
            piece = connection.recv(65536)
            assert piece
            answer += piece


def test_a_path_is_not_echoed_at_length(tiny):
    response = tiny.http.get("/" + "a" * 10_000)
    assert response.status_code == 404
    assert len(response.content) < 500
    response = tiny.http.post("/v1/models/" + "a" * 10_000)
    assert response.status_code == 405
    assert len(response.content) < 500


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/load", "/version", "/metrics", "/v1/models", "/docs"])
def test_head_is_get_without_a_body(tiny, path):
    head, get = tiny.http.head(path), tiny.http.get(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    with tiny.raw(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()) as connection:
        assert read_all(connection).endswith(b"\r\n\r\n")


def test_head_of_what_takes_none(tiny):
    response = tiny.http.head("/v1/completions")
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    assert tiny.http.head("/no/such/route").status_code == 404


@pytest.mark.parametrize(("method", "path"), [("PUT", "/health"), ("GET", "/v1/completions"), ("DELETE", "/ping")])
def test_another_method_is_told_which(tiny, method, path):
    response = tiny.http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
