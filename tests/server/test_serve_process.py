"""``pagefold serve`` as a process: what it prints, how it ends, and what it refuses before any weights are loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import httpx
import pytest
from local_server import PATIENCE_S, ProcessServer, error_of, finish_reasons, free_port, post_head, start_cli, until
from typer.testing import CliRunner

from pagefold import __version__
from pagefold.cli import app
from pagefold.runner.fused.formats import natural_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LONG = {"prompt": [5] * 10, "max_tokens": 1200, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def tiny_process(tiny_chat_model: Path) -> Iterator[ProcessServer]:
    server = ProcessServer(
        str(tiny_chat_model),
        *("--kv-cache-memory-bytes", "4M", "--served-model-name", "tiny", "--max-model-len", "1500"),
        *("--log-level", "warning"),
    )
    yield server
    server.close()


def test_sigterm_drains(tiny_process):
    """Streams finish, new requests are refused, and the exit code is 0."""
    server = tiny_process
    streams: list[list[dict]] = []

    def read() -> None:
        streams.append(server.events("/v1/completions", LONG))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    until(lambda: server.metric("vllm:num_requests_running") == 3, "the streams to run")
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.http.get("/ready").status_code == 503, "the drain to begin")
    error = error_of(server.http.post("/v1/completions", json={"prompt": "a"}), 503)
    assert "shutting down" in error["message"]
    error_of(server.http.post("/v1/completions", json={"prompt": "a", "stream": True}), 503)
    error_of(server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}), 503)
    assert server.http.get("/health").status_code == 200
    assert server.metric("vllm:num_requests_running") == 3  # or this test showed nothing
    for reader in readers:
        reader.join(PATIENCE_S)
    assert [finish_reasons(events) for events in streams] == [["length"]] * 3
    assert server.process.wait(PATIENCE_S) == 0
    weights, budget, fits, computes, ready = server.output().splitlines()
    assert weights.startswith("weights ")
    assert "blocks of 16 tokens" in budget
    assert "max_model_len = 1,500" in fits
    assert computes.startswith(f"computes   {natural_dtype()}, by ")
    assert ready.startswith(f"ready on {server.url} (model tiny) after ")


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT], ids=lambda number: number.name
)
def test_a_second_signal_stops_at_once(tiny_process, number):
    server = tiny_process
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        pieces = response.iter_bytes()
        next(pieces)
        server.process.send_signal(number)
        until(lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 503, "the drain to begin")
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE_S) == 128 + number
        rest = b""
        with contextlib.suppress(httpx.RemoteProtocolError):  # cut off, or told so: whichever comes first
            for piece in pieces:
                rest += piece
        assert b'"finish_reason":"length"' not in rest


@pytest.mark.long
def test_a_body_that_never_ends_holds_nothing_up(tiny_process):
    """SIGTERM ends a request that is still being sent, with an answer in OpenAI's form and nothing in the log."""
    server = tiny_process
    with server.raw(post_head("/v1/completions", 100) + b"{") as connection:
        until(lambda: server.http.get("/health").status_code == 200, "the head to arrive")
        server.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 503")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "engine_unavailable"
    assert server.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in server.output()


@pytest.mark.long
def test_the_door_is_open_while_the_model_loads(tiny_chat_model):
    """Alive, not ready, requests refused with a reason; and SIGTERM ends it at any time."""
    with contextlib.closing(_Loading(str(tiny_chat_model))) as server:
        error = error_of(httpx.get(f"{server.url}/ready", timeout=PATIENCE_S), 503)
        assert "still loading" in error["message"]
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        for path in ("/v1/completions", "/v1/chat/completions"):
            error = error_of(httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S), 503)
            assert "still loading" in error["message"]
        assert "vllm:num_requests_running" in httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in server.process.stdout.read()


WARMS_UP_SLOWLY = """
import pathlib, sys, time
from pagefold.cli import app
from pagefold.runner.torch_runner import TorchRunner

warm_up, folder = TorchRunner.warm_up, pathlib.Path(sys.argv.pop())

def slowly(self):
    (folder / "warming").touch()
    while not (folder / "go on").exists():
        time.sleep(0.01)
    warm_up(self)
    (folder / "warm").touch()

TorchRunner.warm_up = slowly
app()
"""


