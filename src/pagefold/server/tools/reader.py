"""ToolCallReader: finds calls of tools in a model's text as it comes.

What it returns depends on the text alone, not on how it was cut into pieces: so a stream says what a whole answer says.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pagefold.server.pieces import ArgumentsPiece, CallBegun, TextPiece
from pagefold.server.tools.formats import CLOSING, OPENING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from pagefold.server.pieces import Piece

__all__ = ["ToolCallReader"]

_HEAD = re.compile(r'[\s\[,}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAYBE_OPENING = re.compile(r"\s*(?:" + "|".join(re.escape(OPENING[:n]) for n in range(len(OPENING), 0, -1)) + r")?\Z")


class ToolCallReader:
    """Reads one output.

    A call is taken for one as soon as the name of a known function and the beginning of its arguments are there; its
    arguments then come as they are written. What stands between the marks and is no call is text.

    Args:
        names: the functions that there are.
        max_calls: calls beyond are left out.
        is_all: the output consists of calls, or has none: marks further on are text, such as a text in JSON.
    """

    def __init__(self, names: Collection[str], *, max_calls: int | None = None, is_all: bool = False) -> None:
        self._names = names
        self._max_calls = max_calls
        self._num_calls = 0
        self._held = ""  # what is not certain yet
        self._read: Callable[[bool], Iterator[Piece]] = self._at_beginning if is_all else self._in_text
        self._space = ""  # before the opening mark
        self._after_call = False  # spaces around calls belong to nobody
        self._has_call = False  # since the opening mark
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    @property
    def num_calls(self) -> int:
        """How many calls there are so far."""
        return self._num_calls if self._max_calls is None else min(self._num_calls, self._max_calls)

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain now."""
        self._held += text
        return list(self._pieces(is_last=False))

    def end(self) -> list[Piece]:
        """The output has ended: return what was held back."""
        return list(self._pieces(is_last=True))

    def _pieces(self, *, is_last: bool) -> Iterator[Piece]:
        while self._held:
            num_held, read = len(self._held), self._read
            yield from read(is_last)
            if len(self._held) == num_held and self._read == read:
                return

    def _at_beginning(self, is_last: bool) -> Iterator[Piece]:  # noqa: FBT001 - one of five alike
        text = self._held.lstrip()
        if text.startswith(OPENING):
            self._read = self._in_text
        elif is_last or not OPENING.startswith(text):
            self._read = self._in_plain_text
        yield from ()

    def _in_plain_text(self, _is_last: bool) -> Iterator[Piece]:  # noqa: FBT001 - as above
        text, self._held = self._held, ""
        yield TextPiece(text)

    def _in_text(self, is_last: bool) -> Iterator[Piece]:  # noqa: FBT001 - as above
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        text, opening, rest = self._held.partition(OPENING)
        if opening:
            whole, text, self._held = text, text.rstrip(), rest
            self._space = whole[len(text) :]
            self._read, self._has_call = self._in_marks, False
        elif is_last:
            self._held = ""
        else:
            maybe = _MAYBE_OPENING.search(text)
            assert maybe is not None, "it matches nothing at the end of any text"
            text, self._held = text[: maybe.start()], text[maybe.start() :]
        if text:
            yield TextPiece(text)

    def _in_marks(self, is_last: bool) -> Iterator[Piece]:  # noqa: FBT001 - as above
        """Between the marks, before a call or after one."""
        head = _HEAD.match(self._held)
        name = "" if head is None else _unquoted(head[1])
        if head is not None and name in self._names:
            self._held = self._held[head.end() :]
            self._read, self._has_call = self._in_arguments, True
            yield from self._begin(name)
            return
        body, closing, rest = self._held.partition(CLOSING)
        if not (closing or is_last):
            return
        self._held = rest
        self._read, self._after_call = self._in_text, True
        if self._has_call:
            return
        calls = _calls_in(body, self._names) if closing else None
        if calls is None:
            self._after_call = False
            yield TextPiece(self._space + OPENING + body + closing)
            return
        for called, arguments in calls:
            yield from self._begin(called)
            yield from self._arguments(arguments)

    def _in_arguments(self, _is_last: bool) -> Iterator[Piece]:  # noqa: FBT001 - as above
        end = self._end_of_object(self._held)
        text, self._held = self._held[:end], self._held[end:]
        if not self._depth:
            self._read = self._in_marks
        yield from self._arguments(text)

    def _end_of_object(self, text: str) -> int:
        """Go on through a JSON object; return how much of ``text`` belongs to it."""
        for at, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = letter == "\\"
                self._is_in_string = letter != '"'
            elif letter == '"':
                self._is_in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return len(text)

    def _begin(self, name: str) -> Iterator[Piece]:
        self._num_calls += 1
        if self._num_calls == self.num_calls:
            yield CallBegun(self._num_calls - 1, name)

    def _arguments(self, text: str) -> Iterator[Piece]:
        if self._num_calls == self.num_calls:
            yield ArgumentsPiece(self._num_calls - 1, text)


def _unquoted(text: str) -> str:
    """Return what a JSON string says; nothing if it is none."""
    try:
        return str(json.loads(text))
    except ValueError:  # an escape that JSON does not have
        return ""


def _calls_in(body: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Return name and arguments of the calls that JSON lists, in whatever order it has them; None if it does not."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    calls = []
    for call in found if isinstance(found, list) else [found]:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            return None
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return calls
