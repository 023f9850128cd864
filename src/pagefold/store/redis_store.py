"""RedisStore: blocks in a Redis or Valkey server.

A block is one string: its frame, under ``pagefold:LAYOUT:DIGEST`` (both in hex). The server makes room, by its
``maxmemory-policy``; what it refuses for want of room is not kept, and that is no failure.
"""

from __future__ import annotations

import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from pagefold.errors import ConfigError
from pagefold.store.deadline import Deadline
from pagefold.store.frame import MissCause
from pagefold.store.protocol import StoreError, StoreUse
from pagefold.store.resp import RespConnection, ServerError, begin_command, command, words
from pagefold.store.self_test import run_self_test

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.store.address import RemoteAddress
    from pagefold.store.frame import BlockName, FrameFormat
    from pagefold.store.protocol import Get, Put
    from pagefold.store.resp import Reply
    from pagefold.store.self_test import SelfTest

__all__ = ["DEFAULT_PORT", "RedisStore"]

DEFAULT_PORT = 6379

_T = TypeVar("_T")
_OPTIONS = frozenset({"ttl_s", "ca_file", "cert_file", "key_file"})
_BATCH_BYTES = 2**23
"""Blocks that are sent or asked for together: many round trips' worth, and little beside a server's memory."""
_BATCH_NAMES = 512
_MOST_IDLE = 8
_MOST_SKIPPED_BYTES = 2**26
"""A longer value under our key was written by somebody else: the connection is dropped rather than read to its end."""


