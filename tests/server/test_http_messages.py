"""/v1/messages as Anthropic's client uses it: whole and streamed, with tools, and what of it is refused here."""

from __future__ import annotations

import json
import uuid

import anthropic
import pytest
from jsonschema import Draft202012Validator
from local_server import PATIENCE_S, LocalServer

HI = [{"role": "user", "content": "Say something, naïve 日本."}]
SAMPLING = {"temperature": 0, "ignore_eos": True}
GREEDY = {"model": "tiny", "messages": HI, "extra_body": SAMPLING}  # this client has no temperature of its own any more
ALONE = {"extra_body": {"cache_salt": "scripted"}}  # a script computes no KV that others may find
WEATHER = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Tromsø"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "weather", "description": "Tell the weather.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
SCHEMAS = {tool["name"]: tool["input_schema"] for tool in TOOLS}
ARGUMENTS = {"place": "Tromsø", "days": 3}
CALL = '{"name": "weather", "arguments": {"place": "Tromsø", "days": 3}}'


def client_of(server: LocalServer, **settings) -> anthropic.Anthropic:
    settings = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S} | settings
    return anthropic.Anthropic(base_url=server.url, **settings)


@pytest.fixture
def client(tiny):
    with client_of(tiny) as client:
        yield client


def says(server: LocalServer, text: str) -> None:
    """Let the model say ``text``, and end."""
    server.runner.script = [*server.tokenizer.encode(text), 2]


def create(client, **fields):
    return client.messages.create(**{"model": "tiny", "messages": HI, "max_tokens": 400, **ALONE, **fields})


def streamed(client, **fields):
    with client.messages.stream(**{"model": "tiny", "messages": HI, "max_tokens": 400, **ALONE, **fields}) as stream:
        return stream.get_final_message()


def told(message):
    """What a message says, but for its ids."""
    blocks = [("text", block.text) if block.type == "text" else (block.name, block.input) for block in message.content]
    return blocks, message.stop_reason, message.stop_sequence


