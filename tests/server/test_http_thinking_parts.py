"""Thinking models behind Responses and Anthropic's messages: what they think is a part of its own."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from local_server import PATIENCE_S, LocalServer

THOUGHT, ANSWER = "Well, 1 < 2.", "Yes, it is."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
HI = [{"role": "user", "content": "Is 1 less than 2?"}]
CALL = '{"name": "f", "arguments": {"a": 1}}'
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def thinker(tiny_chat_model):
    server = LocalServer(tiny_chat_model, door={"reasoning_parser": "qwen3"}, kv_cache_memory_bytes=2**22)
    yield server
    server.check_pool()
    server.close()


@pytest.fixture
def server(thinker):
    yield thinker
    thinker.runner.script = None


def says(server, text):
    server.runner.script = [*server.tokenizer.encode(text), 2]


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


def test_thoughts_are_blocks_where_they_are_asked_for(server, messages):
    says(server, TEXT)
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        blocks, whole = messages(thinking=thinking)
        assert [(kind, text.strip()) for kind, text in blocks] == [("thinking", THOUGHT), ("text", ANSWER)]
        assert whole.stop_reason == "end_turn"
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        blocks, whole = messages(**fields)
        assert [(kind, text.strip()) for kind, text in blocks] == [("text", ANSWER)]
        assert whole.usage.output_tokens == len(server.runner.script)


def test_a_thought_before_a_call(server, messages):
    says(server, f"<think>\n{THOUGHT}\n</think>\n\n<tool_call>[{CALL}]</tool_call>")
    tools = [{"name": "f", "input_schema": SCHEMA}]
    blocks, whole = messages(thinking={"type": "adaptive"}, tools=tools)
    assert [kind for kind, _ in blocks] == ["thinking", "tool_use"]
    assert (blocks[1][1], whole.stop_reason) == ({"a": 1}, "tool_use")
    says(server, "Good.")
    history = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "And?"}]
    assert messages(messages=history, tools=tools)[0] == [("text", "Good.")]


def test_thoughts_are_items_of_responses(server):
    says(server, TEXT)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        whole = client.responses.create(model="tiny", input="Is it?")
        with client.responses.stream(model="tiny", input="Is it?") as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        for response in (whole, streamed):
            thought, answer = response.output
            assert (thought.type, thought.status, thought.content[0].text.strip()) == (
                "reasoning",
                "completed",
                THOUGHT,
            )
            assert answer.content[0].text.strip() == response.output_text.strip() == ANSWER
            details = response.usage.output_tokens_details
            assert 0 < details.reasoning_tokens < response.usage.output_tokens
        deltas = [event for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(event.delta for event in deltas).strip() == THOUGHT
        assert {(event.item_id, event.output_index) for event in deltas} == {(streamed.output[0].id, 0)}
        (done,) = (event for event in events if event.type == "response.reasoning_text.done")
        assert done.text.strip() == THOUGHT
        says(server, "Good.")
        history = [*HI, *whole.output, {"role": "user", "content": "And?"}]
        sent = client.responses.create(model="tiny", input=history)
        stored = client.responses.create(model="tiny", input="And?", previous_response_id=whole.id)
        assert sent.output_text == stored.output_text == "Good."


def test_an_answer_of_a_form_behind_thoughts(server):
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    says(server, f'<think>\n{THOUGHT}\n</think>\n\n{{"a": 1}}')
    answer = server.http.post("/v1/responses", json={"input": "a", "text": text}).json()
    thought, message = answer["output"]
    assert thought["content"][0]["text"].strip() == THOUGHT
    assert json.loads(message["content"][0]["text"]) == {"a": 1}
