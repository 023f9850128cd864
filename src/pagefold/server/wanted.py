"""Wanted: what a request with tools and a form of the answer comes to: what the model must write, and who reads it.

All routes that answer chats ask here. Where the model thinks first, :class:`Thinking` has the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefold.errors import InvalidRequestError
from pagefold.server.output_reader import OutputReader
from pagefold.server.structured_fields import Structured
from pagefold.server.tools.use import tool_use
from pagefold.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.server.reasoning.thinking import Thinking
    from pagefold.server.served import Served
    from pagefold.server.tools.asked import AskedTools
    from pagefold.server.tools.schemas import Tool
    from pagefold.server.tools.use import ToolUse

__all__ = ["Wanted", "wanted"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What becomes of the tools of a request and the form of its answer.

    Attributes:
        tools: what the model hears of.
        use: what it may call; None for nothing.
        structured: what the answer must look like, calls included; None for anything.
    """

    tools: Sequence[Tool]
    use: ToolUse | None
    structured: Structured | None

    def reader(self, thinking: Thinking) -> OutputReader:
        """Return who reads one output, which begins as ``thinking`` says."""
        calls = None if self.use is None else self.use.reader(is_all=self.structured is not None)
        return OutputReader(thinking.reader(self.structured), calls)


def wanted(asked: AskedTools, structured: Structured | None, served: Served) -> Wanted:
    """Return what tools and the form of the answer come to together: calls, or an answer of that form.

    Raises:
        InvalidRequestError: two tools have one name, the one that must be called is not there, the model takes none, or
            calls cannot be told from an answer of that form.
    """
    which = asked.which
    if which.mode == "none" or (which.mode == "auto" and not asked.tools):
        return Wanted((), None, structured)
    use = tool_use(asked.tools, which, served.tool_format(), is_parallel=asked.is_parallel)
    if which.mode == "required":  # there is no answer that could be of a form
        calls = StructuredOutputsParams(grammar=use.grammar())
        return Wanted(asked.tools, use, Structured(calls, "tools", is_calls=True))
    if structured is None:
        return Wanted(asked.tools, use, None)
    if not structured.params.is_json:
        field = structured.field
        msg = f"{field} asks for another form than JSON, and tools may be called: a call might be the answer."
        remedy = f"Ask for JSON, leave {field} out, or send tool_choice: none."
        raise InvalidRequestError(msg, param=field, remedy=remedy)
    either = replace(structured.params, calls=use.grammar())
    return Wanted(asked.tools, use, structured._replace(params=either))
