"""``POST /v1/responses``: OpenAI's newer form of a chat. Nothing is kept between requests."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagefold.errors import PagefoldError
from pagefold.server.answer import whole_answer
from pagefold.server.answer_schemas import STREAMED, OpenAIResponse
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.errors import error_body
from pagefold.server.generation import Generation
from pagefold.server.keys import account_of
from pagefold.server.request_log import attach_generation
from pagefold.server.responses_schemas import ResponseRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.streaming import EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pagefold.server.served import Served

__all__ = ["response_routes"]


def response_routes(served: Served) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post("/v1/responses", response_model=None, responses={200: {"model": OpenAIResponse, "content": STREAMED}})
    async def create_response(asked: ResponseRequest, request: Request) -> Response:
        """Answer a text or the last message of a chat."""
        served.admit(asked, request)
        sampling = asked.sampling()
        form = _ResponseForm(asked, served.model_name)
        generation = Generation(
            served.client,
            request_id=form.response_id,
            prompts=await served.encode_chat(asked.messages(), param="input", receive=request.receive),
            sampling=sampling,
            caller=asked.caller(account_of(request.scope)),
            param="input",
        )
        attach_generation(request.scope, generation)
        if asked.stream:
            return EventStream(_events(form, generation), on_end=generation.close, is_typed=True)
        return await whole_answer(generation, request, lambda: form.ended(generation))

    return router


class _ResponseForm:
    """How a response and its one message are written."""

    def __init__(self, asked: ResponseRequest, model_name: str) -> None:
        self.response_id = f"resp_{uuid.uuid4().hex}"
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._fields = {
            "id": self.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
            "background": False,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "user": asked.user,
        }

    def began(self) -> dict[str, Any]:
        """Return the response before its text."""
        return self._response("in_progress")

    def ended(self, generation: Generation) -> dict[str, Any]:
        """Return the response with its text and what it cost."""
        status = _status(generation)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(
            status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=details,
            output=[self.message(status, [self.part(_text(generation))])],
            usage=_usage(generation),
        )

    def failed(self, error: PagefoldError, generation: Generation) -> dict[str, Any]:
        """Return the response that did not come to its end, with what there is of its text."""
        return self._response(
            "failed",
            error={"code": "server_error", "message": error_body(error)["error"]["message"]},
            output=[self.message("incomplete", [self.part(_text(generation))])],
            usage=_usage(generation),
        )

    def message(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the one item of the output."""
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": parts}

    def part(self, text: str) -> dict[str, Any]:
        """Return the one part of the message."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def place(self) -> dict[str, Any]:
        """Return where events of the text are."""
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _response(self, status: str, **fields: object) -> dict[str, Any]:
        rest: dict[str, object] = {
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return {**self._fields, "status": status, **rest, **fields}


async def _events(form: _ResponseForm, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
    """Number the events, and end with one that says how it ended."""
    number = 0
    try:
        async for event in _steps(form, generation):
            yield {**event, "sequence_number": number}
            number += 1
    except PagefoldError as error:
        yield {"type": "response.failed", "response": form.failed(error, generation), "sequence_number": number}


async def _steps(form: _ResponseForm, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
    yield {"type": "response.created", "response": form.began()}
    yield {"type": "response.in_progress", "response": form.began()}
    yield {"type": "response.output_item.added", "output_index": 0, "item": form.message("in_progress", [])}
    place = form.place()
    yield {"type": "response.content_part.added", **place, "part": form.part("")}
    async with aclosing(generation.deltas()) as deltas:
        async for _, delta in deltas:
            if delta.text:
                yield {"type": "response.output_text.delta", **place, "delta": delta.text, "logprobs": []}
    response = form.ended(generation)
    text = _text(generation)
    yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": form.part(text)}
    yield {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]}
    yield {"type": f"response.{response['status']}", "response": response}


def _status(generation: Generation) -> str:
    return "incomplete" if generation.outputs[0].finish_reason == "length" else "completed"


def _text(generation: Generation) -> str:
    return "".join(generation.outputs[0].text)


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
