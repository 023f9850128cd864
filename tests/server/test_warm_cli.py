"""``pagefold warm`` and ``serve --warm``, as users type them; a cache lives as long as its server."""

from __future__ import annotations

import http.server
import json
import re
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from local_server import PATIENCE_S, ProcessServer, start_cli, until
from typer.testing import CliRunner

from pagefold.cli import app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SYSTEM = "You are a careful librarian, and you never raise your voice. " * 6
PLAIN = {"prompt": list(range(200, 300))}
LINES = [
    {"prompt": SYSTEM + "Answer briefly."},
    {"messages": [{"role": "system", "content": SYSTEM}], "pin": False},
    {**PLAIN, "ttl_s": 500.0},
]
ADMIN = {"Authorization": "Bearer sk-admin"}


def written(folder: Path, *lines: object) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(file)


def serve(model: Path, *flags: str) -> ProcessServer:
    return ProcessServer(
        str(model),
        "--served-model-name",
        "tiny",
        "--kv-cache-memory-bytes",
        "4M",
        "--admin-api-key",
        "sk-admin",
        *flags,
    )


@pytest.fixture(scope="module")
def served(tiny_chat_model: Path) -> Iterator[ProcessServer]:
    server = serve(tiny_chat_model)
    yield server
    server.close()


def run(*arguments: str, status: int = 0) -> str:
    process = start_cli("warm", *arguments)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, output
    return output


def hit(server: ProcessServer, prompt: object) -> int:
    return server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]


def pins(server: ProcessServer) -> list[dict]:
    return server.http.get("/v1/cache/pins", headers=ADMIN).raise_for_status().json()["data"]


@pytest.fixture
def empty(served: ProcessServer) -> ProcessServer:
    served.http.post("/reset_prefix_cache", headers=ADMIN).raise_for_status()
    return served


def test_a_file_is_warmed(empty, tmp_path):
    output = run(written(tmp_path, *LINES), "--url", empty.url, "--admin-api-key", "sk-admin", "--pin")
    assert "warmed 3 prompts" in output
    assert output.rstrip().endswith("2 pinned")
    assert hit(empty, SYSTEM + "Answer briefly. Where is the door?") > 60
    assert hit(empty, list(range(200, 310))) == 96
    assert sorted(pin["ttl_left_s"] is None for pin in pins(empty)) == [False, True]


def test_results_as_json_with_the_key_from_the_environment(empty, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEFOLD_ADMIN_API_KEY", "sk-admin")
    path = written(tmp_path, PLAIN, "", PLAIN)
    results = json.loads(run(path, "--url", f"{empty.url}/v1", "--json"))
    assert [result["line"] for result in results] == [1, 3]
    assert [result["num_cached_tokens"] for result in results] == [0, 96]
    assert {result["num_kept_tokens"] for result in results} == {100}


def test_defaults_are_for_lines_that_do_not_say(empty, tmp_path):
    path = written(tmp_path, PLAIN, {"prompt": list(range(400, 450)), "ttl_s": 5000.0})
    flags = ("--pin", "--ttl", "50", "--retention-priority", "70")
    run(path, "--url", empty.url, "--admin-api-key", "sk-admin", *flags)
    first, second = pins(empty)
    assert first["ttl_left_s"] < 50 < second["ttl_left_s"]
    assert 60 < first["retention_priority"] <= 70


def test_what_is_refused_is_told_by_line_and_the_rest_is_warmed(empty, tmp_path):
    path = written(tmp_path, {"prompt": [1]}, PLAIN, {"prompt": list(range(200, 300)), "pin": True, "ttl_s": -1})
    output = run(path, "--url", empty.url, "--admin-api-key", "sk-admin", "--json", status=2)
    assert "line 1: The prompt has 1 tokens to keep" in output
    assert "line 3: ttl_s is -1" in output
    assert "2 of 3 prompts" in output
    assert hit(empty, list(range(200, 310))) == 96


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "a"}', '{"prompt": "b"'], "Line 2 of .*prompts.jsonl is not valid JSON"),
        (["", '["a"]'], "Line 2 of .*prompts.jsonl is no JSON object"),
        ([f'{{"prompt": [{"9" * 5000}]}}'], "Line 1 of .*prompts.jsonl is not valid JSON: it holds a number"),
        ([], "holds no prompts"),
        (["  ", ""], "holds no prompts"),
    ],
)
@pytest.mark.parametrize("command", ["warm", "serve"])
def test_broken_files_are_refused_before_anything_is_done(tmp_path, lines, said, command):
    path = written(tmp_path, *lines)
    arguments = (
        ("warm", path, "--url", "http://127.0.0.1:9") if command == "warm" else ("serve", "none", "--warm", path)
    )
    _refused(said, *arguments)


