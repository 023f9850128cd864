"""``pagefold top``, as users type it, against a real server."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from dashboard_stage import Stage
from local_server import PATIENCE_S, LocalServer, start_cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    door = {"api_keys": ("sk-one",), "admin_api_key": "sk-admin"}
    server = LocalServer(tiny_chat_model, door=door, kv_cache_memory_bytes=2**21, max_num_seqs=4)
    yield server
    server.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def run(url: str, *arguments: str, status: int = 0) -> str:
    process = start_cli("top", "--url", url, *arguments)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, output
    return output


def test_it_shows_a_server_once(server: LocalServer) -> None:
    headers = {"Authorization": "Bearer sk-one"}
    body = {"prompt": list(range(700, 800)), "max_tokens": 3, "ignore_eos": True}
    ids = [server.http.post("/v1/completions", json=body, headers=headers).json()["id"] for _ in range(2)]
    output = run(server.url, "--api-key", "sk-admin", "--once")
    assert output.startswith("pagefold tiny")
    assert "48.0% found: 96 on the device, 0 in tiers, 104 computed" in output
    assert "100 tokens  never_seen: nothing that was computed before goes on so" in output
    assert re.search(r"\d+ held .* \d+ cached .* \d+ free", output)
    assert all(id_[:20] in output for id_ in ids)
    assert "partial_block (4)" in output
    told = json.loads(run(server.url, "--api-key", "sk-admin", "--json"))
    assert [one["id"] for one in told["requests"]] == [f"{id_}-0" for id_ in reversed(ids)]


def test_tiers_evictions_and_prefixes_are_shown(stage: Stage) -> None:
    output = run(stage.url, "--once")
    assert re.search(r"host ─+\n[▒·]+\n▒ 960 cached", output)
    assert re.search(r"blocks evicted, ten minutes ─+\n[ ▁▂▃▄▅▆▇█]+\n[\d,]+: the policy named it", output)
    best = json.loads(run(stage.url, "--json"))["prefixes"][0]
    assert f"{best['name']} {best['tokens']} tokens x {best['finds']}" in output


def test_what_is_wrong_is_said(server: LocalServer) -> None:
    assert "does not bring the admin key" in run(server.url, "--api-key", "sk-one", "--once", status=2)
    assert "No Pagefold server answers" in run("http://127.0.0.1:9", "--once", status=2)
    assert "It looks like http://" in run("localhost", "--once", status=2)


def test_in_a_terminal_it_refreshes_until_it_is_left(stage: Stage) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-m", "pagefold.cli", "top", "--url", stage.url, "--every", "0.5"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + PATIENCE_S
    while shown.count(b"tokens/s out") < 3:
        assert time.monotonic() < deadline, shown
        if select.select([ours], [], [], 0.5)[0]:
            shown += os.read(ours, 2**16)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        assert time.monotonic() < deadline
        if select.select([ours], [], [], 0.1)[0]:
            try:
                shown += os.read(ours, 2**16)
            except OSError:
                break
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0
    assert shown.startswith(b"\x1b[?1049h")
    assert b"\x1b[?1049l" in shown
    assert b"Traceback" not in shown
