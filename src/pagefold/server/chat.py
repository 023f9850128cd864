"""``POST /v1/chat/completions``: messages in the model's own template."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagefold.server.answer import answer
from pagefold.server.answer_schemas import STREAMED, ChatCompletion
from pagefold.server.generation import Generation
from pagefold.server.logprobs import chat_logprobs, told_tokens
from pagefold.server.schemas import ChatRequest  # noqa: TC001 - FastAPI reads it

if TYPE_CHECKING:
    from pagefold.engine.outputs import OutputDelta
    from pagefold.server.generation import Output
    from pagefold.server.served import Served
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
        sampling = asked.sampling()
        form = _ChatForm(served.model_name, int(time.time()), asked.top_logprobs, served.client.tokenizer)
        generation = Generation(
            served.client,
            request_id=form.request_id,
            prompts=await served.encode_chat(asked.messages),
            sampling=sampling,
            caller=asked.caller(),
            param="messages",
        )
        return await answer(asked, form, generation, request)

    return router


class _ChatForm:
    """See :class:`~pagefold.server.answer.Form`."""

    def __init__(self, model_name: str, created: int, num_top: int, tokenizer: Tokenizer | None) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self.request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._common = {"created": created, "model": model_name}

    def head(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": "chat.completion", **self._common}

    def chunk_head(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": "chat.completion.chunk", **self._common}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(output.text), "refusal": None}
        logprobs = chat_logprobs(output.told, self._num_top, self._tokenizer)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def first_chunk_choice(self, index: int) -> dict[str, Any]:
        first = {"role": "assistant", "content": ""}
        return {"index": index, "delta": first, "logprobs": None, "finish_reason": None}

    def chunk_choice(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        logprobs = chat_logprobs(told_tokens(delta), self._num_top, self._tokenizer)
        piece = {"content": delta.text} if delta.text else {}
        return {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": delta.finish_reason}
