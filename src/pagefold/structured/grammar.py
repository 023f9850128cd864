"""Grammar: which tokens may come next, by llguidance. The only file that knows the library.

A grammar is written as text (its *source*), vetted in a process of its own (``vetting.py``), and compiled here. Each
output gets a matcher, which its tokens advance one by one.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from pagefold.errors import InvalidRequestError
from pagefold.structured.params import FIELD

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from llguidance._lib import JsonCompileOptions

    from pagefold.structured.free_beginning import FreeBeginning
    from pagefold.structured.params import StructuredOutputsParams

__all__ = ["Grammar", "GrammarMatcher", "GrammarSource", "GrammarTokenizer", "first_line", "grammar_source"]

_MAX_SOURCE_CHARACTERS = 256 * 1024

_MAX_MESSAGE_CHARACTERS = 300

_START = "start: "

_LARK_LINE = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")
"""A line that Lark has and GBNF has not: what ``llguidance.gbnf_to_lark.is_lark_syntax`` looks for. The library looks
from each line on over all empty lines behind it, which takes a minute where there are 200,000 of them."""

_SOME_WHITESPACE = r"[ \t\r\n]{0,20}"

_SPACES = ("", " ", "\n")
_MAX_LEXER_STATES = 8_000
_LEXER_STATE_BYTES = 2 * 2**10
_WORN_STEPS = 2**15
"""After so many tokens a grammar has probably grown. Its states are never given back, and where it has as many as it
may have, every output that needs another fails: so it is compiled anew for outputs that come later."""

_LIMITS = LLParserLimits(
    # A mask takes some microseconds. With the library's own limits one that was made to be slow takes seconds, and all
    # other requests wait for it; with these, a tenth of a second.
    step_lexer_fuel=50_000,
    max_items_in_row=1_000,
    max_lexer_states=_MAX_LEXER_STATES,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarSource(NamedTuple):
    """A grammar as text. Equal sources are equal grammars.

    Attributes:
        text: what the library compiles, or GBNF.
        is_gbnf: whether it must be converted first. That is plain Python of the library's, without bounds: the process
            that vets grammars does it.
    """

    text: str
    is_gbnf: bool = False

    def converted(self) -> GrammarSource:
        """Return it as the library compiles it.

        Raises:
            Exception: of any kind, if it is not GBNF.
        """
        return GrammarSource(str(LLMatcher.grammar_from_lark(gbnf_to_lark(self.text)))) if self.is_gbnf else self


def grammar_source(params: StructuredOutputsParams) -> GrammarSource:
    """Return the text of what an output must look like.

    Raises:
        InvalidRequestError: it is too long, or not written as it should be.
    """
    try:
        source = _source(params)
    except (ValueError, TypeError, RecursionError) as error:
        msg = f"The grammar cannot be read: {first_line(str(error))}."
        raise InvalidRequestError(msg, param=FIELD, remedy="Check how it is written.") from None
    if len(source.text) > _MAX_SOURCE_CHARACTERS:
        msg = f"The grammar has {len(source.text)} characters."
        raise InvalidRequestError(msg, param=FIELD, remedy=f"Send at most {_MAX_SOURCE_CHARACTERS}.")
    return source


def _source(params: StructuredOutputsParams) -> GrammarSource:
    if params.regex is not None:
        ascii_classes = regex_to_lark(params.regex, "dw").replace("\n", r"\n")
        return GrammarSource(LLMatcher.grammar_from_lark(f"start: /{ascii_classes}/"))
    if params.choice is not None:
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return GrammarSource(LLMatcher.grammar_from_lark(f"start: {choices}"))
    if params.grammar is not None:
        if _LARK_LINE.search(params.grammar) is None:
            return GrammarSource(params.grammar, is_gbnf=True)
        return GrammarSource(LLMatcher.grammar_from_lark(params.grammar))
    schema, options = _schema(params), _json_options(params)
    if params.calls is not None:
        return GrammarSource(
            LLMatcher.grammar_from_lark(_calls_or_json(params.calls, {**schema, "x-guidance": options}))
        )
    return GrammarSource(LLMatcher.grammar_from_json_schema(schema, overrides=options))


def _calls_or_json(calls: str, schema: Mapping[str, Any]) -> str:
    """Return a grammar of what ``calls`` says, or else of JSON."""
    assert calls.startswith(_START)
    rules = [
        "start: calls | answer",
        f"answer: %json {json.dumps(schema, ensure_ascii=False)}",
        f"calls: {calls.removeprefix(_START)}",
    ]
    return "\n".join(rules)


def _schema(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.json is None:
        return {"type": "object"}
    text = params.json if isinstance(params.json, str) else json.dumps(dict(params.json), allow_nan=False)
    if len(text) > _MAX_SOURCE_CHARACTERS:
        msg = f"it has {len(text)} characters, and at most {_MAX_SOURCE_CHARACTERS} are read"
        raise ValueError(msg)
    schema = json.loads(text)
    if not isinstance(schema, dict):
        msg = "a JSON schema must be an object"
        raise TypeError(msg)
    return schema


def _json_options(params: StructuredOutputsParams) -> JsonCompileOptions:
    options: JsonCompileOptions = {"whitespace_pattern": _SOME_WHITESPACE, "lenient": params.lenient}
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False, "lenient": params.lenient}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return options


class GrammarTokenizer:
    """A model's vocabulary as the library wants it. Takes half a second to make.

    Args:
        tokenizer_json: the text of ``tokenizer.json``.
        vocab_size: of the model. Tokens that the tokenizer does not have are in no mask.
        eos_token_ids: of the model.

    Raises:
        InvalidRequestError: the library cannot tell which bytes this tokenizer's tokens stand for.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        try:
            self.backend = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except ValueError as error:
            msg = f"Structured output does not work with this model's tokenizer: {first_line(str(error))}."
            raise InvalidRequestError(msg, param=FIELD, remedy="Leave it out, or use another model.") from None


