"""/v1/responses with functions, and with a form of the answer, as openai-python uses it."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest
from jsonschema import Draft202012Validator
from local_server import PATIENCE_S, LocalServer

ALONE = {"extra_body": {"cache_salt": "scripted"}}  # a script computes no KV that others may find
WEATHER = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Tromsø"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "name": "weather", "description": "Tell the weather.", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
SCHEMAS = {"weather": WEATHER, "now": NOW}
ARGUMENTS = '{"place": "Tromsø", "days": 3}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'


class Weather(pydantic.BaseModel):
    """How it will be."""

    place: str = pydantic.Field(max_length=8)
    is_cold: bool


@pytest.fixture
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def says(server: LocalServer, text: str) -> None:
    """Let the model say ``text``, and end."""
    server.runner.script = [*server.tokenizer.encode(text), 2]


def create(client, **fields):
    return client.responses.create(**{"model": "tiny", "input": "Hi", "max_output_tokens": 400, **ALONE, **fields})


def streamed(client, **fields):
    """The response that openai's own helper puts together, and the events."""
    fields = {"model": "tiny", "input": "Hi", "max_output_tokens": 400, **ALONE, **fields}
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response, events


def told(response):
    """What a response says, but for its ids."""
    items = [
        ("text", item.content[0].text, item.status)
        if item.type == "message"
        else (item.name, item.arguments, item.status)
        for item in response.output
    ]
    return response.status, items


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ("required", {"weather", "now"}, 99),
        ({"type": "function", "name": "weather"}, {"weather"}, 1),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, {"now"}, 99),
    ],
)
def test_a_call_that_must_be_is_one_that_is_allowed(client, choice, names, most):
    for seed in (1, 2):
        fields = {"tools": TOOLS, "tool_choice": choice, "extra_body": {"seed": seed}, "parallel_tool_calls": seed > 1}
        response = create(client, **fields)
        assert told(streamed(client, **fields)[0]) == told(response)
        assert 1 <= len(response.output) <= (most if seed > 1 else 1)
        for item in response.output[: None if response.status == "completed" else -1]:
            assert (item.type, item.status) == ("function_call", "completed")
            assert item.id.startswith("fc_")
            assert item.call_id.startswith("call_")
            assert item.name in names
            Draft202012Validator(SCHEMAS[item.name]).validate(json.loads(item.arguments))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("Sunny, I think.", [("text", "Sunny, I think.")]),
        (f"<tool_call>[\n{CALL}\n]</tool_call>", [("weather", ARGUMENTS)]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [("weather", ARGUMENTS)] * 2),
        (f"Let me look.\n<tool_call>[{CALL}]</tool_call>", [("text", "Let me look."), ("weather", ARGUMENTS)]),
    ],
)
def test_the_model_may_call_or_answer(tiny, client, text, items):
    says(tiny, text)
    wanted = ("completed", [(*item, "completed") for item in items])
    for fields in ({}, {"tool_choice": "auto"}):
        assert told(create(client, tools=TOOLS, **fields)) == wanted
        assert told(streamed(client, tools=TOOLS, **fields)[0]) == wanted
    calls = [item for item in create(client, tools=TOOLS, parallel_tool_calls=False).output if item.type != "message"]
    assert len(calls) <= 1
    assert told(create(client, tools=TOOLS, tool_choice="none"))[1] == [("text", text, "completed")]
    only_now = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    assert all(item.type == "message" for item in create(client, tools=TOOLS, tool_choice=only_now).output)


