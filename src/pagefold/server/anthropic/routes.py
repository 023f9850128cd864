"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: chats as Anthropic's API has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagefold.request import HintPin
from pagefold.server.answer import whole_answer
from pagefold.server.answer_schemas import STREAMED, AnthropicMessage, CountedTokens
from pagefold.server.anthropic.form import MessageForm
from pagefold.server.anthropic.schemas import CountRequest, MessageRequest  # noqa: TC001 - FastAPI reads them
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.event_stream import EventStream
from pagefold.server.generation import Generation
from pagefold.server.keys import account_of
from pagefold.server.parts import PartReader
from pagefold.server.request_log import attach_generation
from pagefold.server.wanted import wanted

if TYPE_CHECKING:
    from pagefold.server.diagnoses import Diagnoses
    from pagefold.server.served import Served

__all__ = ["message_routes"]


def message_routes(served: Served, diagnoses: Diagnoses) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post("/v1/messages", response_model=None, responses={200: {"model": AnthropicMessage, "content": STREAMED}})
    async def create_message(asked: MessageRequest, request: Request) -> Response:
        """Answer the last message of a chat, in Anthropic's form."""
        served.admit(asked, request)
        lifetime = asked.cache_lifetime()
        want = wanted(asked.asked_tools(), asked.structured(), served)
        options = asked.chat_options()
        breakpoints = asked.breakpoints()
        chat = await served.prepare_chat(
            asked.chat(),
            want.tools,
            options=options,
            cuts=[each.cut for each in breakpoints],
            receive=request.receive,
        )
        hints = [
            HintPin(num_tokens, each.ttl_s)
            for num_tokens, each in zip(chat.cut_tokens, breakpoints, strict=True)
            if num_tokens
        ]
        if asked.cache_control is not None:
            hints.append(HintPin(len(chat.token_ids), asked.cache_control.ttl_s))
        tells_thinking = asked.tells_thinking(can_be_told=chat.thinking.is_known)
        structured = chat.thinking.before(want.structured)
        sampling = asked.sampling(served.client.max_model_len - len(chat.token_ids))
        account = account_of(request.scope)

        def about_cache(generation: Generation) -> dict[str, Any]:
            if asked.diagnostics is None:
                return {}
            previous_id = asked.diagnostics.previous_message_id
            if previous_id is None:
                return {"diagnostics": None}
            return {"diagnostics": diagnoses.diagnose(account.tenant, previous_id, generation).as_anthropic()}

        form = MessageForm(served.name_of(asked), asked.max_tokens, about_cache, lifetime)
        generation = Generation(
            served.client,
            request_id=form.message_id,
            prompts=[chat.token_ids],
            sampling=chat.thinking.sampling(sampling, structured),
            caller=replace(served.caller_of(asked, request), hint_pins=tuple(hints)),
            param="messages",
            grammar=await served.compile(structured),
            thinking=chat.thinking,
        )
        await generation.begin(request.receive)
        attach_generation(request.scope, generation)
        diagnoses.note(account.tenant, form.message_id, chat.fingerprint, len(chat.token_ids))
        reader = PartReader(want.reader(chat.thinking), tells_thinking=tells_thinking)
        if asked.stream:
            return EventStream(form.events(generation, reader), on_end=generation.close, is_typed=True)

        def whole() -> dict[str, Any]:
            reader.read("".join(generation.outputs[0].text))
            return form.whole(generation, reader)

        return await whole_answer(generation, request, whole)

    @router.post("/v1/messages/count_tokens", responses={200: {"model": CountedTokens}})
    async def count_tokens(asked: CountRequest, request: Request) -> dict[str, int]:
        """Count the tokens of a prompt in Anthropic's form."""
        served.admit(asked, request)
        caller = served.caller_of(asked, request)  # refuses what a message would be refused for
        served.client.check_kind(caller)
        asked.cache_lifetime()
        want = wanted(asked.asked_tools(), asked.structured(), served)
        options = asked.chat_options()
        chat = await served.prepare_chat(asked.chat(), want.tools, options=options, receive=request.receive)
        return {"input_tokens": len(chat.token_ids)}

    return router
