"""ChatForm: how /v1/chat/completions writes the pieces of a model's text, whole or in chunks."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagefold.server.logprobs import chat_logprobs, told_tokens
from pagefold.server.pieces import CallBegun, ReasoningPiece, TextPiece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagefold.engine.outputs import OutputDelta
    from pagefold.server.generation import Output
    from pagefold.server.output_reader import OutputReader
    from pagefold.server.pieces import Piece
    from pagefold.tokenizer import Tokenizer

__all__ = ["ChatForm", "ToldParts"]


@dataclass(frozen=True, slots=True)
class ToldParts:
    """What of an answer is told beside its text.

    Attributes:
        num_top: so many alternatives to each token, where logprobs are asked for.
        thinking: whether messages have fields for thinking, if only nulls.
        includes_thinking: whether the client wants to see it.
    """

    num_top: int = 0
    thinking: bool = False
    includes_thinking: bool = True


class ChatForm:
    """See :class:`~pagefold.server.answer.Form`.

    Args:
        head: what all chunks of the response, or the whole, have in common.
        parts: what is told.
        tokenizer: the model's.
        make_reader: returns who reads one output.
    """

    def __init__(
        self,
        head: dict[str, Any],
        parts: ToldParts,
        tokenizer: Tokenizer | None,
        make_reader: Callable[[], OutputReader],
    ) -> None:
        self._head = head
        self._parts = parts
        self._tokenizer = tokenizer
        self._make_reader = make_reader
        self._readers: dict[int, OutputReader] = {}  # of the choices that are being streamed

    def head(self) -> dict[str, Any]:
        """See :class:`~pagefold.server.answer.Form`."""
        return {**self._head, "object": "chat.completion"}

    def chunk_head(self) -> dict[str, Any]:
        """See :class:`~pagefold.server.answer.Form`."""
        return {**self._head, "object": "chat.completion.chunk"}

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """See :class:`~pagefold.server.answer.Form`."""
        reader = self._make_reader()
        told = _Told.of([*reader.push("".join(output.text)), *reader.end()])
        message: dict[str, Any] = {"role": "assistant", "content": told.content or (None if told.is_more else "")}
        if told.calls:
            message["tool_calls"] = [_without_index(call) for call in told.calls.values()]
        if self._parts.thinking:
            message |= _thinking(told.reasoning if self._parts.includes_thinking else "")
        message["refusal"] = None
        logprobs = chat_logprobs(output.told, self._parts.num_top, self._tokenizer)
        finish_reason = reader.finish_reason(output.finish_reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def first_chunk_choice(self, index: int) -> dict[str, Any]:
        """See :class:`~pagefold.server.answer.Form`."""
        first = {"role": "assistant", "content": ""}
        return {"index": index, "delta": first, "logprobs": None, "finish_reason": None}

    def chunk_choice(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        """See :class:`~pagefold.server.answer.Form`."""
        reader = self._readers.get(index) or self._readers.setdefault(index, self._make_reader())
        is_last = delta.finish_reason is not None
        told = _Told.of([*reader.push(delta.text), *(reader.end() if is_last else ())])
        piece: dict[str, Any] = {}
        if told.reasoning and self._parts.includes_thinking:
            piece |= _thinking(told.reasoning)
        if told.content:
            piece["content"] = told.content
        if told.calls:
            piece["tool_calls"] = list(told.calls.values())
        logprobs = chat_logprobs(told_tokens(delta), self._parts.num_top, self._tokenizer)
        if not piece and logprobs is None and not is_last:
            return None
        finish_reason = reader.finish_reason(delta.finish_reason)
        return {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": finish_reason}

    def empty_choice(self, index: int) -> dict[str, Any]:
        """See :class:`~pagefold.server.answer.Form`."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}


@dataclass(slots=True)
class _Told:
    """Pieces in OpenAI's fields.

    Attributes:
        reasoning: the text of thinking.
        content: that of the answer.
        calls: what is told of each call, by its index.
    """

    reasoning: str = ""
    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_more(self) -> bool:
        """Whether there is something that is not content."""
        return bool(self.reasoning or self.calls)

    @staticmethod
    def of(pieces: Iterable[Piece]) -> _Told:
        told = _Told()
        for piece in pieces:
            if isinstance(piece, ReasoningPiece):
                told.reasoning += piece.text
            elif isinstance(piece, TextPiece):
                told.content += piece.text
            elif isinstance(piece, CallBegun):
                told.calls[piece.index] = {
                    "index": piece.index,
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            else:
                call = told.calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return told


def _thinking(text: str) -> dict[str, str | None]:
    """Return thinking in vLLM's fields: the newer name, and the one that most clients know."""
    return {"reasoning": text or None, "reasoning_content": text or None}


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}
