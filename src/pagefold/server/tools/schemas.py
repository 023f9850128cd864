"""Tools as clients send them: OpenAI's forms of tools, of the choice among them, and of calls in a chat's history."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, Field, PlainValidator, StrictBool, StrictStr

from pagefold.server.ignored import Body

__all__ = ["MAX_ALLOWED", "Arguments", "CalledFunction", "Tool", "ToolCall", "ToolChoice", "ToolFunction", "WhichTool"]

_MAX_NAME = 64
MAX_ALLOWED = 128
"""How many tools a choice may allow by name."""


class ToolFunction(Body):
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema of its arguments, which are an object; without one there are none.
        strict: refuse a schema that says more than can be enforced, instead of ignoring that.
    """

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=_MAX_NAME)]
    description: StrictStr = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: StrictBool = False

    def arguments_schema(self) -> dict[str, Any]:
        """Return the schema of its arguments."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(Body):
    """Something that the model may call: a function."""

    type: Literal["function"]
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates want it."""
        function = {"name": self.function.name, "description": self.function.description}
        return {"type": "function", "function": {**function, "parameters": self.function.arguments_schema()}}


class WhichTool(NamedTuple):
    """Whether and what to call.

    Attributes:
        mode: ``none``, ``auto`` or ``required``.
        name: with ``required``, the function that must be called; None for any.
        allowed: the functions that may be called; None for all. The model hears of the others too: so the beginning of
            the prompt stays what it was for requests that allow others.
    """

    mode: Literal["none", "auto", "required"]
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def lets(self, name: str) -> bool:
        """Return whether a function may be called."""
        return self.name in (None, name) and (self.allowed is None or name in self.allowed)


def _as_choice(value: object) -> WhichTool:
    if value == "none":
        return WhichTool("none")
    if value == "auto":
        return WhichTool("auto")
    if value == "required":
        return WhichTool("required")
    name = _name_of(value)
    if name is not None:
        return WhichTool("required", name)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _as_allowed(value.get("allowed_tools"))
    msg = 'it must be none, auto, required, {"type": "function", "function": {"name": ...}}, or allowed_tools'
    raise ValueError(msg)


def _as_allowed(value: object) -> WhichTool:
    mode, tools = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else (None, None)
    names = [_name_of(tool) for tool in tools] if isinstance(tools, list) and len(tools) <= MAX_ALLOWED else []
    allowed = tuple(name for name in names if name is not None)
    if mode not in ("auto", "required") or not names or len(allowed) < len(names):
        msg = (
            'its allowed_tools must be {"mode": "auto" or "required", "tools": [{"type": "function", "function": '
            f'{{"name": ...}}}}, ...]}}, with at most {MAX_ALLOWED} tools'
        )
        raise ValueError(msg)
    return WhichTool("auto" if mode == "auto" else "required", allowed=allowed)


def _name_of(value: object) -> str | None:
    """Return the function that a choice names, if it does."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


ToolChoice: TypeAlias = Annotated[
    WhichTool, PlainValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any])
]


def _json_object(text: str) -> str:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        msg = "arguments must be the text of a JSON object"
        raise ValueError(msg)  # noqa: TRY004 - pydantic wants ValueErrors
    return text


Arguments: TypeAlias = Annotated[StrictStr, AfterValidator(_json_object)]
"""What a call was given: a JSON object, as text."""


class CalledFunction(Body):
    """What was called, and with what.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: StrictStr
    arguments: Arguments = "{}"


class ToolCall(Body):
    """A call in a message of the assistant."""

    id: StrictStr
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates want it: with its arguments as an object."""
        arguments = json.loads(self.function.arguments or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}
