"""What becomes of every HTTP request: its id, one line in the log at its end, and a count of responses."""

from __future__ import annotations

import logging
import re
import time
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders

from pagefold.observe.logs import current_request_id
from pagefold.server.keys import account_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pagefold.server.explanations import Explanations
    from pagefold.server.generation import Generation

__all__ = ["RequestLog", "attach_generation", "attached_generation"]

_log = logging.getLogger("pagefold.request")

_HEADER = "x-request-id"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_QUIET_PATHS = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/v1/dashboard"})
"""What probes and dashboards ask all day: logged with ``debug``, whatever the answer."""

_OTHER_ROUTE = "other"
_MOST_ERROR_BYTES = 2**14
_NUM_SHOWN_CHARACTERS = 200


def attach_generation(scope: Scope, generation: Generation) -> None:
    """Tell the log which generation answers a request."""
    scope.setdefault("state", {})["generation"] = generation


def attached_generation(scope: Scope) -> Generation | None:
    """Return which generation answers a request; None where none does."""
    generation: Generation | None = scope.get("state", {}).get("generation")
    return generation


def _ignore(_response_id: str) -> None:
    pass


class RequestLog:
    """ASGI middleware; the outermost, so that it sees every response.

    A client's ``X-Request-Id`` is taken if it is sane (up to 128 letters, digits and ``._:-``), else one is made. It
    comes back as a header and stands in every line of the log that is about the request. Two requests may bring the
    same: the engine does not know it.

    Args:
        app: what it watches.
        count: told of each response: its route as the app declares it, or ``other``, and its status.
        explanations: told which response went by which id, and what was refused; None where nobody asks for that.
        on_end: told which response has ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        count: Callable[[str, int], None],
        explanations: Explanations | None = None,
        on_end: Callable[[str], None] = _ignore,
    ) -> None:
        self._app = app
        self._count = count
        self._explanations = explanations
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log it when it has been answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        request_id = _request_id(scope)
        current_request_id.set(request_id)
        status: int | None = None
        error = b""

        async def watched(message: Message) -> None:
            nonlocal status, error
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._explanations is not None:
                    _name(self._explanations, scope, request_id)
                self._count(getattr(scope.get("route"), "path", _OTHER_ROUTE), message["status"])
                MutableHeaders(scope=message)[_HEADER] = request_id
            elif status is not None and status >= HTTPStatus.BAD_REQUEST and len(error) < _MOST_ERROR_BYTES:
                error += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if self._explanations is not None:
                _note(self._explanations, scope, request_id, status, error)
            _write(scope, request_id, status, time.monotonic() - began)
            generation = attached_generation(scope)
            if generation is not None:
                self._on_end(generation.request_id)


def _note(explanations: Explanations, scope: Scope, request_id: str, status: int | None, error: bytes) -> None:
    """Let a request be explained by its id: which response it got, or why none."""
    if _name(explanations, scope, request_id) or scope["method"] != "POST" or status is None:
        return
    if status >= HTTPStatus.BAD_REQUEST and status != HTTPStatus.UNAUTHORIZED:  # whose that was nobody knows
        explanations.refused(account_of(scope).tenant, request_id, status, error)


def _name(explanations: Explanations, scope: Scope, request_id: str) -> bool:
    """Note which response a request gets; whether it gets one."""
    generation = attached_generation(scope)
    if generation is not None:
        explanations.name(account_of(scope).tenant, request_id, generation.request_id)
    return generation is not None


def _request_id(scope: Scope) -> str:
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER.encode()]
    return given[0] if len(given) == 1 and _SANE.fullmatch(given[0]) else uuid.uuid4().hex


def _write(scope: Scope, request_id: str, status: int | None, e2e_s: float) -> None:
    level = logging.INFO
    if scope["path"] in _QUIET_PATHS:
        level = logging.DEBUG
    elif status in (None, HTTPStatus.INTERNAL_SERVER_ERROR):  # no refusal, but a fault
        level = logging.WARNING
    if not _log.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": request_id,
        "method": scope["method"],
        "path": scope["path"][:_NUM_SHOWN_CHARACTERS],
        "status": status,
    }
    generation = attached_generation(scope)
    if generation is not None:
        fields |= generation.summary()
    fields |= scope.get("state", {}).get("refusal", {})  # of who was not taken
    _log.log(level, "request", extra={**fields, "e2e_s": round(e2e_s, 6)})
