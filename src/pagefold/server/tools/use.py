"""ToolUse: what the tools of one request come to: what the model must write, and who reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import InvalidRequestError
from pagefold.server.tools.reader import ToolCallReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.server.tools.formats import ToolFormat
    from pagefold.server.tools.schemas import Tool, WhichTool
    from pagefold.structured.params import StructuredOutputsParams

__all__ = ["ToolUse", "tool_use"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        tools: those that may be called.
        max_calls: how many calls an answer may have; None for any number.
        grammar: what the output must look like, where a call is required.
    """

    tools: Sequence[Tool]
    max_calls: int | None
    grammar: StructuredOutputsParams | None

    def reader(self) -> ToolCallReader:
        """Return who reads one output."""
        return ToolCallReader({tool.function.name for tool in self.tools}, max_calls=self.max_calls)


def tool_use(tools: Sequence[Tool], which: WhichTool, form: ToolFormat, *, is_parallel: bool) -> ToolUse:
    """Return what the tools of a request come to, which may call them.

    Raises:
        InvalidRequestError: two tools have one name, or the one that must be called is not there.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        msg = "Two tools have the same name."
        raise InvalidRequestError(msg, param="tools", remedy="Rename one of them.")
    unknown = [name for name in which.allowed or () if name not in names]
    if unknown:
        msg = f"tool_choice allows {unknown[0]}, and there is no such tool."
        raise InvalidRequestError(msg, param="tool_choice", remedy=f"There are {', '.join(names) or 'none'}.")
    callable_tools = [tool for tool in tools if which.lets(tool.function.name)]
    if not callable_tools:
        msg = f"tool_choice asks for {which.name or 'a call'}, and there is no such tool."
        raise InvalidRequestError(msg, param="tool_choice", remedy=f"There are {', '.join(names) or 'none'}.")
    may_be_many = is_parallel and which.name is None
    return ToolUse(
        callable_tools,
        None if may_be_many else 1,
        form.grammar(callable_tools, is_parallel=may_be_many) if which.mode == "required" else None,
    )
