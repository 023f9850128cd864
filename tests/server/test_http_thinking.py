"""Thinking models over HTTP: a tiny model with marks in its vocabulary and a template of the test's own.

Where the text matters the test writes the output; where a grammar must hold it the model is random, and a bias makes it
end its thinking.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import uuid
from pathlib import Path

import openai
import pytest
from jsonschema import Draft202012Validator
from local_server import PATIENCE_S, LocalServer, error_of, finish_reasons, joined

sys.path.append(str(Path(__file__).parents[1] / "structured"))
from thinking_vocabulary import END_ID, START_ID, with_marks

TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\\n' }}
{%- if message.reasoning_content and keep_thinking %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ '<tool_call> ' + tools | tojson + '\\n' }}{% endif %}
{%- if budget is defined and budget > 9 %}{{ raise_exception('a budget of ' ~ budget ~ ' is too much') }}{% endif %}
{%- for _ in range(budget or 0) %}{{ '.' }}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- if open_thinking %}{{ '<think>\\n' }}{% endif %}
{%- endif %}
"""
ASK = [{"role": "user", "content": "Is 1 less than 2?"}]
THOUGHT, ANSWER = "Well, 1 < 2.", "Yes, it is."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
SCHEMA = {
    "type": "object",
    "properties": {"less": {"type": "boolean"}, "by": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["less", "by"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "compare", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "forget", "parameters": {"type": "object", "maxProperties": 0}}}


@pytest.fixture(scope="module", params=[False, True], ids=["added", "special"])
def thinker(request, tiny_chat_model, tmp_path_factory):
    """A server whose marks are tokens, special or not: special ones are in no text unless somebody wants them there."""
    folder = tmp_path_factory.mktemp("thinker") / "tiny"
    shutil.copytree(tiny_chat_model, folder)
    file = folder / "tokenizer.json"
    file.write_text(with_marks(file.read_text(), ("<think>", "</think>"), special=request.param))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    for name in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        config.pop(name, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    server = LocalServer(
        folder,
        kv_cache_memory_bytes=2**22,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        door={"reasoning_parser": "qwen3"},
    )
    yield server
    server.close()


@pytest.fixture
def server(thinker):
    yield thinker
    thinker.runner.script = None
    thinker.check_pool()


def says(server, text):
    server.runner.script = [*server.tokenizer._backend.encode(text, add_special_tokens=False).ids, 2]
    return server.runner.script


def ask(server, **fields):
    response = server.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def message_of(answer):
    (choice,) = answer["choices"]
    return choice["message"]


def streamed(server, index=0, **fields):
    """(thinking, answer) of a stream, and its events."""
    events = server.events("/v1/chat/completions", {"messages": ASK, "max_tokens": 200, **fields})
    deltas = [one["delta"] for event in events for one in event["choices"] if one["index"] == index]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    return "".join(delta.get("reasoning") or "" for delta in deltas), joined(events, index), events


def prompt_of(server, **fields):
    """The text of the prompt that a request comes to; nothing of it is cached."""
    server.check_pool()  # what was asked before has gone
    says(server, "x")
    server.runner.close_gate()
    body = {"messages": ASK, "stream": True, "cache_salt": uuid.uuid4().hex, **fields}
    try:
        with server.http.stream("POST", "/v1/chat/completions", json=body):
            plan = server.runner.wait_in_step()
            return server.tokenizer.decode(plan.token_ids, skip_special_tokens=False)
    finally:
        server.runner.allow()


def test_thinking_is_told_beside_the_answer(server):
    script = says(server, TEXT)
    assert START_ID in script
    assert END_ID in script
    answer = ask(server)
    message = message_of(answer)
    assert message == {
        "role": "assistant",
        "content": ANSWER,
        "reasoning": THOUGHT,
        "reasoning_content": THOUGHT,
        "refusal": None,
    }
    num_thought = script.index(END_ID) + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    thought, said, events = streamed(server, stream_options={"include_usage": True})
    assert (thought, said, finish_reasons(events)) == (THOUGHT, ANSWER, ["stop"])
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}


@pytest.mark.quick(every=2)
def test_openai_s_client_sees_it(server):
    says(server, TEXT)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        answer = client.chat.completions.create(model="tiny", messages=ASK)
        assert answer.choices[0].message.reasoning_content == THOUGHT
        assert answer.usage.completion_tokens_details.reasoning_tokens > 3
        chunks = list(client.chat.completions.create(model="tiny", messages=ASK, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == ANSWER


def test_who_does_not_want_thinking_gets_none(server):
    says(server, TEXT)
    answer = ask(server, include_reasoning=False)
    assert message_of(answer)["content"] == ANSWER
    assert message_of(answer)["reasoning"] is message_of(answer)["reasoning_content"] is None
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
    thought, said, events = streamed(server, include_reasoning=False)
    assert (thought, said) == ("", ANSWER)
    assert THOUGHT not in json.dumps(events)


def test_what_is_cut_off_in_thinking_is_thinking(server):
    says(server, TEXT)
    answer = ask(server, max_tokens=4)
    message = message_of(answer)
    assert message["content"] is None
    assert THOUGHT.startswith(message["reasoning"])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_may_lie_in_thinking_or_across_its_end(server):
    says(server, TEXT)
    message = message_of(ask(server, stop=" <"))
    assert (message["reasoning"], message["content"]) == ("Well, 1", None)
    message = message_of(ask(server, stop="think>\n\nY"))
    assert (message["reasoning"], message["content"]) == (f"{THOUGHT}\n</", None)
    thought, said, _ = streamed(server, stop="think>\n\nY")
    assert (thought, said) == (f"{THOUGHT}\n</", "")
    message = message_of(ask(server, stop="s, it"))
    assert (message["reasoning"], message["content"]) == (THOUGHT, "Ye")


@pytest.mark.quick(every=2)
def test_every_choice_thinks_for_itself_and_keeps_its_logprobs(server):
    fields = {"n": 3, "seed": 5, "max_tokens": 24, "logprobs": True, "logit_bias": {str(END_ID): 6.5}}
    fields |= {"chat_template_kwargs": {"open_thinking": True}}
    answer = ask(server, **fields)
    assert len(answer["choices"]) == 3
    num_tokens = 0
    for choice in answer["choices"]:
        index, message = choice["index"], choice["message"]
        thought, said, events = streamed(server, index, **fields)
        assert thought == (message["reasoning"] or "")
        assert said == (message["content"] or "")
        assert len(choice["logprobs"]["content"]) > 0
        told = [
            one["logprobs"]["content"]
            for event in events
            for one in event["choices"]
            if one["index"] == index and one["logprobs"]
        ]
        assert [entry for entries in told for entry in entries] == choice["logprobs"]["content"]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        num_tokens += tokens.index("</think>") + 1 if "</think>" in tokens else len(tokens)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


def test_the_template_reads_the_client_s_variables(server):
    plain = prompt_of(server)
    assert plain.endswith("<|im_start|>assistant\n")
    assert prompt_of(server, chat_template_kwargs={"enable_thinking": False}) == plain + "<think>\n\n</think>\n\n"
    says(server, TEXT)
    answer = ask(server, chat_template_kwargs={"enable_thinking": False})
    assert message_of(answer)["content"] == TEXT
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    says(server, TEXT.removeprefix("<think>\n"))
    assert message_of(ask(server, chat_template_kwargs={"open_thinking": True}))["reasoning"] == THOUGHT


@pytest.mark.parametrize(
    ("variables", "says_what"),
    [
        ({"budget": 10}, "a budget of 10 is too much"),
        ({"budget": 10**8}, "too large"),
        ({"budget": "many"}, "refused chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"tools": []}, "tools"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"raise_exception": 1}, "raise_exception"),
        ({"bos_token": "x"}, "bos_token"),
        ({"a b": 1}, "no name"),
        ({"text": "x" * 9000}, "9"),
        ({f"v{number}": 1 for number in range(33)}, "33"),
        (["x"], "object"),
    ],
)
def test_variables_that_are_not_taken(server, variables, says_what):
    body = {"messages": ASK, "chat_template_kwargs": variables, "max_tokens": 1}
    error = error_of(server.http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "chat_template_kwargs"
    assert says_what in error["message"]


def test_a_template_that_refuses_the_messages_is_not_the_variables_fault(server, monkeypatch):
    monkeypatch.setattr(server.tokenizer._tokenizer, "chat_template", "{{ raise_exception('no ' ~ (tone or 'way')) }}")
    body = {"messages": ASK, "chat_template_kwargs": {"tone": "shouting"}}
    error = error_of(server.http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "messages"
    assert "no way" in error["message"]


def test_what_was_thought_goes_to_the_template(server):
    for field in ("reasoning", "reasoning_content"):
        messages = [*ASK, {"role": "assistant", "content": ANSWER, field: THOUGHT}, {**ASK[0], "name": "Ann"}]
        prompt = prompt_of(server, messages=messages, chat_template_kwargs={"keep_thinking": True})
        assert f"<|im_start|>assistant\n<think>\n{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>" in prompt
        assert "<|im_start|>user Ann\n" in prompt
        assert THOUGHT not in prompt_of(server, messages=messages)
    error = error_of(server.http.post("/v1/chat/completions", json={"messages": [{**ASK[0], "reasoning": "x"}]}), 400)
    assert "assistant" in error["message"]


def test_a_message_is_continued(server):
    begun = [*ASK, {"role": "assistant", "content": "Yes, it "}]
    prompt = prompt_of(server, messages=begun, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nYes, it ")
    assert prompt_of(server, messages=begun, continue_final_message=True, add_generation_prompt=False) == prompt
    closed = prompt_of(server, messages=begun, add_generation_prompt=False)
    assert closed.endswith("Yes, it <|im_end|>\n")
    says(server, "is.")
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert message_of(ask(server, messages=begun, **fields))["content"] == "is."
    says(server, f"2.</think>{ANSWER}")
    begun = [*ASK, {"role": "assistant", "content": "<think>1 < "}]
    message = message_of(ask(server, messages=begun, **fields))
    assert (message["reasoning"], message["content"]) == ("2.", ANSWER)


@pytest.mark.parametrize(
    ("fields", "says_what"),
    [
        ({"add_generation_prompt": True, "messages": [*ASK, {"role": "assistant", "content": "x"}]}, "both true"),
        ({}, "not what the assistant said"),
    ],
)
def test_messages_that_cannot_be_continued(server, fields, says_what):
    body = {"messages": ASK, "continue_final_message": True, **fields}
    error = error_of(server.http.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "continue_final_message"
    assert says_what in error["message"]


def test_a_template_that_leaves_the_last_message_out(server, monkeypatch):
    monkeypatch.setattr(server.tokenizer._tokenizer, "chat_template", "{{ messages[0].content }}")
    body = {"messages": [*ASK, {"role": "assistant", "content": "x"}], "continue_final_message": True}
    assert "cannot be continued" in error_of(server.http.post("/v1/chat/completions", json=body), 400)["message"]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_answer_behind_thinking_is_what_was_asked_for(server, seed, opens):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    bias = {str(END_ID): 7.0, str(START_ID): 60.0}
    fields = {"seed": seed, "max_tokens": 600, "logit_bias": bias, "chat_template_kwargs": {"open_thinking": opens}}
    answer = ask(server, response_format=form, **fields)
    message = message_of(answer)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    Draft202012Validator(SCHEMA).validate(json.loads(message["content"]))
    thought, said, _ = streamed(server, response_format=form, **fields)
    assert (thought, said) == (message["reasoning"] or "", message["content"])
    message = message_of(ask(server, guided_regex=" [ab]{3,9}", **fields))
    assert re.fullmatch(" [ab]{3,9}", message["content"])
    choice = ask(server, tools=[TOOL, OTHER], tool_choice="required", parallel_tool_calls=False, **fields)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] in ("compare", "forget")


@pytest.mark.quick(every=2)
def test_only_allowed_tools_are_called_and_the_prompt_shows_all(server):
    which = {"mode": "required", "tools": [{"type": "function", "function": {"name": "compare"}}]}
    allowed = {"type": "allowed_tools", "allowed_tools": which}
    both = prompt_of(server, tools=[TOOL, OTHER])
    assert prompt_of(server, tools=[TOOL, OTHER], tool_choice=allowed) == both
    server.runner.script = None
    fields = {"tools": [TOOL, OTHER], "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 600}
    for seed in range(3):
        message = message_of(ask(server, tool_choice=allowed, seed=seed, parallel_tool_calls=False, **fields))
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "compare"
        Draft202012Validator(SCHEMA).validate(json.loads(call["function"]["arguments"]))
    forgets = '<tool_call>\n{"name": "forget", "arguments": {}}\n</tool_call>'
    says(server, forgets)
    freely = {"type": "allowed_tools", "allowed_tools": {**which, "mode": "auto"}}
    assert message_of(ask(server, tool_choice=freely, **fields))["content"] == forgets
    assert message_of(ask(server, tool_choice="auto", **fields))["tool_calls"][0]["function"]["name"] == "forget"


@pytest.mark.parametrize(
    "which",
    [
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "nobody"}}]},
        {"mode": "auto", "tools": []},
        {"mode": "never", "tools": [{"type": "function", "function": {"name": "compare"}}]},
        "compare",
    ],
)
def test_tools_that_cannot_be_allowed(server, which):
    body = {"messages": ASK, "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": which}}
    assert error_of(server.http.post("/v1/chat/completions", json=body), 400)["param"] == "tool_choice"
