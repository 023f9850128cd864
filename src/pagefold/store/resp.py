"""RespConnection: speaks to a Redis or Valkey server (RESP2), and copies blocks once, between socket and memory.

Clients of general use read a value into buffers of their own, then into a bytes object, from which it would be copied
again: several times slower than the network. Their time limits hold for each piece that arrives, not for the answer.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, TypeAlias

from pagefold.store.protocol import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.store.deadline import Deadline

__all__ = ["Reply", "RespConnection", "ServerError", "begin_command", "command", "words"]

_READ_BYTES = 2**14
_MOST_SMALL_BYTES = 2**22
"""What is no block is shorter; a server that says otherwise is none."""


class ServerError(str):
    """What a server said instead of an answer: ``"OOM command not allowed ..."``."""

    __slots__ = ()


Reply: TypeAlias = "int | bytes | str | ServerError | list[Reply] | None"


def command(*said: bytes | int) -> bytes:
    """Return a command as the server reads it."""
    return begin_command(len(said), *said)


def begin_command(num_words: int, *said: bytes | int) -> bytes:
    """Return the beginning of a command of so many words."""
    return b"*%d\r\n" % num_words + words(*said)


def words(*said: bytes | int) -> bytes:
    """Return words of a command."""
    raw = [one if isinstance(one, bytes) else b"%d" % one for one in said]
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


class RespConnection:
    """One connection, used by one thread at a time. After any exception it is in no known state: close it.

    Args:
        place: family and address of the server, as ``socket.getaddrinfo`` returns them.
        tls: how to speak TLS, and to whom; None speaks plain TCP.
        deadline: for the connection.

    Attributes:
        deadline: for what is sent and read next.
    """

    def __init__(
        self, place: tuple[int, tuple[object, ...]], tls: tuple[ssl.SSLContext, str] | None, deadline: Deadline
    ) -> None:
        self.deadline = deadline
        self._pending = memoryview(b"")
        family, where = place
        plain = socket.socket(family, socket.SOCK_STREAM)
        self._socket: socket.socket = plain
        try:
            plain.settimeout(deadline.left_s())
            plain.connect(where)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                context, host = tls
                self._socket = context.wrap_socket(plain, server_hostname=host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it. Again does nothing."""
        self._socket.close()

    def is_idle(self) -> bool:
        """Return whether it can be used: nothing waits to be read, not even its end."""
        if len(self._pending):
            return False
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False  # its end, or an answer to nothing

    def send(self, *parts: bytes | memoryview) -> None:
        """Send bytes."""
        for part in parts:
            self._socket.settimeout(self.deadline.left_s())
            self._socket.sendall(part)

    def read_reply(self) -> Reply:
        """Read one answer that is no block."""
        kind, rest = self._read_line()
        if kind == b"+":
            return rest.decode(errors="replace")
        if kind == b"-":
            return ServerError(rest.decode(errors="replace"))
        number = _number(rest)
        if kind == b":":
            return number
        if number > _MOST_SMALL_BYTES or kind not in {b"$", b"*"}:
            raise _no_redis()
        if number < 0:
            return None
        if kind == b"*":
            return [self.read_reply() for _ in range(number)]
        found = bytearray(number)
        self.read_into(memoryview(found))
        self.end_bulk()
        return bytes(found)

    def begin_bulk(self) -> int | ServerError | None:
        """Read the beginning of a value: its bytes, which are to be read next; None if there is no such value."""
        kind, rest = self._read_line()
        if kind == b"-":
            return ServerError(rest.decode(errors="replace"))
        if kind != b"$":
            raise _no_redis()
        number = _number(rest)
        return None if number < 0 else number

    def read_into(self, into: memoryview) -> None:
        """Read as many bytes of a value as ``into`` has."""
        ready = min(len(into), len(self._pending))
        into[:ready] = self._pending[:ready]
        self._pending = self._pending[ready:]
        into = into[ready:]
        while len(into):
            self._socket.settimeout(self.deadline.left_s())
            into = into[self._some(self._socket.recv_into(into)) :]

    def skip(self, num_bytes: int) -> None:
        """Read bytes of a value and forget them."""
        scratch = memoryview(bytearray(min(num_bytes, 2**16)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self.read_into(part)
            num_bytes -= len(part)

    def end_bulk(self) -> None:
        """Read the end of a value, all of whose bytes were read."""
        end = bytearray(2)
        self.read_into(memoryview(end))
        if end != b"\r\n":
            raise _no_redis()

    def ask(self, commands: Sequence[bytes]) -> list[Reply]:
        """Send commands together and read their answers."""
        self.send(b"".join(commands))
        return [self.read_reply() for _ in commands]

    def _read_line(self) -> tuple[bytes, bytes]:
        line = bytes(self._pending)
        while (end := line.find(b"\r\n")) < 0:
            if len(line) > _READ_BYTES:
                raise _no_redis()
            self._socket.settimeout(self.deadline.left_s())
            more = self._socket.recv(_READ_BYTES)
            self._some(len(more))
            line += more
        self._pending = memoryview(line)[end + 2 :]
        return line[:1], line[1:end]

    @staticmethod
    def _some(num_bytes: int) -> int:
        if not num_bytes:
            msg = "it closed the connection"
            raise ConnectionError(msg)
        return num_bytes


def _number(raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError:
        raise _no_redis() from None


def _no_redis() -> StoreError:
    return StoreError("what answers there does not speak the protocol of Redis")
