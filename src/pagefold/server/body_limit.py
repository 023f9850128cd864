"""The largest body that is taken in, and how long it may stall: more is refused while it comes, and never kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from pagefold.server.errors import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BodyLimit"]

_STALL_S = 30.0


class BodyLimit:
    """ASGI middleware: 413 for a body of more than ``max_bytes``, announced or not; 408 for one that stops coming.

    A body that announces its length is refused unread; one that comes in chunks, at the chunk that is too much. What is
    still under way then is thrown away by uvicorn, so that a client that is still sending gets to read the answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._message = f"The body is larger than the {max_bytes} bytes that this server takes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:  # h11 has refused what is no number
            await error_response(413, self._message)(scope, receive, send)
            return
        num_bytes = 0
        is_whole = False

        async def counted() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:  # from now on a handler waits for the client to go away, for as long as its answer takes
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), _STALL_S)
            except TimeoutError:
                raise HTTPException(408, f"The body stopped coming for {_STALL_S:g} s.") from None
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._message)  # FastAPI hands this on while it reads a body
            return message

        await self._app(scope, counted, send)
