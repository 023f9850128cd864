"""``POST /tokenize`` and ``/detokenize``: the model's tokens, in vLLM's form."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from pagefold.server.answer_schemas import Detokenized, Tokenized
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.tokenize_schemas import DetokenizeRequest, TokenizeRequest  # noqa: TC001 - FastAPI reads them

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.server.served import Served

__all__ = ["tokenize_routes"]

_NUM_TOGETHER = 2**14
"""Tokens that are written in one piece: the interpreter is held meanwhile, for about a millisecond."""


def tokenize_routes(served: Served) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post("/tokenize", response_model=None, responses={200: {"model": Tokenized}})
    async def tokenize(asked: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a prompt, or of a chat in the model's template."""
        served.admit(asked, request)
        adds, receive = asked.add_special_tokens, request.receive
        if asked.messages is not None:
            chat = await served.prepare_chat(
                asked.messages,
                asked.tools,
                options=asked.chat_options(),
                add_special_tokens=adds or False,
                receive=receive,
            )
            token_ids = chat.token_ids
        else:
            adds = adds is None or adds
            (token_ids,) = await served.encode([asked.prompt or ""], add_special_tokens=adds, receive=receive)
        texts = await served.token_texts(token_ids, receive=receive) if asked.return_token_strs else None
        write = partial(_written, token_ids, texts, served.client.max_model_len)
        (body,) = await served.workers.run(len(token_ids), [write], receive)
        return Response(body, media_type="application/json")

    @router.post("/detokenize", responses={200: {"model": Detokenized}})
    async def detokenize(asked: DetokenizeRequest, request: Request) -> dict[str, str]:
        """Return the text of tokens, special ones included."""
        served.admit(asked, request)
        return {"prompt": await served.decode(asked.tokens, receive=request.receive)}

    return router


def _written(token_ids: list[int], texts: list[str] | None, max_model_len: int) -> bytes:
    """Return the answer as JSON. A long list is written in pieces, so that others' work comes between them."""
    head = f'{{"count":{len(token_ids)},"max_model_len":{max_model_len},"tokens":['
    tail = "null}" if texts is None else f"[{_listed(texts)}]}}"
    return f'{head}{_listed(token_ids)}],"token_strs":{tail}'.encode()


def _listed(values: Sequence[int | str]) -> str:
    pieces = (values[first : first + _NUM_TOGETHER] for first in range(0, len(values), _NUM_TOGETHER))
    return ",".join(json.dumps(piece, separators=(",", ":"))[1:-1] for piece in pieces)
