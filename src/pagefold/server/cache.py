"""The admin's view of the prefix cache: warm it, see and take away pins, and forget it all."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException, Request, Response
from starlette.responses import JSONResponse

from pagefold.server.answer_schemas import Pins, Quotas, Unpinned, Warmed
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.disconnect import while_connected
from pagefold.server.warm_schemas import WarmRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.warming import described

if TYPE_CHECKING:
    from pagefold.server.warming import Warmer

__all__ = ["cache_routes"]


def cache_routes(warmer: Warmer) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=CheckedRoute)
    served = warmer.served

    @router.post("/v1/cache/warm", response_model=None, responses={200: {"model": Warmed}})
    async def warm(asked: WarmRequest, request: Request) -> Response:
        """Cache a prompt before anybody sends it, and pin it if wanted."""
        served.admit(asked, request)
        return JSONResponse(await while_connected(request.receive, warmer.warm(asked)))

    @router.get("/v1/cache/pins", responses={200: {"model": Pins}})
    async def list_pins() -> dict[str, Any]:
        """List what is pinned, and the last pins that went, with the cause."""
        report = await served.client.pins()
        dropped = [
            {"id": gone.pin_id, **{k: v for k, v in asdict(gone).items() if k != "pin_id"}} for gone in report.dropped
        ]
        return {
            "object": "list",
            "data": [described(pin) for pin in report.pins],
            "dropped": dropped,
            "num_blocks": report.num_blocks,
            "max_blocks": report.max_blocks,
        }

    @router.get("/v1/cache/quotas", responses={200: {"model": Quotas}})
    async def list_quotas() -> dict[str, Any]:
        """List what tenants with a quota have of the device's blocks. For the admin."""
        told = [{"object": "cache.quota", **asdict(quota)} for quota in await served.client.quotas()]
        return {"object": "list", "data": told}

    @router.delete("/v1/cache/pins/{pin_id}", responses={200: {"model": Unpinned}})
    async def unpin(pin_id: str) -> dict[str, Any]:
        """Take a pin away; what it kept stays cached until its memory is needed."""
        if not await served.client.unpin(pin_id):
            raise HTTPException(404)
        return {"id": pin_id, "object": "cache.pin", "deleted": True}

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, int]:
        """Forget every cached prefix; running requests go on. For the admin."""
        return {"num_blocks_freed": await served.client.reset_prefix_cache()}

    return router
