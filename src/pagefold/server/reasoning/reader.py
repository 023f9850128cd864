"""ReasoningReader: tells a model's thinking from its answer as the text comes.

What it returns depends on the text alone, not on how it was cut into pieces: so a stream says what a whole answer says.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from pagefold.server.pieces import ReasoningPiece, TextPiece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.server.reasoning.formats import ReasoningFormat

__all__ = ["Beginning", "ReasoningReader"]


class Beginning(Enum):
    """How an output begins."""

    THINKING = auto()
    """Within thinking; a start mark may come all the same, and means nothing."""
    MARKED = auto()
    """With thinking if a start mark comes first, else with the answer."""
    ANSWER = auto()
    """With the answer: marks in it are text."""


class ReasoningReader:
    """Reads one output. White space around marks belongs to nobody.

    Args:
        form: the marks.
        beginning: how the output begins.
        keeps_space: white space behind the end mark belongs to the answer all the same.

    Attributes:
        has_thought: whether there is thinking, if only its start mark so far.
        has_ended: whether all that follows is the answer.
    """

    def __init__(self, form: ReasoningFormat, beginning: Beginning, *, keeps_space: bool = False) -> None:
        self._form = form
        self._keeps_space = keeps_space
        self._is_open = beginning is Beginning.THINKING
        self._is_first = True  # nothing but white space has come in this part
        self._held = ""  # what is not certain yet
        self.has_thought = self._is_open
        self.has_ended = beginning is Beginning.ANSWER
        self._read: Callable[[bool], Iterator[ReasoningPiece | TextPiece]] = (
            self._in_answer if self.has_ended else self._at_beginning
        )

    def push(self, text: str) -> list[ReasoningPiece | TextPiece]:
        """Take more text; return what is certain now."""
        self._held += text
        return list(self._pieces(is_last=False))

    def end(self) -> list[ReasoningPiece | TextPiece]:
        """The output has ended: return what was held back."""
        return list(self._pieces(is_last=True))

    def _pieces(self, *, is_last: bool) -> Iterator[ReasoningPiece | TextPiece]:
        while self._held:
            num_held, read = len(self._held), self._read
            yield from read(is_last)
            if len(self._held) == num_held and self._read == read:
                return

    def _at_beginning(self, is_last: bool) -> Iterator[ReasoningPiece | TextPiece]:  # noqa: FBT001 - one of four alike
        text = self._held.lstrip()
        mark = next((mark for mark in self._form.starts if text.startswith(mark)), None)
        if mark is not None:
            self._held = text[len(mark) :]
        elif not is_last and any(mark.startswith(text) for mark in self._form.starts):
            return
        if mark is not None or self._is_open:
            self.has_thought = True
            self._read = self._in_thinking
        else:
            self.has_ended = True
            self._read = self._in_answer
        yield from ()

    def _in_thinking(self, is_last: bool) -> Iterator[ReasoningPiece | TextPiece]:  # noqa: FBT001 - as above
        if self._is_first:
            self._held = self._held.lstrip()
            self._is_first = not self._held
        found = [(at, mark) for mark in self._form.ends if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text, self._held = self._held[:at].rstrip(), self._held[at + len(mark) :]
            self.has_ended = True
            self._read = self._in_answer if self._keeps_space else self._behind_mark
        else:
            num_marks = 0 if is_last else _begun(self._held, self._form.ends)
            text = self._held[: len(self._held) - num_marks].rstrip()
            self._held = "" if is_last else self._held[len(text) :]
        if text:
            yield ReasoningPiece(text)

    def _behind_mark(self, _is_last: bool) -> Iterator[ReasoningPiece | TextPiece]:  # noqa: FBT001 - as above
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._in_answer
        yield from ()

    def _in_answer(self, _is_last: bool) -> Iterator[ReasoningPiece | TextPiece]:  # noqa: FBT001 - as above
        text, self._held = self._held, ""
        yield TextPiece(text)


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of ``text`` could be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