class Grammar:
    """A compiled grammar: makes the matcher of each output.

    It grows: its matchers share the states that any of them came through.

    Args:
        source: converted.
        tokenizer: of the model.
        num_bytes: that it takes as it is compiled.

    Attributes:
        max_bytes: that it takes at most, with all states that it may have.

    Raises:
        InvalidRequestError: it does not compile, or allows no output.
    """

    def __init__(self, source: GrammarSource, tokenizer: GrammarTokenizer, num_bytes: int = 0) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self.max_bytes = num_bytes + _MAX_LEXER_STATES * _LEXER_STATE_BYTES
        self._wear = _Wear()
        self._first = LLMatcher(tokenizer.backend, source.text, log_level=0, limits=_LIMITS)
        self._first_mask = b"" if self._first.is_error() else self._first.compute_bitmask()
        if self._first.is_error() or self._first.is_stopped():
            why = _explained(self._first.get_error()) or "it allows nothing but an empty output"
            msg = f"The grammar does not compile: {why}."
            raise InvalidRequestError(msg, param=FIELD, remedy="Change it, or leave it out.")

    @property
    def is_worn(self) -> bool:
        """Whether it has, or may have, about as many states as it may have: a fresh one should take its place."""
        return self._wear.has_failed or self._wear.num_steps >= _WORN_STEPS

    def behind(self, beginning: FreeBeginning) -> GrammarSource:
        """Return the source of outputs that begin with ``beginning`` and go on as this grammar says.

        Where the bound part too could begin with a start mark, nobody could tell it from thinking: then outputs think.
        """
        is_told_apart = not any(self._may_begin_with(space + mark) for mark in beginning.starts for space in _SPACES)
        return GrammarSource(beginning.before(self._source.text, may_be_left_out=is_told_apart))

    def _may_begin_with(self, text: str) -> bool:
        state = self._first.deep_copy()
        tokenize = self._tokenizer.backend.tokenize_bytes  # a byte at a time: as text, not as a mark's own token
        tokens = [token_id for byte in text.encode() for token_id in tokenize(bytes([byte]))]
        return all(state.consume_token(token_id) for token_id in tokens)

    def matcher(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """Return the matcher of a new output. Cheap: what is compiled is shared.

        Args:
            ignore_eos: the output goes on while the grammar lets it.
        """
        never = self._tokenizer.eos_token_ids if ignore_eos else ()
        return GrammarMatcher(self._first.deep_copy(), self._first_mask, never, self._wear)


class _Wear:
    """What the matchers of one grammar did to it. Counted without a lock: one more or less does not matter.

    Attributes:
        num_steps: tokens that they accepted.
        has_failed: whether one of them failed.
    """

    __slots__ = ("has_failed", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self.has_failed = False


class GrammarMatcher:
    """A :class:`~pagefold.structured.matcher.TokenMatcher`.

    Args:
        state: the library's.
        mask: of the tokens that may come first.
        never: token ids that come only if nothing else may.
        wear: of the grammar.
    """

    __slots__ = ("_mask", "_never", "_state", "_wear", "error", "is_complete")
    field = FIELD

    def __init__(self, state: LLMatcher, mask: bytes, never: Sequence[int], wear: _Wear) -> None:
        self._wear = wear
        self._state = state
        self._mask = mask
        self._never = never
        self.is_complete = False
        self.error: str | None = None

    def mask(self, banned: Collection[int] = ()) -> bytes:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`."""
        mask = self._mask
        unwanted = [token_id for token_id in (*self._never, *banned) if mask[token_id >> 3] >> (token_id & 7) & 1]
        if not unwanted:
            return mask
        rest = bytearray(mask)
        for token_id in unwanted:
            rest[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(rest) if any(rest) else mask

    def copy(self) -> GrammarMatcher:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`."""
        return GrammarMatcher(self._state.deep_copy(), self._mask, self._never, self._wear)

    def accept(self, token_id: int) -> None:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`. It computes the next mask: what fails, fails now."""
        state = self._state
        self._wear.num_steps += 1
        if state.consume_token(token_id) and not state.is_stopped():
            self._mask = state.compute_bitmask()
        if state.is_error():
            self._wear.has_failed = True
            self.error = _explained(state.get_error()) or "no token can follow"
        elif state.is_stopped():
            self.is_complete = True


def _explained(error: str) -> str:
    return "no output can begin or go on as it wants" if error.startswith("NoExtension") else first_line(error)


def first_line(text: str) -> str:
    """Return what of the library's messages is for users."""
    return text.partition("\n")[0].strip().rstrip(".:")[:_MAX_MESSAGE_CHARACTERS]
