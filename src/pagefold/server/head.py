"""HEAD: what GET would answer, without its body."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["HeadAsGet"]


class HeadAsGet:
    """ASGI middleware: lets the app see a GET, and leaves the body out of what it answers: uvicorn does that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}

        async def telling(message: Message) -> None:
            if "route" in as_get:  # whoever counts answers asks the request's own scope
                scope["route"] = as_get["route"]
            await send(message)

        await self._app(as_get, receive, telling)
