"""Attack: hostile bodies against one server, by several clients at once, and what became of them and of others."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx
from good_bodies import good_bodies
from hostile_bodies import HostileBody, hostile_body
from judge import complaint
from lateness import LATE_S
from local_server import AnyServer, ProcessServer, until
from memory import resident_bytes
from raw_cases import raw_case, send_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ADMIN_KEY = "sk-admin"
NUM_CLIENTS = 6
_PATIENCE_S = 300.0  # many long answers at once, on a busy machine
MAX_RSS_RATIO = 1.1
_AUTHORIZATION = {"Authorization": f"Bearer {ADMIN_KEY}"}
_RAW_SHARE, _DESCRIBED_SHARE = 0.04, 0.16


class Sent(NamedTuple):
    """A body on its way: what it was, when, and how it is sent again."""

    label: str
    begin: float
    end: float
    again: Callable[[], object]


class Watch:
    """The program of ``lateness.py`` beside the server."""

    def __init__(self, url: str, pid: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        program = Path(__file__).parent / "lateness.py"
        command = [sys.executable, str(program), host, port, str(pid)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.moments: list[dict[str, Any]] = []
        self._summary: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        time.sleep(1.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            moment = json.loads(line)
            if moment["kind"] == "summary":
                self._summary = moment
            else:
                self.moments.append(moment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> dict[str, Any]:
        """Let it sum up, once."""
        if self._process.returncode is not None:
            return self._summary
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_PATIENCE_S)
        self._reader.join(_PATIENCE_S)
        self._process.stdout.close()
        return self._summary


class Attack:
    """So many bodies of one seed against a server.

    Args:
        server: that nobody else asks, in a process of its own to be watched. Its admin key is ``ADMIN_KEY``.
        seed: of all bodies.
        num_bodies: mutated, described and raw ones together.
    """

    def __init__(self, server: AnyServer, seed: int, num_bodies: int) -> None:
        self._server = server
        self._seed = seed
        self._host, port = server.url.removeprefix("http://").split(":")
        self._port = int(port)
        self.description = server.http.get("/openapi.json").json()
        routes = self.description["paths"]
        self._paths = sorted(path for path in routes if "requestBody" in routes[path].get("post", {}))
        self.num_raw = round(num_bodies * _RAW_SHARE)
        self.num_described = round(num_bodies * _DESCRIBED_SHARE)
        self.num_mutated = num_bodies - self.num_raw - self.num_described
        self._sent: list[Sent] = []
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []

    def run_alone(self) -> None:
        """Send the mutated and the raw ones, one after another."""
        self._be_a_client(self._work())

    def run(self, send_described: Callable[[Attack], None]) -> dict[str, Any]:
        """Send all; return the figures. What is wrong is in ``failures``.

        Args:
            send_described: sends ``num_described`` bodies that are made from the server's own description.
        """
        assert isinstance(self._server, ProcessServer)
        pid = self._server.process.pid
        self._send_first_of_each_kind()
        self._rest()
        before = resident_bytes(pid)
        begin = time.monotonic()
        with Watch(self._server.url, pid) as watch:
            self._send_all(send_described)
            seconds = time.monotonic() - begin
            self._settle()
            self._tell_late(watch)
            lateness = watch.end()
        self._rest()
        after = resident_bytes(pid)
        ratio = after / before
        if ratio > MAX_RSS_RATIO:
            self.failures.append(f"memory at rest: {after / 2**20:.0f} MiB after {before / 2**20:.0f}: {ratio:.2f} x")
        return {
            "seed": self._seed,
            "bodies": {"mutated": self.num_mutated, "described": self.num_described, "raw": self.num_raw},
            "statuses": dict(sorted(self.statuses.items())),
            "seconds": round(seconds, 1),
            "health": lateness["health"],
            "stream": lateness["stream"],
            "rss_mib": {"before": before >> 20, "after": after >> 20, "ratio": round(ratio, 3)},
            "failures": len(self.failures),
        }

    def _send_all(self, send_described: Callable[[Attack], None]) -> None:
        work = self._work()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(self._be_a_client, work) for _ in range(NUM_CLIENTS)]
            send_described(self)
            for client in clients:
                client.result()

    def note(self, label: str, begin: float, statuses: list[int], wrong: str, again: Callable[[], object]) -> None:
        """Remember a body that has been sent."""
        self._sent.append(Sent(label, begin, time.time(), again))
        self.statuses.update(statuses)
        if wrong:
            self.failures.append(f"{wrong[:600]}\n    for {label}")

    def _work(self) -> Iterator[Callable[[httpx.Client], None]]:
        every = max(1, self.num_mutated // max(1, self.num_raw))
        raw = iter(range(self.num_raw))
        for index in range(self.num_mutated):
            yield lambda http, index=index: self._send_mutated(http, index)
            if index % every == 0 and (number := next(raw, None)) is not None:
                yield lambda _, number=number: self._send_raw(number)

    def _be_a_client(self, work: Iterator[Callable[[httpx.Client], None]]) -> None:
        with self._client() as http:
            while True:
                with _TURN:
                    send = next(work, None)
                if send is None:
                    return
                send(http)

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self._server.url, timeout=_PATIENCE_S, headers=_AUTHORIZATION)

    def _send_mutated(self, http: httpx.Client, index: int) -> None:
        body = hostile_body(self._seed, index, self._paths)
        begin = time.time()
        statuses, wrong = self._post(http, body)
        self.note(body.label, begin, statuses, wrong, lambda: self._post_alone(index))

    def _post_alone(self, index: int) -> None:
        with self._client() as http:
            self._post(http, hostile_body(self._seed, index, self._paths))

    def _post(self, http: httpx.Client, body: HostileBody) -> tuple[list[int], str]:
        headers = {name: value.encode("latin-1") for name, value in body.headers.items()}
        for is_last in (False, True):  # a connection may have been closed when it is used again
            try:
                response = http.request(body.method, body.path, content=body.content, headers=headers)
            except httpx.HTTPError as error:
                if is_last:
                    return [], f"no answer: {error!r}"
            else:
                kind = response.headers.get("content-type", "")
                return [response.status_code], complaint(response.status_code, kind, response.text)
        raise AssertionError

    def _send_raw(self, index: int) -> None:
        case = raw_case(self._seed, index)
        begin = time.time()

        def send() -> tuple[list[int], str]:
            return send_raw(self._host, self._port, case)

        try:
            statuses, wrong = send()
        except OSError as error:
            statuses, wrong = [], f"no connection: {error!r}"
        sent = b"".join(case.parts)
        label = f"seed {self._seed}, raw case {index}: {case.name}, {len(sent)} bytes: {sent[:200]!r}"
        self.note(label, begin, statuses, wrong, send)

    def _send_first_of_each_kind(self) -> None:
        with self._client() as http:
            for path in self._paths:
                for body in good_bodies(path):
                    for _ in range(2):
                        http.post(path, json=body)
            for path, methods in self.description["paths"].items():
                if "get" in methods and "{" not in path:
                    http.get(path)

    def _tell_late(self, watch: Watch) -> None:
        """Who was late or was failed, and for whose body."""
        moments = [*watch.moments]
        failed = Counter(moment["failed"] for moment in moments if "failed" in moment)
        self.failures += [f"{count} x another client was failed: {why}" for why, count in failed.items()]
        late = sorted((moment for moment in moments if "late_s" in moment), key=lambda moment: -moment["late_s"])
        for kind in ("health", "stream"):
            most = [f"{moment['late_s'] * 1000:.0f}" for moment in late if moment["kind"] == kind]
            if most:
                limit = f"{LATE_S * 1000:.0f} ms of process time"
                self.failures.append(f"{len(most)} x {kind} was late by more than {limit}: {', '.join(most[:10])} ms")
        for label, late_s in self._guilty(watch, late[:8]).items():
            self.failures.append(f"alone, {late_s * 1000:.0f} ms late\n    for {label}")

    def _guilty(self, watch: Watch, late: list[dict[str, Any]]) -> dict[str, float]:
        """How late others are for each body that was on its way in a late moment, sent again alone; if they are."""
        suspects = {
            sent.label: sent
            for moment in late
            for sent in self._sent
            if sent.begin <= moment["to"] and sent.end >= moment["from"]
        }
        guilty = {}
        for sent in suspects.values():
            num_before = len(watch.moments)
            with suppress(OSError, httpx.HTTPError):
                sent.again()
            self._settle()
            if again := [moment["late_s"] for moment in watch.moments[num_before:] if "late_s" in moment]:
                guilty[sent.label] = max(again)
        return guilty

    def _settle(self) -> None:
        """Until nobody is served but who watches."""
        until(lambda: self._server.metric("vllm:num_requests_running") <= 1, "the attack to end", _PATIENCE_S)
        time.sleep(0.1)

    def _rest(self) -> None:
        until(self._server.is_idle, "the server to be idle", _PATIENCE_S)
        self._server.check_pool()
        time.sleep(1.0)


_TURN = threading.Lock()
