"""Many servers on a real Ray: what goes is replaced, what streams goes on, and whoever returns finds what he left."""

from __future__ import annotations

import json
import os
import signal
import time
from importlib.util import find_spec

import pytest
from local_server import until
from ray_fleet import GREEDY, START_S, FleetProcess

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(900),
]

LONG = "tell me more of this and of that " * 8


@pytest.fixture(scope="module")
def fleets():
    made = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def fleet(fleets, tiny_chat_model):
    """The fleet that is there; another one, where a test has ended it."""
    if not fleets or fleets[-1].process.poll() is not None:
        flags = ("--replicas", "2", "--kv-cache-memory-bytes", "4MiB", "--max-model-len", "2048")
        fleets.append(FleetProcess(tiny_chat_model, *flags))
    return fleets[-1]


def test_two_servers_are_known_and_answer(fleet):
    until(lambda: len(fleet.replicas()) == 2, "both replicas", START_S, 0.2)
    assert len(fleet.servers()) == 2
    assert fleet.complete("hello", max_tokens=3)["usage"]["completion_tokens"] == 3
    assert fleet.http.get("/v1/models").status_code == 200
    assert fleet.http.post("/v1/completions", json={"prompt": "x", "max_tokens": -1}).status_code == 400


def test_who_returns_finds_what_he_left_by_events(fleet):
    until(lambda: all(each["is_known"] for each in fleet.replicas()), "events", 60)
    before = sum(each["num_blocks"] for each in fleet.replicas())
    num_heard = fleet.num_heard()
    fleet.complete(LONG, max_tokens=1)
    until(lambda: fleet.num_heard() > num_heard, "events to come by themselves", 60)
    until(lambda: sum(each["num_blocks"] for each in fleet.replicas()) > before, "its blocks to be told of", 60)
    time.sleep(11)  # what is expected of a request is forgotten by then: from now on events alone say who holds it
    cached = fleet.complete(LONG + "and more", max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 32
    assert fleet.choices()["prefix"] >= 1


def test_a_stream_is_a_stream(fleet):
    body = {"prompt": "once upon", "max_tokens": 200, "stream": True, **GREEDY}
    with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        *events, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert last == "[DONE]"
    assert len(events) > 20, "tokens come together where a client is slow, but not all of them"
    text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
    assert text == fleet.complete("once upon", max_tokens=200)["choices"][0]["text"]


def test_a_server_that_is_killed_in_the_middle_of_a_stream_is_told_and_replaced(fleet):
    until(lambda: len(fleet.replicas()) == 2, "both replicas", START_S, 0.2)
    body = {"prompt": [7] * 40, "max_tokens": 1900, "stream": True, **GREEDY}
    told = []
    with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line:
                continue
            told.append(line)
            if len(told) == 3:
                for pid in fleet.servers():
                    os.kill(pid, signal.SIGKILL)
    error = json.loads(told[-1].removeprefix("data: "))["error"]
    assert error["code"] == "replica_lost"
    until(lambda: len(fleet.servers()) == 2, "other servers", START_S, 0.2)
    until(lambda: _answers(fleet), "answers", START_S, 1.0)


def _answers(fleet):
    return fleet.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_an_end_loses_no_token(fleet):
    until(lambda: len(fleet.servers()) == 2, "both replicas", START_S, 0.2)
    body = {"prompt": [7] * 40, "max_tokens": 300, "stream": True, **GREEDY}
    lines = []
    with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                if len(lines) == 3:
                    fleet.process.send_signal(signal.SIGTERM)
    assert lines[-1] == "data: [DONE]", lines[-1]
    assert fleet.process.wait(START_S) == 0, fleet.output()
    until(lambda: not fleet.servers(), "servers to end", 60)
