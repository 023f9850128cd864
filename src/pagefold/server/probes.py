"""The small routes: what probes, scrapers, load balancers and admins ask of a server."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pagefold import __version__
from pagefold.config import ServerConfig
from pagefold.errors import EngineStoppedError

if TYPE_CHECKING:
    from pagefold.observe.metrics import Metrics
    from pagefold.server.served import Served

__all__ = ["probe_routes"]

_TOLD = [field.name for field in fields(ServerConfig) if field.repr and field.name != "accounts"]
"""What is no key, nor holds one."""


def probe_routes(served: Served, config: ServerConfig, metrics: Metrics) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    client = served.client

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Tell whether the process is alive: 503 only after a failure that it does not survive."""
        if not client.status().is_healthy:
            msg = "The engine has failed."
            raise EngineStoppedError(msg, remedy="Restart the server.")
        return {"status": "ok"}

    @router.get("/ping")
    async def ping() -> dict[str, str]:
        """Tell the same as ``/health``, for SageMaker and as vLLM does."""
        return await health()

    @router.post("/ping")
    async def post_ping() -> dict[str, str]:
        """Tell the same."""
        return await health()

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Tell whether requests are taken now: 503 while the model loads and while the server drains."""
        client.ensure_ready()
        return {"status": "ready"}

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Tell how many requests run or wait, in vLLM's form; each sample of ``n`` counts once it runs."""
        status = client.status()
        return {"server_load": status.num_running + status.num_waiting}

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def read_metrics() -> Response:
        """Return Prometheus' text."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Tell which Pagefold this is."""
        return {"version": __version__}

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Tell how the server was started and what its engine does now, but no key. For the admin, where keys are."""
        return {
            "version": __version__,
            "model": served.about_model(),
            "server": {name: getattr(config, name) for name in _TOLD},
            "num_tenants": len({account.tenant for account in config.accounts}),
            "engine": asdict(client.status()),
        }

    return router
