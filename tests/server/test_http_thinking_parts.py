"""Thinking models behind Responses and Anthropic's messages: what they think is a part of its own.

The test writes the outputs, and they are held to their grammars: what is no answer of the form that was asked for is
refused.
"""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from local_server import PATIENCE_S, LocalServer

THOUGHT, ANSWER = "Well, 1 < 2.", "Yes, it is."
THINKING = f"<think>\n{THOUGHT}\n</think>\n\n"
HI = [{"role": "user", "content": "Is 1 less than 2?"}]
CALL = '{"name": "f", "arguments": {"a": 1}}'
CALLS = f"<tool_call>[\n{CALL}\n]</tool_call>"
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
FORM = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{ '<tool_call>[' + tools | tojson + '\\n' }}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
"""


@pytest.fixture(scope="module")
def thinker(tiny_chat_model):
    server = LocalServer(tiny_chat_model, door={"reasoning_parser": "qwen3"}, kv_cache_memory_bytes=2**22)
    yield server
    server.check_pool()
    server.close()


@pytest.fixture
def server(thinker, monkeypatch):
    monkeypatch.setattr(thinker.tokenizer._tokenizer, "chat_template", TEMPLATE)
    yield thinker
    thinker.runner.script = None


@pytest.fixture
def messages(server):
    """Ask by Anthropic's client, whole and streamed."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        def ask(**fields):
            asked = {"model": "tiny", "messages": HI, "max_tokens": 200, **fields}
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            blocks = [
                [(block.type, getattr(block, block.type, None) or block.input) for block in message.content]
                for message in (whole, streamed)
            ]
            assert blocks[0] == blocks[1]
            return blocks[0], whole

        yield ask


