"""TraceRequests: tells where an HTTP request that was traced by others goes on: which requests of the engine it had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.observe.logs import current_request_id
from pagefold.observe.request_trace import HttpEnd
from pagefold.server.request_log import attached_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["TraceRequests"]

_HEADERS = ("traceparent", "tracestate")


class TraceRequests:
    """ASGI middleware; inside :class:`~pagefold.server.request_log.RequestLog`, which names requests.

    Args:
        app: what it watches.
        end: told of each HTTP request that has ended which of the engine's requests it had.
    """

    def __init__(self, app: ASGIApp, end: Callable[[Sequence[str], HttpEnd], None]) -> None:
        self._app = app
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and tell of it when it has been answered."""
        try:
            await self._app(scope, receive, send)
        finally:
            generation = attached_generation(scope)
            if generation is not None:
                end = HttpEnd(current_request_id.get() or "", generation.request_id, _headers(scope))
                self._end(generation.request_ids, end)


def _headers(scope: Scope) -> dict[str, str]:
    """Return those of W3C's Trace Context; of several of a name none, as it says."""
    found: dict[str, str] = {}
    for name in _HEADERS:
        values = [value for key, value in scope["headers"] if key == name.encode()]
        if len(values) == 1:
            found[name] = values[0].decode("latin-1")
    return found
