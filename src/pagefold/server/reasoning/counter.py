"""ReasoningCounter: how many tokens of an output are thinking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.server.reasoning.reader import ReasoningReader
    from pagefold.tokenizer import Detokenizer

__all__ = ["NOTHING_COUNTED", "ReasoningCounter", "TokenCounter"]


class TokenCounter(Protocol):
    """Counts tokens of one output.

    Attributes:
        num_tokens: so far.
    """

    @property
    def num_tokens(self) -> int:
        """How many tokens were counted so far."""

    def push(self, token_ids: Iterable[int]) -> None:
        """Take the output's next tokens."""


class ReasoningCounter:
    """Counts the tokens up to the one that completes the end mark; marks count.

    It reads tokens, not the text that is told: stop strings hold that back, and a slow client's comes in larger pieces.

    Args:
        detokenizer: for this output, and nobody else's.
        reader: tells where thinking ends in this output, and in nobody else's.
    """

    def __init__(self, detokenizer: Detokenizer, reader: ReasoningReader) -> None:
        self._detokenizer = detokenizer
        self._reader = reader
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """How many there are so far."""
        return self._num_tokens if self._reader.has_thought else 0

    def push(self, token_ids: Iterable[int]) -> None:
        """Take the output's next tokens."""
        for token_id in token_ids:
            if self._reader.has_ended:
                return
            self._num_tokens += 1
            self._reader.push(self._detokenizer.push(token_id))


class _NothingCounted:
    num_tokens = 0

    def push(self, token_ids: Iterable[int]) -> None:
        pass


NOTHING_COUNTED: TokenCounter = _NothingCounted()
