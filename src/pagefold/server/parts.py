"""Parts: what one output consists of, in order: thinking, texts, calls of tools. Responses and messages tell it so.

An :class:`OutputReader` says what a model's text is, piece by piece; a :class:`PartReader` makes parts of the pieces,
and says when each begins, grows and ends. What it says depends on the text alone, not on how the text was cut: a stream
tells what a whole answer tells.
"""

from __future__ import annotations

import uuid
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from pagefold.server.pieces import CallBegun, ReasoningPiece, TextPiece

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from pagefold.server.generation import Generation
    from pagefold.server.output_reader import OutputReader
    from pagefold.server.pieces import Piece

__all__ = [
    "Part",
    "PartBegan",
    "PartEnded",
    "PartEvent",
    "PartGrew",
    "PartReader",
    "part_events",
]


Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Part:
    """One part of an output.

    Attributes:
        kind: ``reasoning``, ``text``, or ``call`` of a tool.
        index: counts the parts of the output, from 0.
        name: of the tool that is called.
        key: random; ids are made of it.
        pieces: of its text, or of the text of the call's arguments.
    """

    kind: Kind
    index: int
    name: str = ""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The part's text so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class PartBegan:
    """A part begins, and is still empty."""

    part: Part


@dataclass(frozen=True, slots=True)
class PartGrew:
    """A part got more text."""

    part: Part
    text: str


@dataclass(frozen=True, slots=True)
class PartEnded:
    """A part has all its text.

    Attributes:
        part: the part.
        is_last: whether the output ends with it, and may have been cut off in it.
    """

    part: Part
    is_last: bool


PartEvent: TypeAlias = PartBegan | PartGrew | PartEnded


class PartReader:
    """Makes parts of one output. An output that says nothing has one empty text.

    Args:
        reader: says what the output's text is.
        tells_thinking: whether thinking is a part, or left out.

    Attributes:
        parts: those that have begun.
    """

    def __init__(self, reader: OutputReader, *, tells_thinking: bool = True) -> None:
        self._reader = reader
        self._tells_thinking = tells_thinking
        self._open: Part | None = None
        self.parts: list[Part] = []

    @property
    def has_calls(self) -> bool:
        """Whether a tool is called."""
        return any(part.kind == "call" for part in self.parts)

    def push(self, text: str) -> list[PartEvent]:
        """Take more text; return what is certain now."""
        return [event for piece in self._reader.push(text) for event in self._take(piece)]

    def end(self) -> list[PartEvent]:
        """The output has ended: return what is left to say."""
        events = [event for piece in self._reader.end() for event in self._take(piece)]
        if not self.parts:
            events += self._begin("text")
        return [*events, *self._end_open(is_last=True)]

    def read(self, text: str) -> None:
        """Take all of an output at once."""
        self.push(text)
        self.end()

    def _take(self, piece: Piece) -> Iterator[PartEvent]:
        if isinstance(piece, CallBegun):
            yield from self._begin("call", piece.name)
            return
        kind = _kind_of(piece)
        if kind == "reasoning" and not self._tells_thinking:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(piece.text)
        yield PartGrew(self._open, piece.text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[PartEvent]:
        yield from self._end_open(is_last=False)
        self._open = Part(kind, len(self.parts), name)
        self.parts.append(self._open)
        yield PartBegan(self._open)

    def _end_open(self, *, is_last: bool) -> Iterator[PartEvent]:
        if self._open is not None:
            yield PartEnded(self._open, is_last)
            self._open = None


def _kind_of(piece: Piece) -> Kind:
    """Return of which kind the part is whose text ``piece`` is. Arguments follow the beginning of their call."""
    if isinstance(piece, ReasoningPiece):
        return "reasoning"
    return "text" if isinstance(piece, TextPiece) else "call"


async def part_events(generation: Generation, reader: PartReader) -> AsyncGenerator[list[PartEvent], None]:
    """Yield what ``reader`` says of the one output of ``generation``, as it comes; of some of it that is nothing.

    Raises:
        PagefoldError: see :meth:`~pagefold.server.generation.Generation.deltas`.
    """
    async with aclosing(generation.deltas()) as deltas:
        async for _, delta in deltas:
            yield reader.push(delta.text)
    yield reader.end()
