"""ToolUse: what the tools of one request come to: what the model must write, and how its text is told to the client."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.errors import InvalidRequestError
from pagefold.server.tools.reader import ArgumentsPiece, CallBegun, TextPiece, ToolCallReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagefold.request import FinishReason
    from pagefold.server.tools.formats import ToolFormat
    from pagefold.server.tools.reader import Piece
    from pagefold.server.tools.schemas import Tool, WhichTool
    from pagefold.structured.params import StructuredOutputsParams

__all__ = ["CallTeller", "ToolUse", "tool_use"]


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

    def teller(self) -> CallTeller:
        """Return who tells one output."""
        return CallTeller(self.reader())


def tool_use(tools: Sequence[Tool], which: WhichTool, form: ToolFormat, *, is_parallel: bool) -> ToolUse:
    """Return what the tools of a request come to, which may call them.

    Raises:
        InvalidRequestError: two tools have one name, or the one that must be called is not there.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        msg = "Two tools have the same name."
        raise InvalidRequestError(msg, param="tools", remedy="Rename one of them.")
    callable_tools = [tool for tool in tools if which.name in (None, tool.function.name)]
    if not callable_tools:
        msg = f"tool_choice asks for {which.name or 'a call'}, and there is no such tool."
        raise InvalidRequestError(msg, param="tool_choice", remedy=f"There are {', '.join(names) or 'none'}.")
    may_be_many = is_parallel and which.name is None
    return ToolUse(
        callable_tools,
        None if may_be_many else 1,
        form.grammar(callable_tools, is_parallel=may_be_many) if which.mode == "required" else None,
    )


class CallTeller:
    """Tells one output's text and calls in OpenAI's form, whole or piece by piece."""

    def __init__(self, reader: ToolCallReader) -> None:
        self._reader = reader

    def message(self, text: str) -> dict[str, Any]:
        """Return the message of a whole answer, but for its role."""
        told = _merged([*self._reader.push(text), *self._reader.end()])
        calls = [
            {name: value for name, value in call.items() if name != "index"} for call in told.get("tool_calls", [])
        ]
        return {"content": told.get("content"), **({"tool_calls": calls} if calls else {})}

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return what a chunk adds; empty if nothing is certain yet."""
        return _merged([*self._reader.push(text), *(self._reader.end() if is_last else ())])

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return why the output ended."""
        return "tool_calls" if reason == "stop" and self._reader.num_calls else reason


def _merged(pieces: Iterable[Piece]) -> dict[str, Any]:
    content = ""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, TextPiece):
            content += piece.text
        elif isinstance(piece, CallBegun):
            function = {"name": piece.name, "arguments": ""}
            calls[piece.index] = {
                "index": piece.index,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": function,
            }
        else:
            assert isinstance(piece, ArgumentsPiece)
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    told: dict[str, Any] = {"content": content} if content else {}
    return {**told, "tool_calls": list(calls.values())} if calls else told
