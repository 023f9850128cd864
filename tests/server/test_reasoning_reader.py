"""Thinking in a model's text: told from the answer, whole or streamed, and the same however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.config import REASONING_PARSERS
from pagefold.server.output_reader import OutputReader
from pagefold.server.pieces import ArgumentsPiece, CallBegun, ReasoningPiece, TextPiece
from pagefold.server.reasoning.formats import FORMATS
from pagefold.server.reasoning.reader import Beginning, ReasoningReader
from pagefold.server.reasoning.thinking import thinking_of
from pagefold.server.tools.reader import ToolCallReader


def read(text, cuts=(), *, form="qwen3", beginning=Beginning.MARKED, keeps_space=False):
    """Return (thinking, answer)."""
    reader = ReasoningReader(FORMATS[form], beginning, keeps_space=keeps_space)
    places = [0, *sorted(cuts), len(text)]
    pieces = [piece for a, b in pairwise(places) for piece in reader.push(text[a:b])] + reader.end()
    kinds = [type(piece) for piece in pieces]
    assert kinds == sorted(kinds, key=[ReasoningPiece, TextPiece].index), "thinking comes first"
    assert all(piece.text for piece in pieces)
    parts = {
        kind: "".join(piece.text for piece in pieces if type(piece) is kind) for kind in (ReasoningPiece, TextPiece)
    }
    return parts[ReasoningPiece], parts[TextPiece]


def twin(text, *, form="qwen3", beginning=Beginning.MARKED, keeps_space=False):
    """The same from the whole text, as one would write it down."""
    marks = FORMATS[form]
    if beginning is Beginning.ANSWER:
        return "", text
    body = text.lstrip()
    start = next((mark for mark in marks.starts if body.startswith(mark)), None)
    if start is None and beginning is Beginning.MARKED:
        return "", text
    body = body[len(start or "") :]
    ends = [(body.index(mark), mark) for mark in marks.ends if mark in body]
    if not ends:
        return body.strip(), ""
    at, mark = min(ends)
    answer = body[at + len(mark) :]
    return body[:at].strip(), answer if keeps_space else answer.lstrip()


CASES = {
    "both marks": ("<think>\nWell, 1 < 2.\n</think>\n\nYes.", "Well, 1 < 2.", "Yes."),
    "no marks": (" Yes. ", "", " Yes. "),
    "cut off in thinking": ("<think>Well \n", "Well", ""),
    "cut off in the end mark": ("<think>Well </thi", "Well </thi", ""),
    "cut off in the start mark": ("\n<thi", "", "\n<thi"),
    "nothing thought": ("<think>\n\n</think>\n\nYes.", "", "Yes."),
    "nothing said": ("<think>Well</think> \n", "Well", ""),
    "a mark in the answer": ("<think>a</think>b</think><think>c", "a", "b</think><think>c"),
    "a start mark in thinking": ("<think>a<think>b</think>c", "a<think>b", "c"),
    "a start mark too late": ("Well. <think>a</think>b", "", "Well. <think>a</think>b"),
    "nearly a mark": ("<think>a</ think></</think>b", "a</ think></", "b"),
}


@pytest.mark.parametrize("name", CASES)
def test_thinking_is_told_from_the_answer(name):
    text, thought, answer = CASES[name]
    assert read(text) == (thought, answer) == twin(text)
    assert read(text, range(len(text))) == (thought, answer)


def test_what_has_begun_in_the_prompt_needs_no_mark():
    for text in ("a</think>b", "<think>a</think>b", "\n<think>\na\n</think>\nb"):
        assert read(text, beginning=Beginning.THINKING) == ("a", "b")
    assert read("a", beginning=Beginning.THINKING) == ("a", "")
    assert read("<think>a</think>b", beginning=Beginning.ANSWER) == ("", "<think>a</think>b")


def test_thinking_comes_as_soon_as_it_is_certain():
    reader = ReasoningReader(FORMATS["qwen3"], Beginning.THINKING)
    assert reader.push("a b") == [ReasoningPiece("a b")]
    assert reader.push(" <") == []
    assert reader.push("x </thin") == [ReasoningPiece(" <x")]
    assert reader.push("k>\n") == []
    assert reader.push("c ") == [TextPiece("c ")]


MARKS = sorted({mark for form in FORMATS.values() for mark in (*form.starts, *form.ends)})
PARTS = st.sampled_from([*MARKS, *(mark[:-1] for mark in MARKS), "<", "Here", " ", "\n\n", "\u2003", "text", "é"])


@given(
    parts=st.lists(PARTS, max_size=12),
    form=st.sampled_from(sorted(FORMATS)),
    beginning=st.sampled_from(Beginning),
    keeps_space=st.booleans(),
    data=st.data(),
)
def test_what_is_told_does_not_depend_on_how_the_text_is_cut(parts, form, beginning, keeps_space, data):
    text = "".join(parts)
    how = {"form": form, "beginning": beginning, "keeps_space": keeps_space}
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(text, cuts, **how) == read(text, range(len(text)), **how) == twin(text, **how)


CALL = '<tool_call>{"name": "add", "arguments": {"x": "<think>"}}</tool_call>'


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_calls_come_behind_thinking(cuts):
    thought = f"I could {CALL}"
    text = f"<think>{thought}</think>\nSo: {CALL}"
    reader = OutputReader(ReasoningReader(FORMATS["qwen3"], Beginning.MARKED), ToolCallReader({"add"}))
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [piece for a, b in pairwise(places) for piece in reader.push(text[a:b])] + reader.end()
    told = {
        kind: "".join(piece.text for piece in pieces if isinstance(piece, kind))
        for kind in (ReasoningPiece, TextPiece, ArgumentsPiece)
    }
    assert told == {ReasoningPiece: thought, TextPiece: "So:", ArgumentsPiece: '{"x": "<think>"}'}
    assert [piece.name for piece in pieces if isinstance(piece, CallBegun)] == ["add"]
    assert reader.finish_reason("stop") == "tool_calls"
    assert reader.finish_reason("length") == "length"


class NoTokens:
    def token_id(self, _text):
        return None


@pytest.mark.parametrize(
    ("form", "prompt", "continued", "beginning"),
    [
        ("deepseek_r1", "<|user|>Hi<|assistant|><think>\n", "", Beginning.THINKING),
        ("deepseek_r1", "<|user|>Hi<|assistant|>", "", Beginning.THINKING),
        ("deepseek_v3", "<|user|>Hi<|assistant|></think>", "", Beginning.ANSWER),
        ("qwen3", "<|im_start|>assistant\n", "", Beginning.MARKED),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", Beginning.ANSWER),
        ("qwen3", "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", "", Beginning.MARKED),
        ("qwen3", "assistant\n<think>Well", "<think>Well", Beginning.THINKING),
        ("deepseek_r1", "assistant\nThe answer", "The answer", Beginning.ANSWER),
        ("deepseek_r1", "a<think>b</think>c", "<think>b</think>c", Beginning.ANSWER),
        ("qwen3", "assistant\n", " ", Beginning.MARKED),
    ],
)
def test_the_prompt_says_how_thinking_stands(form, prompt, continued, beginning):
    assert thinking_of(FORMATS[form], prompt, continued, NoTokens()).beginning is beginning


def test_the_configuration_knows_every_format():
    assert tuple(sorted(FORMATS)) == REASONING_PARSERS
