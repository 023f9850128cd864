"""/v1/responses as openai-python uses it, and what of it is not kept here."""

from __future__ import annotations

import json
import uuid

import openai
import pytest
from local_server import LocalServer, error_of

TEXT = "Say something, naïve 日本."
ALONE = {"extra_body": {"cache_salt": "scripted"}}  # a script computes no KV that others may find
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(tiny: LocalServer):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_of(tiny: LocalServer, messages: list[dict], num_tokens: int) -> str:
    body = {"messages": messages, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = tiny.http.post("/v1/chat/completions", json=body)
    return answer.json()["choices"][0]["message"]["content"]


def test_a_text(tiny, client):
    salt = uuid.uuid4().hex
    body = {**GREEDY, "extra_body": {"ignore_eos": True, "cache_salt": salt}}
    cold, warm = (
        client.responses.create(model="tiny", input=TEXT, max_output_tokens=9, metadata={"a": "b"}, **body)
        for _ in range(2)
    )
    assert cold.output_text == warm.output_text == chat_of(tiny, [{"role": "user", "content": TEXT}], 9)
    assert cold.id.startswith("resp_")
    assert cold.id != warm.id
    assert (cold.object, cold.model, cold.store, cold.metadata) == ("response", "tiny", True, {"a": "b"})
    assert (cold.status, cold.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cold.temperature, cold.top_p, cold.max_output_tokens, cold.error) == (0, 1, 9, None)
    (message,) = cold.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    usage = cold.usage
    assert usage.output_tokens == 9
    assert usage.total_tokens == usage.input_tokens + 9
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.input_tokens > warm.usage.input_tokens_details.cached_tokens > 0
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_ends_by_itself_is_completed(tiny, client):
    tiny.runner.script = [*tiny.tokenizer.encode("one two three"), 2]
    for response in (
        client.responses.create(model="tiny", input="count", **ALONE),
        _last(client.responses.create(model="tiny", input="count", stream=True, **ALONE)),
    ):
        assert (response.status, response.incomplete_details) == ("completed", None)
        assert response.output_text == "one two three"
        assert response.output[0].status == "completed"
        assert response.completed_at >= response.created_at


def test_instructions_and_messages_are_a_chat(tiny, client):
    answer = client.responses.create(
        model="tiny",
        instructions="Be short.",
        input=[
            {"role": "user", "content": "Hi"},
            {"type": "message", "role": "assistant", "content": "Hello"},
            {"role": "user", "content": [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "so?"}]},
        ],
        max_output_tokens=12,
        **GREEDY,
    )
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And\nso?"},
    ]
    assert answer.output_text == chat_of(tiny, messages, 12)


def test_an_answer_can_be_sent_back(tiny, client):
    """As the guides do: the input grows by the output, item by item."""
    first = client.responses.create(model="tiny", input="Hi", max_output_tokens=6, **GREEDY)
    history = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "Go on"}]
    raw = client.responses.with_raw_response.create(model="tiny", input=history, max_output_tokens=6, **GREEDY)
    assert "x-pagefold-ignored" not in raw.headers
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on"},
    ]
    assert raw.parse().output_text == chat_of(tiny, messages, 6)


