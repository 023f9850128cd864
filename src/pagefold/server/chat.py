"""``POST /v1/chat/completions``: messages in the model's own template."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagefold.server.answer import answer
from pagefold.server.generation import Generation
from pagefold.server.schemas import ChatRequest  # noqa: TC001 - FastAPI reads it

if TYPE_CHECKING:
    from pagefold.request import FinishReason
    from pagefold.server.generation import Output
    from pagefold.server.served import Served

__all__ = ["chat_routes"]


def chat_routes(served: Served) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(asked: ChatRequest, request: Request) -> Response:
        """Answer the last message of a chat."""
        served.admit(asked.model)
        sampling = asked.sampling()
        form = _ChatForm(served.model_name, int(time.time()))
        generation = Generation(
            served.client,
            request_id=form.request_id,
            prompts=await served.encode_chat(asked.messages),
            sampling=sampling,
            caller=asked.caller(),
            param="messages",
        )
        return await answer(asked, form, generation, request.receive)

    return router


class _ChatForm:
    """See :class:`~pagefold.server.answer.Form`."""

    def __init__(self, model_name: str, created: int) -> None:
        self.request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._common = {"created": created, "model": model_name}

    def head(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": "chat.completion", **self._common}

    def chunk_head(self) -> dict[str, Any]:
        return {"id": self.request_id, "object": "chat.completion.chunk", **self._common}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(output.text), "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": output.finish_reason}

    def first_chunk_choice(self, index: int) -> dict[str, Any]:
        return _chunk_choice(index, {"role": "assistant", "content": ""}, None)

    def chunk_choice(self, index: int, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        return _chunk_choice(index, {"content": text} if text else {}, finish_reason)


def _chunk_choice(index: int, delta: dict[str, str], finish_reason: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
