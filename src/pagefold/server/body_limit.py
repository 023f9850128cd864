"""How large a body may be, how long it may take, and how many bytes of bodies are kept at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from pagefold.server.checked_route import HELD_BODY
from pagefold.server.errors import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BodyLimit"]

_STALL_S = 30.0
_SMALL_BYTES = 64 * 2**10
"""Bodies up to this size are always taken: there are as many as connections."""
_MAX_LARGE_BODIES = 16
"""How many bodies of the largest size may be held at once; more that are smaller."""


class BodyLimit:
    """ASGI middleware: 413 for a body of more than ``max_bytes``, announced or not; 408 for one that stops coming.

    A body that announces its length is refused unread; one that comes in chunks, at the chunk that is too much. What is
    still under way then is thrown away by uvicorn, so that a client that is still sending gets to read the answer.

    All bodies together that have come and are not checked yet have a bound too: 429 for the one that is too much.

    Args:
        app: what it guards.
        max_bytes: of one body.
        timeout_s: how long one may take to come; one that stalls for ``_STALL_S`` is given up before.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._message = f"The body is larger than the {max_bytes} bytes that this server takes."
        self._room = _Room(_MAX_LARGE_BODIES * max(max_bytes, _SMALL_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:  # h11 has refused what is no number
            await error_response(413, self._message)(scope, receive, send)
            return
        held = _HeldBody(self._room)
        is_whole = False
        deadline = asyncio.get_running_loop().time() + self._timeout_s

        async def counted() -> Message:
            nonlocal is_whole
            if is_whole:  # from now on a handler waits for the client to go away, for as long as its answer takes
                return await receive()
            message = await self._receive(receive, deadline)
            is_whole = not message.get("more_body", False)
            held.grow(len(message.get("body", b"")))
            if held.num_bytes > self._max_bytes:
                raise HTTPException(413, self._message)  # FastAPI hands this on while it reads a body
            return message

        scope.setdefault("state", {})[HELD_BODY] = held.release
        try:
            await self._app(scope, counted, send)
        finally:
            held.release()

    async def _receive(self, receive: Receive, deadline: float) -> Message:
        """Return what comes next, unless it takes too long."""
        stalls_at = asyncio.get_running_loop().time() + _STALL_S
        try:
            async with asyncio.timeout_at(min(stalls_at, deadline)):
                return await receive()
        except TimeoutError:
            if deadline < stalls_at:
                raise HTTPException(408, f"The body was not complete after {self._timeout_s:g} s.") from None
            raise HTTPException(408, f"The body stopped coming for {_STALL_S:g} s.") from None


class _Room:
    """Where large bodies are until they are checked."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class _HeldBody:
    """One body, as far as it has come."""

    def __init__(self, room: _Room) -> None:
        self._room = room
        self._num_in_room = 0
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Count what has come.

        Raises:
            HTTPException: there is no room for it.
        """
        self.num_bytes += num_bytes
        if self.num_bytes <= _SMALL_BYTES:
            return
        num_new = self.num_bytes - self._num_in_room
        if self._room.num_bytes + num_new > self._room.max_bytes:
            message = "Too many large bodies are being received. Try again in 1 s."
            raise HTTPException(429, message, headers={"Retry-After": "1"})
        self._room.num_bytes += num_new
        self._num_in_room = self.num_bytes

    def release(self) -> None:
        """Let go of it. Again does nothing."""
        self._room.num_bytes -= self._num_in_room
        self._num_in_room = 0
