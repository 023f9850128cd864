"""``pagefold bench`` against servers that misbehave: every request ends, with figures that are true or a reason."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from pagefold.bench import LoadSettings, Prompt, run_load, summarize
from pagefold.bench.client import Client
from pagefold.bench.gauge import Gauge
from pagefold.cli import app

RUN = CliRunner()


def event(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text(piece: str, **more: object) -> bytes:
    return event(choices=[{"index": 0, "text": piece} | more])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
GOOD = [text("a"), 0.05, text("b"), 0.05, text("c", finish_reason="length"), USAGE, b"data: [DONE]\n\n"]


class Answers(BaseHTTPRequestHandler):
    """Answers prompts with its server's script: bytes are sent, numbers are seconds of waiting, "cut" cuts it off."""

    server: Server

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        models, metrics = self.server.models, self.server.metrics
        if self.path == "/v1/models":
            self._answer(
                503 if models == b"loading" else 200,
                models if isinstance(models, bytes) else json.dumps(models).encode(),
            )
        else:
            self._answer(404 if metrics is None else 200, metrics or b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status != 200:
            self._answer(self.server.status, b"it is broken \xff")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if "cut" in self.server.script:
            self.send_header("Content-Length", "100000")
        self.end_headers()
        for part in self.server.script:
            if isinstance(part, float):
                time.sleep(part)
            elif isinstance(part, bytes):
                self.wfile.write(part)
                self.wfile.flush()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.script: list[bytes | float | str] = list(GOOD)
        self.status = 200
        self.models: object = {"data": [{"id": "m"}]}
        self.metrics: bytes | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """Clients may leave."""


@pytest.fixture
def server():
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def measure(server: Server, num_prompts: int = 1, timeout_s: float = 20.0):
    """Send prompts; return the records and the figures."""

    async def run():
        client = Client(server.url, timeout_s=timeout_s)
        await client.find_model()
        result = await run_load(client, [Prompt("x", 3)] * num_prompts, LoadSettings(), on_done=lambda _: None)
        await client.close()
        return result

    result = asyncio.run(run())
    chains = [[0]] * num_prompts
    return result.records, summarize(result, LoadSettings(), backend="openai", model="m", chains=chains)


def test_times_are_those_of_the_stream(server: Server):
    server.script = [0.2, *GOOD]
    (record,), figures = measure(server)
    assert record.error == ""
    assert record.ttft_s >= 0.2
    assert len(record.itls_s) == 2
    assert record.latency_s == pytest.approx(record.ttft_s + sum(record.itls_s))
    assert record.latency_s >= 0.3
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 3, None)
    assert figures["mean_tpot_ms"] == pytest.approx(1e3 * sum(record.itls_s) / 2)
    assert figures["output_throughput"] == pytest.approx(3 / figures["duration"])


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([], "no output came"),
        ([b'{"choices": [{"text": "whole"}]}'], "no output came"),
        ([b"<html>hello</html>\n\n"], "no output came"),
        ([text("a"), b"data: {broken\n\n"], "Expecting property name"),
        ([b"data: 5\n\n"], "attribute"),
        ([b"data: [1]\n\n"], "attribute"),
        ([b"data: null\n\n"], "attribute"),
        ([event(choices=7)], "not iterable"),
        ([event(choices=[7])], "attribute"),
        ([event(choices=[{"delta": "x"}])], "attribute"),
        ([text("a"), event(usage="many")], "attribute"),
        ([text("a"), event(usage={"prompt_tokens": "many"})], "invalid literal"),
        ([text("a"), event(usage={"prompt_tokens_details": {"cached_tokens": {}}})], "int()"),
        ([text("a"), event(error={"message": "out of memory"})], "out of memory"),
        ([text("a"), text("b")], "the stream broke off"),
        ([text("a"), "cut"], "peer closed"),
        ([b"data: " + b"\xff\xfe\n\n"], "Expecting value"),
    ],
)
def test_a_broken_stream_is_a_failed_request_with_a_reason(server: Server, script: list, words: str):
    server.script = script
    records, figures = measure(server, 2)
    assert [record.error != "" for record in records] == [True, True]
    assert words in records[0].error
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (0, 2, 0)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("script", [[30.0], [text("a"), 30.0], [part for _ in range(300) for part in (text("a"), 0.1)]])
def test_a_server_that_never_ends_is_left(server: Server, script: list):
    server.script = script
    began = time.monotonic()
    (record,), _ = measure(server, timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert "had not ended after 0.5 s" in record.error


def test_an_end_without_done_is_an_end_if_a_reason_is_given(server: Server):
    server.script = GOOD[:-1]
    (record,), _ = measure(server)
    assert record.error == ""


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"data": []}, "has no model"),
        ({"data": None}, "no server that names its models"),
        ({"data": [{}]}, "no server that names its models"),
        ([], "no server that names its models"),
        (5, "no server that names its models"),
        (b"<html>", "no server that names its models"),
        (b"loading", "no server that names its models: HTTP 503: loading"),
    ],
)
def test_models_in_another_form_are_said_in_a_line(server: Server, models: object, words: str):
    server.models = models
    result = RUN.invoke(app, ["bench", "--url", server.url])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.strip().count("\n") == 0


def test_a_server_that_fails_is_said_in_a_line(server: Server):
    server.status = 500
    result = RUN.invoke(app, ["bench", "--url", server.url])
    assert result.exit_code == 2
    assert "does not answer a prompt: " in result.stderr


def test_a_server_that_counts_no_tokens_is_measured_with_prompts_of_a_file(server: Server, tmp_path):
    server.script = [text("a"), text("b", finish_reason="length"), b"data: [DONE]\n\n"]
    refused = RUN.invoke(app, ["bench", "--url", server.url])
    assert refused.exit_code == 2
    assert "counts no tokens" in refused.stderr
    prompts, measured = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text('{"prompt": "x"}\n')
    flags = ["--dataset-path", str(prompts), "--result-filename", str(measured), "--json"]
    result = RUN.invoke(app, ["bench", "--url", server.url, *flags])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["output_lens"] == [2]
    plan = RUN.invoke(app, ["plan", "Qwen3-8B", "--device", "H100", "--from-bench", str(measured)])
    assert plan.exit_code == 2
    assert "counted no tokens of its prompts" in plan.stderr


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "metrics", [b"\xff\xfe", b"vllm:num_requests_running e\n", b"vllm:num_requests_running NaN\n", b"{" * 1000]
)
def test_metrics_in_another_form_are_no_metrics(server: Server, metrics: bytes):
    server.metrics = metrics
    (record,), figures = measure(server)
    assert record.error == ""
    assert figures["server"] == {}


def test_metrics_of_several_engines_add_up():
    lines = [
        'vllm:num_requests_running{engine="0",model_name="a}b"} 3.0 1700000000',
        'vllm:num_requests_running{engine="1",model_name="a}b"} 4.0 1700000000',
        'vllm:num_requests_waiting{engine="0"} 0.0',
        'vllm:num_requests_waiting{engine="1"} 2.0',
        'vllm:kv_cache_usage_perc{engine="0"} 0.5',
        'vllm:kv_cache_usage_perc{engine="1"} 0.75',
    ]
    gauge = Gauge()
    gauge.look("\n".join(lines) + "\n")
    figures = gauge.figures()
    assert (figures["max_num_requests_running"], figures["max_num_requests_waiting"]) == (7, 2)
    assert figures["max_kv_cache_usage_perc"] == 0.75
