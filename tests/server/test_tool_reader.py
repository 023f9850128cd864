"""Calls of tools in a model's text: found, whole or streamed, and the same however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.server.pieces import ArgumentsPiece, CallBegun, TextPiece
from pagefold.server.tools.reader import ToolCallReader

NAMES = {"add", "look-up"}
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(text, cuts=(), max_calls=None, *, is_all=False):
    """Return (text, [(name, arguments)])."""
    reader = ToolCallReader(NAMES, max_calls=max_calls, is_all=is_all)
    places = [0, *sorted(cuts), len(text)]
    pieces = [piece for a, b in pairwise(places) for piece in reader.push(text[a:b])] + reader.end()
    calls = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            assert piece.index == len(calls)
            calls.append([piece.name, ""])
        elif isinstance(piece, ArgumentsPiece):
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.text
    assert reader.num_calls == len(calls)
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)), [tuple(call) for call in calls]


TRICKY = '{"s": "a}]\\"</tool_call>{", "l": [1, {"q": "\\\\"}], "é": {}}'
SECOND = '{"name": "add", "parameters": {"y": 2}}'
CASES = {
    "nothing": ("", "", []),
    "text": ("  a < b <tool> c ", "  a < b <tool> c ", []),
    "one": (f'{OPEN}\n{{"name": "add", "arguments": {{"x": 1}}}}\n{CLOSE}', "", [("add", '{"x": 1}')]),
    "a list": (
        f'{OPEN}[\n{{"name": "add", "arguments": {{}}}},\n{{"name":"look-up","arguments":{TRICKY}}}\n]{CLOSE}',
        "",
        [("add", "{}"), ("look-up", TRICKY)],
    ),
    "several marks": (
        f'Let me see. \n{OPEN}{{"name": "add", "arguments": {{}}}}{CLOSE}\n {OPEN}{SECOND}{CLOSE} Done.',
        "Let me see.Done.",
        [("add", "{}"), ("add", '{"y": 2}')],
    ),
    "an empty list": (f"{OPEN}[]{CLOSE} So be it.", "So be it.", []),
    "another order": (f'{OPEN}{{"arguments": {{"x": "é"}}, "name": "add"}}{CLOSE}', "", [("add", '{"x": "é"}')]),
    "more keys": (f'{OPEN}{{"name": "add", "arguments": {{}}, "id": 3}}{CLOSE}.', ".", [("add", "{}")]),
    "an unknown name": (
        f'a {OPEN}{{"name": "sub", "arguments": {{}}}}{CLOSE} b',
        f'a {OPEN}{{"name": "sub", "arguments": {{}}}}{CLOSE} b',
        [],
    ),
    "no JSON": (f"a {OPEN}add(1){CLOSE} b", f"a {OPEN}add(1){CLOSE} b", []),
    "cut off in the arguments": (f'{OPEN}{{"name": "add", "arguments": {{"x": "lo', "", [("add", '{"x": "lo')]),
    "cut off in the name": (f'a {OPEN}{{"name": "ad', f'a {OPEN}{{"name": "ad', []),
    "cut off in the mark": ("a <tool_c", "a <tool_c", []),
    "an escaped name": (f'{OPEN}{{"name": "a\\u0064d", "arguments": {{}}}}{CLOSE}', "", [("add", "{}")]),
    "a bad escape": (f'{OPEN}{{"name": "\\x", "arguments": {{}}}}{CLOSE}',) * 2 + ([],),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_told_from_text(name):
    text, told, calls = CASES[name]
    assert read(text) == (told, calls)
    assert read(text, range(len(text))) == (told, calls)
    assert read(text, max_calls=1)[1] == calls[:1]


PARTS = st.sampled_from(
    [
        OPEN,
        CLOSE,
        "[",
        "]",
        "{",
        "}",
        '"name": "add"',
        ", ",
        '"arguments": ',
        '{"x": "}"}',
        " ",
        "\n",
        "text",
        "<tool",
        "\\",
    ]
)


@given(parts=st.lists(PARTS, max_size=14), data=st.data())
def test_what_is_told_does_not_depend_on_how_the_text_is_cut(parts, data):
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(text, cuts) == read(text) == read(text, range(len(text)))
    told = read(text, is_all=True)
    assert told == read(text, cuts, is_all=True) == read(text, range(len(text)), is_all=True)
    assert told == (read(text) if text.lstrip().startswith(OPEN) else (text, []))


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3)
        ),
        max_size=4,
    ),
    is_list=st.booleans(),
    data=st.data(),
)
def test_any_arguments_are_read_back(calls, is_list, data):
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = f"{OPEN}[{', '.join(bodies)}]{CLOSE}" if is_list else "\n".join(f"{OPEN}\n{one}\n{CLOSE}" for one in bodies)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    told, found = read(text, cuts)
    assert told == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