def chat_of(tiny: LocalServer, messages: list[dict], num_tokens: int) -> str:
    body = {"messages": messages, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = tiny.http.post("/v1/chat/completions", json=body)
    return answer.json()["choices"][0]["message"]["content"]


def test_a_message(tiny, client):
    body = {**GREEDY, "extra_body": {**SAMPLING, "cache_salt": uuid.uuid4().hex}}
    cold, warm = (client.messages.create(max_tokens=9, **body) for _ in range(2))
    assert cold.content[0].text == warm.content[0].text == chat_of(tiny, HI, 9)
    assert (cold.type, cold.role, cold.model) == ("message", "assistant", "tiny")
    assert told(cold)[1:] == ("max_tokens", None)
    assert cold.id.startswith("msg_")
    assert cold.id != warm.id
    assert cold._request_id
    count = client.messages.count_tokens(model="tiny", messages=HI).input_tokens
    size = 16
    for message, num_read in ((cold, 0), (warm, count - 1)):
        usage = message.usage
        assert (usage.output_tokens, usage.cache_read_input_tokens) == (9, num_read)
        assert usage.cache_creation_input_tokens == max(0, count // size * size - num_read)
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == count


@pytest.mark.parametrize("asks", [{"kv_keep": 2.0}, {"kv_keep": 0.5}, {"kv_quality": "best"}])
def test_a_kind_that_is_not_offered_is_not_counted_for(tiny, asks):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = tiny.http.post(path, json={"model": "tiny", "messages": HI, "max_tokens": 2, **asks})
        assert answer.status_code == 400, answer.text
        assert next(iter(asks)) in answer.json()["error"]["message"]


def test_counting_refuses_what_a_message_is_refused_for(tiny):
    body = {"model": "tiny", "max_tokens": 1, "messages": HI, "returns_in_s": -1}
    told = [tiny.http.post(path, json=body) for path in ("/v1/messages", "/v1/messages/count_tokens")]
    assert [response.status_code for response in told] == [400, 400]
    assert "returns_in_s" in told[1].json()["error"]["message"]


def test_a_stream_has_the_documented_events(tiny):
    salt = uuid.uuid4().hex
    body = {"messages": HI, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    whole = tiny.http.post("/v1/messages", json=body).json()
    with tiny.http.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        parts = response.read().decode().removesuffix("\n\n").split("\n\n")
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name.removeprefix("event: ") == events[-1]["type"]
    kinds = [event["type"] for event in events]
    assert [kind for kind in kinds if kind != "content_block_delta"] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["id"][:4]) == ([], None, "msg_")
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert start["usage"]["cache_read_input_tokens"] == end["usage"]["cache_read_input_tokens"] > 0
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 20
    counts = [[count for name, count in each["usage"].items() if name != "cache_creation"] for each in (end, whole)]
    assert sum(counts[0]) == sum(counts[1])
    for usage in (end["usage"], whole["usage"]):
        created = usage["cache_creation"]
        assert created.keys() == {"ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"}
        assert sum(created.values()) == usage["cache_creation_input_tokens"]


def test_system_and_messages_are_a_chat(tiny, client):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "user", "content": "And"},
        {"role": "user", "content": [{"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}}]},
    ]
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And\nso?"},
    ]
    for system in ("Be short.", [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]):
        fields = {**GREEDY, "messages": messages, "system": system, "metadata": {"user_id": "me"}}
        raw = client.messages.with_raw_response.create(max_tokens=12, **fields)
        assert "x-pagefold-ignored" not in raw.headers
        assert raw.parse().content[0].text == chat_of(tiny, chat, 12)


def test_an_answer_goes_on_with_the_assistant_s_message(tiny, client):
    begun = {"role": "assistant", "content": "The rivers are"}
    fields = {**GREEDY, "messages": [*HI, begun]}
    answer = client.messages.create(max_tokens=12, **fields)
    body = {"messages": [*HI, begun], "max_tokens": 12, **SAMPLING}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    chat = tiny.http.post("/v1/chat/completions", json=body).json()
    assert answer.content[0].text == chat["choices"][0]["message"]["content"]
    count = client.messages.count_tokens(model="tiny", messages=[*HI, begun]).input_tokens
    assert count == chat["usage"]["prompt_tokens"]


def test_why_it_stopped(tiny, client):
    says(tiny, "one two three")
    assert told(create(client)) == told(streamed(client)) == ([("text", "one two three")], "end_turn", None)
    stop = {"stop_sequences": ["four", " thr"]}
    assert told(create(client, **stop)) == ([("text", "one two")], "stop_sequence", " thr")
    assert told(streamed(client, **stop)) == ([("text", "one two")], "stop_sequence", " thr")
    assert told(create(client, max_tokens=1))[1] == "max_tokens"
    tiny.runner.script = tiny.tokenizer.encode(" on")  # and on
    long = create(client, max_tokens=64_000, messages=[{"role": "user", "content": "and on " * 950}])
    assert long.stop_reason == "model_context_window_exceeded"
    usage = long.usage
    num_input = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert num_input + usage.output_tokens == 2048


def test_an_answer_without_text_is_an_empty_one(tiny, client):
    tiny.runner.script = [2]
    assert told(create(client)) == told(streamed(client)) == ([("text", "")], "end_turn", None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ({"type": "any"}, {"weather", "now"}, 99),
        ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "now"}, 1),
        ({"type": "tool", "name": "weather"}, {"weather"}, 1),
    ],
)
def test_a_call_that_must_be_is_one_that_is_allowed(client, choice, names, most):
    for seed in range(3):
        fields = {"tools": TOOLS, "tool_choice": choice, "extra_body": {"seed": seed}, "max_tokens": 600}
        message = create(client, **fields)
        assert told(streamed(client, **fields)) == told(message)
        assert message.stop_reason in ("tool_use", "max_tokens")
        assert 1 <= len(message.content) <= most
        for block in message.content[: None if message.stop_reason == "tool_use" else -1]:
            assert block.type == "tool_use"
            assert block.id.startswith("toolu_")
            assert block.name in names
            Draft202012Validator(SCHEMAS[block.name]).validate(block.input)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("Sunny, I think.", [("text", "Sunny, I think.")]),
        (f"<tool_call>[\n{CALL}\n]</tool_call>", [("weather", ARGUMENTS)]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [("weather", ARGUMENTS)] * 2),
        (f"Let me look.\n<tool_call>[{CALL}]</tool_call>", [("text", "Let me look."), ("weather", ARGUMENTS)]),
    ],
)
def test_the_model_may_call_or_answer(tiny, client, text, blocks):
    says(tiny, text)
    reason = "end_turn" if blocks[0][0] == "text" and len(blocks) == 1 else "tool_use"
    for choice in ({}, {"tool_choice": {"type": "auto"}}):
        for ask in (create, streamed):
            assert told(ask(client, tools=TOOLS, **choice)) == (blocks, reason, None)
    alone = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert len([name for name, _ in told(create(client, tools=TOOLS, **alone))[0] if name == "weather"]) <= 1
    assert told(create(client, tools=TOOLS, tool_choice={"type": "none"}))[0] == [("text", text)]