class RedisStore:
    """A :class:`BlockStore` in a Redis or Valkey server. Nothing is connected before it is needed.

    A block's bytes are read from the socket to where they are to be, and verified there.

    Args:
        address: of the server. Its path is the number of the database. Options: ``ttl_s``, seconds from when a block is
            written until it is dropped (0: never); ``ca_file``, ``cert_file``, ``key_file`` for ``rediss``.
        form: of the frames.
        timeout_s: for each batch of a call, connecting included.

    Raises:
        ConfigError: an option is wrong.
    """

    is_out = False
    tier = "remote"

    def __init__(self, address: RemoteAddress, form: FrameFormat, *, timeout_s: float = 1.0) -> None:
        address.only_options(_OPTIONS)
        if address.path and not address.path.isdecimal():
            msg = f"{address}: {address.path!r} is not the number of a database."
            raise ConfigError(msg, remedy="Write it as redis://HOST:PORT/0.")
        self.address = address
        self._form = form
        self._timeout_s = timeout_s
        self._ttl_ms = round(address.number("ttl_s", 0) * 1000)
        self._prefix = b"pagefold:%b:" % form.layout.hex().encode()
        self._tls = _tls_of(address)
        self._num_batched = max(1, _BATCH_BYTES // form.frame_bytes)
        # The system's look-up of names knows no time limit: it has threads of its own, and is left to itself when late.
        self._resolver = ThreadPoolExecutor(2, "redis-name")
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._closed = False

    def put(self, puts: Sequence[Put]) -> int:
        """Keep blocks; see :class:`BlockStore`."""
        known: list[Reply] = []
        for names in _batches(puts, _BATCH_NAMES):
            with self._connection() as connection:
                known += map(_answer, connection.ask([command(b"TOUCH", self._key(put.name.digest)) for put in names]))
        new = [put for put, is_known in zip(puts, known, strict=True) if not is_known]
        num_kept = len(puts) - len(new)
        for batch in _batches(new, self._num_batched):
            num_put = self._put(batch)
            num_kept += num_put
            if num_put < len(batch):  # it is full, and would be asked in vain
                break
        return num_kept

    def get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        """Bring blocks; see :class:`BlockStore`."""
        found: list[bytes | MissCause] = []
        for batch in _batches(gets, self._num_batched):
            found += self._get(batch)
            if isinstance(found[-1], MissCause):
                break
        wrong = [
            get.name.digest
            for get, got in zip(gets, found, strict=False)
            if isinstance(got, MissCause) and got is not MissCause.ABSENT
        ]
        if wrong:
            with suppress(StoreError):  # what was brought is right all the same
                self.delete(wrong)
        return found + [MissCause.ABSENT] * (len(gets) - len(found))

    def count(self, names: Sequence[BlockName]) -> int:
        """Return how many it holds in a row; see :class:`BlockStore`."""
        num = 0
        for batch in _batches(names, _BATCH_NAMES):
            with self._connection() as connection:
                asked = [command(b"EXISTS", self._key(name.digest)) for name in batch]
                for answer in list(map(_answer, connection.ask(asked))):
                    if not answer:
                        return num
                    num += 1
        return num

    def delete(self, digests: Sequence[bytes]) -> None:
        """Forget blocks."""
        for batch in _batches(digests, _BATCH_NAMES):
            self._ask(command(b"UNLINK", *map(self._key, batch)))

    def clear(self) -> int:
        """Forget all blocks of this layout; return how many. The time limit is for each page of names."""
        num, cursor = 0, b"0"
        while True:
            page = self._ask(command(b"SCAN", cursor, b"MATCH", self._prefix + b"*", b"COUNT", _BATCH_NAMES))
            if not (isinstance(page, list) and len(page) == 2 and isinstance(page[1], list)):  # noqa: PLR2004  # cursor and names
                msg = f"{self.address}: SCAN was answered with something else"
                raise StoreError(msg)
            cursor = page[0] if isinstance(page[0], bytes) else b"0"
            keys = [key for key in page[1] if isinstance(key, bytes)]
            if keys:
                dropped = self._ask(command(b"UNLINK", *keys))
                num += dropped if isinstance(dropped, int) else 0
            if cursor == b"0":
                return num

    def use(self) -> StoreUse:
        """Return what the whole server holds, and may hold: it does not count what is ours."""
        facts = self._memory()
        return StoreUse(-1, int(facts.get("used_memory", -1)), int(facts.get("maxmemory", 0)))

    def self_test(self) -> SelfTest:
        """Try it out; warn of a server that will refuse blocks when it is full."""
        tested = run_self_test(self, self._form, str(self.address))
        try:
            facts = self._memory()
        except StoreError:
            return tested
        if tested.ok and int(facts.get("maxmemory", 0)) and facts.get("maxmemory_policy") == "noeviction":
            warning = "; its maxmemory-policy is noeviction: once full it keeps nothing new (set allkeys-lru)"
            return tested._replace(told=tested.told + warning)
        return tested

    def close(self) -> None:
        """Close all connections; those in use are closed when their call ends. Again does nothing."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        self._resolver.shutdown(wait=False, cancel_futures=True)

    # Inside.

    def _key(self, digest: bytes) -> bytes:
        return self._prefix + digest.hex().encode()

    def _put(self, puts: Sequence[Put]) -> int:
        expiry = (b"PX", self._ttl_ms) if self._ttl_ms else ()
        value_bytes = b"$%d\r\n" % self._form.frame_bytes
        with self._connection() as connection:
            for put in puts:
                head = begin_command(3 + len(expiry), b"SET", self._key(put.name.digest)) + value_bytes
                connection.send(head + self._form.header(put.name, put.checksum), put.payload)
                connection.send(b"\r\n" + words(*expiry))
            answers = [connection.read_reply() for _ in puts]
            return sum(not _is_full(answer) and _answer(answer) == "OK" for answer in answers)

    def _get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        with self._connection() as connection:
            connection.send(b"".join(command(b"GET", self._key(get.name.digest)) for get in gets))
            return [self._receive(connection, get) for get in gets]

    def _receive(self, connection: RespConnection, get: Get) -> bytes | MissCause:
        num_bytes = connection.begin_bulk()
        if num_bytes is None:
            return MissCause.ABSENT
        if isinstance(num_bytes, ServerError):
            if num_bytes.startswith("WRONGTYPE"):
                return MissCause.DAMAGED
            raise StoreError(num_bytes)
        if num_bytes > _MOST_SKIPPED_BYTES + self._form.frame_bytes:
            msg = f"a value of {num_bytes:,} bytes is where a block should be"
            raise StoreError(msg)
        header = memoryview(bytearray(min(num_bytes, self._form.header_bytes)))
        connection.read_into(header)
        payload = get.into[: num_bytes - len(header)]
        connection.read_into(payload)
        too_many = num_bytes - len(header) - len(payload)
        connection.skip(too_many)
        connection.end_bulk()
        checked = self._form.check(header, payload, get.name)
        return MissCause.DAMAGED if too_many and isinstance(checked, bytes) else checked

    def _memory(self) -> dict[str, str]:
        told = self._ask(command(b"INFO", b"memory"))
        lines = told.decode(errors="replace").splitlines() if isinstance(told, bytes) else []
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def _ask(self, asked: bytes) -> Reply:
        with self._connection() as connection:
            return _answer(connection.ask([asked])[0])

    @contextmanager
    def _connection(self) -> Iterator[RespConnection]:
        """Lend a connection for one batch. What fails closes it, since its answers may still be under way."""
        deadline = Deadline(self._timeout_s)
        connection = None
        try:
            connection = self._take(deadline)
            yield connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, StoreError | OSError):  # a TimeoutError is one, and so is what TLS raises
                msg = self.address.without_secrets(f"{self.address}: {_told(error, deadline)}")
                raise StoreError(msg) from None
            raise
        with self._lock:
            if not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _take(self, deadline: Deadline) -> RespConnection:
        while True:
            with self._lock:
                if self._closed:
                    msg = "it was closed"
                    raise StoreError(msg)
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(deadline)
            if connection.is_idle():
                connection.deadline = deadline
                return connection
            connection.close()

    def _connect(self, deadline: Deadline) -> RespConnection:
        host, port = self.address.host, self.address.port
        looked_up = self._resolver.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = looked_up.result(deadline.left_s())
        finally:
            looked_up.cancel()
        refused: OSError | None = None
        for family, _, _, _, where in found:
            try:
                connection = RespConnection((family, where), self._tls, deadline)
            except OSError as error:
                refused = error
                continue
            try:
                self._greet(connection)
            except BaseException:
                connection.close()
                raise
            return connection
        raise refused or OSError("its name has no address")

    def _greet(self, connection: RespConnection) -> None:
        greeting = []
        account = [self.address.username.encode()] if self.address.username else []
        if self.address.password:
            greeting.append(command(b"AUTH", *account, self.address.password.encode()))
        if int(self.address.path or 0):
            greeting.append(command(b"SELECT", int(self.address.path)))
        if greeting:
            for answer in connection.ask(greeting):
                _answer(answer)


def _batches(items: Sequence[_T], num: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), num):
        yield items[start : start + num]


def _answer(reply: Reply) -> Reply:
    if isinstance(reply, ServerError):
        raise StoreError(str(reply))
    return reply


def _is_full(reply: Reply) -> bool:
    return isinstance(reply, ServerError) and reply.startswith("OOM")


def _told(error: Exception, deadline: Deadline) -> str:
    """Return an error in words."""
    if isinstance(error, TimeoutError):
        return deadline.told()
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


def _tls_of(address: RemoteAddress) -> tuple[ssl.SSLContext, str] | None:
    options = address.options
    if address.scheme not in {"rediss", "valkeys"}:
        if {"ca_file", "cert_file", "key_file"} & set(options):
            msg = f"{address}: certificates are for rediss://."
            raise ConfigError(msg, remedy="Write rediss:// instead of redis://, or leave them out.")
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("ca_file"))
        if "cert_file" in options:
            context.load_cert_chain(options["cert_file"], options.get("key_file"))
    except OSError as error:
        msg = f"{address}: a certificate cannot be read: {error}."
        raise ConfigError(msg, remedy="ca_file, cert_file and key_file are paths of PEM files.") from None
    return context, address.host
