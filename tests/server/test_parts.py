"""Parts of an output: what is told as it comes, put together, is what is told at once; whatever the cuts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.server.output_reader import OutputReader
from pagefold.server.parts import PartBegan, PartEnded, PartGrew, PartReader
from pagefold.server.reasoning.thinking import NO_THINKING
from pagefold.server.tellable import arguments_object
from pagefold.server.tools.reader import ToolCallReader

CALL = '{"name": "f", "arguments": {"a": [1, "}"]}}'
TEXTS = st.lists(
    st.sampled_from(
        ["Hm. ", "\n", "<tool_call>", "</tool_call>", f"<tool_call>{CALL}</tool_call>", CALL, "<tool", "[", "]"]
    ),
    max_size=7,
).map("".join)


@st.composite
def cut_texts(draw):
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def said(reader):
    return [(part.kind, part.index, part.name, part.text) for part in reader.parts]


@given(cut_texts(), st.booleans())
def test_what_is_told_depends_on_no_cut(pieces, has_tools):
    def reader():
        return PartReader(OutputReader(NO_THINKING.reader(), ToolCallReader({"f"}) if has_tools else None))

    whole, streamed = reader(), reader()
    whole.read("".join(pieces))
    events = [event for piece in pieces for event in streamed.push(piece)] + streamed.end()
    assert said(streamed) == said(whole)
    assert len({part.key for part in streamed.parts}) == len(streamed.parts) >= 1
    told = []
    is_open = False
    for event in events:
        if isinstance(event, PartBegan):
            assert not is_open
            assert event.part.index == len(told)
            told.append("")
            is_open = True
        else:
            assert is_open
            assert event.part is streamed.parts[len(told) - 1]
        if isinstance(event, PartGrew):
            told[-1] += event.text
        if isinstance(event, PartEnded):
            is_open = False
            assert event.is_last == (event.part is streamed.parts[-1])
    assert not is_open
    assert told == [part.text for part in whole.parts]
    if not has_tools:
        assert said(whole) == [("text", 0, "", "".join(pieces))]
    assert whole.has_calls == any(part.kind == "call" for part in whole.parts)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 10**5])
def test_what_is_no_object_that_json_can_tell(text):
    assert arguments_object(text) is None


def test_what_is_one():
    assert arguments_object('{"a": "ø", "b": [1.5, null]}') == {"a": "ø", "b": [1.5, None]}
    assert json.dumps(arguments_object("{}")) == "{}"
