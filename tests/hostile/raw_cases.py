"""Bytes that are no good HTTP, and good HTTP by clients that behave badly: by kind, with what may come back."""

from __future__ import annotations

import json
import random
import re
import select
import socket
import struct
import time
from typing import NamedTuple

BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
LONG = json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
_PATIENCE_S = 30.0
_QUIET_S = 0.15


class RawCase(NamedTuple):
    """What is sent over a connection of its own.

    Attributes:
        name: its kind.
        parts: are sent one after another, with ``pause_s`` between.
        ending: ``wait`` for what comes, ``half`` closes our side first, ``reset`` leaves at once.
        most_answers: how many answers may come; more were to somebody's hidden request.
    """

    name: str
    parts: list[bytes]
    ending: str = "wait"
    pause_s: float = 0.0
    most_answers: int = 1


def post(body: bytes = BODY, *fields: str, length: str | None = None) -> bytes:
    size = (f"Content-Length: {len(body) if length is None else length}",) if length != "" else ()
    head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *size, *fields, "", "")
    return "\r\n".join(head).encode("latin-1") + body


def chunked(*chunks: bytes) -> bytes:
    return post(b"", "Transfer-Encoding: chunked", length="") + b"".join(chunks)


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HIDDEN = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)


def raw_case(seed: int, index: int) -> RawCase:
    """One case, always the same for a seed and an index."""
    draw = random.Random(f"raw/{seed}/{index}")
    kinds = [_bad_line, _bad_head, _bad_length, _bad_chunks, _smuggled, _slow, _left, _pipelined, _noise]
    return draw.choice(kinds)(draw)


