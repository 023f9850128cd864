"""Functions: tools in the form of Responses, flat where those of chats are nested, and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from pagefold.server.schemas import Text  # noqa: TC001 - pydantic reads it
from pagefold.server.tellable import is_tellable, tellable
from pagefold.server.tools.schemas import MAX_ALLOWED, Tool, ToolFunction, WhichTool

__all__ = ["Choice", "Function", "FunctionChoice"]


class Function(ToolFunction):
    """A function that the model may call."""

    type: Literal["function"]
    description: Text = ""
    parameters: Annotated[dict[str, Any], AfterValidator(tellable)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict) and fields.get("type") != "function":
            msg = "this server calls nothing itself: tools are of type function, which the client calls"
            raise ValueError(msg)
        return fields

    def as_tool(self) -> Tool:
        """Return the function in the form of chats."""
        return Tool.model_construct(type="function", function=self)

    def told(self) -> dict[str, Any]:
        """Return the function as responses repeat it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description or None,
            "parameters": self.arguments_schema(),
            "strict": self.strict,
        }


class Choice(NamedTuple):
    """The functions that may be called, or must.

    Attributes:
        which: whether, and what.
        told: the same as the client said it.
    """

    which: WhichTool
    told: str | dict[str, Any]


_SAYS = (
    'it must be none, auto, required, {"type": "function", "name": ...}, or {"type": "allowed_tools", "mode": ..., '
    '"tools": [{"type": "function", "name": ...}]}'
)


def _as_choice(value: object) -> Choice:
    if value == "none":
        return Choice(WhichTool("none"), "none")
    if value == "auto":
        return Choice(WhichTool("auto"), "auto")
    if value == "required":
        return Choice(WhichTool("required"), "required")
    kind = value.get("type") if isinstance(value, dict) else None
    if (
        kind == "function"
        and isinstance(value, dict)
        and is_tellable(name := value.get("name"))
        and isinstance(name, str)
    ):
        return Choice(WhichTool("required", name), {"type": "function", "name": name})
    if kind == "allowed_tools" and isinstance(value, dict):
        return _as_allowed(value)
    raise ValueError(_SAYS)


def _as_allowed(value: dict[str, Any]) -> Choice:
    mode, tools = value.get("mode", "auto"), value.get("tools")
    names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not 0 < len(names) <= MAX_ALLOWED:
        raise ValueError(_SAYS)
    told = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    return Choice(WhichTool(mode, allowed=tuple(names)), told)


def _name_of(tool: object) -> str:
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str) or not is_tellable(name):
        raise ValueError(_SAYS)
    return name


FunctionChoice: TypeAlias = Annotated[
    Choice, PlainValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any])
]
