"""ResponseForm: how a response and the items of its output are written."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from pagefold.server.errors import error_body
from pagefold.server.responses.items import call_id

if TYPE_CHECKING:
    from pagefold.errors import PagefoldError
    from pagefold.server.generation import Generation
    from pagefold.server.parts import Part, PartReader
    from pagefold.server.responses.schemas import ResponseRequest

__all__ = ["ResponseForm", "content_part", "item_id", "item_of"]

_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("previous_response_id", "temperature", "top_p", "user"),
)


class ResponseForm:
    """One response, from its beginning to its end.

    Args:
        asked: what it answers.
        model_name: what clients call the model.
        is_stored: whether it will be kept.
    """

    def __init__(self, asked: ResponseRequest, model_name: str, *, is_stored: bool) -> None:
        self.response_id = f"resp_{uuid.uuid4().hex}"
        self._fields = {
            "id": self.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
            "background": False,
            "reasoning": {"effort": None, "summary": None},
            "store": is_stored,
            "text": asked.text.told(),
            "tool_choice": asked.tool_choice.told,
            "tools": [function.told() for function in asked.tools],
            "truncation": "disabled",
            **{name: getattr(asked, name) for name in _REPEATED},
            "service_tier": "default",
            **asked.told_back(),
        }

    def began(self) -> dict[str, Any]:
        """Return the response before its output."""
        return self._response("in_progress")

    def ended(
        self, generation: Generation, reader: PartReader, diagnosis: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the response with its output and what it cost; and what changed, if that is asked."""
        is_whole = generation.outputs[0].finish_reason != "length"
        status = "completed" if is_whole else "incomplete"
        return self._response(
            status,
            completed_at=int(time.time()) if is_whole else None,
            incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
            output=_output(reader, status),
            usage=_usage(generation),
            **({} if diagnosis is None else {"prompt_cache_diagnostics": diagnosis}),
        )

    def failed(self, error: PagefoldError, generation: Generation, reader: PartReader) -> dict[str, Any]:
        """Return the response that did not come to its end, with what there is of its output."""
        return self._response(
            "failed",
            error={"code": "server_error", "message": error_body(error)["error"]["message"]},
            output=_output(reader, "incomplete"),
            usage=_usage(generation),
        )

    def _response(self, status: str, **fields: object) -> dict[str, Any]:
        rest: dict[str, object] = {
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return {**self._fields, "status": status, **rest, **fields}


_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def item_id(part: Part) -> str:
    """Return the id of a part as an item."""
    return f"{_PREFIXES[part.kind]}_{part.key}"


def item_of(part: Part, status: str) -> dict[str, Any]:
    """Return a part of the output as an item: thinking, a message or a call. What is in progress is still empty."""
    if part.kind == "call":
        arguments = "" if status == "in_progress" else part.text
        about = {"call_id": call_id(part), "name": part.name, "arguments": arguments}
        return {"id": item_id(part), "type": "function_call", "status": status, **about}
    content = [] if status == "in_progress" else [content_part(part, part.text)]
    if part.kind == "reasoning":
        return {"id": item_id(part), "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": item_id(part), "type": "message", "role": "assistant", "status": status, "content": content}


def content_part(part: Part, text: str) -> dict[str, Any]:
    """Return the one piece of content of a message or of thinking."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _output(reader: PartReader, status: str) -> list[dict[str, Any]]:
    """Return all items; what was cut off is the last of them."""
    last = len(reader.parts) - 1
    return [item_of(part, status if part.index == last else "completed") for part in reader.parts]


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    written = {"cache_write_tokens": generation.prompt_use().num_written}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], **written},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": usage["total_tokens"],
    }