def test_a_stream_has_the_documented_events(tiny, client):
    whole = client.responses.create(model="tiny", input=TEXT, max_output_tokens=20, **GREEDY)
    events = list(client.responses.create(model="tiny", input=TEXT, max_output_tokens=20, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert len(set(map(kinds.index, ("response.content_part.added", "response.output_text.delta")))) == 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == whole.output_text
    done = {event.type: event for event in events}
    assert done["response.output_text.done"].text == whole.output_text
    assert done["response.content_part.done"].part.text == whole.output_text
    assert done["response.output_item.done"].item.content[0].text == whole.output_text
    assert done["response.created"].response.status == "in_progress"
    last = done["response.incomplete"].response
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == 20
    assert last.id == done["response.created"].response.id
    assert {event.item_id for event in deltas} == {last.output[0].id}


def test_openai_s_stream_helper(tiny, client):
    tiny.runner.script = [*tiny.tokenizer.encode("one two three"), 2]
    with client.responses.stream(model="tiny", input="count", **ALONE) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "one two three"


def test_the_stream_on_the_wire(tiny):
    body = {"input": "x", "max_output_tokens": 2, "stream": True, "ignore_eos": True}
    with tiny.http.stream("POST", "/v1/responses", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().removesuffix("\n\n").split("\n\n")
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


def test_a_stream_that_fails_says_so(narrow, caplog):
    narrow.runner.script = narrow.tokenizer.encode("one two three four five six")
    narrow.runner.close_gate()
    narrow.runner.allow(5)
    with openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.responses.create(model="tiny", input="x", max_output_tokens=50, stream=True, **ALONE)
        text = ""
        for event in stream:
            if event.type == "response.output_text.delta":
                if not text:
                    narrow.runner.wait_in_step()
                    narrow.runner.fail(3)
                    narrow.runner.allow()
                text += event.delta
    assert event.type == "response.failed"
    assert event.response.status == "failed"
    assert event.response.error.code == "server_error"
    assert event.response.output_text == text
    assert text.startswith("one")


def test_a_whole_one_that_fails_is_a_500(tiny, client, caplog):
    tiny.runner.fail(3)
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="tiny", input="x")
    assert caught.value.code == "step_failed"


TOOL = {"type": "function", "name": "f", "parameters": {}}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
MESSAGE = {"role": "user", "content": "Hi"}

BAD = {
    "no input": ({}, "input", "missing"),
    "null": ({"input": None}, "input", "missing"),
    "number": ({"input": 5}, "input", "list"),
    "no messages": ({"input": []}, "input", "at least 1"),
    "texts": ({"input": ["a"]}, "input.0", "object"),
    "half a character": ({"input": "\ud83d"}, "input.0.content.0.text", "surrogate"),
    "too many": ({"input": [MESSAGE] * 2_049}, "input", "2048"),
    "too many parts": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2_049}]},
        "input",
        "2048",
    ),
    "unknown role": ({"input": [{"role": "king", "content": "a"}]}, "input.0.role", "'king'"),
    "no content": ({"input": [{"role": "user"}]}, "input.0.content", "missing"),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "image"),
    "half a character in parts": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "\ud83d"}]}]},
        "input.0.content.0.text",
        "surrogate",
    ),
    "another item": ({"input": [{"type": "computer_call", "call_id": "1"}]}, "input.0", "function_call_output"),
    "item of a number": ({"input": [{"type": 5}]}, "input.0", "function_call_output"),
    "item of a list": ({"input": [{"type": []}]}, "input.0", "function_call_output"),
    "call without id": ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "missing"),
    "call's arguments": (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]},
        "input.0.arguments",
        "JSON object",
    ),
    "output number": (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]},
        "input.0.output",
        "text",
    ),
    "output image": (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]},
        "input.0.output.0.type",
        "no images",
    ),
    "instructions": ({"input": "a", "instructions": 5}, "instructions", "5"),
    "max_output_tokens 0": ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "0"),
    "temperature": ({"input": "a", "temperature": 2.1}, "temperature", "2.1"),
    "top_p": ({"input": "a", "top_p": 0}, "top_p", "0"),
    "top_k": ({"input": "a", "top_k": -2}, "top_k", "-2"),
    "stream": ({"input": "a", "stream": "yes"}, "stream", "'yes'"),
    "metadata": ({"input": "a", "metadata": {"a": 5}}, "metadata.a", "5"),
    "much metadata": ({"input": "a", "metadata": {str(n): "" for n in range(17)}}, "metadata", "16"),
    "long metadata": ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata.a", "512"),
    "long user": ({"input": "a", "user": "b" * 513}, "user", "512"),
    "priority": ({"input": "a", "priority": 3}, "priority", "fcfs looks at none"),
    "store": ({"input": "a", "store": "yes"}, "store", "'yes'"),
    "previous": ({"input": "a", "previous_response_id": 5}, "previous_response_id", "5"),
    "unknown previous": ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "resp_1"),
    "half a previous": ({"input": "a", "previous_response_id": "\ud83d"}, "previous_response_id", "surrogate"),
    "conversation": ({"input": "a", "conversation": "conv_1"}, "conversation", "not supported"),
    "background": ({"input": "a", "background": True}, "background", "not supported"),
    "prompt": ({"input": "a", "prompt": {"id": "p"}}, "prompt", "not supported"),
    "include": ({"input": "a", "include": ["message.output_text.logprobs"]}, "include.0", "chat/completions"),
    "include number": ({"input": "a", "include": 5}, "include", "5"),
    "search": ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0", "calls nothing itself"),
    "nested tool": ({"input": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "miss"),
    "tools text": ({"input": "a", "tools": "f"}, "tools", "list"),
    "tools alike": ({"input": "a", "tools": [TOOL, TOOL]}, "tools", "same name"),
    "many tools": ({"input": "a", "tools": [TOOL] * 129}, "tools", "128"),
    "half a tool": ({"input": "a", "tools": [{**TOOL, "description": "\ud83d"}]}, "tools.0.description", "surrogate"),
    "half a schema": (
        {"input": "a", "tools": [{**TOOL, "parameters": {"title": "\ud83d"}}], "tool_choice": "none"},
        "tools.0.parameters",
        "surrogate",
    ),
    "no number": (
        {"input": "a", "tools": [{**TOOL, "parameters": {"a": float("nan")}}], "tool_choice": "none"},
        "tools.0.parameters",
        "number",
    ),
    "tool's schema": (
        {"input": "a", "tools": [{**TOOL, "parameters": {"$ref": "#/x"}}], "tool_choice": "required"},
        "tools",
        "does not compile",
    ),
    "tool_choice": ({"input": "a", "tool_choice": "required"}, "tool_choice", "no such tool"),
    "tool_choice any": ({"input": "a", "tools": [TOOL], "tool_choice": "any"}, "tool_choice", "required"),
    "tool_choice of another": (
        {"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
        "no such tool",
    ),
    "tool_choice half": (
        {"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "\ud83d"}},
        "tool_choice",
        "it must be",
    ),
    "none allowed": (
        {"input": "a", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice",
        "it must be",
    ),
    "others allowed": (
        {"input": "a", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "g"}]}},
        "tool_choice",
        "no such tool",
    ),
    "max_tool_calls": ({"input": "a", "max_tool_calls": 0}, "max_tool_calls", "0"),
    "text text": ({"input": "a", "text": "json"}, "text", "object"),
    "format text": ({"input": "a", "text": {"format": "json"}}, "text.format", "json_schema"),
    "format unknown": ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    "no schema": ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
    "strict text": ({"input": "a", "text": {"format": {**SCHEMA, "strict": "x"}}}, "text.format", "true or false"),
    "half a name": ({"input": "a", "text": {"format": {**SCHEMA, "name": "\ud83d"}}}, "text.format", "surrogate"),
    "bad schema": (
        {
            "input": "a",
            "text": {"format": {**SCHEMA, "strict": True, "schema": {"type": "array", "uniqueItems": True}}},
        },
        "text",
        "uniqueItems",
    ),
    "verbosity": ({"input": "a", "text": {"verbosity": "loud"}}, "text.verbosity", "loud"),
    "truncation": ({"input": "a", "truncation": "auto"}, "truncation", "not supported"),
    "logprobs": ({"input": "a", "top_logprobs": 2}, "top_logprobs", "not supported"),
}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("case", BAD)
def test_what_is_bad_or_not_kept_here_is_refused_by_name(tiny, case):
    body, param, says = BAD[case]
    for stream in ({}, {"stream": True}):
        content = json.dumps({**stream, **body})
        response = tiny.http.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
        error = error_of(response, 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert says in error["message"]


def test_longer_than_the_context(tiny):
    for text in ("word " * 3000, "word " * 200_000):
        error = error_of(tiny.http.post("/v1/responses", json={"input": text}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_what_means_nothing_is_no_error(tiny):
    nothing = {
        "store": False,
        "previous_response_id": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
        "service_tier": "auto",
        "prompt_cache_key": "me",
        "safety_identifier": "me",
        "stream_options": {"include_obfuscation": False},
        "user": "me",
        "metadata": {},
    }
    response = tiny.http.post("/v1/responses", json={"input": "a", "max_output_tokens": 2, **nothing})
    assert response.status_code == 200
    assert "x-pagefold-ignored" not in response.headers


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority"])
def test_a_tier_is_told_back(tiny, tier):
    response = tiny.http.post("/v1/responses", json={"input": "a", "max_output_tokens": 2, "service_tier": tier})
    assert response.json()["service_tier"] == ("default" if tier == "auto" else tier)
    wrong = tiny.http.post("/v1/responses", json={"input": "a", "service_tier": "gold"})
    assert error_of(wrong, 400)["param"] == "service_tier"


def _last(events):
    *_, last = events
    return last.response
