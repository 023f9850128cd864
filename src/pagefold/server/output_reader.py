"""OutputReader: from a model's text to its pieces: thinking first, then text and calls of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.server.pieces import TextPiece

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pagefold.request import FinishReason
    from pagefold.server.pieces import Piece
    from pagefold.server.reasoning.reader import ReasoningReader
    from pagefold.server.tools.reader import ToolCallReader

__all__ = ["OutputReader"]


class OutputReader:
    """Reads one output, as it comes or whole: the pieces together are the same.

    Args:
        reasoning: tells thinking from the answer.
        calls: finds calls in the answer; None where there are no tools.
    """

    def __init__(self, reasoning: ReasoningReader, calls: ToolCallReader | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        return list(self._with_calls(self._reasoning.push(text)))

    def end(self) -> list[Piece]:
        """The output has ended: return what was held back."""
        pieces = list(self._with_calls(self._reasoning.end()))
        return pieces if self._calls is None else [*pieces, *self._calls.end()]

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return why the output ended, in OpenAI's words."""
        return "tool_calls" if reason == "stop" and self._calls is not None and self._calls.num_calls else reason

    def _with_calls(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if self._calls is not None and isinstance(piece, TextPiece):
                yield from self._calls.push(piece.text)
            else:
                yield piece
