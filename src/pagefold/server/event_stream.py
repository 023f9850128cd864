"""Server-sent events: one JSON object an event; an error becomes an event in OpenAI's form."""

from __future__ import annotations

import contextlib
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from pagefold.server.disconnect import ClientGoneError, while_connected
from pagefold.server.errors import error_body

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.types import Receive, Scope, Send

__all__ = ["EventStream"]


class EventStream(Response):
    """Sends ``events`` as they come, and calls ``on_end`` when they have ended or the client has gone away.

    Events that are typed have a ``type``, which is told as the event's name; others have none, and end with ``[DONE]``.

    Starlette's own streaming response notices a client that went away only when it sends; a request that waits in the
    queue sends nothing, and must leave it all the same.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[dict[str, Any], None], *, on_end: Callable[[], None], is_typed: bool = False
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._is_typed = is_typed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's form
        """Send all of it."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with contextlib.suppress(ClientGoneError):
                await while_connected(receive, self._send_all(send))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await _send(send, self._written(event))
            except Exception as error:  # noqa: BLE001 - the status is sent already: say it in the stream
                body = error_body(error)
                await _send(send, self._written({**body["error"], "type": "error"} if self._is_typed else body))
        if not self._is_typed:
            await _send(send, "data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _written(self, event: dict[str, Any]) -> str:
        """Return JSON in ASCII: no proxy can cut a character in two, no client take U+2028 for the end of a line."""
        name = f"event: {event['type']}\n" if self._is_typed else ""
        return f"{name}data: {json.dumps(event, separators=(',', ':'))}\n\n"


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": True})
