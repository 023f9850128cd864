"""Clients that read slowly, or not at all: they hold up nobody, can catch up, and are ended if they never read."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, joined, post_head, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_TOKENS = 800
"""Their events are 200 kB: more than all buffers hold."""
WORDS = "one two three four five six seven "
LONG = {"prompt": [5] * 10, "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def cramped(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """A server that cannot send much that is not read; its answers come from a script, and fast."""
    server = LocalServer(tiny_chat_model, send_buffer_bytes=4096, kv_cache_memory_bytes=2**22, max_num_seqs=8)
    server.runner.script = server.tokenizer.encode(WORDS)
    yield server
    server.check_pool()
    server.close()


def text_of(server: LocalServer, num_tokens: int) -> str:
    script = server.tokenizer.encode(WORDS)
    return server.tokenizer.decode((script * num_tokens)[:num_tokens])


class Reader:
    """A client that reads when it is told to."""

    def __init__(self, server: LocalServer, body: dict) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.connection = socket.socket()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.connection.settimeout(60)
        self.connection.connect((host, int(port)))
        content = json.dumps(body).encode()
        path = "/v1/completions" if "prompt" in body else "/v1/responses"
        self.connection.sendall(post_head(path, len(content), "Connection: close") + content)

    def events(self) -> list[dict]:
        received = b"".join(iter(lambda: self.connection.recv(65536), b""))
        self.connection.close()
        lines = received.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 200 OK"
        assert b"data: [DONE]\n\n" in lines
        return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]


@pytest.mark.long
def test_who_does_not_read_holds_up_nobody_and_can_catch_up(cramped):
    """It gets all of the text, in fewer events than tokens: what waited for it was put together."""
    body = {**LONG, "max_tokens": NUM_TOKENS, "stream_options": {"include_usage": True}}
    before = cramped.metric("vllm:request_success_total", "length")
    reader = Reader(cramped, body)
    until(lambda: cramped.metric("vllm:request_success_total", "length") > before, "the request to end")
    for number in range(5):
        assert cramped.complete([number + 20] * 10, max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    cramped.check_pool()  # it is computed to its end, and holds no block, read or not
    events = reader.events()
    assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    assert len(events) < NUM_TOKENS / 2
    assert joined(events) == text_of(cramped, NUM_TOKENS)


@pytest.mark.long
def test_several_prompts_of_a_slow_reader_wait_each_for_itself(cramped):
    before = cramped.metric("vllm:request_success_total", "length")
    body = {**LONG, "prompt": [[30 + n] * 10 for n in range(4)], "max_tokens": NUM_TOKENS // 2}
    reader = Reader(cramped, body)
    until(lambda: cramped.metric("vllm:request_success_total", "length") == before + 4, "the requests to end")
    events = reader.events()
    assert [joined(events, index) for index in range(4)] == [text_of(cramped, NUM_TOKENS // 2)] * 4
    assert len(events) < 4 * NUM_TOKENS // 2


def test_who_never_reads_is_ended(tiny_chat_model, monkeypatch):
    """By the kernel, which tells the server; so its request ends, and the connection is not kept."""
    monkeypatch.setattr("pagefold.server.listener._SILENCE_S", 1)
    server = LocalServer(tiny_chat_model, send_buffer_bytes=4096, kv_cache_memory_bytes=2**22, max_num_seqs=8)
    server.runner.close_gate()
    reader = Reader(server, LONG)
    server.runner.script = server.tokenizer.encode("\n" + " " * 80)
    assert len(server.runner.script) == 1
    server.runner.wait_in_step()
    server.runner.allow(1800)  # 144 kB, more than all buffers hold; and it does not come to its end
    until(
        lambda: not server.client._commands.empty() or server.metric("vllm:request_success_total", "abort"),
        "the server to give it up",
    )
    server.runner.allow()
    server.check_pool()
    assert server.metric("vllm:request_success_total", "abort") == 1
    until(lambda: len(server._server.server_state.connections) <= 1, "its connection to go")  # one is ours
    reader.connection.close()
    server.close()
