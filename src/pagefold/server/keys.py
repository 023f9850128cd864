"""API keys: who may ask, and for which tenant.

Keys are compared in constant time, and never shown: not in logs, errors or reprs.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from pagefold.config import Account
from pagefold.server.errors import error_response

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["OPEN_PATHS", "Keys", "account_of", "is_for_admin"]

_ADMIN_PATHS = frozenset({"/reset_prefix_cache"})
_ADMIN_PREFIX = "/v1/cache/"

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json"})
"""Without a key: what probes and scrapers ask."""

_NOBODY = Account(key="")
"""Who brings no key, or one that no key file names."""


def is_for_admin(path: str) -> bool:
    """Whether a path asks for the admin key."""
    return path in _ADMIN_PATHS or path.startswith(_ADMIN_PREFIX)


def account_of(scope: Mapping[str, Any]) -> Account:
    """Return whose request it is: what :class:`Keys` has found out, and nothing that a client can write."""
    account = scope.get("state", {}).get("account", _NOBODY)
    assert isinstance(account, Account)
    return account


class Keys:
    """ASGI middleware: 401 for who brings no key that is known.

    Args:
        app: what it guards.
        accounts: the key of any of them opens all routes but the admin's; none at all leaves them open.
        admin_key: opens every route; None closes the admin's to everybody.
    """

    def __init__(self, app: ASGIApp, *, accounts: Sequence[Account], admin_key: str | None) -> None:
        self._app = app
        self._admins = [Account(key=admin_key)] if admin_key is not None else []
        self._accounts = [*accounts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        path = scope.get("path", "")
        is_admins = is_for_admin(path)
        if scope["type"] != "http" or path in OPEN_PATHS or not (is_admins or self._accounts):
            await self._app(scope, receive, send)
        elif is_admins and not self._admins:
            message = f"{path} is for the admin, and this server has no admin key. Start it with --admin-api-key."
            await error_response(403, message)(scope, receive, send)
        else:
            account = _whose(scope, self._admins if is_admins else self._accounts + self._admins)
            if account is None:
                what = "the admin key" if is_admins else "a key that this server knows"
                await self._refuse(what, scope, receive, send)
            else:
                scope.setdefault("state", {})["account"] = account
                await self._app(scope, receive, send)

    async def _refuse(self, what: str, scope: Scope, receive: Receive, send: Send) -> None:
        how = "Send it as the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        message = f"The request does not bring {what}. {how}"
        response = error_response(401, message, headers={"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)


def _whose(scope: Scope, accounts: list[Account]) -> Account | None:
    headers = dict(scope["headers"])
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    given = [bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
    # All of them are compared, whichever matches: time must tell nothing.
    matches = [account for key in given for account in accounts if hmac.compare_digest(key, account.key.encode())]
    return matches[0] if matches else None
