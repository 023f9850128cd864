"""Answers: what both APIs do once they have a generation and know how its pieces are written."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import JSONResponse, Response

from pagefold.server.disconnect import while_connected
from pagefold.server.event_stream import EventStream
from pagefold.server.extras import Extras
from pagefold.server.request_log import attach_generation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.requests import Request

    from pagefold.engine.outputs import OutputDelta
    from pagefold.server.generation import Generation, Output
    from pagefold.server.schemas import GenerationRequest

__all__ = ["Form", "answer", "whole_answer"]


class Form(Protocol):
    """How an API writes its responses. Heads are what all chunks of a response, or the whole, have in common."""

    def head(self) -> dict[str, Any]:
        """Return the fields around the choices of a whole response."""

    def chunk_head(self) -> dict[str, Any]:
        """Return the fields around the choices of a chunk."""

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """Return one choice of a whole response."""

    def first_chunk_choice(self, index: int) -> dict[str, Any] | None:
        """Return what a stream says of a choice before its text, if anything."""

    def chunk_choice(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        """Return a choice with what was added to it; None if there is nothing to tell yet."""

    def empty_choice(self, index: int) -> dict[str, Any]:
        """Return a choice to which nothing was added that has a text."""


async def answer(asked: GenerationRequest, form: Form, generation: Generation, request: Request) -> Response:
    """Return the response of ``generation``, streamed or whole as ``asked``; closes it at the end of either."""
    attach_generation(request.scope, generation)
    extras = Extras(asked, generation)
    if asked.stream:
        chunks = _chunks(form, generation, extras, include_usage=asked.include_usage)
        return EventStream(chunks, on_end=generation.close)
    return await whole_answer(generation, request, lambda: _whole(form, generation, extras))


async def whole_answer(generation: Generation, request: Request, write: Callable[[], dict[str, Any]]) -> Response:
    """Run ``generation`` to its end, close it, and return what ``write`` makes of it.

    Raises:
        ClientGoneError: the client went away.
    """
    try:
        await while_connected(request.receive, generation.run())
    finally:
        generation.close()
    if not generation.tells_prompts:
        return JSONResponse(write())
    # It may be long: written on another thread, and by an encoder that lets others go on.
    return Response(await asyncio.to_thread(lambda: _encode(write())), media_type="application/json")


def _encode(answer: dict[str, Any]) -> bytes:
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(encoder.iterencode(answer)).encode()


def _whole(form: Form, generation: Generation, extras: Extras) -> dict[str, Any]:
    choices = [form.choice(index, output) | extras.choice(output) for index, output in enumerate(generation.choices())]
    head = {**form.head(), **extras.head(), **extras.whole()}
    return {**head, "choices": choices, "usage": generation.usage()}


async def _chunks(
    form: Form, generation: Generation, extras: Extras, *, include_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    head = form.chunk_head() | extras.head()
    no_usage = {"usage": None} if include_usage else {}  # as OpenAI: null until the last chunk
    for index in range(len(generation.outputs)):
        first = form.first_chunk_choice(index)
        if first is not None:
            beside, more = extras.chunk(index, None)
            yield {**head, "choices": [first | more], **no_usage, **beside}
    async with aclosing(generation.deltas()) as deltas:
        async for index, delta in deltas:
            choice = form.chunk_choice(index, delta)
            if choice is None and extras.tells_every_token:
                choice = form.empty_choice(index)
            if choice is not None:
                beside, more = extras.chunk(index, delta)
                yield {**head, "choices": [choice | more], **no_usage, **beside}
    if include_usage:
        yield {**head, "choices": [], "usage": generation.usage()}
