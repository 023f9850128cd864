"""Errors as Anthropic writes them, ``{"type": "error", "error": {"type", "message"}}``: made of OpenAI's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders

from pagefold.observe.logs import current_request_id
from pagefold.server.errors import error_body, error_status

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AnthropicErrors", "error_event", "is_anthropic"]

_PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIRST_ERROR = 400
_FIRST_OF_SERVER = 500


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def error_event(error: Exception) -> dict[str, Any]:
    """Return ``error`` as a stream tells it."""
    return _body(error_status(error), error_body(error)["error"]["message"])


class AnthropicErrors:
    """ASGI middleware: on Anthropic's routes it rewrites every error, whoever made it, and names the request so.

    Errors are small and come whole, so their bodies are held until they have ended.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or not is_anthropic(scope["path"]):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def rewriting(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = current_request_id.get() or ""
                if message["status"] >= _FIRST_ERROR:
                    start = message
                    return
            if start is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                content = _rewritten(start["status"], body)
                MutableHeaders(scope=start)["content-length"] = str(len(content))
                await send(start)
                await send({"type": "http.response.body", "body": content})

        await self._app(scope, receive, rewriting)


def _rewritten(status: int, body: bytes) -> bytes:
    """Return an error in Anthropic's form. What has no body has nobody to read it."""
    return json.dumps(_body(status, json.loads(body)["error"]["message"])).encode() if body else body


def _body(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < _FIRST_OF_SERVER else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": current_request_id.get(),
    }