@pytest.mark.long
def test_not_ready_until_warm(tiny_chat_model, tmp_path):
    """Kernels and a dummy pass come before /ready is 200; /health is 200 all the time, and nothing of it is counted."""
    port = free_port()
    flags = ("--port", str(port), "--kv-cache-memory-bytes", "4M", "--max-model-len", "256")
    process = subprocess.Popen(
        [sys.executable, "-c", WARMS_UP_SLOWLY, "serve", str(tiny_chat_model), *flags, str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    with process, contextlib.ExitStack() as at_end:
        at_end.callback(process.kill)
        until((tmp_path / "warming").exists, "the warm-up to begin")
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
        error_of(httpx.get(f"{url}/ready", timeout=PATIENCE_S), 503)
        error_of(httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE_S), 503)
        (tmp_path / "go on").touch()
        until(lambda: httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200, "the server to be ready")
        assert (tmp_path / "warm").exists()
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
        for line in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines():
            if line.startswith("vllm:") and not line.startswith("vllm:cache_config_info") and "_created" not in line:
                assert line.endswith(" 0.0"), line


class _Loading:
    """A server that has just begun to listen."""

    def __init__(self, model: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = start_cli("serve", model, "--port", str(port), "--max-model-len", "auto")
        until(self._answers, "the door to open")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


# Refusals.


@pytest.fixture(scope="module")
def refusal(tiny_chat_model, tmp_path_factory) -> Callable[[str], tuple[int, str]]:
    """Exit code and output of a server that cannot start."""
    scratch = tmp_path_factory.mktemp("refused")
    no_weights = scratch / "no_weights"
    shutil.copytree(tiny_chat_model, no_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    unknown_class = _changed(tiny_chat_model, scratch / "unknown_class", model_type="no_such_model")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    rope = _changed(tiny_chat_model, scratch / "rope", rope_parameters=dynamic)
    commands = {
        "budget": ("smollm2-135m", "--kv-cache-memory-bytes", "1M"),
        "port": ("smollm2-135m",),
        "host": ("smollm2-135m", "--host", "no.such.host.invalid"),
        "no weights": (str(no_weights),),
        "unknown model": ("no-such-model",),
        "unknown class": (str(unknown_class),),
        "length": ("smollm2-135m", "--max-model-len", "8193"),
        "rope": (str(rope),),
        "block size": ("smollm2-135m", "--block-size", "17"),
        "dtype": ("smollm2-135m", "--dtype", "int3"),
        "log level": ("smollm2-135m", "--log-level", "loud"),
    }

    def refuse(name: str) -> tuple[int, str]:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1]) if name == "port" else "0"
            process = start_cli("serve", *commands[name], "--port", port)
            try:
                output, _ = process.communicate(timeout=PATIENCE_S * 2)
            finally:
                process.kill()  # it has ended, or started after all
        return process.returncode, output

    return refuse


def _changed(folder: Path, to: Path, **fields: object) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config.pop("layer_types", None)
    (to / "config.json").write_text(json.dumps({**config, **fields}))
    return to


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("budget", ["smallest budget that works is kv_cache_memory_bytes=", "max_model_len"]),
        ("port", ["Cannot listen on 127.0.0.1", "in use", "--port"]),
        pytest.param("host", ["Cannot listen on no.such.host.invalid"], marks=pytest.mark.long),
        pytest.param("no weights", ["no weights"], marks=pytest.mark.long),
        ("unknown model", ["no-such-model", "smollm2-135m"]),
        # As far as "unknown model" comes; what they say is tested with the rooms that say it.
        pytest.param("unknown class", ["no_such_model"], marks=pytest.mark.long),
        pytest.param("length", ["max_model_len is 8193", "at most 8192"], marks=pytest.mark.long),
        pytest.param("rope", ["llama", "rope of type dynamic"], marks=pytest.mark.long),
        pytest.param("block size", ["block_size is 17", "power of two"], marks=pytest.mark.long),
        pytest.param("dtype", ["int3", "bfloat16"], marks=pytest.mark.long),
        pytest.param("log level", ["log_level is 'loud'", "warning"], marks=pytest.mark.long),
    ],
)
def test_what_cannot_start_says_why_in_one_line(refusal, name, says):
    exit_code, output = refusal(name)
    assert exit_code == 2, output
    (line,) = output.splitlines()
    assert line.startswith("error: ")
    for words in says:
        assert words in line
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["serve", "m", "--no-such-flag"],
        ["serve", "m", "--port", "x"],
        ["serve", "m", "--kv-cache-memory-bytes", "12Q"],
        ["serve", "m", "--kv-cache-memory-bytes", "-1"],
        ["serve", "m", "--max-model-len", "long"],
        ["serve", "m", "--shutdown-timeout", "-1"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("url", "flags", "said"),
    [
        ("redis://:pa55@host", [], "error: kv_remote_url is set, but without prefix caching nothing is ever kept."),
        ("redis://:pa55@host", ["--kv-remote-url", ""], "error: kv_remote_url is empty."),
        ("", ["--kv-remote-required"], "error: kv_remote_required is set, but there is no kv_remote_url."),
    ],
)
def test_a_remote_store_may_come_from_the_environment(monkeypatch, url, flags, said):
    monkeypatch.setenv("PAGEFOLD_KV_REMOTE_URL", url)
    result = CliRunner().invoke(app, ["serve", "m", "--no-enable-prefix-caching", *flags])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "pa55" not in result.output


def test_missing_dependencies_are_named(monkeypatch):
    monkeypatch.setattr("pagefold.cli.serve.find_spec", lambda name: None if name in ("torch", "fastapi") else object())
    result = CliRunner().invoke(app, ["serve", "smollm2-135m"])
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        'error: To serve, torch, fastapi must be installed. pip install "pagefold[serve]"'
    ]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["models", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\n"
        "from pagefold.cli import app\n"
        f"try: app({arguments!r})\n"
        "finally: assert not {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'numba'} & set(sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"pagefold {__version__}\n"


def test_the_cli_has_its_commands():
    output = CliRunner().invoke(app, ["--help"]).output
    assert all(command in output for command in ("serve", "models", "demo"))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1000", 1000),
        ("512M", 512 * 2**20),
        ("2G", 2 * 2**30),
        ("2GiB", 2 * 2**30),
        ("2g", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("1.5K", 1536),
        ("1T", 2**40),
        ("64 MiB", 64 * 2**20),
        ("10B", 10),
    ],
)
def test_sizes(text, num_bytes):
    from pagefold.cli.size import parse_size

    assert parse_size(text) == num_bytes
