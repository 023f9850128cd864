"""Tools in chats, with openai's client: streamed and not.

The model is random, so that a call that is required is right by its grammar; where the model is free to call, the test
writes its output.
"""

from __future__ import annotations

import json
import shutil

import openai
import pytest
from jsonschema import Draft202012Validator
from local_server import PATIENCE_S, LocalServer, error_of

from pagefold.server.tools.formats import FORMATS, format_of_template

ASK = [{"role": "user", "content": "How is the weather in Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Oslo", "Tromsø"]}},
}
TIME = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 4}}, "required": ["zone"]}
TIME |= {"additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time_of", "parameters": TIME}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": WEATHER, "time_of": TIME, "now": {"type": "object", "maxProperties": 0}}
CALL = '{"name": "weather", "arguments": {"place": "Tromsø", "days": 3}}'
MARKED = json.dumps({"text": f"a <tool_call>[{CALL}]</tool_call>"}, ensure_ascii=False)
ANSWER = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 200}}, "required": ["text"]}
ANSWER |= {"additionalProperties": False}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER, "strict": True}}}


@pytest.fixture
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def chat(client, **fields):
    fields = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 400} | fields
    (choice,) = client.chat.completions.create(**fields).choices
    return choice


def streamed(client, **fields):
    """Put the chunks together as clients do; return what ``told`` does."""
    fields = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 400} | fields
    content, calls, reasons = "", [], []
    for chunk in client.chat.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id
                assert call.type == "function"
                calls.append([call.function.name, ""])
            else:
                assert call.index == len(calls) - 1
                assert call.id is None
                assert call.function.name is None
            calls[-1][1] += call.function.arguments
        if choice.finish_reason is not None:
            reasons.append(choice.finish_reason)
    (reason,) = reasons
    return content, [tuple(call) for call in calls], reason


def told(choice):
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return (
        choice.message.content or "",
        [(call.function.name, call.function.arguments) for call in calls],
        (choice.finish_reason),
    )


