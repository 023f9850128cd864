"""RedisStore: blocks in a Redis or Valkey server, by way of redis-py.

A block is one string: its frame, under ``pagefold:LAYOUT:DIGEST`` (both in hex). The server makes room, by its
``maxmemory-policy``; what it refuses for want of room is not kept, and that is no failure.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.protocol import StoreUse
from pagefold.store.self_test import run_self_test

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pagefold.store.address import RemoteAddress
    from pagefold.store.frame import BlockName, FrameFormat
    from pagefold.store.protocol import Get, Put, SelfTest

__all__ = ["RedisStore"]

_TLS_OPTIONS = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
"""Options of the URL, and what redis-py calls them."""
_BATCH_BYTES = 2**20
"""Blocks that are sent or asked for together, and read at once. redis-py copies them from buffer to buffer: batches of
2 MiB and more arrive at a third of the speed (benchmarks/remote_store.py)."""
_BATCH_NAMES = 512
_NO_REDIS = (ValueError, TypeError, AttributeError, LookupError)
"""What redis-py raises where what answers is no Redis."""
_MOST_CONNECTIONS = 8


class RedisStore:
    """A :class:`BlockStore` in a Redis or Valkey server. Nothing is connected before it is needed.

    A block's bytes are copied to where they are to be, and verified there. No call is repeated: what fails is a
    :class:`StoreError` at once. A connection that the server closed meanwhile is seen before it is used.

    Args:
        address: of the server. Its path is the number of the database. Options: ``ttl_s``, seconds from when a block is
            written until it is dropped (0: never); ``ca_file``, ``cert_file``, ``key_file`` for ``rediss``.
        form: of the frames.
        timeout_s: for connecting, for a free connection, and for each wait for the server within a batch: one that
            sends a little now and then is waited for. Looking up its name takes what the system's resolver takes.

    Raises:
        ConfigError: an option is wrong.
    """

    is_out = False
    tier = "remote"

    def __init__(self, address: RemoteAddress, form: FrameFormat, *, timeout_s: float = 1.0) -> None:
        address.only_options(frozenset({"ttl_s", *_TLS_OPTIONS}))
        if address.path and not address.path.isdecimal():
            msg = f"{address}: {address.path!r} is not the number of a database."
            raise ConfigError(msg, remedy="Write it as redis://HOST:PORT/0.")
        self.address = address
        self._form = form
        self._timeout_s = timeout_s
        ttl_ms = round(address.number("ttl_s", 0) * 1000)
        self._expiry = ("PX", ttl_ms) if ttl_ms else ()
        self._prefix = b"pagefold:%b:" % form.layout.hex().encode()
        self._num_batched = max(1, _BATCH_BYTES // form.frame_bytes)
        account = UsernamePasswordCredentialProvider(address.username, address.password) if address.password else None
        self._pool = redis.BlockingConnectionPool(
            _MOST_CONNECTIONS,
            timeout_s,
            host=address.host,
            port=address.port,
            db=int(address.path or 0),
            credential_provider=account,  # shown by no repr
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_BATCH_BYTES,
            **_tls_of(address),
        )
        self._redis = redis.Redis(connection_pool=self._pool)
        self._closed = False

    def put(self, puts: Sequence[Put]) -> int:
        """Keep blocks; see :class:`BlockStore`."""
        known = self._ask((("TOUCH", self._key(put.name.digest)) for put in puts), _BATCH_NAMES)
        new = [put for put, num_known in zip(puts, known, strict=True) if num_known != 1]
        num_kept = len(puts) - len(new)
        for answer in self._ask(map(self._set, new), self._num_batched):
            if answer is not True:  # it is full, and would be asked in vain
                break
            num_kept += 1
        return num_kept

    def get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        """Bring blocks; see :class:`BlockStore`."""
        found: list[bytes | MissCause] = []
        end = self._form.frame_bytes  # one byte more than a frame has is enough to see that it is none
        commands = (("GETRANGE", self._key(get.name.digest), 0, end) for get in gets)
        answers = self._ask(commands, self._num_batched)
        for get, answer in zip(gets, answers, strict=True):
            found.append(self._taken(get, answer))
            if isinstance(found[-1], MissCause):
                if found[-1] is not MissCause.ABSENT:
                    with suppress(StoreError):  # what was brought is right all the same
                        self.delete([get.name.digest])
                break
        return found + [MissCause.ABSENT] * (len(gets) - len(found))

    def count(self, names: Sequence[BlockName]) -> int:
        """Return how many it holds in a row; see :class:`BlockStore`."""
        found = self._ask((("EXISTS", self._key(name.digest)) for name in names), _BATCH_NAMES)
        return sum(takewhile(lambda answer: answer == 1, found))

    def delete(self, digests: Sequence[bytes]) -> None:
        """Forget blocks."""
        for _ in self._ask((("UNLINK", self._key(digest)) for digest in digests), _BATCH_NAMES):
            pass

    def clear(self) -> int:
        """Forget all blocks of this layout; return how many. The time limit is for each page of names."""
        num: int = 0
        cursor: int = 0
        while True:
            ((cursor, keys),) = self._ask([("SCAN", cursor, "MATCH", self._prefix + b"*", "COUNT", _BATCH_NAMES)])
            num += sum(self._ask((("UNLINK", key) for key in keys), _BATCH_NAMES))
            if not cursor:
                return num

    def use(self) -> StoreUse:
        """Return what the whole server holds, and may hold: it does not count what is ours."""
        facts = self._memory()
        return StoreUse(-1, _number(facts, "used_memory", -1), _number(facts, "maxmemory", 0))

    def known_use(self) -> None:
        """Return nothing: it would have to be asked."""

    def self_test(self) -> SelfTest:
        """Try it out; warn of a server that will refuse blocks when it is full."""
        tested = run_self_test(self, self._form, str(self.address))
        with suppress(StoreError):
            facts = self._memory()
            if tested.ok and facts.get("maxmemory") and facts.get("maxmemory_policy") == "noeviction":
                warning = "; its maxmemory-policy is noeviction: once full it keeps nothing new (set allkeys-lru)"
                return tested._replace(told=tested.told + warning)
        return tested

    def close(self) -> None:
        """Close all connections; one that is in use is closed with the store. Again does nothing."""
        self._closed = True
        self._pool.disconnect(inuse_connections=False)

    # Inside.

    def _key(self, digest: bytes) -> bytes:
        return self._prefix + digest.hex().encode()

    def _set(self, put: Put) -> tuple[Any, ...]:
        header, payload = self._form.encode(put.name, put.payload, put.checksum, put.note)
        return "SET", self._key(put.name.digest), header + payload, *self._expiry

    def _taken(self, get: Get, answer: bytes | redis.ResponseError) -> bytes | MissCause:
        if answer == b"":  # there is no such key, or an empty string in it
            key = self._key(get.name.digest)
            return MissCause.DAMAGED if self._send([("EXISTS", key), ("STRLEN", key)]) == [1, 0] else MissCause.ABSENT
        if not isinstance(answer, bytes) or len(answer) > self._form.frame_bytes:
            return MissCause.DAMAGED
        sent = memoryview(answer)[self._form.header_bytes :]
        return self._form.take(answer[: self._form.header_bytes], sent, get)

    def _memory(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = next(self._ask([("INFO", "memory")]))
        return facts

    def _ask(self, commands: Iterable[tuple[Any, ...]], num_together: int = 1) -> Iterator[Any]:
        """Send commands, so many together, and yield their answers."""
        rest = iter(commands)
        while batch := list(islice(rest, num_together)):
            yield from self._send(batch)

    def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the answers to commands; errors that are about one block are among them."""
        try:
            if self._closed:
                msg = "it was closed"
                raise redis.ConnectionError(msg)
            pipeline = self._redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, redis.ResponseError) and not _is_about_one_block(answer):
                    raise answer
        except redis.TimeoutError:
            msg = f"{self.address}: no answer within {self._timeout_s:g} s"
            raise StoreError(msg) from None
        except (redis.RedisError, OSError, *_NO_REDIS) as error:
            msg = self.address.without_secrets(f"{self.address}: {str(error).rstrip('.') or type(error).__name__}")
            raise StoreError(msg) from None
        return answers


