"""Fleets for the tests: many servers on a real Ray, and clients that look at each token."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import httpx
from local_server import free_port, start_cli, until

START_S = 300.0
GREEDY = {"temperature": 0, "ignore_eos": True}

_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray listen on this machine's loopback alone: without it, ``127.0.0.1`` is replaced by another address."""

_TOLD_EVERY_S = 0.5
_WATCH = """
import json, sys, time
import ray
from ray import serve
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
while True:
    app = serve.status().applications.get("pagefold")
    told = {} if app is None else {name: each.replica_states for name, each in app.deployments.items()}
    print(json.dumps({"status": None if app is None else app.status, "deployments": told}), flush=True)
    time.sleep(float(sys.argv[2]))
"""


class Fleet:
    """What tests do with many servers, whoever has started them.

    Args:
        folder: of the model, by which its servers are known among all processes.
        port: of the front.
    """

    def __init__(self, folder, port) -> None:
        self.folder = str(folder)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=START_S)

    def replicas(self):
        return self.http.get("/replicas").raise_for_status().json()["replicas"]

    def names(self):
        return {each["replica"] for each in self.replicas()}

    def servers(self):
        """The processes of the replicas' servers."""
        listed = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 1) for line in listed.splitlines()]
        return [
            int(pid)
            for pid, command in rows
            if all(part in command for part in ("pagefold.cli serve", "--kv-events-config", self.folder))
        ]

    def complete(self, prompt, **fields):
        answer = self.http.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()


class FleetProcess(Fleet):
    """``pagefold serve --replicas``, as a user starts it."""

    def __init__(self, folder, *flags) -> None:
        super().__init__(folder, free_port())
        self.process = start_cli("serve", str(folder), "--port", str(self.port), *flags)
        self._output = Lines(self.process.stdout)
        until(lambda: self._is_ready() or self.process.poll() is not None, "the fleet to start", START_S, 0.2)
        assert self.process.poll() is None, self.output()

    def _is_ready(self):
        return any("ready on" in line and "replicas)" in line for line in self._output.lines)

    def output(self):
        return "".join(self._output.lines)

    def choices(self):
        lines = self.http.get("/metrics").text.splitlines()
        told = [line.split() for line in lines if line.startswith("pagefold:router_requests_total")]
        return {name.split('"')[1]: float(value) for name, value in told}

    def num_heard(self):
        """Batches of events that came as they were sent: nobody had to ask for them."""
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if 'router_event_batches_total{how="sent"}' in line)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def close(self):
        if self.process.poll() is None:
            self.stop()
        self.http.close()
        self._output.close()