def test_the_events_of_a_call(tiny, client):
    says(tiny, f"Let me look.\n<tool_call>[{CALL}]</tool_call>")
    events = list(create(client, tools=TOOLS, stream=True))
    response = events[-1].response
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    message, call = response.output
    begun, done = (
        event.item for event in events if event.type.startswith("response.output_item") and event.output_index == 1
    )
    assert (begun.arguments, begun.status, begun.name) == ("", "in_progress", "weather")
    assert (done.arguments, done.status, done.id, done.call_id) == (ARGUMENTS, "completed", call.id, call.call_id)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == ARGUMENTS
    assert {(event.item_id, event.output_index) for event in deltas} == {(call.id, 1)}
    (end,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert (end.arguments, end.item_id) == (ARGUMENTS, call.id)
    assert begun.id == call.id != message.id


def test_a_call_that_is_cut_off_is_incomplete(tiny, client):
    says(tiny, f"<tool_call>[{CALL}]</tool_call>")
    for response in (
        create(client, tools=TOOLS, max_output_tokens=20),
        streamed(client, tools=TOOLS, max_output_tokens=20)[0],
    ):
        assert response.incomplete_details.reason == "max_output_tokens"
        ((name, arguments, status),) = told(response)[1]
        assert (name, status) == ("weather", "incomplete")
        assert ARGUMENTS.startswith(arguments)
        later = create(client, input="Go on", previous_response_id=response.id, max_output_tokens=5)
        assert later.status == "incomplete"  # the model hears of no call that it did not finish


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_conversation_goes_on_after_a_call(tiny, client, is_stored):
    """By its id, and by sending all of it back, the model is told the same."""
    says(tiny, f"Let me look.\n<tool_call>[{CALL}]</tool_call>")
    first = create(client, tools=TOOLS, store=is_stored)
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "-3 °C"}
    says(tiny, "Cold.")
    fields = {"input": [output], "previous_response_id": first.id}
    if not is_stored:
        fields = {"input": [{"role": "user", "content": "Hi"}, *first.output, output]}
    raw = client.responses.with_raw_response.create(model="tiny", tools=TOOLS, **fields, **ALONE)
    assert "x-pagefold-ignored" not in raw.headers
    assert told(raw.parse()) == ("completed", [("text", "Cold.", "completed")])
    by_hand = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"function": {"name": "weather", "arguments": json.loads(ARGUMENTS)}}],
        },
        {"role": "tool", "content": "-3 °C"},
    ]
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER},
        },
        {"type": "function", "function": {"name": "now", "description": "", "parameters": NOW}},
    ]
    assert raw.parse().usage.input_tokens == len(tiny.tokenizer.encode_chat(by_hand, tools))


def test_what_was_thought_may_be_sent_back(tiny, client):
    says(tiny, "Cold.")
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    user = {"role": "user", "content": "Hi"}
    both = [create(client, input=[user, *more]).usage.input_tokens for more in ([], [thought])]
    assert both[0] == both[1]


def test_parse_returns_the_pydantic_model(client):
    for seed in range(4):
        fields = {"model": "tiny", "input": "Weather?", "text_format": Weather, "extra_body": {"seed": seed}}
        response = client.responses.parse(**fields)
        assert isinstance(response.output_parsed, Weather)
        assert response.text.format.type == "json_schema"
        with client.responses.stream(**fields) as stream:
            assert stream.get_final_response().output_parsed == response.output_parsed


def test_a_pydantic_function_tool_is_parsed(client):
    tool = openai.pydantic_function_tool(Weather)["function"]
    tools = [{"type": "function", **tool}]
    response = client.responses.parse(
        model="tiny", input="Weather?", tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    (item,) = response.output
    assert Weather.model_validate(item.parsed_arguments)


def test_any_json_object(client):
    for seed in range(3):
        text = {"format": {"type": "json_object"}}
        response = create(client, text=text, extra_body={"seed": seed}, max_output_tokens=40)
        assert response.status == "incomplete" or isinstance(json.loads(response.output_text), dict)
        assert response.text.format.type == "json_object"


def test_calls_or_an_answer_of_the_form(tiny, client):
    text = {"format": {"type": "json_schema", "name": "answer", "schema": NOW, "strict": True}}
    says(tiny, f"<tool_call>[\n{CALL}\n]</tool_call>")
    assert told(create(client, tools=TOOLS, text=text))[1] == [("weather", ARGUMENTS, "completed")]
    says(tiny, "{}")
    assert told(create(client, tools=TOOLS, text=text))[1] == [("text", "{}", "completed")]
    tiny.runner.script = None
    for seed in range(3):
        for item in create(client, tools=TOOLS, text=text, extra_body={"seed": seed}).output:
            given = json.loads(item.content[0].text if item.type == "message" else item.arguments)
            Draft202012Validator(NOW if item.type == "message" else SCHEMAS[item.name]).validate(given)


def test_what_was_asked_is_told_back(tiny, client):
    says(tiny, "Cold.")
    response = create(client, tools=TOOLS, tool_choice="auto", parallel_tool_calls=False, max_tool_calls=2)
    assert [tool.name for tool in response.tools] == ["weather", "now"]
    assert (response.tools[0].strict, response.tools[0].parameters) == (True, WEATHER)
    assert (response.tool_choice, response.parallel_tool_calls, response.max_tool_calls) == ("auto", False, 2)
    tiny.runner.script = None
    named = create(client, tools=TOOLS, tool_choice={"type": "function", "name": "now"}, max_output_tokens=5)
    assert named.tool_choice.name == "now"
