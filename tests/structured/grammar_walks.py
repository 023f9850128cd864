"""Random JSON schemas whose values end, and random outputs that a grammar allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
    import random

EOS = 2
NUM_PADDED = 67

WORDS = st.sampled_from(
    ["", "a", "null", "Zoë", "世界", "\U0001f600 \U0001f3fd", 'q"u\\o\nte', "e\u0301", "\u00a0", "0"]
)
NAMES = st.sampled_from(["a", "b", "name", "Straße", "日本", "with space", 'q"', "$x"])
PATTERNS = st.sampled_from([r"^[a-z]{2,6}$", r"^\d{4}-\d{2}$", r"^[éè世]{1,3}$", r"^(ab|cd)*e$", r"^[A-Z][a-z]?\.$"])


@st.composite
def _strings(draw):
    if draw(st.booleans()):
        return {"type": "string", "pattern": draw(PATTERNS)}
    least = draw(st.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 8))}


@st.composite
def _numbers(draw):
    least = draw(st.integers(-200, 200))
    kind = draw(st.sampled_from(["integer", "number"]))
    schema = {"type": kind, "minimum": least, "maximum": least + draw(st.integers(0, 300))}
    if draw(st.booleans()):
        schema["exclusiveMaximum"] = schema.pop("maximum") + 1
    return schema


_LEAVES = st.one_of(
    _strings(),
    _numbers(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    st.lists(st.one_of(WORDS, st.integers(-5, 5), st.none()), min_size=1, max_size=4).map(lambda some: {"enum": some}),
    WORDS.map(lambda word: {"const": word}),
)


@st.composite
def _objects(draw, inner):
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@st.composite
def _arrays(draw, inner):
    least = draw(st.integers(0, 2))
    return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + draw(st.integers(0, 2))}


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner), _arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    ),
    max_leaves=8,
)

LINKED = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/end"}},
            "required": ["value", "next"],
            "additionalProperties": False,
        },
        "end": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
    },
    "$ref": "#/$defs/node",
}
"""Refers to itself, and ends."""


def tokens_of(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist()


def walk(grammar, rng: random.Random, *, eos: int, max_tokens: int = 2000) -> list[int]:
    """Choose any token of each mask, as a model without sense does; return the output once it has ended."""
    matcher = grammar.matcher()
    output: list[int] = []
    while not matcher.is_complete:
        assert matcher.error is None, matcher.error
        assert len(output) < max_tokens
        token_id = rng.choice(tokens_of(matcher.mask()))
        if token_id == eos:
            break
        output.append(token_id)
        matcher.accept(token_id)
    return output
