"""Large and hostile bodies: whatever is in them, the event loop is everybody's."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import httpx
import pytest
from local_server import PATIENCE_S, LocalServer, error_of, post_head, until

from pagefold.server.checked_route import CheckedRoute

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MB = 2**20
SIZE = 2 * MB
"""Of hostile bodies: parsed on the event loop, most of them would hold it for 100 to 500 ms."""
USER = '{"role":"user","content":"x"}'
JSON = {"Content-Type": "application/json"}


def filled(before: str, unit: str, after: str, num_bytes: int = SIZE, between: str = ",") -> bytes:
    num_units = (num_bytes - len(before) - len(after)) // (len((unit + between).encode()))
    return (before + between.join([unit] * num_units) + after).encode()


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HOSTILE = {
    "nested objects": (CHAT, filled(f'{{"messages":[{USER}],"x":[', '{"a":{"b":[]}}', "]}")),
    "empty lists": (CHAT, filled('{"messages":[', "[]", "]}")),
    "deep": (CHAT, filled('{"messages":', "[", "", between="")),
    "keys": (CHAT, ("{" + ",".join(f'"{number}":1' for number in range(300_000)) + "}").encode()),
    "a tool's schema": (
        CHAT,
        filled(
            f'{{"messages":[{USER}],"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"x":[',
            '{"a":[]}',
            "]}}}]}",
        ),
    ),
    "messages": (CHAT, filled('{"messages":[', USER, "]}")),
    "floats": (CHAT, filled('{"messages":[{"role":"user","content":"x"}],"x":[', "1e5", "],}")),
    "escapes": (CHAT, filled('{"messages":[{"role":"user","content":"', "\\u65e5", '"}]}', between="")),
    "token ids": (COMPLETIONS, filled('{"max_tokens":1,"prompt":[', "5", "]}")),
    "negative id": (COMPLETIONS, filled('{"prompt":[', "5", ",-1]}")),
    "texts": (COMPLETIONS, filled('{"prompt":[', '"a"', "]}")),
    "no text": (COMPLETIONS, filled('{"prompt":"', "a", '"}', between="").replace(b"aaa", b"a\xffa", 1)),
}


@pytest.fixture(scope="module")
def wide(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """A server that takes bodies of the default size."""
    server = LocalServer(
        tiny_chat_model,
        door={"max_body_bytes": 4 * MB},
        kv_cache_memory_bytes=2**22,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    server.http.post(CHAT, content=HOSTILE["deep"][1], headers=JSON)  # the process that checks has started
    gc.collect()
    gc.freeze()  # as a server does when it has started: what is there now is not walked through again and again
    yield server
    gc.unfreeze()
    server.check_pool()
    server.close()


LONGEST_S = 0.2
"""Processor time that the event loop may be held for, also on a slow machine that does much else."""


class LoopClock:
    """How long the server's event loop is at most busy while it goes round as often as a small request needs.

    In the loop's own processor time: the machine may be busy with other things, and the engine may compute.
    """

    _NUM_ROUNDS = 5

    def __init__(self, server: LocalServer) -> None:
        self._loop = server.http_loop()
        self._is_over = False
        self._stamps: deque[float] = deque(maxlen=self._NUM_ROUNDS + 1)
        self.longest_s = 0.0

    def __enter__(self) -> Self:
        self._loop.call_soon_threadsafe(self._go_round)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True

    def _go_round(self) -> None:
        self._stamps.append(time.thread_time())
        self.longest_s = max(self.longest_s, self._stamps[-1] - self._stamps[0])
        if not self._is_over:
            self._loop.call_soon(self._go_round)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_holds_the_event_loop(wide, name):
    path, body = HOSTILE[name]
    with LoopClock(wide) as clock:
        response = wide.http.post(path, content=body, headers=JSON)
    error_of(response, 400)
    assert clock.longest_s < LONGEST_S


def test_nor_do_many_at_once(wide):
    """What is small is checked here, one after another; what is large, in two processes."""
    nested = (f'{{"max_tokens":1,"messages":[{USER}],"x":[', '{"a":{"b":[]}}', "]}")
    small = [filled(*nested, 60_000), filled('{"messages":[', USER, "]}", 60_000)] * 10
    large = [filled(*nested, MB), filled('{"messages":[', USER, "]}", MB)] * 3
    with LoopClock(wide) as clock, ExitStack() as stack:
        requests = [post_head(CHAT, len(body), "Connection: close") + body for body in small + large]
        connections = [stack.enter_context(wide.raw(b"")) for _ in requests]
        senders = [
            threading.Thread(target=connection.sendall, args=(request,))
            for connection, request in zip(connections, requests, strict=True)
        ]
        for sender in senders:
            sender.start()
        statuses = {connection.recv(4096).split()[1] for connection in connections}
        for sender in senders:
            sender.join(PATIENCE_S)
    assert statuses == {b"200", b"400"}
    assert clock.longest_s < LONGEST_S


def test_what_is_large_and_right_is_served(wide):
    """As it would be in a small body: text, tokens, fields that nobody knows, tools."""
    text = json.dumps({"prompt": ["a", "b"], "max_tokens": 2, "temperature": 0, "x": ["y" * 70_000], "z": None})
    asked = httpx.post(f"{wide.url}{COMPLETIONS}", content=text, headers=JSON, timeout=PATIENCE_S)
    assert asked.headers["x-pagefold-ignored"] == "x"
    same = wide.complete(["a", "b"], max_tokens=2, temperature=0)
    assert asked.json()["choices"] == same["choices"]
    ids = {"prompt": [[5] * 2000] * 40, "max_tokens": 1, "temperature": 0}
    assert len(wide.http.post(COMPLETIONS, json=ids).json().get("choices", ())) in (0, 40)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "'hot'"),
        (COMPLETIONS, {"temperature": 1}, "prompt", "missing"),
        (COMPLETIONS, {"prompt": "a", "echo": 5}, "echo", "echo"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}, 5]}, "messages.1", "5"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "stream_options": {}}, "stream_options", "stream"),
    ],
)
def test_what_is_wrong_is_told_as_of_a_small_body(wide, path, fields, param, said):
    small = error_of(wide.http.post(path, json=fields), 400)
    large = error_of(wide.http.post(path, json={**fields, "x": "y" * 100_000}), 400)
    assert large == small
    assert large["param"] == param
    assert said in large["message"]


def test_json_that_ends_too_early_is_told_where(wide):
    error = error_of(wide.http.post(COMPLETIONS, content=b'{"prompt": "' + b"a" * 100_000, headers=JSON), 400)
    assert "not valid JSON" in error["message"]
    assert "at character 11" in error["message"]


def test_large_text_that_is_no_json_is_a_415(wide):
    response = wide.http.post(COMPLETIONS, content=b"x" * 100_000, headers={"Content-Type": "text/plain"})
    assert error_of(response, 415)


@pytest.mark.long
def test_a_killed_process_is_replaced(wide):
    """Whoever kills it: the body is tried again, and nobody notices."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "x": "y" * 100_000}).encode()
    for _ in range(3):
        for pid in wide.children():
            os.kill(pid, signal.SIGKILL)
        assert wide.http.post(COMPLETIONS, content=body, headers=JSON).status_code == 200


