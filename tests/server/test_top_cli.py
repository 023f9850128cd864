"""``pagefold top``, as users type it, against a real server."""

from __future__ import annotations

import json
import os
import pty
import queue
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from io import StringIO
from typing import TYPE_CHECKING, Any, cast

import pytest
from dashboard_stage import Stage
from local_server import PATIENCE_S, LocalServer, start_cli, until
from rich.console import Console

from pagefold.cli.running_server import RunningServer
from pagefold.cli.top import _watch
from pagefold.cli.top_beside import Beside
from pagefold.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    door = {"api_keys": ("sk-one",), "admin_api_key": "sk-admin"}
    folder = tmp_path_factory.mktemp("disk")
    disk = {"kv_offloading_size": 0.01, "kv_disk_path": str(folder), "kv_disk_size": 0.01}
    server = LocalServer(tiny_chat_model, door=door, kv_cache_memory_bytes=2**21, max_num_seqs=4, **disk)
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
    assert re.search(r"\ndisk ─+\n[▒·]+\n▒ 0 cached  · [\d,]+ free *\n0 blocks read \(0 B\), 0 in vain", output)
    assert all(id_[:20] in output for id_ in ids)
    assert "partial_block (4)" in output
    told = json.loads(run(server.url, "--api-key", "sk-admin", "--json"))
    assert [one["id"] for one in told["requests"]] == [f"{id_}-0" for id_ in reversed(ids)]


@pytest.mark.long
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


@pytest.mark.long
def test_the_curve_is_drawn_beside(tiny_chat_model: Path, stage: Stage) -> None:
    told = json.loads(run(stage.url, "--json"))
    curve = told["whatif"]
    assert curve["object"] == "cache.whatif"
    assert [one["told"] for one in told["advice"]["data"]]
    output = run(stage.url, "--once")
    lines = output.split("\n")
    size = curve["num_blocks"]
    used = next(one for one in curve["policies"] if one["is_used"])
    best = max((one for one in curve["policies"] if one is not used), key=lambda one: found(one, size))
    (head,) = (number for number, line in enumerate(lines) if line.startswith("what if the cache were larger"))
    assert re.search(rf"size +blocks +{used['policy']}, in use +{best['policy']}, the best other", lines[head + 1])
    for row, times in enumerate((0.5, 1, 2, 4), head + 2):
        num = round(times * size)
        shares = rf"█+·* +{found(used, num):.1%} +█+·* +{found(best, num):.1%}"
        assert re.search(rf"^ *x {times:g} +{num:,} +{shares} *$", lines[row]), lines[row]
    assert curve["told"] in " ".join(lines[head + 6 : head + 9]).replace("  ", " ")
    # Where there is none, it is said why: here a prompt of less than a block is all that was asked.
    bare = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**21, max_num_seqs=2)
    try:
        assert "There is no curve yet: no request has ended." in run(bare.url, "--once")
        bare.complete([5, 6, 7], max_tokens=1)
        assert "No prompt of a whole block has been looked up yet." in run(bare.url, "--once")
        told = json.loads(run(bare.url, "--json"))
        assert told["whatif"] is None
        assert "No prompt of a whole block" in told["whatif_why"]
    finally:
        bare.close()


def test_what_a_server_does_not_remember_is_said() -> None:
    bare = Stage(door=ServerConfig(enable_explain=False))
    try:
        output = run(bare.url, "--once")
        assert "This server remembers none: it was started with --no-enable-explain." in output
        assert "There is no curve yet" in output
    finally:
        bare.close()


class Terminal:
    """``pagefold top`` in a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "60"}
        command = [sys.executable, "-m", "pagefold.cli", "top", "--url", url, "--every", "0.5"]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.shown = b""

    def read(self, until: Callable[[bytes], bool], since: int = 0) -> int:
        """Read until what came since then is as it should be; return how much has come."""
        deadline = time.monotonic() + PATIENCE_S
        while not until(self.shown[since:]):
            assert time.monotonic() < deadline, self.shown[since:]
            assert self.process.poll() is None, self.shown[since:]
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 2**16)
        return len(self.shown)

    def leave(self) -> int:
        """Press Ctrl-C; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._ours, 2**16)
                except OSError:
                    break
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        os.close(self._ours)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)


