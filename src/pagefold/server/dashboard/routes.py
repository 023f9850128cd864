"""``/dashboard``, the page for everybody, and ``/v1/dashboard``, its data for the admin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response

from pagefold.server.dashboard.page import dashboard_page
from pagefold.server.dashboard.schemas import Dashboard
from pagefold.server.dashboard.told import told
from pagefold.server.keys import Locks

if TYPE_CHECKING:
    from pagefold.config import ServerConfig
    from pagefold.observe.overview import Overview

__all__ = ["dashboard_routes"]

_MORE = {"whatif": "/v1/cache/whatif", "advice": "/v1/advice"}
"""What a dashboard asks for beside, by panel."""


def dashboard_routes(model_name: str, config: ServerConfig, overview: Overview) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    locks = Locks.of(config)

    @router.get("/dashboard", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def page() -> Response:
        """Return the dashboard's page. It holds no data, and asks for a key where one is needed."""
        found = dashboard_page()
        return Response(found.html, media_type="text/html; charset=utf-8", headers=found.headers)

    @router.get("/v1/dashboard", responses={200: {"model": Dashboard}})
    async def data() -> dict[str, Any]:
        """Tell what the last ten minutes did to the cache: what the dashboard draws, and ``pagefold top``."""
        seen = overview.see()
        assert seen is not None, "the app has it watch the engine"
        has_more = overview.explains and bool(seen.requests)
        more = _more(locks) if has_more else dict.fromkeys(_MORE)
        return told(seen, model_name) | {"explains": overview.explains, "more": more}

    return router


def _more(locks: Locks) -> dict[str, str | None]:
    """Return where else to ask; None for what this server tells nobody."""
    return {panel: path if _opens(locks, path) else None for panel, path in _MORE.items()}


def _opens(locks: Locks, path: str) -> bool:
    lock = locks.at(path)
    return lock is None or not lock.closed