def test_a_process_is_kept_until_it_has_grown(wide):
    """What one terrible body has left behind does not stay."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "x": "y" * 100_000}).encode()

    def ask_all() -> set[int]:
        for _ in range(2):
            assert wide.http.post(COMPLETIONS, content=body, headers=JSON).status_code == 200
        return set(wide.children())

    before = ask_all()
    assert len(before) == 2
    assert ask_all() == before
    terrible = filled(f'{{"messages":[{USER}],"x":[', '{"a":{"b":[]}}', "]}", 4 * MB)
    error_of(wide.http.post(CHAT, content=terrible, headers=JSON), 400)
    until(lambda: len(wide.children()) == 2, "another process")
    assert len(before & set(wide.children())) == 1


def test_a_process_that_always_ends_is_an_error(wide, monkeypatch):
    ends = "import socket, sys; c = socket.socket(fileno=int(sys.argv[-1].split(',')[0])); c.send(b'\\n'); c.recv(1)"
    monkeypatch.setattr("pagefold.server.body_checker._PROGRAM", ends)
    for pid in wide.children():
        os.kill(pid, signal.SIGKILL)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "x": "y" * 100_000}).encode()
    assert "could not be read" in error_of(wide.http.post(COMPLETIONS, content=body, headers=JSON), 400)["message"]
    monkeypatch.undo()
    assert wide.http.post(COMPLETIONS, content=body, headers=JSON).status_code == 200


def test_bodies_that_are_held_have_a_bound(wide):
    """Of bodies that come and do not end, so many are taken; small ones always."""
    with ExitStack() as stack:
        connections = []
        for _ in range(20):
            head = post_head(COMPLETIONS, 4 * MB)
            connections.append(stack.enter_context(wide.raw(head + b'{"prompt":"' + b"a" * (4 * MB - 100))))
        answered = []
        for connection in connections:
            connection.settimeout(0.2)
            try:
                answered.append(connection.recv(4096))
            except TimeoutError:
                continue
        assert len(answered) >= 3
        assert all(answer.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in answer for answer in answered)
        assert wide.complete("small", max_tokens=1)
    until(lambda: wide.http.post(COMPLETIONS, content=HOSTILE["texts"][1], headers=JSON).status_code == 400, "room")


def test_crumbs_are_no_body(wide):
    """Each chunk costs as much as a small body; a thousand of them are taken, however small."""
    fields = ("Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked")
    head = "\r\n".join((f"POST {COMPLETIONS} HTTP/1.1", *fields, "", ""))
    text = json.dumps({"prompt": "a", "max_tokens": 1})
    text += " " * (1000 - len(text))
    chunks = "".join(f"1\r\n{character}\r\n" for character in text)
    with wide.raw(f"{head}{chunks}0\r\n\r\n".encode()) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    answers = []
    with LoopClock(wide) as clock:
        for _ in range(8):  # one by one: several bodies that arrive at once may be read in one round of the loop
            with wide.raw(head.encode() + b"1\r\na\r\n" * 1500) as connection:
                answers.append(connection.recv(4096))
    assert all(answer.startswith(b"HTTP/1.1 400 ") and b"chunks" in answer for answer in answers)
    assert clock.longest_s < LONGEST_S


def test_every_route_with_a_body_is_checked(wide):
    """A route that is added takes part."""
    routes = [route for included in wide.app.routes for route in getattr(included, "original_router", wide.app).routes]
    with_bodies = [route for route in routes if getattr(route, "body_field", None) is not None]
    assert len(with_bodies) >= 6
    assert all(isinstance(route, CheckedRoute) for route in with_bodies)