def _bad_line(draw: random.Random) -> RawCase:
    size = draw.choice([100, 9000, 70_000, 300_000])
    line = draw.choice(
        [
            b"GET",
            b"GET /health",
            b"get /health HTTP/1.1",
            b"GET  /health  HTTP/1.1",
            b"GET /health HTTP/9.9",
            b"GET /health HTTP/1.0",
            b"PRI * HTTP/2.0",
            b"OPTIONS * HTTP/1.1",
            b"CONNECT x:1 HTTP/1.1",
            b"TRACE / HTTP/1.1",
            b"GET http://other/health HTTP/1.1",
            b"GET /\0 HTTP/1.1",
            b"GET /%00%ff%zz HTTP/1.1",
            b"HEAD /health HTTP/1.1",
            b"GET /" + b"a" * size + b" HTTP/1.1",
            b"A" * size + b" / HTTP/1.1",
            b"GET /v1/models/" + b"../" * 99 + b"x HTTP/1.1",
            b"GET /health?" + b"a=1&" * (size // 4) + b" HTTP/1.1",
            b"",
            b"\r\n\r\nGET /health HTTP/1.1",
            b"\x16\x03\x01\x02\x00",
        ]
    )
    return RawCase("request line", [line + b"\r\nHost: x\r\n\r\n"])


def _bad_head(draw: random.Random) -> RawCase:
    fields = draw.choice(
        [
            b"",
            b"Host: a\r\nHost: b\r\n",
            b"Host: x\r\nno colon\r\n",
            b"Host : x\r\n",
            b"Host: x\r\n folded\r\n",
            b"Host: x\r\nA: \0\r\n",
            b"Host: x\r\nA\xff: \xfe\r\n",
            b"Host: x\r\n: empty\r\n",
            b"Host: x\nA: b\n",
            b"Host: x\r\nA: " + b"b" * draw.choice([9000, 70_000, 300_000]) + b"\r\n",
            b"Host: x\r\n" + b"".join(b"A%d: b\r\n" % number for number in range(draw.choice([200, 5000]))),
            b"Host: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==\r\n",
            b"Host: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n",
            b"Host: x\r\nConnection: " + draw.choice([b"close, keep-alive", b"", b"Host", b"\t,,,"]) + b"\r\n",
            b"Host: x\r\nRange: bytes=0-,0-,0-\r\nIf-None-Match: *\r\n",
            b"Host: x\r\nExpect: 200-maybe\r\n",
        ]
    )
    return RawCase("head", [b"GET /health HTTP/1.1\r\n" + fields + b"\r\n"])


def _bad_length(draw: random.Random) -> RawCase:
    length = draw.choice(
        ["-1", "+5", "0x10", "5, 6", "5,5", "1e3", "", " ", "9" * 30, str(2**63), str(2**70), "\uff15", "\xb2"]
    )
    kind = draw.randrange(4)
    if kind == 0:
        return RawCase("length", [post(BODY, length=length.encode("utf-8").decode("latin-1") or " ")])
    if kind == 1:
        return RawCase("length", [post(BODY, f"Content-Length: {len(BODY) + 1}")])
    if kind == 2:
        return RawCase("length", [post(BODY, length=str(len(BODY) + 10))], ending="half")
    return RawCase("length", [post(BODY, "Expect: 100-continue")], most_answers=2)


def _bad_chunks(draw: random.Random) -> RawCase:
    bad = draw.choice(
        [
            b"zz\r\n",
            b"-1\r\n",
            b"+5\r\nhello\r\n",
            b"0x5\r\nhello\r\n",
            b"f" * 20 + b"\r\n",
            b"5\r\nhelloXX",
            b"5\nhello\n",
            b"5;" + b"a=b;" * draw.choice([5, 20_000]) + b"\r\nhello\r\n",
            b"\r\n\r\n",
            b"5 \r\nhello\r\n",
            b"\xff\r\n",
            CHUNK + b"0\r\n" + b"X: y\r\n" * draw.choice([3, 20_000]) + b"\r\n",
            b"1\r\n{\r\n" * 3000 + b"0\r\n\r\n",
        ]
    )
    return RawCase("chunks", [chunked(bad)], ending=draw.choice(["wait", "half"]))


def _smuggled(draw: random.Random) -> RawCase:
    coding = draw.choice(
        ["chunked", " chunked", "Chunked", "identity, chunked", "chunked, chunked", "xchunked", "gzip, chunked"]
    )
    body = draw.choice([CHUNK + b"0\r\n\r\n" + HIDDEN, b"0\r\n\r\n" + HIDDEN])
    length = draw.choice([4, len(BODY), len(body), len(body) - len(HIDDEN)])
    return RawCase("length and chunks", [post(body, f"Transfer-Encoding: {coding}", length=str(length))])


def _slow(draw: random.Random) -> RawCase:
    request = draw.choice([GET, post(), chunked(CHUNK, b"0\r\n\r\n")])
    size = draw.choice([1, 7, 40])
    parts = [request[at : at + size] for at in range(0, len(request), size)]
    return RawCase(
        "drips", parts[: draw.choice([len(parts), len(parts) // 2])], draw.choice(["wait", "half", "reset"]), 0.002
    )


def _left(draw: random.Random) -> RawCase:
    request = draw.choice([post(LONG), post(LONG)[:-5], post(), GET])
    return RawCase("left", [request], ending=draw.choice(["half", "reset"]))


def _pipelined(draw: random.Random) -> RawCase:
    requests = draw.choices(
        [GET, HIDDEN, post(), post(b"{"), b"\xff\xff\r\n\r\n"], weights=[5, 3, 3, 1, 1], k=draw.choice([2, 9, 60])
    )
    return RawCase("pipelined", [b"".join(requests)], ending=draw.choice(["wait", "half"]), most_answers=len(requests))


def _noise(draw: random.Random) -> RawCase:
    return RawCase(
        "noise", [draw.randbytes(draw.choice([1, 50, 5000, 200_000]))], ending=draw.choice(["wait", "half", "reset"])
    )


def send_raw(host: str, port: int, case: RawCase) -> tuple[list[int], str]:
    """Send a case; return the statuses that came, and what was wrong with them, if anything was."""
    with socket.create_connection((host, port), timeout=_PATIENCE_S) as connection:
        try:
            for part in case.parts:
                connection.sendall(part)
                time.sleep(case.pause_s)
            if case.ending == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return [], ""
            if case.ending == "half":
                connection.shutdown(socket.SHUT_WR)
        except OSError:  # it has closed already: what it said before counts
            pass
        answer = _read(connection)
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)]
    if any(status >= 500 for status in statuses):
        return statuses, f"a {max(statuses)}: {answer[:300]!r}"
    if len([status for status in statuses if status >= 200]) > case.most_answers:
        return statuses, f"{len(statuses)} answers, where {case.most_answers} are the most: {answer[:600]!r}"
    if b"Traceback" in answer or len(answer) > 200_000:
        return statuses, f"{len(answer)} bytes: {answer[:300]!r}"
    return statuses, ""


def _read(connection: socket.socket) -> bytes:
    """What comes until it is quiet, or closed."""
    answer = b""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and select.select([connection], [], [], _QUIET_S)[0]:
        try:
            data = connection.recv(65536)
        except OSError:
            break
        if not data:
            break
        answer += data
    return answer
