"""A tokenizer that is loaded without transformers does what transformers' would; any other is left to it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import copy_with
from transformers import AutoTokenizer

from pagefold.tokenizer.plain import PlainTokenizer, load_plain_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a <place> & its 'sky' 🏔️", "parameters": {"type": "object"}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich", "n": 1.5}}}
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>Grüezi</b> 🙂\n\n"}],
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}],
    [{"role": "tool", "content": '{"sky": null}', "tool_call_id": "1"}, {"role": "user", "content": "And?"}],
    [{"role": "assistant", "content": "5", "thinking": "2 + 3"}, {"role": "user", "content": "Sure?"}],
    [{"role": "assistant", "content": "5", "reasoning": "2 + 3", "reasoning_content": None}],
]
TEMPLATES = [
    None,
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}",
    "{%- for m in messages %}\n {%- if loop.first %}{% continue %}{% endif %}\n{{ m | tojson(indent=2) }}{% endfor -%}",
    "{{ messages | tojson(true) }}{{ tools | tojson if tools is not none else 'none' }}{{ documents }} {{ unk_token }}",
    "{% for m in messages %}{{ m.keys() | list }}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}",
    (
        "{% set tail %}<|end|>{% endset %}{% macro say(x) %}[{{ x | trim }}]{% endmacro %}{{ say(messages[0].role) }}"
        "{% if add_generation_prompt %}{{ tail }}{% endif %}{{ range(3) | list }}"
    ),
]


def both(folder: Path) -> tuple[PlainTokenizer, Any]:
    plain = load_plain_tokenizer(folder)
    assert plain is not None
    return plain, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def pair(smollm2: Path) -> tuple[PlainTokenizer, Any]:
    return both(smollm2)


def test_both_have_the_same_tokens(pair):
    plain, expected = pair
    told, wanted = (json.loads(one.backend_tokenizer.to_str()) for one in pair)
    del told["post_processor"], wanted["post_processor"]  # transformers puts one there that does nothing
    assert told == wanted
    assert plain.chat_template == expected.chat_template


TEXT = st.text() | st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", " ", "\n", "é", "12", "a"])).map("".join)


@given(text=TEXT)
def test_a_text_is_encoded_alike(pair, text):
    plain, expected = pair
    for special in (True, False):
        how = {"add_special_tokens": special}
        assert plain.encode(text, **how) == expected.encode(text, **how)
        found = plain(text, **how, return_offsets_mapping=True)
        wanted = expected(text, **how, return_offsets_mapping=True)
        assert (found["input_ids"], found["offset_mapping"]) == (wanted["input_ids"], wanted["offset_mapping"])


def test_half_a_surrogate_pair_is_no_text_for_either(pair):
    errors = []
    for tokenizer in pair:
        with pytest.raises(Exception, match=r".") as raised:
            tokenizer.encode("\ud800")
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def rendered(tokenizer: Any, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    return tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_is_rendered_alike(smollm2, tmp_path, template):
    settings = {} if template is None else {"chat_template": template}
    plain, expected = both(copy_with(smollm2, tmp_path, **settings))
    for chat in CHATS:
        for tools in (None, [], [TOOL]):
            if template is None and chat[0].get("content") is None:
                continue
            assert outcome(plain, chat, tools) == outcome(expected, chat, tools)


def outcome(tokenizer: Any, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> object:
    try:
        return rendered(tokenizer, chat, tools)
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return type(error), str(error)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[9].role }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ('{0.__class__}').format(messages) }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_would_break_out_fails_alike(smollm2, tmp_path, template):
    plain, expected = both(copy_with(smollm2, tmp_path, chat_template=template))
    told = outcome(plain, CHATS[0], None)
    assert told == outcome(expected, CHATS[0], None)
    assert not isinstance(told, str) or told == ""  # what is hidden is undefined


def test_a_chat_without_messages_fails_alike(pair):
    told, wanted = (outcome(one, [], None) for one in pair)
    assert told == wanted


def test_several_templates_without_a_default_are_an_error(smollm2, tmp_path):
    templates = [{"name": "tool_use", "template": "{{ tools }}"}]
    plain, expected = both(copy_with(smollm2, tmp_path, chat_template=templates))
    assert rendered(plain, CHATS[0], []) == rendered(expected, CHATS[0], [])
    for tokenizer in (plain, expected):
        with pytest.raises(ValueError, match="default"):
            rendered(tokenizer, CHATS[0], None)


IS_NOT_PLAIN: dict[str, dict[str, Any]] = {
    "a class of its own": {"tokenizer_class": "LlamaTokenizer"},
    "no class": {"tokenizer_class": None},
    "a setting that is not known": {"add_bos_token": True},
    "added tokens": {"added_tokens_decoder": {"0": {"content": "<|endoftext|>"}}},
    "a special token that is none yet": {"bos_token": "<new>"},
    "a special token that is an ordinary one": {"bos_token": "the"},
    "a special token with settings": {"bos_token": {"content": "<|im_start|>", "lstrip": True}},
    "more special tokens": {"extra_special_tokens": ["<x>"]},
    "a template that is wrong": {"chat_template": "{% if %}"},
    "a template with transformers' tags": {"chat_template": "{% generation %}x{% endgeneration %}"},
    "a template with a namespace": {"chat_template": "{% set ns = namespace(x=1) %}"},
    "a template with the date": {"chat_template": "{{ strftime_now('%Y') }}"},
    "templates of another form": {"chat_template": {"default": "x"}},
}


@pytest.mark.parametrize("kind", IS_NOT_PLAIN)
def test_whatever_else_is_left_to_transformers(smollm2, tmp_path, kind):
    assert load_plain_tokenizer(copy_with(smollm2, tmp_path, **IS_NOT_PLAIN[kind])) is None


@pytest.mark.parametrize("name", ["chat_template.jinja", "added_tokens.json", "tokenizer.model"])
def test_files_that_change_it_leave_it_to_transformers(smollm2, tmp_path, name):
    folder = copy_with(smollm2, tmp_path)
    assert load_plain_tokenizer(folder) is not None
    (folder / name).write_text("{}")
    assert load_plain_tokenizer(folder) is None


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("special_tokens_map.json", {"bos_token": "<|endoftext|>"}),
        ("special_tokens_map.json", {"mask_token": "<|im_end|>"}),
        (
            "tokenizer.json",
            {"truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
        ),
        ("config.json", {"model_type": "qwen2"}),
    ],
)
def test_what_other_files_say_leaves_it_to_transformers(smollm2, tmp_path, file, change):
    folder = copy_with(smollm2, tmp_path)
    written = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(written | change))
    assert load_plain_tokenizer(folder) is None
