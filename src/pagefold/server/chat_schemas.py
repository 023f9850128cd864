"""What clients send to ``/v1/chat/completions``: messages, and tools that the model may call."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, StrictBool, StrictInt, model_validator

from pagefold.errors import InvalidRequestError
from pagefold.request import MAX_LOGPROBS
from pagefold.server.ignored import Body
from pagefold.server.schemas import MAX_PARTS, GenerationRequest, Text, few_parts
from pagefold.server.tools.schemas import Tool, ToolCall, ToolChoice  # noqa: TC001 - pydantic reads them
from pagefold.server.unsupported import IN_CHAT

__all__ = ["ChatMessage", "ChatRequest", "TextPart"]

_MAX_TOOLS = 128


def _as_parts(value: object) -> list[object]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    msg = "it must be a text or a list of text parts"
    raise ValueError(msg)


class TextPart(Body):
    """A piece of a message; other kinds than text are not supported."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    """One message of a chat.

    Attributes:
        role: ``developer`` is OpenAI's newer name of ``system``.
        content: a text, or text parts, which are joined by newlines as vLLM does. The assistant's may be left out
            where it called tools.
        tool_calls: what the assistant called.
        tool_call_id: which of the calls a tool's message answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])
    ] = []  # noqa: RUF012 - as above
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MAX_TOOLS), FailFast()] = []  # noqa: RUF012 - as above
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _check_whole(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            msg = "only the assistant's messages may have tool_calls"
            raise ValueError(msg)
        if self.role == "tool" and self.tool_call_id is None:
            msg = "its tool_call_id is missing, which names the call that it answers"
            raise ValueError(msg)
        if not self.tool_calls and "content" not in self.model_fields_set:
            msg = "its content is missing"
            raise ValueError(msg)
        return self

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates want it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "\n".join(part.text for part in self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``. Without ``max_tokens`` an answer may be as long as fits.

    Attributes:
        messages: the chat.
        logprobs: whether each token's logprob is told.
        top_logprobs: with it, those of so many most likely tokens.
        tools: what the model may call.
        tool_choice: whether it must, and what; ``auto`` where there are tools.
        parallel_tool_calls: whether one answer may have several calls.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_CHAT

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_PARTS), FailFast(), BeforeValidator(few_parts)
    ]
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS), FailFast()] = []  # noqa: RUF012 - as above
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool = True

    def num_logprobs(self) -> int | None:
        """See :class:`GenerationRequest`.

        Raises:
            InvalidRequestError: alternatives are asked for, but not logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            msg = f"top_logprobs is {self.top_logprobs}, but logprobs is not true."
            raise InvalidRequestError(msg, param="top_logprobs", remedy="Leave it out, or send logprobs: true.")
        return self.top_logprobs if self.logprobs else None
