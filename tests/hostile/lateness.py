"""A program beside a server: it asks for ``/health`` all the time, reads a stream, and writes down what came late.

    python lateness.py HOST PORT PID < (ends when this does)

Late is counted in the server's process time: what it computed, on all its threads, between a question and its answer,
or between two chunks of a stream; and never more than what passed on the clock until the kernel had the answer, so that
neither a busy machine nor this program's own turn is taken for the server's. A process of its own, so that nothing that
happens in a test's process is in the figures. Each late moment is a line of JSON at once; the last line sums up.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time

LATE_S = 0.1
_PAUSE_S = 0.02
_PATIENCE_S = 300.0
_SO_TIMESTAMPNS = 35
_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Server:
    """The server's address, and its process's clock."""

    def __init__(self, host: str, port: str, pid: str) -> None:
        self._address = host, int(port)
        self._clock = (~int(pid) << 3) | 2  # as clock_getcpuclockid(3) makes it

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=_PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        return connection

    def process_time(self) -> float:
        return time.clock_gettime(self._clock)


class Moment:
    """What time it is: on the clock on the wall, and on the process's."""

    def __init__(self, server: Server, at: float | None = None) -> None:
        self.process = server.process_time()
        self.wall = time.time() if at is None else at


def receive(connection: socket.socket) -> tuple[bytes, float]:
    """What has come, and when the kernel had it."""
    data, extras, _, _ = connection.recvmsg(65536, 64)
    for level, kind, value in extras:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("qq", value[:16])
            return data, seconds + nanoseconds / 1e9
    return data, time.time()


class Figures:
    """How late answers of one kind were."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._late: list[float] = []
        self._wall = 0.0
        self._failures: list[str] = []

    def add(self, begin: Moment, end: Moment) -> None:
        wall = end.wall - begin.wall
        late = max(0.0, min(wall, end.process - begin.process))
        self._late.append(late)
        self._wall = max(self._wall, wall)
        if late > LATE_S:
            self._tell({"kind": self._kind, "from": begin.wall, "to": end.wall, "late_s": late})

    def fail(self, why: str) -> None:
        self._failures.append(why)
        self._tell({"kind": self._kind, "from": time.time(), "to": time.time(), "failed": why})

    def _tell(self, what: dict) -> None:
        print(json.dumps(what), flush=True)

    def summary(self) -> dict:
        late = sorted(self._late) or [0.0]
        return {
            "count": len(self._late),
            "late_ms": {
                "p50": _ms(late[len(late) // 2]),
                "p99": _ms(late[len(late) * 99 // 100]),
                "max": _ms(late[-1]),
            },
            "longest_wall_ms": _ms(self._wall),
            "failures": self._failures[:20],
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def watch_health(server: Server, figures: Figures, is_over: threading.Event) -> None:
    connection = server.connect()
    while not is_over.wait(_PAUSE_S):
        begin = Moment(server)
        try:
            connection.sendall(_HEALTH)
            answer = b""
            while b"}" not in answer:
                data, at = receive(connection)
                if not data:
                    break
                answer += data
            end = Moment(server, at)
        except OSError as error:
            answer = repr(error).encode()
        if answer.startswith(b"HTTP/1.1 200"):
            figures.add(begin, end)
        else:
            figures.fail(answer.decode(errors="replace")[:300] or "closed")
            connection = server.connect()


def watch_stream(server: Server, figures: Figures, is_over: threading.Event) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
    content = json.dumps(body)
    fields = (
        "Host: x",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(content)}",
        "",
        "",
    )
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields))
    while not is_over.is_set():
        try:
            read_stream(server, figures, (head + content).encode(), is_over)
        except OSError as error:
            figures.fail(repr(error))


def read_stream(server: Server, figures: Figures, request: bytes, is_over: threading.Event) -> None:
    with server.connect() as connection:
        connection.sendall(request)
        answer = b""
        last: Moment | None = None
        while not is_over.is_set():
            data, at = receive(connection)
            if not data:
                break
            now = Moment(server, at)
            if last is not None:
                figures.add(last, now)
            answer = answer[-500:] + data
            last = now if b"data: " in answer else None
        if not is_over.is_set() and b"[DONE]" not in answer:
            figures.fail(answer.decode(errors="replace")[-300:] or "closed")


def main(host: str, port: str, pid: str) -> None:
    server, is_over = Server(host, port, pid), threading.Event()
    health, stream = Figures("health"), Figures("stream")
    watchers = [
        threading.Thread(target=watch_health, args=(server, health, is_over), daemon=True),
        threading.Thread(target=watch_stream, args=(server, stream, is_over), daemon=True),
    ]
    for watcher in watchers:
        watcher.start()
    sys.stdin.read()
    is_over.set()
    for watcher in watchers:
        watcher.join(_PATIENCE_S)
    print(json.dumps({"kind": "summary", "health": health.summary(), "stream": stream.summary()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
