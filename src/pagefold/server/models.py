"""``/v1/models``: the model that is served, and its adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from pagefold.server.answer_schemas import Model, Models

if TYPE_CHECKING:
    from pagefold.server.served import Served

__all__ = ["model_routes"]


def model_routes(served: Served) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/v1/models", responses={200: {"model": Models}})
    async def list_models() -> dict[str, Any]:
        """List the model that is served, and its adapters."""
        adapters = [served.about_adapter(one) for one in served.adapters.values()]
        return {"object": "list", "data": [served.about_model(), *adapters]}

    @router.get("/v1/models/{model_id:path}", responses={200: {"model": Model}})
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """Describe the model, or an adapter."""
        return served.about(model_id)

    return router
