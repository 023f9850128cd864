"""Connection: HTTP/1.1 as uvicorn speaks it, with limits on time and number, and errors in OpenAI's form.

What a client does before its request is whole, and after its answer, is bounded in time. Between the two nothing here
ends it: an answer may be streamed for as long as it takes.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagefold.server.errors import error_response
from pagefold.server.framing import MAX_HEAD_BYTES, Framing

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from pagefold.config import ServerConfig

__all__ = ["Connection", "Connections", "http_settings"]

_READ_BYTES = 16 * 2**10
"""What is read at once: h11 needs some milliseconds for the worst of it, and others come in between."""

_LINGER_S = 2.0
_OTHER_ROUTE = "other"


class Connections:
    """All connections of one server.

    Args:
        max_connections: how many there may be. One too many takes the place of the one that has had nothing to do for
            longest; where all of them are busy it is refused.
        header_timeout_s: how long the head of a request may take to come.
        body_timeout_s: how long its body may take.
        count: told of each answer that the app knows nothing of: a route's name, and the status.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        header_timeout_s: float,
        body_timeout_s: float,
        count: Callable[[str, int], None],
    ) -> None:
        self.max_connections = max_connections
        self.header_timeout_s = header_timeout_s
        self.body_timeout_s = body_timeout_s
        self.count = count
        self.read_buffer = bytearray(_READ_BYTES)  # one for all: what is read is taken out of it at once
        self._idle: dict[Connection, None] = {}  # the longest idle first

    def note_idle(self, connection: Connection) -> None:
        """A connection has answered, or is new."""
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def note_busy(self, connection: Connection) -> None:
        """A request has come on a connection, or it has ended."""
        self._idle.pop(connection, None)

    def longest_idle(self) -> Connection | None:
        """Return the connection that has had nothing to do for longest, if one has nothing to do."""
        return next(iter(self._idle), None)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """One connection of a client.

    Args:
        connections: what it belongs to.
        arguments: uvicorn's.
    """

    def __init__(self, *, connections: Connections, **arguments: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(**arguments)
        self.conn: h11.Connection = Framing()
        self._all = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_for: tuple[str, object] | None = None
        self._has_head_bytes = False
        self._is_overdue = False
        self._is_refused = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See :class:`asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > self._all.max_connections:
            longest_idle = self._all.longest_idle()
            if longest_idle is None:
                self._refuse(503, "All connections that this server takes are in use. Try again later.")
                return
            longest_idle.transport.close()
            self._all.note_busy(longest_idle)
        self._all.note_idle(self)
        self._watch()

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - asyncio's form
        """See :class:`asyncio.BufferedProtocol`."""
        return self._all.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See :class:`asyncio.BufferedProtocol`."""
        self.data_received(bytes(memoryview(self._all.read_buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._is_refused:
            return
        self._has_head_bytes = True
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._wait_for(None, 0.0)
        self._all.note_busy(self)

    # What uvicorn calls.

    def on_response_complete(self) -> None:
        """Go on with what was sent meanwhile, or wait for it."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE:  # uvicorn's keep-alive timer runs
            self._has_head_bytes = False
            self._all.note_idle(self)
            self._wait_for(None, 0.0)
        else:
            self._watch()
        if self._is_overdue:
            self.loop.call_later(_LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; ``msg`` is uvicorn's, and says less than h11 does."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == HTTPStatus.NOT_IMPLEMENTED:  # a transfer coding: it is the client's to send one that is known
            status = HTTPStatus.BAD_REQUEST
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._refuse(status, f"The head of the request is larger than the {MAX_HEAD_BYTES} bytes that are taken.")
        else:
            self._refuse(status, f"The request is not the HTTP that this server speaks: {str(error or msg)[:200]}.")

    # Ours.

    def _watch(self) -> None:
        """Start the clock of what is to come next, unless it runs."""
        if self._is_refused or self.transport.is_closing():
            self._wait_for(None, 0.0)
        elif self.conn.their_state is h11.IDLE:
            self._wait_for(("head", self.cycle), self._all.header_timeout_s)
        else:
            self._all.note_busy(self)
            if self.conn.their_state is h11.SEND_BODY:
                self._wait_for(("body", self.cycle), self._all.body_timeout_s)
            else:
                self._wait_for(None, 0.0)

    def _wait_for(self, what: tuple[str, object] | None, timeout_s: float) -> None:
        if what == self._waits_for:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._waits_for = what
        self._deadline = None if what is None else self.loop.call_later(timeout_s, self._on_overdue, what[0])

    def _on_overdue(self, what: str) -> None:
        if what == "head":
            if self._has_head_bytes:
                message = f"The head of the request was not complete after {self._all.header_timeout_s:g} s."
                self._refuse(408, message, "head_timeout")
            else:
                self.transport.close()
        elif self.cycle.response_complete:  # it was refused before its body had come
            self.transport.close()
        else:  # the app reads the body, knows the same limit, and answers
            self._is_overdue = True

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer what never comes to the app, and close when the client has had time to read that.

        (What a system has not read when it closes takes the answer with it. So the rest is read and thrown away.)
        """
        can_tell = not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        self._is_refused = True
        self._wait_for(None, 0.0)
        if self.cycle is not None and not self.cycle.response_complete:  # whoever reads its body need not wait
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if can_tell:
            answer = error_response(status, message, code=code)
            request_id = (b"x-request-id", uuid.uuid4().hex.encode())
            headers = [*answer.raw_headers, request_id, (b"connection", b"close")]
            events = (
                h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
            self._all.count(_OTHER_ROUTE, status)
        if can_tell and len(self.connections) <= 2 * self._all.max_connections:
            self.transport.write_eof()
            self.transport.resume_reading()
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()


def http_settings(
    app: FastAPI,
    config: ServerConfig,
    count: Callable[[str, int], None],
    *,
    max_connections: int | None = None,
    **settings: Any,  # noqa: ANN401 - uvicorn's own
) -> uvicorn.Config:
    """Return how uvicorn serves ``app``.

    Args:
        app: from :func:`~pagefold.server.app.create_app`.
        config: of the door.
        count: see :class:`Connections`.
        max_connections: fewer than the config's.
        settings: of uvicorn, besides.
    """
    connections = Connections(
        max_connections=max_connections or config.max_connections,
        header_timeout_s=config.http_header_timeout_s,
        body_timeout_s=config.http_body_timeout_s,
        count=count,
    )
    return uvicorn.Config(
        app,
        access_log=False,  # RequestLog writes its own
        http=cast("type[asyncio.Protocol]", functools.partial(Connection, connections=connections)),
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=cast("int", config.timeout_keep_alive_s),  # seconds: a float does as well
        ws="none",
        **settings,
    )
