"""An answer behind thinking: the thinking is free, and the rest is always what was asked for.

Outputs are walked at random through the masks; the end mark is written now by its token, now letter by letter. They are
read as a server reads them.
"""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest
from grammar_walks import EOS
from jsonschema import Draft202012Validator
from thinking_vocabulary import END_ID, START_ID, with_marks
from tokenizers import Tokenizer

from pagefold.server.pieces import ReasoningPiece
from pagefold.server.reasoning.formats import FORMATS
from pagefold.server.reasoning.reader import Beginning
from pagefold.server.reasoning.thinking import Thinking
from pagefold.server.structured_fields import Structured
from pagefold.structured.compiler import GrammarCompiler
from pagefold.structured.params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "</think>", "[/THINK]"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
WHOLE = re.compile(r" ?[ab]{2,6}")
ASKED = {
    "json": (
        StructuredOutputsParams(json=SCHEMA),
        lambda text: Draft202012Validator(SCHEMA).validate(json.loads(text)),
    ),
    "regex": (StructuredOutputsParams(regex=WHOLE.pattern), lambda text: WHOLE.fullmatch(text) or pytest.fail(text)),
    "choice": (
        StructuredOutputsParams(choice=["yes", "no\n"]),
        lambda text: text in ("yes", "no\n") or pytest.fail(text),
    ),
    "GBNF": (
        StructuredOutputsParams(grammar='root ::= "a" [0-9] root?'),
        lambda text: re.fullmatch(r"(a\d)+", text) or pytest.fail(text),
    ),
}
VOCABULARIES = ("plain", "added", "special")


def is_in(mask, token_id):
    return token_id is not None and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


class Walker:
    """A model with one vocabulary, and marks of one format."""

    def __init__(self, tokenizer_json, vocabulary, form):
        self.form = FORMATS[form]
        marks = self.form.starts[0], self.form.ends[0]
        has_tokens = vocabulary != "plain"
        if has_tokens:
            tokenizer_json = with_marks(tokenizer_json, marks, special=vocabulary == "special")
        self.backend = Tokenizer.from_str(tokenizer_json)
        self.texts = {token_id: piece for piece, token_id in self.backend.get_vocab().items()}
        self.compiler = GrammarCompiler(tokenizer_json, self.backend.get_vocab_size(), (EOS,))
        self.token_ids = tuple(zip(marks, (START_ID, END_ID), strict=True)) if has_tokens else ()

    def write(self, mark, matcher, take, rng):
        """Write a mark: by its own token, or by any others that are let through."""
        own = dict(self.token_ids).get(mark)
        if own is not None and rng.random() < 0.5:
            take(own)
            return
        while mark:
            pieces = [mark[:end] for end in range(1, len(mark) + 1)]
            found = {piece: self.backend.token_to_id(piece.replace(" ", "Ġ")) for piece in pieces}
            piece = rng.choice([piece for piece, one in found.items() if one != own and is_in(matcher.mask(), one)])
            take(found[piece])
            mark = mark.removeprefix(piece)

    def walk(self, beginning, asked, rng, *, thinks):
        """Return (thinking, answer) of one random output."""
        thinking = Thinking(self.form, beginning, self.token_ids)
        structured = Structured(asked, "guided_json")
        matcher = self.compiler.compile(thinking.before(structured).params).matcher()
        token_ids = []

        def take(token_id):
            assert is_in(matcher.mask(), token_id), (self.backend.decode(token_ids), token_id)
            matcher.accept(token_id)
            token_ids.append(token_id)
            assert matcher.error is None

        if thinks and beginning is Beginning.MARKED:
            self.write(self.form.starts[0], matcher, take, rng)
        if thinks:
            self.think(matcher, take, rng)
        while not matcher.is_complete:
            may = self._may(matcher)
            if not thinks and not self.backend.decode(token_ids).strip():
                first = self.form.starts[0][0]
                may = [one for one in may if self.texts[one][0] not in (first, *"ĠĊčĉ")]
            token_id = rng.choice(may)
            if token_id == EOS:
                break
            take(token_id)
        reader = thinking.reader(structured)
        pieces = [*reader.push(self.backend.decode(token_ids, skip_special_tokens=False)), *reader.end()]
        parts = {True: "", False: ""}
        for piece in pieces:
            parts[isinstance(piece, ReasoningPiece)] += piece.text
        return parts[True], parts[False]

    def think(self, matcher, take, rng):
        """Write anything, and then an end mark."""
        for _ in range(rng.randrange(8)):
            may = self._may(matcher)
            assert EOS not in may
            take(rng.choice([one for one in may if one not in (START_ID, END_ID)]))
        while not self._is_whole(matcher):
            take(rng.choice(self._may(matcher)))
        self.write(rng.choice(self.form.ends), matcher, take, rng)

    def _is_whole(self, matcher):
        """Whether no character is in its middle."""
        return is_in(matcher.mask(), self.backend.token_to_id("a"))

    @staticmethod
    def _may(matcher):
        bits = np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little")
        return [int(one) for one in np.flatnonzero(bits)]


@pytest.fixture(scope="module", params=[*itertools.product(VOCABULARIES, ("qwen3", "mistral")), ("plain", "granite")])
def walker(request, tokenizer):
    vocabulary, form = request.param
    return Walker(tokenizer.to_json(), vocabulary, form)


@pytest.mark.quick(every=30)
@pytest.mark.parametrize("kind", ASKED)
def test_what_stands_behind_thinking_is_what_was_asked_for(walker, kind):
    asked, check = ASKED[kind]
    rng = random.Random(kind)
    for beginning, thinks in ((Beginning.THINKING, True), (Beginning.MARKED, True), (Beginning.MARKED, False)):
        for _ in range(3):
            thought, answer = walker.walk(beginning, asked, rng, thinks=thinks)
            check(answer)
            assert thinks or not thought


def test_without_thinking_nothing_comes_before(walker):
    asked = Structured(StructuredOutputsParams(choice=["yes"]), "guided_choice")
    assert Thinking(walker.form, Beginning.ANSWER).before(asked) is asked


@pytest.mark.quick(every=9)
def test_an_answer_that_may_begin_like_thinking_is_thought_about_first(walker):
    """Otherwise nobody could tell which of both an output is."""
    asked = Structured(StructuredOutputsParams(regex=r"[^x]{0,40}"), "guided_regex")
    free = Thinking(walker.form, Beginning.MARKED, walker.token_ids).before(asked).params
    may = set(walker._may(walker.compiler.compile(free).matcher()))
    assert walker.backend.token_to_id("a") not in may
    assert walker.backend.token_to_id(walker.form.starts[0][0]) in may
