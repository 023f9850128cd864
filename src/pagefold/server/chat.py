"""``POST /v1/chat/completions``: messages in the model's own template."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagefold.errors import InvalidRequestError
from pagefold.server.answer import answer
from pagefold.server.answer_schemas import STREAMED, ChatCompletion
from pagefold.server.chat_schemas import ChatRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.generation import Generation
from pagefold.server.keys import account_of
from pagefold.server.logprobs import chat_logprobs, told_tokens
from pagefold.server.structured_fields import Structured
from pagefold.server.tools.schemas import WhichTool
from pagefold.server.tools.use import tool_use

if TYPE_CHECKING:
    from pagefold.engine.outputs import OutputDelta
    from pagefold.server.generation import Output
    from pagefold.server.served import Served
    from pagefold.server.tools.use import CallTeller, ToolUse
    from pagefold.tokenizer import Tokenizer

__all__ = ["chat_routes"]


def chat_routes(served: Served) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions", response_model=None, responses={200: {"model": ChatCompletion, "content": STREAMED}}
    )
    async def create_chat_completion(asked: ChatRequest, request: Request) -> Response:
        """Answer the last message of a chat."""
        served.admit(asked, request)
        structured = asked.structured()
        use = _tool_use(asked, served)
        if use is not None:
            structured = _with_tools(structured, use)
        sampling = asked.sampling(structured)
        form = _ChatForm(served.model_name, int(time.time()), asked.top_logprobs, served.client.tokenizer, use)
        generation = Generation(
            served.client,
            request_id=form.request_id,
            prompts=await served.encode_chat(
                asked.messages, () if use is None else asked.tools, receive=request.receive
            ),
            sampling=sampling,
            caller=asked.caller(account_of(request.scope)),
            param="messages",
            grammar=await served.compile(structured),
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


class _ChatForm:
    """See :class:`~pagefold.server.answer.Form`."""

    def __init__(
        self, model_name: str, created: int, num_top: int, tokenizer: Tokenizer | None, use: ToolUse | None
    ) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._use = use
        self._tellers: dict[int, CallTeller] = {}  # of the choices that are being streamed
        self.request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._common = {"created": created, "model": model_name}

    def head(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": "chat.completion", **self._common}

    def chunk_head(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": "chat.completion.chunk", **self._common}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        text = "".join(output.text)
        told: dict[str, Any] = {"content": text}
        finish_reason: str | None = output.finish_reason
        if self._use is not None:
            teller = self._use.teller()
            told = teller.message(text)
            finish_reason = teller.finish_reason(output.finish_reason)
        message = {"role": "assistant", **told, "refusal": None}
        logprobs = chat_logprobs(output.told, self._num_top, self._tokenizer)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def first_chunk_choice(self, index: int) -> dict[str, Any]:
        first = {"role": "assistant", "content": ""}
        return {"index": index, "delta": first, "logprobs": None, "finish_reason": None}

    def chunk_choice(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        logprobs = chat_logprobs(told_tokens(delta), self._num_top, self._tokenizer)
        piece: dict[str, Any] = {"content": delta.text} if delta.text else {}
        finish_reason: str | None = delta.finish_reason
        if self._use is not None:
            teller = self._tellers.get(index) or self._tellers.setdefault(index, self._use.teller())
            piece = teller.delta(delta.text, is_last=delta.finish_reason is not None)
            finish_reason = teller.finish_reason(delta.finish_reason)
        if not piece and logprobs is None and finish_reason is None:
            return None
        return {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": finish_reason}