def test_a_call_that_is_cut_off(tiny, client):
    says(tiny, f"<tool_call>[{CALL}]</tool_call>")
    fields = {"tools": TOOLS, "max_tokens": 20}
    assert told(create(client, **fields)) == ([("weather", {})], "max_tokens", None)
    ((name, begun),), reason, _ = told(streamed(client, **fields))
    assert (name, reason) == ("weather", "max_tokens")
    assert begun.keys() <= ARGUMENTS.keys()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud83d"}', '{"a" 5}'])
def test_arguments_that_json_cannot_tell_are_no_500(tiny, client, arguments):
    says(tiny, f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>')
    assert told(create(client, tools=TOOLS)) == ([("weather", {})], "tool_use", None)


def test_a_conversation_goes_on_after_a_call(tiny, client):
    says(tiny, f"Let me look.\n<tool_call>[{CALL}]</tool_call>")
    first = create(client, tools=TOOLS)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "-3 °C", "is_error": False}
    ask = {"type": "text", "text": "Well?"}
    messages = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result, ask]}]
    says(tiny, "Cold.")
    raw = client.messages.with_raw_response.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=50, **ALONE)
    assert "x-pagefold-ignored" not in raw.headers
    assert told(raw.parse()) == ([("text", "Cold.")], "end_turn", None)
    call = {"function": {"name": "weather", "arguments": ARGUMENTS}}
    by_hand = [
        *HI,
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
        {"role": "tool", "content": "-3 °C"},
        {"role": "user", "content": "Well?"},
    ]
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in TOOLS
    ]
    counted = client.messages.count_tokens(model="tiny", messages=messages, tools=TOOLS).input_tokens
    assert counted == len(tiny.tokenizer.encode_chat(by_hand, tools))


def test_an_answer_of_a_form_with_tools_or_without(tiny, client):
    form = {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}}
    for seed in range(3):
        (block,) = create(client, **form, extra_body={"seed": seed}).content
        Draft202012Validator(WEATHER).validate(json.loads(block.text))
        for block in create(client, **form, tools=TOOLS, extra_body={"seed": seed}).content:
            given = json.loads(block.text) if block.type == "text" else block.input
            Draft202012Validator(SCHEMAS.get(getattr(block, "name", ""), WEATHER)).validate(given)


