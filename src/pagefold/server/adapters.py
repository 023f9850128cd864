"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: the admin loads and unloads adapters, as with vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import StrictBool, StrictInt  # noqa: TC002 - pydantic reads it

from pagefold.errors import AdapterError, InvalidRequestError
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.ignored import Body, note_ignored
from pagefold.server.schemas import Text  # noqa: TC001 - pydantic reads it

if TYPE_CHECKING:
    from pagefold.server.served import Served

__all__ = ["LoadAdapterRequest", "UnloadAdapterRequest", "adapter_routes"]


class LoadAdapterRequest(Body):
    """``POST /v1/load_lora_adapter``.

    Attributes:
        lora_name: what requests will call it as their ``model``.
        lora_path: its folder, on the server.
        load_inplace: whether it takes the name of one that is loaded, which is unloaded then.
    """

    lora_name: Text | None = None
    lora_path: Text | None = None
    load_inplace: StrictBool = False


class UnloadAdapterRequest(Body):
    """``POST /v1/unload_lora_adapter``.

    Attributes:
        lora_name: of the adapter.
        lora_int_id: vLLM's number of it; accepted and ignored.
    """

    lora_name: Text | None = None
    lora_int_id: StrictInt | None = None


def adapter_routes(served: Served) -> APIRouter:
    """Return the routes. Answers are vLLM's texts."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(asked: LoadAdapterRequest, request: Request) -> PlainTextResponse:
        """Load an adapter, and let requests name it. For the admin."""
        note_ignored(asked, request)
        if not asked.lora_name or not asked.lora_path:
            msg = "Both 'lora_name' and 'lora_path' must be provided."
            param = "lora_path" if asked.lora_name else "lora_name"
            raise InvalidRequestError(msg, param=param, remedy="Name the adapter, and its folder on the server.")
        if asked.lora_name == served.model_name:
            msg = f"{asked.lora_name!r} is the name of the model."
            raise AdapterError(msg, remedy="Name the adapter otherwise.")
        await served.client.load_adapter(asked.lora_name, asked.lora_path, in_place=asked.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(asked: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
        """Unload an adapter: its name goes at once, and the answer comes when its last request has ended.

        For the admin.
        """
        note_ignored(asked, request)
        if not asked.lora_name:
            msg = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise InvalidRequestError(msg, param="lora_name", remedy="Name the adapter.")
        await served.client.unload_adapter(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    return router
