"""MessageForm: how an answer is written as a message, whole and in events."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pagefold.server.anthropic.errors import error_event
from pagefold.server.parts import PartBegan, PartGrew, part_events
from pagefold.server.tellable import arguments_object

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from pagefold.server.generation import Generation
    from pagefold.server.parts import Part, PartEvent, PartReader

__all__ = ["MessageForm"]


def _nothing(_generation: Generation) -> dict[str, Any]:
    return {}


class MessageForm:
    """One message.

    Args:
        model_name: what clients call the model.
        max_tokens: how long the client lets it be.
        about_cache: further fields of the message, once its first token is known.
        lifetime: of the last breakpoint of the cache, 5m or 1h: under its count new tokens are told.
    """

    def __init__(
        self,
        model_name: str,
        max_tokens: int,
        about_cache: Callable[[Generation], dict[str, Any]] = _nothing,
        lifetime: str = "5m",
    ) -> None:
        self.message_id = f"msg_{uuid.uuid4().hex}"
        self._head = {"id": self.message_id, "type": "message", "role": "assistant", "model": model_name}
        self._max_tokens = max_tokens
        self._about_cache = about_cache
        self._lifetime = lifetime

    def whole(self, generation: Generation, reader: PartReader) -> dict[str, Any]:
        """Return the message at its end."""
        content = [_block(part, is_whole=True) for part in reader.parts]
        return {
            **self._head,
            "content": content,
            **self._stop(generation, reader),
            "usage": _usage(generation, self._lifetime),
            **self._about_cache(generation),
        }

    async def events(self, generation: Generation, reader: PartReader) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of the message; an error is the last of them."""
        try:
            async with aclosing(self._steps(generation, reader)) as steps:
                async for event in steps:
                    yield event
        except Exception as error:  # noqa: BLE001 - the status is sent already: say it in the stream
            yield error_event(error)

    async def _steps(self, generation: Generation, reader: PartReader) -> AsyncGenerator[dict[str, Any], None]:
        has_begun = False
        async with aclosing(part_events(generation, reader)) as steps:
            async for events in steps:
                if not has_begun:  # only now it is known what the cache had of the prompt
                    yield {"type": "message_start", "message": self._begun(generation)}
                    yield {"type": "ping"}
                    has_begun = True
                for event in events:
                    yield _told(event)
        yield {
            "type": "message_delta",
            "delta": self._stop(generation, reader),
            "usage": _usage(generation, self._lifetime),
        }
        yield {"type": "message_stop"}

    def _begun(self, generation: Generation) -> dict[str, Any]:
        return {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(generation, self._lifetime),
            **self._about_cache(generation),
        }

    def _stop(self, generation: Generation, reader: PartReader) -> dict[str, Any]:
        output = generation.outputs[0]
        reason = "end_turn"
        if output.finish_reason == "length":
            is_asked = output.num_tokens >= self._max_tokens
            reason = "max_tokens" if is_asked else "model_context_window_exceeded"
        elif output.stop_reason is not None:
            reason = "stop_sequence"
        elif reader.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": output.stop_reason}


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of a part to the kind of its deltas, and the field of their text."""


def _told(event: PartEvent) -> dict[str, Any]:
    part = event.part
    if isinstance(event, PartBegan):
        return {"type": "content_block_start", "index": part.index, "content_block": _block(part, is_whole=False)}
    if isinstance(event, PartGrew):
        kind, field = _DELTAS[part.kind]
        return {"type": "content_block_delta", "index": part.index, "delta": {"type": kind, field: event.text}}
    return {"type": "content_block_stop", "index": part.index}


def _block(part: Part, *, is_whole: bool) -> dict[str, Any]:
    """Return a part as a block; empty before it is whole. Arguments that were cut off are no object: none are told."""
    if part.kind == "call":
        given = (arguments_object(part.text) or {}) if is_whole else {}
        return {"type": "tool_use", "id": f"toolu_{part.key[:24]}", "name": part.name, "input": given}
    text = part.text if is_whole else ""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _usage(generation: Generation, lifetime: str) -> dict[str, Any]:
    """Return Anthropic's three kinds of input tokens, which add up to the prompt, and the tokens of the output."""
    use = generation.prompt_use()
    return {
        "input_tokens": use.num_tokens - use.num_read - use.num_written,
        "cache_creation_input_tokens": use.num_written,
        "cache_read_input_tokens": use.num_read,
        "cache_creation": {
            f"ephemeral_{ttl}_input_tokens": use.num_written if ttl == lifetime else 0 for ttl in ("5m", "1h")
        },
        "output_tokens": generation.outputs[0].num_tokens,
    }
