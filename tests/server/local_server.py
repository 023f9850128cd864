"""Servers for the tests: in this process with a runner under the test's control, or as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from pagefold.config import EngineConfig, ServerConfig
from pagefold.engine.build import build_engine
from pagefold.engine.engine_thread import EngineThread
from pagefold.engine.planning import plan_engine
from pagefold.events import fan_out
from pagefold.kv import audit
from pagefold.observe.kv_event_metrics import KVEventMetrics
from pagefold.observe.ledger import Ledger
from pagefold.observe.metrics import Metrics
from pagefold.observe.overview import Overview
from pagefold.observe.recorder import TraceRecorder
from pagefold.server import create_app
from pagefold.server.connection import http_settings
from pagefold.server.listener import listen
from pagefold.server.rates import rates_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from pathlib import Path

    from pagefold.observe.kv_event_publisher import KVEventPublisher
    from pagefold.observe.traces import Traces
    from pagefold.steps import Runner, StepPlan, StepResult

PATIENCE_S = 60.0
"""How long anything may take before a test gives up: for a machine that is busy, not for a measurement."""
START_PATIENCE_S = 300.0
"""The first start of all compiles kernels, maybe while another process does so too."""

_OF_THE_POOL = (
    "pagefold:num_blocks",
    "pagefold:num_free_blocks",
    "pagefold:num_cached_blocks",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


def until(condition, what: str, patience_s: float = PATIENCE_S, pause_s: float = 0.005) -> None:
    """Wait for something that another thread or process is about to do."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
        time.sleep(pause_s)


class ControlledRunner:
    """The real runner, behind a gate; or with a script, so that a test chooses the output token by token.

    Also then blocks hold what was computed: other tests may find them.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._changed = threading.Condition()
        self._num_allowed: float = float("inf")
        self._num_failures = 0
        self.num_entered = 0
        self.script: list[int] | None = None
        self.in_step: StepPlan | None = None

    def run(self, plan: StepPlan) -> StepResult:
        with self._changed:
            self.num_entered += 1
            self.in_step = plan
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._num_allowed > 0, PATIENCE_S)
            self._num_allowed -= 1
            self.in_step = None
            if self._num_failures:
                self._num_failures -= 1
                msg = "the test lets this step fail"
                raise RuntimeError(msg)
        result = self._runner.run(plan)
        if self.script is None:
            return result
        return replace(result, token_ids=[self.script[draw % len(self.script)] for draw in plan.draws])

    def close_gate(self) -> None:
        """Stop at the next step, before it runs."""
        with self._changed:
            self._num_allowed = 0

    def allow(self, num_steps: float = float("inf")) -> None:
        """Let so many steps pass; all, if not said."""
        with self._changed:
            self._num_allowed = num_steps
            self._changed.notify_all()

    def fail(self, num_steps: int) -> None:
        """Let the next steps fail."""
        with self._changed:
            self._num_failures = num_steps

    def wait_in_step(self, starts: list[int] | None = None) -> StepPlan:
        """Wait until a step, or the one with these starts, stands at the closed gate; return its plan."""

        def stands() -> bool:
            plan = self.in_step
            return plan is not None and self._num_allowed == 0 and starts in (None, plan.starts)

        with self._changed:
            assert self._changed.wait_for(stands, PATIENCE_S)
            assert self.in_step is not None
            return self.in_step


class AnyServer:
    """What tests do with a server, wherever it runs."""

    model = ""

    def __init__(self, url: str) -> None:
        self.url = url
        self.open_http()
        self.num_blocks = int(self.metric("pagefold:num_blocks"))

    def open_http(self) -> None:
        """Make a client, with connections of its own. It takes no idle one that the server may be about to close."""
        limits = httpx.Limits(keepalive_expiry=1)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S, limits=limits)

    def metrics(self, prefix: str | tuple[str, ...] = "") -> dict[tuple[str, str], float]:
        """Every sample whose name begins so, by name and by its label beside model_name and engine."""
        lines = self.http.get("/metrics").raise_for_status().text.splitlines(keepends=True)
        text = "".join(line for line in lines if line.startswith(prefix))
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(sample.name, _own_label(sample.labels)): sample.value for sample in samples}

    def metric(self, name: str, label: str = "") -> float:
        return self.metrics(name)[name, label]

    def is_idle(self) -> bool:
        metrics = self.metrics(_OF_THE_POOL)
        return not metrics["vllm:num_requests_running", ""] and not metrics["vllm:num_requests_waiting", ""]

    def check_pool(self) -> None:
        """Nothing runs or waits, and every block is free or cached. Late clients may still be on their way."""
        until(self._is_as_before, "the pool to be as it was before")

    def _is_as_before(self) -> bool:
        metrics = self.metrics(_OF_THE_POOL)
        num_free, num_cached = (metrics[f"pagefold:num_{kind}_blocks", ""] for kind in ("free", "cached"))
        return (
            not metrics["vllm:num_requests_running", ""]
            and not metrics["vllm:num_requests_waiting", ""]
            and num_free + num_cached == metrics["pagefold:num_blocks", ""] == self.num_blocks
            and metrics["vllm:kv_cache_usage_perc", ""] == 0
        )

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        response = self.http.post("/v1/completions", json={"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, content: Any, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        return list(self.iter_events(path, body))

    def iter_events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            last = ""
            for line in response.iter_lines():
                if not line:
                    continue
                assert line.startswith("data: "), line
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    yield json.loads(last)
            assert last == "[DONE]"

    def raw(self, data: bytes) -> socket.socket:
        """Send bytes over a connection of its own, and return that connection."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        connection.sendall(data)
        return connection

    def post_raw(self, path: str, body: dict[str, Any]) -> socket.socket:
        content = json.dumps(body).encode()
        return self.raw(post_head(path, len(content)) + content)