def test_the_model_may_call_before_it_answers_in_a_form(tiny, client):
    """The script is held to the grammar: what is no call and no answer would be refused."""
    form = {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}}
    says(tiny, f"<tool_call>[\n{CALL}\n]</tool_call>")
    assert told(create(client, tools=TOOLS, **form)) == ([("weather", ARGUMENTS)], "tool_use", None)
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    says(tiny, text)
    assert told(create(client, tools=TOOLS, **form)) == ([("text", text)], "end_turn", None)


def test_a_stream_that_fails_says_so(narrow, caplog):
    narrow.runner.script = narrow.tokenizer.encode("one two three four five six")
    narrow.runner.close_gate()
    narrow.runner.allow(6)
    texts = []

    def read(client) -> None:
        for event in create(client, stream=True, max_tokens=50):
            if event.type == "content_block_delta":
                if not texts:
                    narrow.runner.wait_in_step()
                    narrow.runner.fail(3)
                    narrow.runner.allow()
                texts.append(event.delta.text)

    with client_of(narrow) as client, pytest.raises(anthropic.APIStatusError) as caught:
        read(client)
    assert texts[0].startswith("one")
    assert caught.value.body["error"]["type"] == "api_error"


def test_a_whole_one_that_fails_is_a_500(tiny, client, caplog):
    tiny.runner.fail(3)
    with pytest.raises(anthropic.InternalServerError) as caught:
        create(client)
    assert caught.value.body["error"]["type"] == "api_error"


