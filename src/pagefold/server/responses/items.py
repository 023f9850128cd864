"""Items: what a Responses' input is made of (messages, calls, what calls brought), and the chat that they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, FailFast, Field, Tag, TypeAdapter

from pagefold.server.chat_schemas import ChatMessage, TextPart
from pagefold.server.ignored import Body
from pagefold.server.schemas import Text, whole_text
from pagefold.server.tellable import arguments_object
from pagefold.server.tools.schemas import Arguments, CalledFunction, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.server.parts import Part

__all__ = ["ITEMS", "InputMessage", "InputText", "Item", "call_id", "chat_of", "kept", "kept_output"]

_MAX_NAME = 256
_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _as_parts(value: object) -> object:
    if isinstance(value, (str, list)):
        return [{"type": "input_text", "text": value}] if isinstance(value, str) else value
    msg = "it must be a text or a list of text parts"
    raise ValueError(msg)


def _is_text(kind: object) -> object:
    if kind not in ("input_text", "output_text"):
        msg = "this server reads text (input_text), and no images, files or audio"
        raise ValueError(msg)
    return kind


class InputText(Body):
    """A piece of a message; those of an earlier answer may be sent back as they came."""

    known: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(_is_text)]
    text: Text


_Parts: TypeAlias = Annotated[
    list[InputText], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[InputText])
]


_Name: TypeAlias = Annotated[Text, Field(max_length=_MAX_NAME)]


class InputMessage(Body):
    """One message."""

    known: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts

    def kept(self) -> dict[str, Any]:
        """Return what is stored of it."""
        return {"role": self.role, "content": _kept(self.content)}


class FunctionCall(Body):
    """A call in an earlier answer.

    Attributes:
        call_id: by which what it brought is told.
        name: of the function.
        arguments: a JSON object, as text.
    """

    known: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["function_call"]
    call_id: _Name
    name: _Name
    arguments: Annotated[Arguments, AfterValidator(whole_text)]

    def kept(self) -> dict[str, Any]:
        """See :class:`InputMessage`."""
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"type": self.type, **call}


class FunctionCallOutput(Body):
    """What a call brought.

    Attributes:
        call_id: of which call.
        output: a text, or text parts.
    """

    known: ClassVar[frozenset[str]] = frozenset({"id", "status"})

    type: Literal["function_call_output"]
    call_id: _Name
    output: _Parts

    def kept(self) -> dict[str, Any]:
        """See :class:`InputMessage`."""
        return {"type": self.type, "call_id": self.call_id, "output": _kept(self.output)}


class ReasoningText(Body):
    """A piece of what a model thought."""

    type: Literal["reasoning_text"]
    text: Text


class Reasoning(Body):
    """What a model thought before an earlier answer. Templates decide what of it the model sees again.

    Attributes:
        content: what was thought; where there is none, the model is told nothing of it.
    """

    known: ClassVar[frozenset[str]] = frozenset({"id", "summary", "encrypted_content", "status"})

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], FailFast()] = []  # noqa: RUF012 - pydantic copies it

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(part.text for part in self.content)

    def kept(self) -> dict[str, Any]:
        """See :class:`InputMessage`."""
        return kept_thought(self.text)


def kept_thought(text: str) -> dict[str, Any]:
    """Return what is stored of a thought."""
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def _tag(value: Any) -> str | None:  # noqa: ANN401 - whatever the JSON was
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None and isinstance(value, dict):
        kind = "message"
    return f"<{kind}>" if kind in _KINDS else None


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    Discriminator(
        _tag,
        custom_error_type="item",
        custom_error_message=f"it must be an object whose type is one of {', '.join(_KINDS)}",
    ),
]

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
"""Reads items that were stored."""


def kept(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return what is stored of ``items``: what the model is told of them, and no more."""
    return [item.kept() for item in items]


def kept_output(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return what is stored of an output. A call that was cut off is not told again: its arguments are no object."""
    items: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "text":
            items.append({"role": "assistant", "content": [{"type": "output_text", "text": part.text}]})
        elif part.kind == "reasoning":
            items.append(kept_thought(part.text))
        elif arguments_object(part.text) is not None:
            about = {"call_id": call_id(part), "name": part.name, "arguments": part.text}
            items.append({"type": "function_call", **about})
    return items


def call_id(part: Part) -> str:
    """Return the id by which what a call brought is told."""
    return f"call_{part.key[:24]}"


def _kept(parts: Iterable[InputText]) -> list[dict[str, str]]:
    return [{"type": part.type, "text": part.text} for part in parts]


def chat_of(instructions: str | None, items: Iterable[Item]) -> list[ChatMessage]:
    """Return the chat that ``items`` are, after a system message of ``instructions``.

    A thought begins a message of the assistant's, and calls are part of the one before them, as they were when the
    model wrote them.
    """
    chat: list[ChatMessage] = []
    if instructions is not None:
        chat.append(ChatMessage.model_construct(role="system", content=_text(instructions)))
    for item in items:
        if isinstance(item, InputMessage):
            _add_message(chat, item)
        elif isinstance(item, Reasoning):
            _add_thought(chat, item.text)
        elif isinstance(item, FunctionCall):
            _add_call(chat, item)
        else:
            content = [TextPart.model_construct(type="text", text=part.text) for part in item.output]
            chat.append(ChatMessage.model_construct(role="tool", content=content, tool_call_id=item.call_id))
    return chat


def _add_message(chat: list[ChatMessage], item: InputMessage) -> None:
    content = [TextPart.model_construct(type="text", text=part.text) for part in item.content]
    last = chat[-1] if chat else None
    if item.role == "assistant" and last is not None and last.thought and not (last.content or last.tool_calls):
        chat[-1] = last.model_copy(update={"content": content})
    else:
        chat.append(ChatMessage.model_construct(role=item.role, content=content))


def _add_thought(chat: list[ChatMessage], text: str) -> None:
    if text:
        chat.append(ChatMessage.model_construct(role="assistant", content=[], reasoning_content=text))


def _add_call(chat: list[ChatMessage], item: FunctionCall) -> None:
    function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
    call = ToolCall.model_construct(id=item.call_id, function=function)
    last = chat[-1] if chat else None
    if last is not None and last.role == "assistant":
        chat[-1] = last.model_copy(update={"tool_calls": [*last.tool_calls, call]})
    else:
        chat.append(ChatMessage.model_construct(role="assistant", content=[], tool_calls=[call]))


def _text(text: str) -> list[TextPart]:
    return [TextPart.model_construct(type="text", text=text)]
