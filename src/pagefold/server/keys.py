"""API keys: who may ask. Keys are compared in constant time, and never shown: not in logs, errors or reprs."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from pagefold.server.errors import error_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["ADMIN_PATHS", "OPEN_PATHS", "Keys"]

ADMIN_PATHS = frozenset({"/reset_prefix_cache"})
"""Only with the admin key."""

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"})
"""Without a key: what probes and scrapers ask."""


class Keys:
    """ASGI middleware: 401 for who brings no key that is known.

    Args:
        app: what it guards.
        api_keys: any of them opens all routes but the admin's; none at all leaves them open.
        admin_key: opens every route; None closes the admin's to everybody.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._app = app
        self._admin_keys = [admin_key.encode()] if admin_key is not None else []
        self._api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        path = scope.get("path", "")
        if scope["type"] != "http" or path in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif path in ADMIN_PATHS and not self._admin_keys:
            message = f"{path} is for the admin, and this server has no admin key. Start it with --admin-api-key."
            await error_response(403, message)(scope, receive, send)
        elif path in ADMIN_PATHS and not _is_known(scope, self._admin_keys):
            await self._refuse("the admin key", scope, receive, send)
        elif self._api_keys and not _is_known(scope, self._api_keys + self._admin_keys):
            await self._refuse("a key that this server knows", scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _refuse(self, what: str, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"The request does not bring {what}. Send it as the header 'Authorization: Bearer KEY'."
        response = error_response(401, message, headers={"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)


def _is_known(scope: Scope, known: list[bytes]) -> bool:
    given = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, key = given.partition(b" ")
    matches = [hmac.compare_digest(key.strip(), one) for one in known]  # all of them: time must tell nothing
    return scheme.lower() == b"bearer" and any(matches)
