"""Grammars: whatever their masks let through is valid, by other judges: jsonschema, re, and equality."""

from __future__ import annotations

import json
import random
import re

import pytest
from grammar_walks import EOS, LINKED, NUM_PADDED, SCHEMAS, tokens_of, walk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance.gbnf_to_lark import is_lark_syntax

from pagefold import StructuredOutputsParams
from pagefold.errors import InvalidRequestError
from pagefold.structured import vetting
from pagefold.structured.grammar import grammar_source

MANY = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text_of(compiler, tokenizer, seed, **fields):
    grammar = compiler.compile(StructuredOutputsParams(**fields))
    return tokenizer.decode(walk(grammar, random.Random(seed), eos=EOS), skip_special_tokens=False)


@MANY
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), tight=st.booleans())
def test_any_output_of_a_schema_is_valid(compiler, tokenizer, schema, seed, tight):
    for more in range(3):
        text = text_of(compiler, tokenizer, seed + more, json=schema, disable_any_whitespace=tight)
        Draft202012Validator(schema).validate(json.loads(text))


def test_json_without_any_whitespace(compiler, tokenizer):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5}},
    }
    schema |= {"required": ["a"], "additionalProperties": False}
    for seed in range(10):
        assert " " not in text_of(compiler, tokenizer, seed, json=schema, disable_any_whitespace=True)
    spaced = {text_of(compiler, tokenizer, seed, json=schema, whitespace_pattern=" ") for seed in range(10)}
    assert any(" " in text and "\n" not in text for text in spaced)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("seed", range(20))
def test_schemas_may_refer_to_themselves(compiler, tokenizer, seed):
    Draft202012Validator(LINKED).validate(json.loads(text_of(compiler, tokenizer, seed, json=LINKED)))


def test_a_schema_may_be_a_text(compiler, tokenizer):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    (first,) = {str(compiler.compile(StructuredOutputsParams(json=form))) for form in (schema, json.dumps(schema))}
    assert first
    assert len(json.loads(text_of(compiler, tokenizer, 0, json=json.dumps(schema)))) == 2


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{1,12}",
        r"\d{3}-[\d\w]{4}",
        r"(yes|no|maybe)!{0,3}",
        r"[世界é\U0001F600]{1,6}",
        r"(?i)abd",
        r"[^\x00-\x7f]{1,4}",
        r"a.c",
        'two\nlines/"',
    ],
)
def test_outputs_of_a_regex_match_it_wholly(compiler, tokenizer, pattern):
    found = {text_of(compiler, tokenizer, seed, regex=pattern) for seed in range(30)}
    for text in found:
        assert re.fullmatch(pattern, text), text
        assert "\ufffd" not in text


def test_outputs_of_a_choice_are_choices(compiler, tokenizer):
    choices = ["yes", "yes, please", "no", 'q"\\', "世界", "\U0001f600", "line\nend"]
    found = {text_of(compiler, tokenizer, seed, choice=choices) for seed in range(200)}
    assert found == set(choices)


def test_grammars_in_lark_and_gbnf(compiler, tokenizer):
    lark = 'start: "(" NUMBER ("+" NUMBER)~0..3 ")"\nNUMBER: /[0-9]{1,2}/'
    gbnf = 'root ::= "(" number ("+" number)? ")"\nnumber ::= [0-9] [0-9]?'
    for grammar in (lark, gbnf):
        for seed in range(20):
            assert re.fullmatch(r"\(\d{1,2}(\+\d{1,2})*\)", text_of(compiler, tokenizer, seed, grammar=grammar))


@given(st.lists(st.sampled_from([*" \t\n\r\v:sx", "start", "%llguidance", "\n\n", "::="])).map("".join))
def test_lark_is_told_from_gbnf_as_the_library_does(text):
    source = grammar_source(StructuredOutputsParams(grammar=text or " "))
    assert source.is_gbnf == (not is_lark_syntax(text))


@pytest.mark.timeout(30)  # the library's own test takes minutes
def test_very_many_empty_lines_are_read_at_once():
    assert grammar_source(StructuredOutputsParams(grammar="\n" * 250_000)).is_gbnf
    assert not grammar_source(StructuredOutputsParams(grammar="\n" * 250_000 + "start: /a/")).is_gbnf


def test_whitespace_in_json_is_bounded(compiler, tokenizer):
    """A model that likes to write spaces cannot go on for ever."""
    matcher = compiler.compile(StructuredOutputsParams(json={"type": "object"})).matcher()
    matcher.accept(tokenizer.encode("{")[0])
    (space,) = tokenizer.encode(" ")
    num_spaces = 0
    while space in tokens_of(matcher.mask()):
        matcher.accept(space)
        num_spaces += 1
    assert 2 <= num_spaces <= 20


