"""ToolUse: the tools of one request that may be called: how calls are written, and who reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import InvalidRequestError
from pagefold.server.tools.reader import ToolCallReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.server.tools.formats import ToolFormat
    from pagefold.server.tools.schemas import Tool, WhichTool

__all__ = ["ToolUse", "tool_use"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        tools: those that may be called.
        max_calls: how many calls an answer may have; None for any number.
        form: how the model writes them.
    """

    tools: Sequence[Tool]
    max_calls: int | None
    form: ToolFormat

    def grammar(self) -> str:
        """Return, in Lark's syntax, what an output must look like that consists of calls."""
        return self.form.grammar(self.tools, is_parallel=self.max_calls is None)

    def reader(self, *, is_all: bool) -> ToolCallReader:
        """Return who reads one output; ``is_all`` says that it consists of calls, or has none."""
        names = {tool.function.name for tool in self.tools}
        return ToolCallReader(names, max_calls=self.max_calls, is_all=is_all)


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
    return ToolUse(callable_tools, None if is_parallel and which.name is None else 1, form)