@pytest.mark.long
def test_in_a_terminal_it_refreshes_until_it_is_left(stage: Stage) -> None:
    with closing(Terminal(stage.url)) as terminal:
        terminal.read(lambda shown: shown.count(b"tokens/s out") >= 3 and b"the best other" in shown)
        assert terminal.leave() == 0
    assert terminal.shown.startswith(b"\x1b[?1049h")
    assert b"\x1b[?1049l" in terminal.shown
    assert b"Traceback" not in terminal.shown


def test_an_interrupt_that_is_lost_is_noted(stage: Stage) -> None:
    """As Python loses one that comes while an object is finalized."""
    server = RunningServer(stage.url, None)

    class Loses(RunningServer):
        num_asked = 0

        def ask(self, path: str, told: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
            self.num_asked += 1
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            return server.ask(path, told, fields)

    before, loses = signal.getsignal(signal.SIGINT), Loses(stage.url, None)
    told = server.ask("/v1/dashboard", "dashboard")
    _watch(loses, Beside(server), told, Console(file=StringIO(), width=100, height=60), 0.01)
    assert loses.num_asked == 1
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.long
def test_it_waits_for_a_server_that_starts_anew() -> None:
    stage = Stage("old-model")
    with closing(Terminal(stage.url)) as terminal:
        begin = terminal.read(lambda shown: b"old-model" in shown and b"the best other" in shown)
        stage.close()
        begin = terminal.read(lambda shown: b"The server is away" in shown, begin)
        begin = terminal.read(
            lambda shown: b"old-model" in shown and b"the best other" in shown, begin
        )  # what it told last stays
        with closing(Stage("new-model", port=int(stage.url.rpartition(":")[2]))):
            begin = terminal.read(lambda shown: b"new-model" in shown, begin)
            terminal.read(lambda shown: b"the best other" in shown and b"The server is away" not in shown, begin)
            assert terminal.leave() == 0
        assert b"Traceback" not in terminal.shown


def test_a_curve_is_asked_for_seldom_and_of_a_server_that_is_back_at_once() -> None:
    """By a clock of ours. Who looks does not wait for it."""
    server, now_s = _Scripted(), [0.0]
    beside = Beside(cast("RunningServer", server), lambda: now_s[0])
    assert "no curve yet" in beside.look({"advice": None, "whatif": None})["whatif_why"]
    places = {"advice": "/v1/advice", "whatif": "/v1/cache/whatif"}
    assert beside.look(places) == {}
    server.answer({"object": "cache.whatif", "told": "one"})
    until(lambda: beside.look(places).get("whatif") is not None, "the first curve")
    now_s[0] = 29.0
    for _ in range(3):
        assert beside.look(places)["whatif"]["told"] == "one"
    assert server.num_asked == 1
    now_s[0] = 31.0
    assert beside.look(places)["whatif"]["told"] == "one", "until there is another"
    server.answer({"object": "cache.whatif", "told": "two"})
    until(lambda: beside.look(places)["whatif"]["told"] == "two", "the second curve")
    now_s[0] = 62.0
    beside.look(places)
    until(lambda: server.num_asked == 3, "the third question")
    beside.forget()  # the server goes meanwhile
    server.answer({"object": "cache.whatif", "told": "old"})
    until(lambda: not server.is_asked, "its answer")
    assert beside.look(places) == {}
    assert server.num_asked == 3, "who comes and goes is not asked at every sight"
    now_s[0] = 68.0
    assert beside.look(places) == {}
    server.answer({"object": "cache.whatif", "told": "new"})
    until(lambda: beside.look(places) != {}, "a curve")
    assert beside.look(places)["whatif"]["told"] == "new"
    assert server.num_asked == 4


class _Scripted:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.num_asked = 0
        self.is_asked = False

    def ask(self, path: str, _told: str) -> dict[str, Any]:
        if path == "/v1/advice":
            return {"object": "list", "data": []}
        self.num_asked += 1
        self.is_asked = True
        answer = self._answers.get(timeout=PATIENCE_S)
        self.is_asked = False
        return answer

    def answer(self, told: dict[str, Any]) -> None:
        self._answers.put(told)


def found(policy: dict[str, Any], num_blocks: int) -> float:
    return {point["num_blocks"]: point["hit_ratio"] for point in policy["points"]}[num_blocks]
