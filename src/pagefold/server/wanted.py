"""Wanted: what a request with tools and a form of the answer comes to: what the model must write, and who reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.server.output_reader import OutputReader
from pagefold.server.parts import PartReader
from pagefold.server.structured_fields import Structured
from pagefold.server.tools.use import tool_use
from pagefold.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pagefold.server.reasoning.thinking import Thinking
    from pagefold.server.served import Served
    from pagefold.server.tools.schemas import Tool, WhichTool
    from pagefold.server.tools.use import ToolUse

__all__ = ["AskedTools", "Wanted", "wanted"]

_START = "start: "


@dataclass(frozen=True, slots=True)
class AskedTools:
    """What a request says of tools.

    Attributes:
        tools: all that the model hears of.
        which: whether it must call, and what.
        is_parallel: whether one answer may have several calls.
        allowed: the names of those that may be called; None for all.
    """

    tools: Sequence[Tool]
    which: WhichTool
    is_parallel: bool
    allowed: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What becomes of them.

    Attributes:
        tools: what the model hears of.
        use: what it may call; None for nothing.
        structured: what the output must look like; None for anything.
    """

    tools: Sequence[Tool]
    use: ToolUse | None
    structured: Structured | None

    def reader(self, thinking: Thinking, *, tells_thinking: bool = True) -> PartReader:
        """Return who reads an output, which begins as ``thinking`` says; whether that is told is ``tells_thinking``."""
        calls = None if self.use is None else self.use.reader()
        return PartReader(OutputReader(thinking.reader(self.structured), calls), tells_thinking=tells_thinking)


def wanted(asked: AskedTools, structured: Structured | None, served: Served) -> Wanted:
    """Return what tools and the form of the answer come to together: calls, or an answer of that form.

    Raises:
        InvalidRequestError: two tools have one name, the one that must be called is not there, or the model takes none.
    """
    which = asked.which
    if which.mode == "none" or (which.mode == "auto" and not asked.tools):
        return Wanted((), None, structured)
    form = served.tool_format()
    callable_tools = [tool for tool in asked.tools if asked.allowed is None or tool.function.name in asked.allowed]
    use = tool_use(callable_tools, which, form, is_parallel=asked.is_parallel)
    if use.grammar is not None:
        return Wanted(asked.tools, use, Structured(use.grammar, "tools"))
    if structured is None:
        return Wanted(asked.tools, use, None)
    calls = form.grammar(callable_tools, is_parallel=asked.is_parallel)
    return Wanted(asked.tools, use, Structured(_either(calls, structured.params), structured.field))


def _either(calls: StructuredOutputsParams, answer: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return a grammar of calls, or else of an answer that is JSON."""
    assert calls.grammar is not None
    assert calls.grammar.startswith(_START)
    asked: Any = {"type": "object"} if answer.json is None else answer.json
    schema = {**asked, "x-guidance": {"whitespace_pattern": " ?", "lenient": answer.lenient}}
    rules = [
        f"{_START}calls | answer",
        f"answer: %json {json.dumps(schema, ensure_ascii=False)}",
        f"calls: {calls.grammar.removeprefix(_START)}",
    ]
    return StructuredOutputsParams(grammar="\n".join(rules))