class DeployedFleet(Fleet):
    """A Ray that goes on by itself, and an application that is deployed to it again and again, as its users do.

    Args:
        folder: of the model.
        scratch: where configurations are written.
    """

    def __init__(self, folder, scratch) -> None:
        super().__init__(folder, free_port())
        self._config = Path(scratch) / "fleet.yaml"
        self._bin = Path(sys.executable).parent
        self._watch = None
        address = f"127.0.0.1:{free_port()}"
        # Old replicas and new ones are there at once for a while.
        resources = ("--num-cpus", "6", "--object-store-memory", str(200 * 2**20))
        head = ("start", "--head", "--block", "--port", address.split(":")[1], "--node-ip-address", "127.0.0.1")
        # A token of its own: else Ray takes, or does not take, what an earlier one has left in the user's home.
        guarded = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environment = {**os.environ, **_RAY, **_LOOPBACK, **guarded, "RAY_ADDRESS": address}
        self._head, self._head_output = self._run("ray", *head, "--include-dashboard", "false", *resources)
        try:
            ran = "Ray runtime started"
            until(lambda: self._head_output.has(ran) or self._head.poll() is not None, "Ray", START_S, 0.1)
            assert self._head.poll() is None, self._head_output.lines
            self._watch, self._told = self._run(sys.executable, "-c", _WATCH, address, str(_TOLD_EVERY_S))
        except BaseException:
            self.close()
            raise

    def deploy(self, *flags, **settings):
        """Deploy the application with these flags of the servers, in place of the one that is there."""
        arguments = [self.folder, "--kv-cache-memory-bytes", "4MiB", "--threads", "1", *flags]
        config = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "pagefold",
                    "route_prefix": "/",
                    "import_path": "pagefold.integrations.ray.application:build",
                    "args": {"arguments": arguments, **settings},
                }
            ],
        }
        self._config.write_text(json.dumps(config))  # which is YAML too
        process, output = self._run("serve", "run", "--non-blocking", str(self._config))
        assert process.wait(START_S) == 0, output.lines
        output.close()

    def states(self, deployment):
        """How many replicas of a deployment are in which state, as Ray says."""
        return self._status()["deployments"].get(deployment, {})

    def num_told(self):
        """How often Ray has said in which state all are."""
        return len(self._told.lines)

    def least_running(self, deployment, since):
        """How many replicas of a deployment took requests at least, whenever Ray has told of it since then.

        While it takes a new configuration in, it tells of no deployment for a moment.
        """
        told = [json.loads(line) for line in self._told.lines[since:] if line.startswith("{") and line.endswith("}\n")]
        states = [each["deployments"][deployment] for each in told if deployment in each["deployments"]]
        return min(each.get("RUNNING", 0) for each in states)

    def wait_until_settled(self, num_replicas):
        """Wait until so many replicas are there, and nobody comes or goes."""
        until(lambda: self._is_settled(num_replicas), f"{num_replicas} replicas", START_S, 0.2)
        until(lambda: len(self.servers()) == num_replicas, "their servers alone", START_S, 0.2)
        until(lambda: len(self._names_if_any()) == num_replicas, "the front to know them", START_S, 0.2)

    def _names_if_any(self):
        answer = self.http.get("/replicas")
        return [] if answer.status_code != 200 else answer.json()["replicas"]

    def _is_settled(self, num_replicas):
        assert self._watch.poll() is None, self._told.lines
        is_there = self.states("replicas") == {"RUNNING": num_replicas} and self.states("front") == {"RUNNING": 1}
        return is_there and self._status()["status"] == "RUNNING"

    def _status(self):
        told = [line for line in self._told.lines[-20:] if line.startswith("{") and line.endswith("}\n")]
        return json.loads(told[-1]) if told else {"status": None, "deployments": {}}

    def _run(self, program, *arguments):
        if not Path(program).is_absolute():
            program = self._bin / program
        process = subprocess.Popen(
            [str(program), *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return process, Lines(process.stdout)

    def close(self):
        self.http.close()
        if self._watch is not None:
            self._watch.kill()
            self._watch.wait(START_S)
            self._told.close()
        self._head.send_signal(signal.SIGTERM)  # with which it ends all of its Ray
        self._head.wait(START_S)
        until(lambda: not self.servers(), "servers to end", START_S, 0.1)
        self._head_output.close()


class Lines:
    """What a process writes, line by line."""

    def __init__(self, stream) -> None:
        self.lines: list[str] = []
        self._stream = stream
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._stream:
            self.lines.append(line)

    def has(self, text):
        return any(text in line for line in self.lines)

    def close(self):
        self._reader.join(60)
        if not self._reader.is_alive():
            self._stream.close()


class Asked:
    """A request that is under way on a thread of its own, and what came of it.

    Attributes:
        text: what has come so far.
        model: who has answered, by the name that its server has.
        error: what went wrong; empty if nothing did.
    """

    def __init__(self, clients, prompt, max_tokens, *, is_stream) -> None:
        self.text = ""
        self.num_events = 0
        self.model = ""
        self.error = ""
        self._http = clients.http
        self._body = {"prompt": prompt, "max_tokens": max_tokens, **GREEDY}
        self._is_stream = is_stream
        self.key = (str(prompt), max_tokens)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self):
        return not self._thread.is_alive()

    def wait(self):
        self._thread.join(START_S)
        assert self.is_over
        return self

    def _run(self):
        try:
            if self._is_stream:
                self._read()
                return
            answer = self._http.post("/v1/completions", json=self._body)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            self._note(told)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            self.error = f"{type(error).__name__}: {error} after {self.num_events} events"

    def _read(self):
        last = ""
        with self._http.stream("POST", "/v1/completions", json=self._body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line:
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        self._note(json.loads(last))
        assert last == "[DONE]", f"the stream ends with {last}"

    def _note(self, told):
        assert "choices" in told, told
        self.model = told["model"]
        self.text += "".join(choice["text"] for choice in told["choices"])
        self.num_events += 1


class Clients:
    """Many clients of one fleet; each answer is compared with what the same request was told when it was alone."""

    def __init__(self, fleet) -> None:
        self.http = httpx.Client(base_url=fleet.url, timeout=START_S, limits=httpx.Limits(max_connections=None))
        self.asked: list[Asked] = []
        self._alone: dict[tuple[str, int], str] = {}

    def ask(self, prompt, max_tokens, *, is_stream=True):
        asked = Asked(self, prompt, max_tokens, is_stream=is_stream)
        self.asked.append(asked)
        return asked

    def ask_alone(self, prompt, max_tokens):
        """Ask while nobody else does, and keep what is told."""
        asked = Asked(self, prompt, max_tokens, is_stream=False).wait()
        assert not asked.error, asked.error
        self._alone[asked.key] = asked.text

    def models(self):
        """Who has answered how often."""
        return Counter(asked.model for asked in self.asked if asked.is_over)

    def failures(self):
        """What went wrong so far, or was told otherwise."""
        over = [asked for asked in self.asked if asked.is_over]
        wrong = [f"{asked.key[0][:20]}: other text" for asked in over if not asked.error and not self._is_right(asked)]
        return wrong + [asked.error for asked in over if asked.error]

    def _is_right(self, asked):
        return asked.text == self._alone[asked.key]

    def wait(self):
        for asked in self.asked:
            asked.wait()

    def close(self):
        self.http.close()


@contextmanager
def kept_asking(ask, pause_s):
    """Meanwhile call ``ask(0)``, ``ask(1)`` and so on, with a pause after each."""
    is_over = threading.Event()

    def run():
        number = 0
        while not is_over.wait(pause_s):
            ask(number)
            number += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(60)


@contextmanager
def paused(pids):
    """Meanwhile these processes do nothing."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