class LocalServer(AnyServer):
    """A server in this process: uvicorn on one thread, the engine on another."""

    def __init__(
        self,
        folder: Path,
        *,
        max_requests: int | None = None,
        door: dict[str, Any] | None = None,
        send_buffer_bytes: int | None = None,
        record_trace: Path | None = None,
        traces: Traces | None = None,
        kv_events: KVEventPublisher | None = None,
        **settings: Any,
    ) -> None:
        self.model = "tiny"
        metrics = Metrics(self.model)
        config = EngineConfig(model=str(folder), dtype="float64", attention_backend="reference", threads=1, **settings)
        blueprint = plan_engine(config)
        heard = (metrics.emit,) if traces is None else (metrics.emit, traces)
        self.ledger = Ledger(is_on=(door or {}).get("enable_explain", True), tell=fan_out(*heard))
        self.overview = Overview(self.ledger)
        emit = fan_out(*heard, self.ledger, self.overview)
        self.recorder = None if record_trace is None else TraceRecorder(record_trace, time.monotonic)
        if self.recorder is not None:
            self.recorder.begin(config, blueprint.capacity.num_blocks, blueprint.capacity.num_host_blocks)
            emit = fan_out(emit, self.recorder)
        if kv_events is not None:
            emit = fan_out(emit, kv_events)
            metrics.registry.register(KVEventMetrics(self.model, kv_events))
        self.engine = build_engine(blueprint, emit=emit)
        if kv_events is not None:
            kv_events.begin(self.engine.scheduler.core.block_size, tuple(self.engine.scheduler.core.rules))
        self.arena = self.engine.runner.arena
        self.runner = ControlledRunner(self.engine.runner)
        self.engine.runner = self.runner
        config = ServerConfig(**{"max_body_bytes": 2**20} | (door or {}))
        rates = rates_of(config.accounts, time.monotonic)
        self.client = EngineThread(self.engine, max_requests=max_requests, rates=rates)
        self.client.start()
        self.app = create_app(
            self.client,
            model_name=self.model,
            config=config,
            metrics=metrics,
            ledger=self.ledger,
            overview=self.overview,
            traces=traces,
        )
        self._server = uvicorn.Server(http_settings(self.app, config, metrics.count_response))
        listener = listen("127.0.0.1", 0)
        if send_buffer_bytes is not None:  # connections inherit it: of what a client does not read, little goes to it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        until(lambda: self._server.started, "uvicorn")
        super().__init__(f"http://127.0.0.1:{listener.getsockname()[1]}")

    @property
    def tokenizer(self) -> Any:
        return self.client.tokenizer

    def check_pool(self) -> None:
        """And every invariant of the core holds."""
        super().check_pool()
        audit(self.engine.scheduler.core)

    def http_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that its connections are on."""
        assert self._server.servers
        return self._server.servers[0].get_loop()

    def children(self) -> list[int]:
        """The processes of this server that check bodies."""
        return self.app.state.checker.pids

    def close(self) -> None:
        self.http.close()
        self.runner.allow()
        self.client.drain(0.0)
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.app.state.checker.close()
        if self.recorder is not None:
            self.recorder.close()


class ProcessServer(AnyServer):
    """``pagefold serve`` as a user starts it. With ``wait=False`` it may be still loading."""

    def __init__(self, model: str, *flags: str, wait: bool = True) -> None:
        self.model = model
        port = free_port()
        self.process = start_cli("serve", model, "--port", str(port), *flags)
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)  # a log that nobody reads would fill its pipe
        self._reader.start()
        url = f"http://127.0.0.1:{port}"
        path = "/ready" if wait else "/health"
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:  # each makes a TLS context, which takes long
                until(lambda: _answers(http, path) or self.process.poll() is not None, "start", START_PATIENCE_S, 0.05)
            assert self.process.poll() is None, self.output()
        except BaseException:
            self._end()
            raise
        super().__init__(url)

    def output(self) -> str:
        """What it wrote, once it has ended."""
        self._reader.join(PATIENCE_S)
        return "".join(self._lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._lines.extend(self.process.stdout)

    def close(self) -> None:
        self.http.close()
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        return free.getsockname()[1]


def start_cli(*arguments: str) -> subprocess.Popen[str]:
    """Run ``pagefold`` in a process of its own, on one core: threads that wait for each other crawl on a busy one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "pagefold.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def post_head(path: str, num_bytes: int, *more: str) -> bytes:
    """The head of a POST of JSON."""
    fields = ("Host: x", "Content-Type: application/json", f"Content-Length: {num_bytes}", *more)
    return "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode()


def _own_label(labels: dict[str, str]) -> str:
    return "".join(value for name, value in labels.items() if name not in ("model_name", "engine"))


def _answers(http: httpx.Client, path: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return http.get(path).status_code == 200
    return False


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text that a stream brought for one choice."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def finish_reasons(events: list[dict[str, Any]], index: int = 0) -> list[str]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must be in OpenAI's form and show nobody our insides."""
    assert response.status_code == status, response.text
    assert not re.search(r"Traceback|site-packages|\.py\b", response.text)
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    return body["error"]
