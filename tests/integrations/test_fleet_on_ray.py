"""Many servers on a real Ray: what goes is replaced, what streams goes on, and whoever returns finds what he left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import closing
from importlib.util import find_spec

import httpx
import pytest
from local_server import start_cli, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(900),
]

START_S = 300.0
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = "tell me more of this and of that " * 8


class FleetProcess:
    """``pagefold serve --replicas``, as a user starts it."""

    def __init__(self, folder, *flags) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        self.process = start_cli("serve", str(folder), "--port", str(port), *flags)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_S)
        until(lambda: self._is_ready() or self.process.poll() is not None, "the fleet to start", START_S, 0.2)
        assert self.process.poll() is None, self.output()

    def _read(self):
        self.lines.extend(self.process.stdout)

    def _is_ready(self):
        return any("ready on" in line and "replicas)" in line for line in self.lines)

    def output(self):
        return "".join(self.lines)

    def replicas(self):
        return self.http.get("/replicas").json()["replicas"]

    def servers(self):
        """The processes of the replicas' servers."""
        listed = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 1) for line in listed.splitlines()]
        return [
            int(pid) for pid, command in rows if "pagefold.cli serve" in command and "--kv-events-config" in command
        ]

    def choices(self):
        lines = self.http.get("/metrics").text.splitlines()
        told = [line.split() for line in lines if line.startswith("pagefold:router_requests_total")]
        return {name.split('"')[1]: float(value) for name, value in told}

    def num_heard(self):
        """Batches of events that came as they were sent: nobody had to ask for them."""
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if 'router_event_batches_total{how="sent"}' in line)

    def complete(self, prompt, **fields):
        answer = self.http.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def close(self):
        if self.process.poll() is None:
            self.stop()
        self.http.close()
        self._reader.join(60)


@pytest.fixture(scope="module")
def fleet(tiny_chat_model):
    made = FleetProcess(
        tiny_chat_model, "--replicas", "2", "--kv-cache-memory-bytes", "4MiB", "--max-model-len", "2048"
    )
    yield made
    made.close()


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
    body = {"prompt": "once upon", "max_tokens": 8, "stream": True, **GREEDY}
    with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) >= 9


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
