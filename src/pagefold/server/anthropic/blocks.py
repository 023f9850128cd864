"""Blocks: what the messages of Anthropic's API are made of, and the chat that they are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, StrictBool, Tag, model_validator

from pagefold.server.anthropic.cache_control import Breakpoint, CacheControl
from pagefold.server.chat_prompt import ChatCut
from pagefold.server.chat_schemas import ChatMessage, TextPart
from pagefold.server.ignored import Body
from pagefold.server.schemas import Text  # noqa: TC001 - pydantic reads it
from pagefold.server.tellable import tellable
from pagefold.server.tools.schemas import CalledFunction, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["MessageParam", "TextBlock", "Texts", "breakpoints_of", "chat_of"]

_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _as_blocks(value: object) -> object:
    if isinstance(value, (str, list)):
        return [{"type": "text", "text": value}] if isinstance(value, str) else value
    msg = "it must be a text or a list of blocks"
    raise ValueError(msg)


def _is_text(kind: object) -> object:
    if kind != "text":
        msg = "this server reads text here, and no images or documents"
        raise ValueError(msg)
    return kind


class TextBlock(Body):
    """A text.

    Attributes:
        cache_control: a breakpoint of the cache behind it.
    """

    known: ClassVar[frozenset[str]] = frozenset({"citations"})

    type: Annotated[Literal["text"], BeforeValidator(_is_text)]
    text: Text
    cache_control: CacheControl | None = None


Texts: TypeAlias = Annotated[
    list[TextBlock], FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class ToolUseBlock(Body):
    """A call in an earlier answer.

    Attributes:
        id: by which what it brought is told.
        name: of the tool.
        input: what it was given.
        cache_control: a breakpoint of the cache behind it.
    """

    known: ClassVar[frozenset[str]] = frozenset({"caller"})

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(tellable)]
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    """What a call brought.

    Attributes:
        tool_use_id: of which call.
        content: a text, or texts.
        is_error: taken; the model is told the content alone.
        cache_control: a breakpoint of the cache behind it.
    """

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = []  # noqa: RUF012 - pydantic copies it
    is_error: StrictBool = False
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    """What a model thought before an earlier answer. Templates decide what of it the model sees again.

    Attributes:
        thinking: its text; what was redacted has none, and is told to no model.
    """

    known: ClassVar[frozenset[str]] = frozenset({"signature", "data"})

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text = ""

    @model_validator(mode="before")
    @classmethod
    def _no_breakpoint(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict) and fields.get("cache_control") is not None:
            msg = "no cache_control may be on a block of thinking"
            raise ValueError(msg)
        return fields


def _tag(value: Any) -> str | None:  # noqa: ANN401 - whatever the JSON was
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind not in _KINDS:
        return None
    return "<thinking>" if kind == "redacted_thinking" else f"<{kind}>"


_Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")],
    Discriminator(
        _tag,
        custom_error_type="block",
        custom_error_message=(
            f"it must be a block whose type is one of {', '.join(_KINDS)}; this server reads no images or documents"
        ),
    ),
]


class MessageParam(Body):
    """One message.

    Attributes:
        role: whose it is. Messages of one role that follow each other are one.
        content: a text, or blocks.
    """

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Block])]

    @model_validator(mode="after")
    def _check_roles(self) -> MessageParam:
        for block in self.content:
            if isinstance(block, (ToolUseBlock, ThinkingBlock)) and self.role != "assistant":
                msg = f"only the assistant's messages may have {block.type} blocks"
                raise ValueError(msg)
            if isinstance(block, ToolResultBlock) and self.role != "user":
                msg = "only the user's messages may have tool_result blocks"
                raise ValueError(msg)
        return self

    def controls(self) -> Iterator[CacheControl | None]:
        """Yield what its blocks say of the cache, in order of their ends; None of those that say nothing."""
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield from (text.cache_control for text in block.content)
            if not isinstance(block, ThinkingBlock):
                yield block.cache_control


def breakpoints_of(system: Sequence[TextBlock], messages: Sequence[MessageParam]) -> Iterator[Breakpoint]:
    """Yield the breakpoints of texts and messages, in order, each with the chat before it."""
    for at, block in enumerate(system, 1):
        if block.cache_control is not None:
            yield Breakpoint(block.cache_control.ttl_s, ChatCut(chat_of(system[:at], ())))
    for at, message in enumerate(messages):
        for control, begun in _beginnings(message):
            if control is not None:
                yield Breakpoint(control.ttl_s, ChatCut(chat_of(system, [*messages[:at], begun])))


def _beginnings(message: MessageParam) -> Iterator[tuple[CacheControl | None, MessageParam]]:
    """Yield what each block of a message says of the cache, with the message up to there."""
    content = message.content
    for at, block in enumerate(content):
        if isinstance(block, ToolResultBlock):
            for end, text in enumerate(block.content, 1):
                begun = block.model_copy(update={"content": block.content[:end]})
                yield text.cache_control, message.model_copy(update={"content": [*content[:at], begun]})
        if not isinstance(block, ThinkingBlock):
            yield block.cache_control, message.model_copy(update={"content": content[: at + 1]})


def chat_of(system: Sequence[TextBlock], messages: Iterable[MessageParam]) -> list[ChatMessage]:
    """Return the chat that ``messages`` are, after a system message of the texts of ``system``."""
    chat: list[ChatMessage] = []
    if system:
        chat.append(_message("system", system))
    for message in messages:
        _add(chat, message)
    return chat


def _add(chat: list[ChatMessage], message: MessageParam) -> None:
    """Append a message: results of tools first, which are messages of their own, then texts and calls."""
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    calls = [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    for result in results:
        told = _message("tool", result.content)
        chat.append(told.model_copy(update={"tool_call_id": result.tool_use_id}))
    if results and not texts:
        return
    added = _message(message.role, texts)
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    last = chat[-1] if chat else None
    if last is not None and last.role == message.role != "system":
        chat.pop()
        added = added.model_copy(update={"content": [*last.content, *added.content]})
        calls = [*last.tool_calls, *calls]
        thoughts = [last.reasoning_content or "", *thoughts]
    more = {"tool_calls": calls, "reasoning_content": "\n".join(filter(None, thoughts))}
    chat.append(added.model_copy(update={name: value for name, value in more.items() if value}))


def _message(role: str, texts: Sequence[TextBlock]) -> ChatMessage:
    content = [TextPart.model_construct(type="text", text=block.text) for block in texts]
    return ChatMessage.model_construct(role=role, content=content)


def _call(block: ToolUseBlock) -> ToolCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = CalledFunction.model_construct(name=block.name, arguments=arguments)
    return ToolCall.model_construct(id=block.id, function=function)
