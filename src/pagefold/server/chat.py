"""``POST /v1/chat/completions``: messages in the model's own template."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from pagefold.server.answer import answer
from pagefold.server.answer_schemas import STREAMED, ChatCompletion
from pagefold.server.chat_form import ChatForm, ToldParts
from pagefold.server.chat_schemas import ChatRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.generation import Generation
from pagefold.server.keys import account_of
from pagefold.server.retention import hints_of
from pagefold.server.wanted import wanted

if TYPE_CHECKING:
    from pagefold.server.diagnoses import Diagnoses
    from pagefold.server.served import Served

__all__ = ["chat_routes"]


def chat_routes(served: Served, diagnoses: Diagnoses) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post(
        "/v1/chat/completions", response_model=None, responses={200: {"model": ChatCompletion, "content": STREAMED}}
    )
    async def create_chat_completion(asked: ChatRequest, request: Request) -> Response:
        """Answer the last message of a chat."""
        served.admit(asked, request)
        want = wanted(asked.asked_tools(), asked.structured(), served)
        sampling = asked.sampling()
        chat = await served.prepare_chat(
            asked.messages,
            want.tools,
            options=asked.chat_options(),
            times=asked.times_too_long,
            receive=request.receive,
        )
        thinking = chat.thinking
        structured = thinking.before(want.structured)
        prompts = asked.fitted([chat.token_ids], sampling, served.client.max_model_len)
        caller = replace(
            served.caller_of(asked, request),
            predicted=await _predicted(asked, served, request),
            hint_pins=hints_of(asked.prompt_cache_retention, prompts[0]),
        )
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        generation = Generation(
            served.client,
            request_id=response_id,
            prompts=prompts,
            sampling=thinking.sampling(sampling, structured),
            caller=caller,
            param="messages",
            grammar=await served.compile(structured),
            keeps_token_ids=asked.return_token_ids,
            thinking=thinking,
        )
        await generation.begin(request.receive)
        tenant = account_of(request.scope).tenant
        diagnoses.note(tenant, response_id, chat.fingerprint, len(chat.token_ids))
        form = ChatForm(
            {"id": response_id, "created": int(time.time()), "model": served.name_of(asked)},
            ToldParts(asked.top_logprobs, thinking.is_known, asked.include_reasoning),
            served.client.tokenizer,
            lambda: want.reader(thinking),
        )
        return await answer(asked, form, generation, request)

    return router


async def _predicted(asked: ChatRequest, served: Served, request: Request) -> tuple[int, ...]:
    """Return the tokens that the answer is expected to hold."""
    if asked.prediction is None or not asked.prediction.text:
        return ()
    (token_ids,) = await served.encode(
        [asked.prediction.text], add_special_tokens=False, param="prediction", receive=request.receive
    )
    return tuple(token_ids)
