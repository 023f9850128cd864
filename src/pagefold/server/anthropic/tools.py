"""Tools in Anthropic's form, and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool, StrictStr

from pagefold.server.anthropic.cache_control import CacheControl  # noqa: TC001 - pydantic reads it
from pagefold.server.ignored import Body
from pagefold.server.tools.schemas import Tool, ToolFunction, WhichTool

__all__ = ["Choice", "MessageTool", "ToolUseChoice"]

_MAX_NAME = 128


def _is_custom(kind: object) -> object:
    if kind != "custom":
        msg = "this server calls nothing itself: tools are of type custom, which the client calls"
        raise ValueError(msg)
    return kind


class MessageTool(Body):
    """A tool that the model may call.

    Attributes:
        input_schema: a JSON schema of its input, which is an object.
        strict: refuse a schema that says more than can be enforced, instead of ignoring that.
        cache_control: a breakpoint of the cache behind it.
    """

    known: ClassVar[frozenset[str]] = frozenset({"eager_input_streaming"})

    type: Annotated[Literal["custom"], BeforeValidator(_is_custom)] = "custom"
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=_MAX_NAME)]
    description: StrictStr = ""
    input_schema: dict[str, Any]
    strict: StrictBool = False
    cache_control: CacheControl | None = None

    def as_tool(self) -> Tool:
        """Return the tool in the form of chats."""
        function = ToolFunction.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class Choice(NamedTuple):
    """Whether and what to call, and whether one answer may have several calls."""

    which: WhichTool
    is_parallel: bool


_SAYS = 'it must be {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": ...} or {"type": "none"}'


def _as_choice(value: object) -> Choice:
    if not isinstance(value, dict):
        raise ValueError(_SAYS)  # noqa: TRY004 - pydantic wants ValueErrors
    is_parallel = not value.get("disable_parallel_tool_use")
    kind, name = value.get("type"), value.get("name")
    if kind == "none":
        return Choice(WhichTool("none"), is_parallel)
    if kind == "auto":
        return Choice(WhichTool("auto"), is_parallel)
    if kind == "any":
        return Choice(WhichTool("required"), is_parallel)
    if kind == "tool" and isinstance(name, str):
        return Choice(WhichTool("required", name), is_parallel)
    raise ValueError(_SAYS)


ToolUseChoice: TypeAlias = Annotated[Choice, PlainValidator(_as_choice, json_schema_input_type=dict[str, Any])]
