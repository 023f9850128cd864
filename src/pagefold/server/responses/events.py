"""Events of a streamed response, in OpenAI's forms."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pagefold.errors import PagefoldError
from pagefold.server.parts import PartBegan, PartGrew, part_events
from pagefold.server.responses.form import content_part, item_id, item_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from pagefold.server.generation import Generation
    from pagefold.server.parts import Part, PartEnded, PartEvent, PartReader
    from pagefold.server.responses.form import ResponseForm

__all__ = ["response_events"]


async def response_events(
    form: ResponseForm, generation: Generation, reader: PartReader, end: Callable[[], dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the numbered events of a response; the last says how it ended.

    Args:
        form: how it is written.
        generation: what answers.
        reader: of its output.
        end: called once at a good end; returns the whole response.
    """
    number = 0
    try:
        async with aclosing(_steps(form, generation, reader, end)) as steps:
            async for event in steps:
                yield {**event, "sequence_number": number}
                number += 1
    except PagefoldError as error:
        failed = form.failed(error, generation, reader)
        yield {"type": "response.failed", "response": failed, "sequence_number": number}


async def _steps(
    form: ResponseForm, generation: Generation, reader: PartReader, end: Callable[[], dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    yield {"type": "response.created", "response": form.began()}
    yield {"type": "response.in_progress", "response": form.began()}
    async with aclosing(part_events(generation, reader)) as steps:
        async for events in steps:
            for event in events:
                for told in _told(event, generation):
                    yield told
    response = end()
    yield {"type": f"response.{response['status']}", "response": response}


def _told(event: PartEvent, generation: Generation) -> Iterator[dict[str, Any]]:
    part = event.part
    place = {"output_index": part.index}
    if isinstance(event, PartBegan):
        yield {"type": "response.output_item.added", **place, "item": item_of(part, "in_progress")}
        if part.kind != "call":
            yield {"type": "response.content_part.added", **_in_content(part), "part": content_part(part, "")}
    elif isinstance(event, PartGrew):
        yield _grown(part, event.text)
    else:
        yield from _text_done(part)
        yield {"type": "response.output_item.done", **place, "item": item_of(part, _status(event, generation))}


def _grown(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "response.function_call_arguments.delta", **_in_item(part), "delta": text}
    if part.kind == "reasoning":
        return {"type": "response.reasoning_text.delta", **_in_content(part), "delta": text}
    return {"type": "response.output_text.delta", **_in_content(part), "delta": text, "logprobs": []}


def _text_done(part: Part) -> Iterator[dict[str, Any]]:
    text = part.text
    if part.kind == "call":
        yield {"type": "response.function_call_arguments.done", **_in_item(part), "name": part.name, "arguments": text}
        return
    if part.kind == "reasoning":
        yield {"type": "response.reasoning_text.done", **_in_content(part), "text": text}
    else:
        yield {"type": "response.output_text.done", **_in_content(part), "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **_in_content(part), "part": content_part(part, text)}


def _status(ended: PartEnded, generation: Generation) -> str:
    """Return how a part ended: what is open when the tokens are used up was cut off."""
    is_cut_off = ended.is_last and generation.outputs[0].finish_reason == "length"
    return "incomplete" if is_cut_off else "completed"


def _in_item(part: Part) -> dict[str, Any]:
    return {"item_id": item_id(part), "output_index": part.index}


def _in_content(part: Part) -> dict[str, Any]:
    return {**_in_item(part), "content_index": 0}
