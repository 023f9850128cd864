"""The admin's way to bring a prefix's blocks to a server that runs: what they must be like, and taking them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from pagefold.server.answer_schemas import BlocksTaken, CacheLayoutTold

if TYPE_CHECKING:
    from pagefold.config import ServerConfig
    from pagefold.server.served import Served

__all__ = ["prefix_routes"]


def prefix_routes(served: Served, config: ServerConfig) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/v1/cache/layout", responses={200: {"model": CacheLayoutTold}})
    async def layout() -> dict[str, Any]:
        """Tell how the server's blocks are made, which a prefix file is compared with. For the admin."""
        intake = served.client.intake()
        return {
            "object": "cache.layout",
            **intake.layout.told(),
            "tiers": intake.tiers,
            "max_body_bytes": config.max_body_bytes,
        }

    @router.post("/v1/cache/import", responses={200: {"model": BlocksTaken}})
    async def take(request: Request) -> dict[str, Any]:
        """Put frames of blocks into the slow tiers, as pagefold warm sends them out of a prefix file. For the admin."""
        intake = served.client.intake()
        body = await request.body()
        taken = await asyncio.to_thread(intake.take, body)
        return {"object": "cache.import", "num_blocks": taken.num_blocks, "num_kept": dict(taken.num_kept)}

    return router