def test_masks_never_hold_tokens_that_only_the_model_has_nor_control_tokens(compiler, tokenizer):
    control = set(range(17)) - {EOS}
    for fields in ({"regex": r"(?s).*"}, {"json_object": True}):
        matcher = compiler.compile(StructuredOutputsParams(**fields)).matcher()
        rng = random.Random(0)
        for _ in range(50):
            mask = matcher.mask()
            assert len(mask) * 8 >= tokenizer.vocab_size + NUM_PADDED
            allowed = set(tokens_of(mask))
            assert allowed
            assert max(allowed) < tokenizer.vocab_size
            assert not allowed & control
            matcher.accept(rng.choice(sorted(allowed - {EOS})))


def test_the_end_comes_only_where_an_output_may_end(compiler, tokenizer):
    matcher = compiler.compile(StructuredOutputsParams(regex="[ab]{2,3}")).matcher()
    (a,) = tokenizer.encode("a")
    for may_end in (False, False, True):
        assert (EOS in tokens_of(matcher.mask())) == may_end
        assert not matcher.is_complete
        matcher.accept(a)
    assert matcher.is_complete


def test_banned_tokens_come_only_if_nothing_else_may(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputsParams(regex="[ab]+"))
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    matcher = grammar.matcher()
    matcher.accept(a)
    everything = tokens_of(matcher.mask())
    assert EOS in everything
    assert tokens_of(matcher.mask({EOS})) == [token for token in everything if token != EOS]
    assert tokens_of(matcher.mask(everything)) == everything
    assert tokens_of(matcher.mask({b, 49_150})) == [token for token in everything if token not in {b, 49_150}]
    endless = grammar.matcher(ignore_eos=True)
    endless.accept(a)
    assert EOS not in tokens_of(endless.mask())
    assert tokens_of(endless.mask({a})) == [token for token in everything if token not in {a, EOS}]


def test_matchers_of_one_grammar_know_nothing_of_each_other(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutputsParams(choice=["aXa", "bXb"]))
    one, other = grammar.matcher(), grammar.matcher()
    first = other.mask()
    for token_id in tokenizer.encode("aX"):
        one.accept(token_id)
    assert other.mask() == first == grammar.matcher().mask()
    for token_id in tokenizer.encode("bXb"):
        other.accept(token_id)
    assert other.is_complete
    assert other.error is None
    assert not one.is_complete


def test_a_token_that_is_not_in_the_mask_is_an_error_and_nothing_worse(compiler):
    matcher = compiler.compile(StructuredOutputsParams(regex="a")).matcher()
    matcher.accept(5)
    assert matcher.error is not None
    assert not matcher.is_complete


BAD = {
    "nothing": {},
    "two": {"regex": "a", "choice": ["b"]},
    "no choices": {"choice": []},
    "choices that are one text": {"choice": "abc"},
    "choices that are no texts": {"choice": [1]},
    "a schema that is no schema": {"json": 5},
    "a schema that is no JSON": {"json": "{"},
    "a schema that is a list": {"json": "[]"},
    "a schema with NaN": {"json": {"const": float("nan")}},
    "a schema too deep": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "a wrong type": {"json": {"type": "text"}},
    "bounds that exclude each other": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "a keyword that cannot be enforced": {"json": {"type": "array", "uniqueItems": True}},
    "a reference to nothing": {"json": {"$ref": "#/$defs/none"}},
    "a reference to elsewhere": {"json": {"$ref": "http://localhost/schema.json"}},
    "a schema of nothing but itself": {"json": {"$ref": "#"}},
    "an enormous schema": {"json": {"enum": [f"{number:050}" for number in range(6000)]}},
    "a regex that does not compile": {"regex": "("},
    "a regex that looks ahead": {"regex": "a(?=b)"},
    "a regex that looks back": {"regex": r"(a)\1"},
    "a regex that is a list": {"regex": ["a"]},
    "a regex that explodes": {"regex": "((((a{100}){100}){100}){100})"},
    "a grammar that is none": {"grammar": "hello"},
    "a grammar without its rules": {"grammar": "start: other"},
    "GBNF that breaks off": {"grammar": 'root ::= "a'},
}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_grammar_is_refused_with_the_reason(compiler, name):
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(**BAD[name]))
    assert caught.value.param == "structured_outputs"
    assert caught.value.remedy
    assert len(str(caught.value)) < 500


def test_a_grammar_whose_steps_take_too_long_is_too_complex(compiler, monkeypatch):
    """With no time at all any does: how long a step takes is the machine's affair."""
    grammar = compiler.compile(StructuredOutputsParams(regex="[a-z]{20}"))
    assert vetting._walk(grammar) is None
    monkeypatch.setattr(vetting, "_STEP_LIMIT_S", 0.0)
    assert "takes too long" in vetting._walk(grammar)


def test_lenient_ignores_what_cannot_be_enforced_and_nothing_else(compiler, tokenizer):
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    assert len(json.loads(text_of(compiler, tokenizer, 0, json=schema, lenient=True))) == 3
    with pytest.raises(InvalidRequestError, match="maximum"):
        compiler.compile(StructuredOutputsParams(json={"type": "integer", "minimum": 5, "maximum": 3}, lenient=True))