def _number(facts: Mapping[str, Any], name: str, default: int) -> int:
    value = facts.get(name, default)
    return value if isinstance(value, int) else default


def _is_about_one_block(error: redis.ResponseError) -> bool:
    """Return whether there was no room for it, or something else is where it should be."""
    return isinstance(error, redis.OutOfMemoryError) or str(error).startswith("WRONGTYPE")


def _tls_of(address: RemoteAddress) -> dict[str, Any]:
    """Return how connections speak TLS, if they do, in redis-py's words."""
    files = {name: address.options[name] for name in _TLS_OPTIONS if name in address.options}
    if address.scheme not in {"rediss", "valkeys"}:
        if files:
            msg = f"{address}: certificates are for rediss://."
            raise ConfigError(msg, remedy="Write rediss:// instead of redis://, or leave them out.")
        return {}
    try:  # now, not when the first block is wanted
        context = ssl.create_default_context(cafile=files.get("ca_file"))
        if "cert_file" in files or "key_file" in files:
            context.load_cert_chain(files.get("cert_file", ""), files.get("key_file"))
    except OSError as error:
        msg = f"{address}: a certificate cannot be read: {error}."
        raise ConfigError(msg, remedy="ca_file, cert_file and key_file are paths of PEM files.") from None
    return {"connection_class": redis.SSLConnection} | {_TLS_OPTIONS[name]: path for name, path in files.items()}
