"""``POST /v1/completions``: prompts as texts or token ids, each with a choice of its own."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagefold.server.answer import answer
from pagefold.server.answer_schemas import STREAMED, Completion
from pagefold.server.completion_schemas import CompletionRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.generation import Generation
from pagefold.server.keys import account_of
from pagefold.server.logprobs import completion_logprobs, told_tokens

if TYPE_CHECKING:
    from pagefold.engine.outputs import OutputDelta
    from pagefold.request import FinishReason
    from pagefold.server.generation import Output
    from pagefold.server.logprobs import ToldToken
    from pagefold.server.served import Served
    from pagefold.tokenizer import Tokenizer

__all__ = ["completion_routes"]


def completion_routes(served: Served) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses={200: {"model": Completion, "content": STREAMED}})
    async def create_completion(asked: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        served.admit(asked, request)
        structured = asked.structured()
        form = _CompletionForm(served.model_name, int(time.time()), served.client.tokenizer)
        generation = Generation(
            served.client,
            request_id=form.request_id,
            prompts=await served.encode(asked.prompts, receive=request.receive),
            sampling=asked.sampling(structured),
            caller=asked.caller(account_of(request.scope)),
            param="prompt",
            grammar=await served.compile(structured),
        )
        return await answer(asked, form, generation, request)

    return router


class _CompletionForm:
    """See :class:`~pagefold.server.answer.Form`."""

    def __init__(self, model_name: str, created: int, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.request_id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.request_id, "object": "text_completion", "created": created, "model": model_name}

    def head(self) -> dict[str, Any]:
        return self._head

    def chunk_head(self) -> dict[str, Any]:
        return self._head

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        return self._choice(index, "".join(output.text), output.told, output.finish_reason)

    def first_chunk_choice(self, index: int) -> None:  # noqa: ARG002 - the protocol's form
        return None

    def chunk_choice(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        # Half a character and a held-back stop string wait, unless the token's logprobs are there to tell.
        if not delta.text and delta.finish_reason is None and delta.logprobs is None:
            return None
        return self._choice(index, delta.text, told_tokens(delta), delta.finish_reason)

    def _choice(
        self, index: int, text: str, told: list[ToldToken], finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        logprobs = completion_logprobs(told, self._tokenizer)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