def says(server, text):
    """Let the model say ``text``, and end."""
    server.runner.script = [*server.tokenizer.encode(text), 2]


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_always_one_that_is_allowed(client, seed, parallel):
    fields = {"tool_choice": "required", "seed": seed, "parallel_tool_calls": parallel, "max_tokens": 600}
    choice = chat(client, **fields)
    content, calls, reason = told(choice)
    assert streamed(client, **fields) == (content, calls, reason)
    assert content == ""
    assert calls
    assert reason == "tool_calls" or (reason == "length" and parallel)
    assert parallel or len(calls) == 1
    for name, arguments in calls[: None if reason == "tool_calls" else -1]:
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))
    assert choice.message.content is None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_each_of_several_choices_has_its_own_calls(tiny, is_streamed):
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 3, "seed": 1}
    calls = dict.fromkeys(range(3), "")
    if is_streamed:
        for event in tiny.events("/v1/chat/completions", body):
            for choice in event["choices"]:
                for call in choice["delta"].get("tool_calls", []):
                    assert call["index"] == 0
                    calls[choice["index"]] += call["function"]["arguments"]
    else:
        for choice in tiny.http.post("/v1/chat/completions", json=body).json()["choices"]:
            (call,) = choice["message"]["tool_calls"]
            calls[choice["index"]] = call["function"]["arguments"]
    assert all(isinstance(json.loads(arguments), dict) for arguments in calls.values())


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_call_is_of_that_function(client, name):
    which = {"type": "function", "function": {"name": name}}
    for seed in range(3):
        content, ((called, arguments),), reason = told(chat(client, tool_choice=which, seed=seed))
        assert (content, called, reason) == ("", name, "tool_calls")
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("Sunny, I think.", "Sunny, I think.", []),
        (f"<tool_call>[\n{CALL}\n]</tool_call>", "", ["weather"]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", ["weather", "weather"]),
        (f"Let me look.\n<tool_call>[{CALL}]</tool_call>", "Let me look.", ["weather"]),
        ("<tool_call>weather(Oslo)</tool_call>", "<tool_call>weather(Oslo)</tool_call>", []),
        ('<tool_call>[{"name": "other", "arguments": {}}]</tool_call>',) * 2 + ([],),
    ],
)
def test_the_model_may_call_or_answer(tiny, client, text, content, names):
    says(tiny, text)
    for fields in ({}, {"tool_choice": "auto"}):
        got = told(chat(client, **fields))
        assert got == streamed(client, **fields)
        assert got[0] == content
        assert [name for name, _ in got[1]] == names
        assert all(json.loads(arguments) == {"place": "Tromsø", "days": 3} for _, arguments in got[1])
        assert got[2] == ("tool_calls" if names else "stop")
    assert len(told(chat(client, parallel_tool_calls=False))[1]) == min(1, len(names))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (f"<tool_call>[\n{CALL},\n{CALL}\n]</tool_call>", "", 2),
        (MARKED, MARKED, 0),
        ('{\n  "text": "no"\n}', '{\n  "text": "no"\n}', 0),
    ],
    ids=["calls", "marks in JSON are text", "white space"],
)
def test_the_model_calls_or_answers_in_a_form(tiny, client, text, content, num_calls):
    """The script is held to the grammar: what is no call and no answer would be refused."""
    says(tiny, text)
    for form in (FORM, {"extra_body": {"guided_json": ANSWER}}, {"response_format": {"type": "json_object"}}):
        got = told(chat(client, **form))
        assert got == streamed(client, **form)
        assert got[0] == content
        assert len(got[1]) == num_calls
        assert got[2] == ("tool_calls" if num_calls else "stop")


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(4))
def test_what_the_model_says_beside_calls_is_of_the_form(client, seed):
    got = told(chat(client, **FORM, seed=seed))
    assert got == streamed(client, **FORM, seed=seed)
    content, calls, reason = got
    assert bool(content) != bool(calls)
    if content and reason == "stop":
        Draft202012Validator(ANSWER).validate(json.loads(content))
    for name, arguments in calls if reason == "tool_calls" else ():
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))
    must = told(chat(client, **FORM, seed=seed, tool_choice="required", parallel_tool_calls=False))
    assert (must[0], len(must[1])) == ("", 1)


def test_json_beside_calls_has_the_white_space_that_was_asked_for(tiny, client):
    fields = {"tools": TOOLS, "messages": ASK, "structured_outputs": {"json": ANSWER, "disable_any_whitespace": True}}
    says(tiny, '{"text":"no"}')
    assert tiny.http.post("/v1/chat/completions", json=fields).status_code == 200
    says(tiny, '{"text": "no"}')
    assert tiny.http.post("/v1/chat/completions", json=fields).status_code == 400
    says(tiny, f"<tool_call>[\n{CALL}\n]</tool_call>")
    assert tiny.http.post("/v1/chat/completions", json=fields).status_code == 200


def test_arguments_stream_as_they_are_written(tiny):
    """Some of them are here while the model stands still before the rest."""
    text = f"<tool_call>[{CALL}]</tool_call>"
    says(tiny, text)
    tiny.runner.close_gate()
    events = tiny.iter_events("/v1/chat/completions", {"messages": ASK, "tools": TOOLS})
    assert next(events)["choices"][0]["delta"]["role"] == "assistant"
    tiny.runner.allow(len(tiny.tokenizer.encode(text[: text.index("days")])))
    arguments = ""
    while not arguments.startswith('{"place'):  # in one piece or several
        for call in next(events)["choices"][0]["delta"].get("tool_calls", []):
            arguments += call["function"]["arguments"]
    assert "days" not in arguments
    tiny.runner.allow()
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"


def test_a_call_that_is_cut_off_ends_with_length(tiny, client):
    says(tiny, f"<tool_call>[{CALL}]</tool_call>")
    content, ((name, arguments),), reason = told(chat(client, max_tokens=20))
    assert (content, name, reason) == ("", "weather", "length")
    assert json.dumps({"place": "Tromsø", "days": 3}, ensure_ascii=False).startswith(arguments)