def refused(response, status: int, kind: str) -> str:
    """The message of an error, which must be in Anthropic's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["error"].keys() == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert int(response.headers["content-length"]) == len(response.content)
    return body["error"]["message"]


USER = {"role": "user", "content": "Hi"}
HALF = "\ud83d"
BODY = {"messages": [USER], "max_tokens": 5}


def blocks(*parts: dict, role: str = "user") -> dict:
    return {**BODY, "messages": [{"role": role, "content": list(parts)}, USER]}


USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}

BAD = {
    "nothing": ({}, "messages is missing"),
    "no max_tokens": ({"messages": [USER]}, "max_tokens is missing"),
    "no messages": ({"max_tokens": 5, "messages": []}, "at least 1"),
    "text": ({"max_tokens": 5, "messages": "Hi"}, "messages is 'Hi'"),
    "texts": ({"max_tokens": 5, "messages": ["Hi"]}, "messages.0 is 'Hi'"),
    "max_tokens 0": ({**BODY, "max_tokens": 0}, "max_tokens is 0"),
    "max_tokens text": ({**BODY, "max_tokens": "5"}, "max_tokens is '5'"),
    "temperature": ({**BODY, "temperature": 1.1}, "temperature is 1.1"),
    "negative temperature": ({**BODY, "temperature": -0.1}, "temperature is -0.1"),
    "top_p": ({**BODY, "top_p": 0}, "top_p is 0"),
    "top_k": ({**BODY, "top_k": -1}, "top_k is -1"),
    "stream": ({**BODY, "stream": "yes"}, "stream is 'yes'"),
    "stop number": ({**BODY, "stop_sequences": 5}, "stop_sequences is 5"),
    "empty stop": ({**BODY, "stop_sequences": [""]}, "stop_sequences.0 is ''"),
    "many stops": ({**BODY, "stop_sequences": ["x"] * 17}, "stop_sequences"),
    "unknown role": ({**BODY, "messages": [{"role": "king", "content": "x"}]}, "messages.0.role is 'king'"),
    "no content": ({**BODY, "messages": [{"role": "user"}]}, "messages.0.content is missing"),
    "content number": ({**BODY, "messages": [{"role": "user", "content": 5}]}, "messages.0.content is 5"),
    "half a character": ({**BODY, "messages": [{"role": "user", "content": HALF}]}, "surrogate"),
    "image": (blocks({"type": "image", "source": {"type": "url", "url": "x"}}), "reads no images"),
    "document": (blocks({"type": "document", "source": {}}), "reads no images or documents"),
    "image in a result": (blocks({**RESULT, "content": [{"type": "image"}]}), "no images or documents"),
    "image in system": ({**BODY, "system": [{"type": "image"}]}, "no images or documents"),
    "system number": ({**BODY, "system": 5}, "system is 5"),
    "block without type": (blocks({"text": "x"}), "messages.0.content.0 is"),
    "text without text": (blocks({"type": "text"}), "messages.0.content.0.text is missing"),
    "use of the user": (blocks(USE), "only the assistant's"),
    "result of the assistant": (blocks(RESULT, role="assistant"), "only the user's"),
    "use without id": (blocks({"type": "tool_use", "name": "f", "input": {}}, role="assistant"), "id is missing"),
    "input text": (blocks({**USE, "input": "{}"}, role="assistant"), "content.0.input is '{}'"),
    "input half": (blocks({**USE, "input": {"a": HALF}}, role="assistant"), "surrogate"),
    "input nan": (blocks({**USE, "input": {"a": float("nan")}}, role="assistant"), "number that JSON"),
    "too many blocks": (blocks(*[{"type": "text", "text": "a"}] * 2_049), "2048"),
    "too many messages": ({**BODY, "messages": [USER] * 2_049}, "2048"),
    "calls at the end": ({**BODY, "messages": [USER, {"role": "assistant", "content": [USE]}]}, "holds calls"),
    "nothing to go on with": ({**BODY, "messages": [USER, {"role": "assistant", "content": " "}]}, "no text to go on"),
    "thinking": ({**BODY, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "does not know how its model marks"),
    "thinking unknown": ({**BODY, "thinking": {"type": "deep"}}, "thinking.type is 'deep'"),
    "thinking text": ({**BODY, "thinking": "yes"}, "thinking is 'yes'"),
    "tools text": ({**BODY, "tools": "f"}, "tools is 'f'"),
    "tool without schema": ({**BODY, "tools": [{"name": "f"}]}, "tools.0.input_schema is missing"),
    "tool of the server": (
        {**BODY, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "this server calls nothing itself",
    ),
    "tool name": ({**BODY, "tools": [{"name": "f g", "input_schema": {}}]}, "tools.0.name"),
    "tools alike": ({**BODY, "tools": [TOOLS[1], TOOLS[1]]}, "same name"),
    "too many tools": ({**BODY, "tools": [TOOLS[1]] * 129}, "at most 128"),
    "tool's schema": (
        {**BODY, "tools": [{"name": "f", "input_schema": {"$ref": "#/x"}}], "tool_choice": {"type": "any"}},
        "does not compile",
    ),
    "tool of half a character": (
        {**BODY, "tools": [{"name": "f", "input_schema": {}, "description": HALF}]},
        "surrogate",
    ),
    "choice text": ({**BODY, "tools": TOOLS, "tool_choice": "any"}, "tool_choice is 'any'"),
    "choice unknown": ({**BODY, "tools": TOOLS, "tool_choice": {"type": "required"}}, "it must be"),
    "choice of another": ({**BODY, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "no such tool"),
    "any of none": ({**BODY, "tool_choice": {"type": "any"}}, "no such tool"),
    "form": ({**BODY, "output_config": {"format": {"type": "json"}}}, "output_config.format.type"),
    "form without schema": ({**BODY, "output_config": {"format": {"type": "json_schema"}}}, "schema is missing"),
    "form that does not compile": (
        {**BODY, "output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}},
        "does not compile",
    ),
    "container": ({**BODY, "container": "c"}, "container is not supported"),
    "mcp": ({**BODY, "mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    "edits": ({**BODY, "context_management": {"edits": [{}]}}, "context_management is not supported"),
    "model number": ({**BODY, "model": 5}, "model is 5"),
    "long": ({**BODY, "messages": [{"role": "user", "content": "word " * 3000}]}, "maximum context length"),
    "very long": ({**BODY, "messages": [{"role": "user", "content": "word " * 200_000}]}, "maximum context length"),
}


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("case", BAD)
def test_what_is_bad_or_not_here_is_refused_in_plain_words(tiny, case):
    body, words = BAD[case]
    for stream in ({}, {"stream": True}):
        content = json.dumps({**stream, **body})
        response = tiny.http.post("/v1/messages", content=content, headers={"Content-Type": "application/json"})
        assert words in refused(response, 400, "invalid_request_error")


def test_other_errors_have_anthropic_s_form_too(tiny):
    http = tiny.http
    refused(http.post("/v1/messages", json={**BODY, "model": "gpt-5"}), 404, "not_found_error")
    refused(http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    refused(http.get("/v1/messages"), 405, "invalid_request_error")
    refused(http.post("/v1/messages", content=b"{"), 415, "invalid_request_error")
    json_type = {"Content-Type": "application/json"}
    refused(http.post("/v1/messages", content=b"{", headers=json_type), 400, "invalid_request_error")
    refused(http.post("/v1/messages", content=b'{"a": "' + b"x" * 2**20, headers=json_type), 413, "request_too_large")
    assert http.head("/v1/messages").content == b""
    assert "error" in http.post("/v1/messagess", json={}).json()  # not of this API


def test_keys(tiny_chat_model):
    door = {"api_keys": ("sk-one", "sk-two"), "admin_api_key": "sk-admin"}
    server = LocalServer(tiny_chat_model, door=door, kv_cache_memory_bytes=2**22)
    ask = {"model": "tiny", "messages": HI, "max_tokens": 2}
    try:
        for settings in ({"api_key": "sk-one"}, {"api_key": None, "auth_token": "sk-two"}, {"api_key": "sk-admin"}):
            with client_of(server, **settings) as client:
                assert client.messages.create(**ask).content
        for key in ("sk-", "sk-one,sk-two", "Bearer sk-one"):
            response = server.http.post("/v1/messages", json=ask, headers={"x-api-key": key})
            assert "x-api-key" in refused(response, 401, "authentication_error")
            assert "sk-" not in response.text
        refused(server.http.post("/v1/messages", json=ask), 401, "authentication_error")
        refused(server.http.post("/v1/messages", json=ask, headers={"x-api-key": ""}), 401, "authentication_error")
        headers = {"authorization": "Basic sk-one"}
        refused(server.http.post("/v1/messages", json=ask, headers=headers), 401, "authentication_error")
        assert server.http.get("/v1/models", headers={"x-api-key": "sk-two"}).status_code == 200
        assert server.http.post("/reset_prefix_cache", headers={"x-api-key": "sk-one"}).status_code == 401
        assert server.http.post("/reset_prefix_cache", headers={"x-api-key": "sk-admin"}).status_code == 200
    finally:
        server.close()


def test_a_full_queue_is_a_429(tiny_chat_model):
    server = LocalServer(tiny_chat_model, max_requests=1, kv_cache_memory_bytes=2**22)
    try:
        server.runner.close_gate()
        waiting = server.post_raw("/v1/completions", {"prompt": "a", "max_tokens": 2})
        server.runner.wait_in_step()
        response = server.http.post("/v1/messages", json=BODY)
        refused(response, 429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        server.runner.allow()
        waiting.close()
    finally:
        server.close()


def test_what_means_nothing_here_is_no_error(tiny):
    nothing = {
        "thinking": {"type": "adaptive"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "tools": [],
        "tool_choice": {"type": "auto"},
        "stop_sequences": [],
        "metadata": {"user_id": "me"},
        "top_k": 0,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "prompt-caching-2024-07-31"}
    response = tiny.http.post("/v1/messages?beta=true", json={**BODY, **nothing}, headers=headers)
    assert response.status_code == 200
    assert "x-pagefold-ignored" not in response.headers
    odd = tiny.http.post("/v1/messages", json={**BODY, "mood": "good"})
    assert odd.headers["x-pagefold-ignored"] == "mood"
