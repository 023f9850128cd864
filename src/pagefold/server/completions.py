"""``POST /v1/completions``: prompts as texts or token ids, each with a choice of its own."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagefold.server.answer import answer
from pagefold.server.answer_schemas import STREAMED, Completion
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.completion_schemas import CompletionRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.generation import Generation
from pagefold.server.logprobs import completion_logprobs, told_tokens
from pagefold.server.told_prompt import ToldPrompt

if TYPE_CHECKING:
    from pagefold.engine.logprobs import PromptLogprobs
    from pagefold.engine.outputs import OutputDelta
    from pagefold.request import FinishReason
    from pagefold.server.generation import Output
    from pagefold.server.logprobs import ToldToken
    from pagefold.server.served import Served
    from pagefold.tokenizer import Tokenizer

__all__ = ["completion_routes"]


def completion_routes(served: Served) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post("/v1/completions", response_model=None, responses={200: {"model": Completion, "content": STREAMED}})
    async def create_completion(asked: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        served.admit(asked, request)
        structured = asked.structured()
        sampling = asked.sampling(structured)
        tokens = await served.encode(asked.prompts, times=asked.times_too_long, receive=request.receive)
        prompts = asked.fitted(tokens, sampling, served.client.max_model_len)
        form = _CompletionForm(served.name_of(asked), int(time.time()), served.client.tokenizer)
        if asked.echo:
            form.echo(_echoed(asked, tokens, prompts, served), asked)
        generation = Generation(
            served.client,
            request_id=form.request_id,
            prompts=prompts,
            sampling=sampling,
            caller=served.caller_of(asked, request),
            param="prompt",
            grammar=await served.compile(structured),
            keeps_token_ids=asked.return_token_ids,
        )
        await generation.begin(request.receive)
        return await answer(asked, form, generation, request)

    return router


def _echoed(
    asked: CompletionRequest, tokens: list[list[int]], kept: list[list[int]], served: Served
) -> list[ToldPrompt]:
    """Return the prompts as they are echoed: as they were sent, or the text of the tokens that were kept."""
    sent = [
        prompt if isinstance(prompt, str) and len(whole) == len(rest) else None
        for prompt, whole, rest in zip(asked.prompts, tokens, kept, strict=True)
    ]
    return [ToldPrompt(rest, text, served.client.tokenizer) for rest, text in zip(kept, sent, strict=True)]


class _CompletionForm:
    """See :class:`~pagefold.server.answer.Form`.

    Args:
        model_name: what clients call the model.
        created: seconds since 1970.
        tokenizer: of the model, or None.
    """

    def __init__(self, model_name: str, created: int, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._echo = _NoEcho()
        self.request_id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.request_id, "object": "text_completion", "created": created, "model": model_name}

    def echo(self, prompts: list[ToldPrompt], asked: CompletionRequest) -> None:
        """Begin each choice with its prompt."""
        self._echo = _Echo(prompts, asked.n, asked.logprobs)

    def head(self) -> dict[str, Any]:
        return self._head

    def chunk_head(self) -> dict[str, Any]:
        return self._head

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        before, told = self._echo.begin(index, output.told, output.prompt_logprobs)
        return self._choice(index, before + "".join(output.text), told, output.finish_reason)

    def first_chunk_choice(self, index: int) -> None:  # noqa: ARG002 - the protocol's form
        return None

    def chunk_choice(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        before, told = self._echo.chunk(index, told_tokens(delta), delta.prompt_logprobs)
        # Half a character and a held-back stop string wait, unless the token's logprobs are there to tell.
        if not before + delta.text and delta.finish_reason is None and not told:
            return None
        return self._choice(index, before + delta.text, told, delta.finish_reason)

    def empty_choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, "", [], None)

    def _choice(
        self, index: int, text: str, told: list[ToldToken], finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        logprobs = completion_logprobs(told, self._tokenizer)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class _NoEcho:
    """What is put before choices: nothing."""

    def begin(self, index: int, told: list[ToldToken], of_prompt: PromptLogprobs | None) -> tuple[str, list[ToldToken]]:  # noqa: ARG002 - as _Echo
        """Return what a choice begins with, and what is told of its tokens."""
        return "", told

    def chunk(self, index: int, told: list[ToldToken], of_prompt: PromptLogprobs | None) -> tuple[str, list[ToldToken]]:
        """Return the same of a chunk: the first of each choice begins it."""
        return self.begin(index, told, of_prompt)


class _Echo(_NoEcho):
    """What is put before choices: their prompts.

    Args:
        prompts: all of them.
        num_choices: how many choices each prompt has.
        num_top: how many likely tokens are told of each token; None for no logprobs.
    """

    def __init__(self, prompts: list[ToldPrompt], num_choices: int, num_top: int | None) -> None:
        self._prompts = prompts
        self._num_choices = num_choices
        self._num_top = num_top
        self._begun: set[int] = set()
        self._known: dict[int, PromptLogprobs] = {}  # by prompt; its first choice brings them

    def begin(self, index: int, told: list[ToldToken], of_prompt: PromptLogprobs | None) -> tuple[str, list[ToldToken]]:
        prompt = self._prompts[index // self._num_choices]
        tokens = []
        if self._num_top is not None and of_prompt is not None:
            tokens = prompt.tokens(of_prompt, self._num_top)
        return prompt.text, tokens + self._behind(prompt, told)

    def chunk(self, index: int, told: list[ToldToken], of_prompt: PromptLogprobs | None) -> tuple[str, list[ToldToken]]:
        at = index // self._num_choices
        if of_prompt is not None:
            self._known[at] = of_prompt
        if index in self._begun:
            return "", self._behind(self._prompts[at], told)
        self._begun.add(index)
        return self.begin(index, told, self._known.get(at))

    @staticmethod
    def _behind(prompt: ToldPrompt, told: list[ToldToken]) -> list[ToldToken]:
        return [one._replace(text_offset=one.text_offset + len(prompt.text)) for one in told]