def test_with_none_the_model_hears_of_no_tools(tiny, client):
    text = f"<tool_call>[{CALL}]</tool_call>"
    says(tiny, text)
    assert told(chat(client, tool_choice="none")) == (text, [], "stop")
    fields = {"model": "tiny", "messages": ASK, "max_tokens": 1}
    without, none, empty, auto = (
        client.chat.completions.create(**fields, **more).usage.prompt_tokens
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tools": TOOLS})
    )
    assert without == none == empty < auto


def test_a_conversation_goes_on_after_a_call(tiny, client):
    says(tiny, f"<tool_call>[{CALL}]</tool_call>")
    first = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0].message
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "-3 °C"}
    messages = [*ASK, first.model_dump(exclude_none=True), answer]
    says(tiny, "Cold.")
    assert told(chat(client, messages=messages)) == ("Cold.", [], "stop")
    assert told(chat(client, messages=messages, tools=openai.omit)) == ("Cold.", [], "stop")
    by_hand = [*ASK, {"role": "assistant", "content": "", "tool_calls": [template_form(first.tool_calls[0])]}, answer]
    text = tiny.tokenizer.decode(tiny.tokenizer.encode_chat(by_hand, []), skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nHow is the weather in Oslo?<|im_end|>\n"
        f"<|im_start|>assistant\n<tool_call>[\n{CALL}\n]</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n-3 °C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def template_form(call):
    return {"function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)}}


def test_the_tools_are_in_the_system_prompt(tiny):
    chats = [ASK, [{"role": "system", "content": "Be terse."}, *ASK]]
    for messages in chats:
        text = tiny.tokenizer.decode(tiny.tokenizer.encode_chat(messages, TOOLS), skip_special_tokens=False)
        system = text.split("<|im_end|>")[0]
        assert system.startswith("<|im_start|>system\n")
        listed = system.split("<tools>")[1].split("</tools>")[0]
        assert json.loads(listed) == TOOLS
        assert ("Be terse.\n\n" in system) == (messages is chats[1])
        assert text.count("<|im_start|>system") == 1


def test_a_template_without_tools_refuses_them(tiny_chat_model, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(tiny_chat_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (config["chat_template"],) = [one["template"] for one in config["chat_template"] if one["name"] == "default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    server = LocalServer(folder, kv_cache_memory_bytes=2**22)
    try:
        body = {"messages": ASK, "tools": TOOLS}
        error = error_of(server.http.post("/v1/chat/completions", json=body), 400)
        assert error["param"] == "tools"
        assert "takes no tools" in error["message"]
        history = [*ASK, {"role": "tool", "tool_call_id": "x", "content": "1"}]
        error = error_of(server.http.post("/v1/chat/completions", json={"messages": history}), 400)
        assert error["param"] == "messages"
        response = server.http.post("/v1/chat/completions", json={**body, "tool_choice": "none", "max_tokens": 2})
        assert response.status_code == 200
    finally:
        server.close()


def test_hermes_calls_have_marks_of_their_own(tiny, monkeypatch):
    assert format_of_template("... <tool_call>\n{...}") is FORMATS["hermes"]
    assert format_of_template("<tool_call>[ ...") is FORMATS["smollm2"]
    assert format_of_template("{{ messages }}") is None
    server_format = "pagefold.server.served.format_of_template"
    monkeypatch.setattr(server_format, lambda _template: FORMATS["hermes"])
    for seed in range(4):
        body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 300}
        response = tiny.http.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False})
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        Draft202012Validator(SCHEMAS[call["function"]["name"]]).validate(json.loads(call["function"]["arguments"]))


@pytest.mark.long
def test_the_built_in_model_calls_what_it_must(smol):
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    (choice,) = smol.http.post("/v1/chat/completions", json=body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    Draft202012Validator(SCHEMAS[call["function"]["name"]]).validate(json.loads(call["function"]["arguments"]))
