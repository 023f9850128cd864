"""``pagefold serve`` under load: hundreds of clients at once, too few files, and signals in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_server import PATIENCE_S, ProcessServer, until

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_CLIENTS = 500
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def served(tiny_chat_model: Path) -> Iterator:
    """Start servers of the tiny model with flags of the test's own."""
    started: list[ProcessServer] = []

    def start(*flags: str) -> ProcessServer:
        defaults = ("--kv-cache-memory-bytes", "8M", "--served-model-name", "tiny", "--max-model-len", "1500")
        server = ProcessServer(str(tiny_chat_model), *defaults, "--max-num-seqs", "16", *flags)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@dataclass
class Answer:
    """What a client got.

    Attributes:
        status: of HTTP.
        headers: lower case.
        body: of it, without chunk sizes.
    """

    status: int
    headers: dict[str, str]
    body: str

    def num_tokens(self) -> int:
        """How many tokens it says it has, streamed or not; the answer must be whole."""
        if "text/event-stream" not in self.headers["content-type"]:
            usage = json.loads(self.body)["usage"]
        else:
            events = [line.removeprefix("data: ") for line in self.body.split("\n") if line.startswith("data: ")]
            if events[-1] == "[DONE]":
                usage = json.loads(events[-2])["usage"]
            else:
                last = json.loads(events[-1])
                assert last["type"] == "response.incomplete"
                usage = last["response"]["usage"]
        return usage.get("completion_tokens") or usage["output_tokens"]


def request_of(number: int, num_tokens: int) -> tuple[str, dict]:
    """One of six kinds of request, no two with the same prompt."""
    stream = number % 2 == 0
    common = {"temperature": 0, "ignore_eos": True, "cache_salt": str(number), "stream": stream}
    if number % 3 == 0:
        return "/v1/responses", {"input": "Hi", "max_output_tokens": num_tokens, **common}
    common["max_tokens"] = num_tokens
    if stream:
        common["stream_options"] = {"include_usage": True}
    if number % 3 == 1:
        return "/v1/completions", {"prompt": [number + 10] * 20, **common}
    return "/v1/chat/completions", {"messages": MESSAGES, **common}


async def ask(server: ProcessServer, path: str, body: dict) -> Answer:
    """Ask over a connection of its own; plain sockets, so that hundreds of them cost the test little."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content)
    received = await asyncio.wait_for(reader.read(), PATIENCE_S * 4)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    head, _, rest = received.partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
    if headers.get("transfer-encoding") == "chunked":
        assert rest.endswith(b"\r\n0\r\n\r\n"), "the answer is cut off"
        rest = b"".join(_chunks(rest))
    return Answer(int(first.split()[1]), headers, rest.decode())


def _chunks(data: bytes) -> Iterator[bytes]:
    while data:
        size, _, data = data.partition(b"\r\n")
        yield data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]


def ask_all(server: ProcessServer, num_clients: int, num_tokens: int) -> list[Answer]:
    """All at once."""
    _let_files_be_opened()

    async def run() -> list[Answer]:
        asked = (ask(server, *request_of(number, num_tokens)) for number in range(num_clients))
        return await asyncio.gather(*asked)

    return asyncio.run(run())


def _let_files_be_opened() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def resident_bytes(server: ProcessServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.mark.long
def test_500_clients_at_once_and_a_signal_in_the_middle_of_the_next(served):
    """All are served. After SIGTERM who runs or waits gets a whole answer, new ones are told, and it exits with 0."""
    server = served("--shutdown-timeout", "300")
    ask_all(server, 20, 5)  # what is loaded lazily is there
    before = resident_bytes(server)
    answers = ask_all(server, NUM_CLIENTS, 20)
    assert [answer.status for answer in answers] == [200] * NUM_CLIENTS
    assert [answer.num_tokens() for answer in answers] == [20] * NUM_CLIENTS
    server.check_pool()
    assert resident_bytes(server) - before < 100 * 2**20
    num_clients, num_tokens = 60, 200

    async def run() -> list[Answer]:
        asked = [asyncio.create_task(ask(server, *request_of(at, num_tokens))) for at in range(num_clients)]
        await asyncio.to_thread(until, lambda: _num_here(server) == num_clients, "all to come")
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(until, lambda: server.http.get("/ready").status_code == 503, "the drain to begin")
        late = await asyncio.gather(*(ask(server, *request_of(at, 5)) for at in range(6)))
        assert {answer.status for answer in late} == {503}
        assert "shutting down" in late[0].body
        assert server.metric("vllm:num_requests_waiting") > 0  # or this test showed less than it says
        return await asyncio.gather(*asked)

    answers = asyncio.run(run())
    assert [answer.status for answer in answers] == [200] * num_clients
    assert [answer.num_tokens() for answer in answers] == [num_tokens] * num_clients
    assert server.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in server.output()


def _num_here(server: ProcessServer) -> float:
    metrics = server.metrics()
    return metrics["vllm:num_requests_running", ""] + metrics["vllm:num_requests_waiting", ""]


@pytest.mark.long
def test_500_clients_at_once_where_few_may_wait_and_then_too_few_files(served):
    """Each is served or told when to come again. Where no more files can be opened, clients wait; the log says so."""
    server = served("--max-queued-requests", "50")
    answers = ask_all(server, NUM_CLIENTS, 20)
    served_well = [answer for answer in answers if answer.status == 200]
    assert len(served_well) >= 66
    assert [answer.num_tokens() for answer in served_well] == [20] * len(served_well)
    for answer in answers:
        if answer.status != 200:
            assert answer.status == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert json.loads(answer.body)["error"]["code"] == "queue_full"
    server.check_pool()
    num_open = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (num_open + 20, num_open + 20))
    answers = ask_all(server, 60, 20)
    assert [(answer.status, answer.num_tokens()) for answer in answers] == [(200, 20)] * 60
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    output = server.output()
    assert output.count(f"All {num_open + 20} files that this process may open are open") == 1
    assert "ulimit" in output
    assert "Traceback" not in output


@pytest.mark.long
def test_a_start_lets_itself_open_more_files():
    """As far as it may; and says how many connections that makes."""
    code = (
        "import resource\n"
        "from pagefold.server.listener import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (50, {hard}))\n"
        "print(raise_open_files(1000), *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    for hard, expected in ((200, "136 200 200"), (1064, "1000 1064 1064"), (60, "0 60 60")):
        command = [sys.executable, "-c", code.format(hard=hard)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected


def test_signals_at_any_time_of_a_start_end_it(tiny_chat_model):
    """Before Python listens to signals the kernel ends it; later it ends itself. It never hangs."""
    for delay_s in (0.0, 0.3, 1.0, 2.0):
        process = subprocess.Popen(
            [sys.executable, "-m", "pagefold.cli", "serve", str(tiny_chat_model), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (0, -signal.SIGTERM), output
        assert "Traceback" not in output
