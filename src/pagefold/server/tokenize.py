"""``POST /tokenize`` and ``/detokenize``: the model's tokens, in vLLM's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from pagefold.server.answer_schemas import Detokenized, Tokenized
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.tokenize_schemas import DetokenizeRequest, TokenizeRequest  # noqa: TC001 - FastAPI reads them

if TYPE_CHECKING:
    from pagefold.server.served import Served

__all__ = ["tokenize_routes"]


def tokenize_routes(served: Served) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post("/tokenize", responses={200: {"model": Tokenized}})
    async def tokenize(asked: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Return the tokens of a prompt, or of a chat in the model's template."""
        served.admit(asked, request)
        if asked.messages is not None:
            (token_ids,) = await served.encode_chat(asked.messages, any_length=True)
        else:
            (token_ids,) = await served.encode([asked.prompt or ""], any_length=True)
        texts = await served.token_texts(token_ids) if asked.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": served.client.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }

    @router.post("/detokenize", responses={200: {"model": Detokenized}})
    async def detokenize(asked: DetokenizeRequest, request: Request) -> dict[str, str]:
        """Return the text of tokens, special ones included."""
        served.admit(asked, request)
        return {"prompt": await served.decode(asked.tokens)}

    return router
