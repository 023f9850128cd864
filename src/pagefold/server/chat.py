"""``POST /v1/chat/completions``: messages in the model's own template."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from pagefold.errors import InvalidRequestError
from pagefold.server.answer import answer
from pagefold.server.answer_schemas import STREAMED, ChatCompletion
from pagefold.server.chat_form import ChatForm, ToldParts
from pagefold.server.chat_schemas import ChatRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.generation import Generation
from pagefold.server.keys import account_of
from pagefold.server.output_reader import OutputReader
from pagefold.server.structured_fields import Structured
from pagefold.server.tools.schemas import WhichTool
from pagefold.server.tools.use import tool_use

if TYPE_CHECKING:
    from pagefold.server.served import Served
    from pagefold.server.tools.use import ToolUse

__all__ = ["chat_routes"]


def chat_routes(served: Served) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post(
        "/v1/chat/completions", response_model=None, responses={200: {"model": ChatCompletion, "content": STREAMED}}
    )
    async def create_chat_completion(asked: ChatRequest, request: Request) -> Response:
        """Answer the last message of a chat."""
        served.admit(asked, request)
        held = asked.structured()
        use = _tool_use(asked, served)
        if use is not None:
            held = _with_tools(held, use)
        sampling = asked.sampling(held)
        tools = () if use is None else asked.tools
        chat = await served.prepare_chat(
            asked.messages, tools, options=asked.chat_options(), times=asked.times_too_long, receive=request.receive
        )
        thinking = chat.thinking
        structured = None if held is None else thinking.before(held)
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        generation = Generation(
            served.client,
            request_id=response_id,
            prompts=asked.fitted([chat.token_ids], sampling, served.client.max_model_len),
            sampling=thinking.sampling(sampling, structured),
            caller=asked.caller(account_of(request.scope)),
            param="messages",
            grammar=await served.compile(structured),
            keeps_token_ids=asked.return_token_ids,
            thinking=thinking,
        )
        form = ChatForm(
            {"id": response_id, "created": int(time.time()), "model": served.model_name},
            ToldParts(asked.top_logprobs, thinking.is_known, asked.include_reasoning),
            served.client.tokenizer,
            lambda: OutputReader(thinking.reader(held), None if use is None else use.reader()),
        )
        return await answer(asked, form, generation, request)

    return router


def _tool_use(asked: ChatRequest, served: Served) -> ToolUse | None:
    which = asked.tool_choice or WhichTool("auto")
    if which.mode == "none" or (which.mode == "auto" and not asked.tools):
        return None
    return tool_use(asked.tools, which, served.tool_format(), is_parallel=asked.parallel_tool_calls)


def _with_tools(structured: Structured | None, use: ToolUse) -> Structured | None:
    """Return what the output must look like, tools included."""
    if structured is not None:
        msg = f"{structured.field} says what the answer must look like, and tools may be called instead of answering."
        remedy = f"Leave {structured.field} out, or send tool_choice: none."
        raise InvalidRequestError(msg, param=structured.field, remedy=remedy)
    return None if use.grammar is None else Structured(use.grammar, "tools")