@pytest.fixture
def responses(server):
    """Ask by OpenAI's client, whole and streamed."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        def ask(**fields):
            asked = {"model": "tiny", "input": HI, **fields}
            whole = client.responses.create(**asked)
            with client.responses.stream(**asked) as stream:
                events = list(stream)
            items = [items_of(response) for response in (whole, events[-1].response)]
            assert items[0] == items[1]
            return items[0], whole, events

        yield ask


def items_of(response):
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


def says(server, text):
    server.runner.script = [*server.tokenizer.encode(text), 2]


def num_tokens(server, chat, tools=None):
    return len(server.tokenizer.encode_chat(chat, tools))


def test_thoughts_are_blocks_where_they_are_asked_for(server, messages):
    says(server, THINKING + ANSWER)
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        blocks, whole = messages(thinking=thinking)
        assert blocks == [("thinking", THOUGHT), ("text", ANSWER)]
        assert (whole.stop_reason, whole.content[0].signature) == ("end_turn", "")
    blocks, whole = messages()
    assert blocks == [("text", ANSWER)]
    assert whole.usage.output_tokens == len(server.runner.script)
    says(server, ANSWER)  # the template has ended the thinking
    assert messages(thinking={"type": "disabled"})[0] == [("text", ANSWER)]


def test_a_thought_before_a_call_goes_back_to_the_template(server, messages):
    says(server, THINKING + CALLS)
    tools = [{"name": "f", "input_schema": SCHEMA}]
    told = {"type": "function", "function": {"name": "f", "description": "", "parameters": SCHEMA}}
    for choice in ({"type": "auto"}, {"type": "any"}):
        blocks, whole = messages(thinking={"type": "adaptive"}, tools=tools, tool_choice=choice)
        assert blocks == [("thinking", THOUGHT), ("tool_use", {"a": 1})]
        assert whole.stop_reason == "tool_use"
    says(server, "Good.")
    result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "2"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    history = [*HI, {"role": "assistant", "content": [*whole.content, redacted]}, {"role": "user", "content": [result]}]
    blocks, whole = messages(messages=history, tools=tools)
    assert blocks == [("text", "Good.")]
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    said = {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": [call]}
    usage = whole.usage
    assert num_tokens(server, [*HI, said, {"role": "tool", "content": "2"}], [told]) == (
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )


def test_a_stream_begins_while_thoughts_are_left_out(server):
    says(server, THINKING + ANSWER)
    server.runner.close_gate()
    server.runner.allow(4)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        events = client.messages.create(model="tiny", messages=HI, max_tokens=200, stream=True)
        try:
            assert next(events).type == "message_start"
        finally:
            server.runner.allow()
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas) == ANSWER


def test_what_the_user_says_is_no_thought(server):
    block = {"type": "thinking", "thinking": "x", "signature": ""}
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    answer = server.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "only the assistant's messages may have thinking blocks" in answer.json()["error"]["message"]


def test_thoughts_are_items_of_responses(server, responses):
    says(server, THINKING + ANSWER)
    items, whole, events = responses()
    assert items == [("reasoning", THOUGHT), ("message", ANSWER)]
    for response in (whole, events[-1].response):
        assert (response.output[0].status, response.output[0].summary) == ("completed", [])
        assert response.output_text == ANSWER
        details = response.usage.output_tokens_details
        assert 0 < details.reasoning_tokens < response.usage.output_tokens
    of_thought = [event for event in events if getattr(event, "output_index", None) == 0]
    kinds = [event.type.removeprefix("response.") for event in of_thought if not event.type.endswith(".delta")]
    assert kinds == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    deltas = [event for event in of_thought if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in deltas) == THOUGHT
    assert {event.item_id for event in deltas} == {events[-1].response.output[0].id}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_conversation_goes_on_after_thoughts(server, responses, is_stored):
    """By its id, and by sending all of it back, the template is told the same: what chats tell it."""
    says(server, THINKING + CALLS)
    called = responses(tools=[FUNCTION], store=is_stored)[1]
    output = {"type": "function_call_output", "call_id": called.output[1].call_id, "output": "2"}
    says(server, THINKING + ANSWER)
    before = [output] if is_stored else [*HI, *called.output, output]
    answered = responses(input=before, previous_response_id=called.id if is_stored else None, store=is_stored)[1]
    says(server, "Good.")
    more = {"role": "user", "content": "And?"}
    before = [more] if is_stored else [*before, *answered.output, more]
    items, last, _ = responses(input=before, previous_response_id=answered.id if is_stored else None)
    assert items == [("message", "Good.")]
    thought = {"role": "assistant", "content": "", "reasoning_content": THOUGHT}
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    by_hand = [
        *HI,
        {**thought, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {**thought, "content": ANSWER},
        more,
    ]
    assert last.usage.input_tokens == num_tokens(server, by_hand)


def test_a_thought_is_whole_though_the_answer_is_cut_off_at_once(server, responses):
    """The token that shows that the thought has ended is the last one."""
    says(server, THINKING + ANSWER)
    items, whole, events = responses(max_output_tokens=len(server.tokenizer.encode(f"{THINKING}Yes")))
    assert items == [("reasoning", THOUGHT), ("message", "Yes")]
    done = [event.item.status for event in events if event.type == "response.output_item.done"]
    assert done == [item.status for item in whole.output] == ["completed", "incomplete"]


def test_what_was_cut_off_while_it_thought_is_a_thought(server, responses):
    says(server, THINKING + ANSWER)
    items, whole, _ = responses(max_output_tokens=6)
    assert [kind for kind, _ in items] == ["reasoning"]
    assert THOUGHT.startswith(items[0][1])
    assert (whole.status, whole.output[0].status) == ("incomplete", "incomplete")
    says(server, "Good.")
    items, _, _ = responses(input="And?", previous_response_id=whole.id)
    assert items == [("message", "Good.")]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("text", "kind"), [('{"a": 1}', "message"), (CALLS, "function_call")], ids=["answer", "calls"])
def test_behind_thoughts_the_model_calls_or_answers_in_a_form(server, responses, messages, text, kind):
    says(server, THINKING + text)
    said = {"message": '{"a": 1}', "function_call": '{"a": 1}'}[kind]
    items, whole, _ = responses(text=FORM, tools=[FUNCTION])
    assert items == [("reasoning", THOUGHT), (kind, said)]
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    blocks, _ = messages(
        thinking={"type": "adaptive"},
        tools=[{"name": "f", "input_schema": SCHEMA}],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert blocks == [("thinking", THOUGHT), ("text", said) if kind == "message" else ("tool_use", {"a": 1})]
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    answer = server.http.post("/v1/chat/completions", json={"messages": HI, "tools": [tool], **fields}).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == THOUGHT
    assert message["content"] == (said if kind == "message" else None)
    assert len(message.get("tool_calls", [])) == (kind == "function_call")


def test_an_answer_of_a_form_behind_thoughts(server, responses):
    says(server, f'{THINKING}{{"a": 1}}')
    items, whole, _ = responses(text=FORM)
    assert items == [("reasoning", THOUGHT), ("message", '{"a": 1}')]
    assert json.loads(whole.output_text) == {"a": 1}
    says(server, f'{THINKING}{{"a": 2}}')
    answer = server.http.post("/v1/responses", json={"input": HI, "text": FORM})
    assert answer.status_code == 400, "the grammar holds behind thoughts"
