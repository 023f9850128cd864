"""API keys: who may ask, and for which tenant.

Keys are compared in constant time, and never shown: not in logs, errors or reprs.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.config import Account
from pagefold.server.errors import error_response

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from pagefold.config import ServerConfig

__all__ = ["OPEN_PATHS", "TRAFFIC_PATHS", "Keys", "Lock", "Locks", "account_of", "account_with", "is_for_admin"]

_ADMIN_PATHS = frozenset(
    {"/reset_prefix_cache", "/server_info", "/v1/dashboard", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)
_ADMIN_PREFIX = "/v1/cache/"
_CLIENT_PATHS = frozenset({"/v1/cache/whatif"})
"""Paths behind that prefix of which everybody sees his own."""
_DASHBOARD = "/v1/dashboard"
"""It shows everybody's traffic too: where only that has a key, it is not open."""
_OPEN_WITHOUT_KEYS = frozenset({"/server_info", _DASHBOARD})

TRAFFIC_PATHS = frozenset({"/metrics", "/load"})
"""Paths that show what all tenants do together."""

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/docs", "/openapi.json", "/dashboard"})
"""Without a key: what probes ask, and pages that hold no data."""

_NOBODY = Account(key="")
"""Who brings no key, or one that no key file names."""


def is_for_admin(path: str) -> bool:
    """Whether a path asks for the admin key, where there are keys."""
    return path in _ADMIN_PATHS or (path.startswith(_ADMIN_PREFIX) and path not in _CLIENT_PATHS)


@dataclass(frozen=True, slots=True)
class Lock:
    """What a path asks for.

    Attributes:
        accounts: whose key opens it: any of these.
        what: such a key, in words.
        remedy: what whoever runs the server can do about it.
        closed: why no key opens it, if none does.
    """

    accounts: tuple[Account, ...] = ()
    what: str = ""
    remedy: str = ""
    closed: str = ""


@dataclass(frozen=True, slots=True)
class Locks:
    """The locks of paths.

    Attributes:
        admin: of the admin's routes.
        traffic: of what shows everybody's traffic; None leaves it open.
        clients: of all others that are not open to everybody; None leaves them open.
    """

    admin: Lock
    traffic: Lock | None
    clients: Lock | None

    @classmethod
    def of(cls, config: ServerConfig) -> Locks:
        """Return the locks of a server.

        Beside tenants the traffic is nobody's but the admin's, unless somebody has said whose it is.
        """
        admins = () if config.admin_api_key is None else (Account(key=config.admin_api_key),)
        accounts = (*(Account(key=key) for key in config.api_keys), *config.accounts)
        admin = Lock(admins, "the admin key")
        if not admins:
            remedy = "Start it with --admin-api-key."
            admin = Lock(closed="is for the admin, and this server has no admin key", remedy=remedy)
        clients = Lock((*accounts, *admins), "a key that this server knows") if accounts else None
        return cls(admin, _traffic_lock(config, admins), clients)

    def at(self, path: str) -> Lock | None:
        """Return what ``path`` asks for; None where it is open."""
        if path in TRAFFIC_PATHS:
            return self.traffic
        if path in _OPEN_WITHOUT_KEYS and self.clients is None and not self.admin.accounts:
            return self.admin if path == _DASHBOARD and self.traffic is not None else None
        if is_for_admin(path):
            return self.admin
        return None if path in OPEN_PATHS else self.clients


def account_of(scope: Mapping[str, Any]) -> Account:
    """Return whose request it is: what :class:`Keys` has found out, and nothing that a client can write."""
    account = scope.get("state", {}).get("account", _NOBODY)
    assert isinstance(account, Account)
    return account


def _traffic_lock(config: ServerConfig, admins: tuple[Account, ...]) -> Lock | None:
    if config.metrics_key is not None:
        return Lock((Account(key=config.metrics_key), *admins), "the metrics key")
    if not config.accounts or config.open_metrics:
        return None
    remedy = "Start the server with --metrics-key, or with --open-metrics to show it to everybody."
    if admins:
        return Lock(admins, "the admin key, and there is no metrics key", remedy)
    return Lock(closed="shows what all tenants do, and this server has no metrics key", remedy=remedy)


class Keys:
    """ASGI middleware: 401 for who brings no key that is known, 403 where no key opens."""

    def __init__(self, app: ASGIApp, locks: Locks) -> None:
        self._app = app
        self._locks = locks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        path = scope.get("path", "")
        lock = self._locks.at(path) if scope["type"] == "http" else None
        if lock is None:
            await self._app(scope, receive, send)
        elif lock.closed:
            code = "no_metrics_key" if path in TRAFFIC_PATHS else "no_admin_key"
            await error_response(403, f"{path} {lock.closed}. {lock.remedy}", code=code)(scope, receive, send)
        else:
            account = account_with(dict(scope["headers"]), lock.accounts)
            if account is None:
                await self._refuse(lock, scope, receive, send)
            else:
                scope.setdefault("state", {})["account"] = account
                await self._app(scope, receive, send)

    async def _refuse(self, lock: Lock, scope: Scope, receive: Receive, send: Send) -> None:
        how = "Send it as the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        message = f"The request does not bring {lock.what}. {how}"
        message += f" {lock.remedy}" if lock.remedy else ""
        response = error_response(401, message, headers={"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)


def account_with(headers: Mapping[bytes, bytes], accounts: Sequence[Account]) -> Account | None:
    """Return the account whose key headers bring; None if they bring none of those. Names are in lower case."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    given = [bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
    # All of them are compared, whichever matches: time must tell nothing.
    matches = [account for key in given for account in accounts if hmac.compare_digest(key, account.key.encode())]
    return matches[0] if matches else None
