"""Tools as clients send them: OpenAI's forms of tools, of the choice among them, and of calls in a chat's history."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, Field, PlainValidator, StrictBool, StrictStr

from pagefold.server.ignored import Body

__all__ = ["Arguments", "CalledFunction", "Tool", "ToolCall", "ToolChoice", "ToolFunction", "WhichTool"]

_MAX_NAME = 64


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
        """Return it as chat templates want it."""
        function = {"name": self.function.name, "description": self.function.description}
        return {"type": "function", "function": {**function, "parameters": self.function.arguments_schema()}}


class WhichTool(NamedTuple):
    """Whether and what to call.

    Attributes:
        mode: ``none``, ``auto`` or ``required``.
        name: with ``required``, the function that must be called; None for any.
    """

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def _as_choice(value: object) -> WhichTool:
    if value == "none":
        return WhichTool("none")
    if value == "auto":
        return WhichTool("auto")
    if value == "required":
        return WhichTool("required")
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return WhichTool("required", name)
    msg = 'it must be none, auto, required, or {"type": "function", "function": {"name": ...}}'
    raise ValueError(msg)


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
