"""``/v1/explain``: why tokens of a request were computed, and what it waited for; or would be, if it were sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from pagefold.errors import InvalidRequestError
from pagefold.server.answer_schemas import AdviceList, Explanation, ExplanationList, Foretold
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.context_length import check_prompt
from pagefold.server.explain_schemas import ExplainRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.explanations import Reader
from pagefold.server.keys import account_of

if TYPE_CHECKING:
    from pagefold.config import ServerConfig
    from pagefold.server.advices import Advices
    from pagefold.server.explanations import Explanations
    from pagefold.server.served import Served

__all__ = ["explain_routes", "reader_of"]

_MOST = 100


def reader_of(request: Request, config: ServerConfig) -> Reader:
    """Return who asks: the admin, where there is a key of his and it was brought, or somebody of a tenant."""
    account = account_of(request.scope)
    is_admin = config.admin_api_key is not None and account.key == config.admin_api_key
    return Reader(account.tenant, is_admin=is_admin, sees_traffic=is_admin or not config.accounts)


def explain_routes(served: Served, explanations: Explanations, advices: Advices, config: ServerConfig) -> APIRouter:
    """Return the routes."""

    async def ensure_on() -> None:
        explanations.ensure_on()

    router = APIRouter(route_class=CheckedRoute, dependencies=[Depends(ensure_on)])

    @router.post("/v1/explain", responses={200: {"model": Foretold}})
    async def foretell(asked: ExplainRequest, request: Request) -> dict[str, Any]:
        """Tell what a request would find in the cache if it were sent now, and why not more. Nothing is done for it."""
        served.admit(asked, request)
        caller = served.caller_of(asked, request)
        served.client.check_kind(caller)
        if asked.messages is not None:
            chat = await served.prepare_chat(
                asked.messages, asked.tools, options=asked.chat_options(), receive=request.receive
            )
            token_ids = chat.token_ids
        elif isinstance(asked.prompt, list):
            token_ids = asked.prompt
        else:
            (token_ids,) = await served.encode([asked.prompt or ""], receive=request.receive)
        check_prompt(len(token_ids), 1, served.client.context, "prompt" if asked.messages is None else "messages")
        return explanations.foretell(token_ids, await served.client.foresee(token_ids, caller))

    @router.get("/v1/explain", responses={200: {"model": ExplanationList}})
    async def explain_some(
        request: Request,
        last: Annotated[int | None, Query(ge=1, le=_MOST)] = None,
        worst: Annotated[int | None, Query(ge=1, le=_MOST)] = None,
    ) -> dict[str, Any]:
        """Explain the last requests, or those that computed most tokens which need not have been."""
        reader = reader_of(request, config)
        if last is not None and worst is not None:
            msg = "last and worst are two questions."
            raise InvalidRequestError(msg, param="worst", remedy="Ask one of them.")
        if worst is not None:
            return explanations.worst(worst, reader)
        return explanations.last(last or 1, reader)

    @router.get("/v1/advice", responses={200: {"model": AdviceList}})
    async def advise(request: Request) -> dict[str, Any]:
        """Tell what costs most of the prompts of the last hour, and what would help."""
        return await asyncio.to_thread(advices.advise, reader_of(request, config))

    @router.get("/v1/explain/{request_id}", responses={200: {"model": Explanation}})
    async def explain(request_id: str, request: Request) -> dict[str, Any]:
        """Explain a request: why tokens of its prompt were computed, what it waited for, and who took its memory."""
        return explanations.explain(request_id, reader_of(request, config))

    return router