def test_a_file_that_cannot_be_read(tmp_path):
    _refused("nothing.jsonl cannot be read: No such file", "warm", str(tmp_path / "nothing.jsonl"))
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    _refused("it is not UTF-8", "warm", str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "a", "ttl": 5}, "Line 1 of .*: ttl: Extra inputs"),
        ({"prompt": "a", "pin": True, "ttl_s": -5}, "Line 1 of .*: ttl_s is -5"),
        ({}, "Line 1 of .*: Neither prompt nor messages"),
    ],
)
def test_serve_checks_what_it_shall_warm_before_weights_are_loaded(tmp_path, line, said):
    _refused(said, "serve", "none", "--warm", written(tmp_path, line))


def test_nobody_is_there_or_not_for_us(empty, tmp_path):
    path = written(tmp_path, PLAIN)
    _refused("No Pagefold server answers at http://127.0.0.1:9:", "warm", path, "--url", "http://127.0.0.1:9")
    _refused("does not bring the admin key", "warm", path, "--url", empty.url)
    _refused("It looks like http://", "warm", path, "--url", "file:///etc/passwd")


@pytest.mark.parametrize("answer", [b"[]", b"{}", b"5", b"<html>"])
def test_another_server_answers(tmp_path, answer):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        _refused("o Pagefold server", "warm", written(tmp_path, PLAIN), "--url", url)
        server.shutdown()


def _refused(said: str, *arguments: str) -> None:
    """Nothing has begun yet: no process is needed to see it."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), "it was not said, but raised"
    assert re.search(said, result.output), result.output


@pytest.mark.long
def test_what_serve_warms_is_there_with_the_first_request_and_after_a_restart(tiny_chat_model, tmp_path):
    """Warming begins anew with each start: nothing of a cache outlives its process."""
    path = written(tmp_path, {**LINES[0], "pin": True}, {"prompt": [5]}, PLAIN)
    for _ in range(2):
        server = serve(tiny_chat_model, "--warm", path)
        try:
            assert hit(server, list(range(200, 310))) == 96
            assert hit(server, SYSTEM + "Answer briefly. Why?") > 60
            assert len(pins(server)) == 1
            assert server.metric("vllm:time_to_first_token_seconds_count") == 2
            server.check_pool()
        finally:
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(PATIENCE_S)
            output = server.output()
            server.close()
        assert code == 0
        assert f"line 2 of {path} is not warmed: The prompt has 1 tokens to keep" in output
        assert "line 1" not in output


@pytest.mark.long
def test_a_signal_while_it_warms(tiny_chat_model, tmp_path):
    """It does not become ready first, and ends as it ends any time."""
    path = written(tmp_path, *[{"prompt": list(range(first, first + 1500))} for first in range(0, 40_000, 200)])
    server = ProcessServer(str(tiny_chat_model), "--kv-cache-memory-bytes", "8M", "--warm", path, wait=False)
    try:
        until(lambda: server.process.poll() is not None or server.http.get("/ready").status_code == 503, "the door")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
        assert "ready on" not in server.output()
    finally:
        server.close()
