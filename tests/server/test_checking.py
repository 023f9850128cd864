"""What the process that checks bodies tells: the same request, or the same error, as a check in the server would."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from pagefold.errors import InvalidRequestError
from pagefold.server.anthropic.schemas import MessageRequest
from pagefold.server.chat_schemas import ChatRequest
from pagefold.server.checking import Answer, check
from pagefold.server.completion_schemas import CompletionRequest
from pagefold.server.responses.schemas import ResponseRequest
from pagefold.server.tokenize_schemas import DetokenizeRequest, TokenizeRequest
from pagefold.server.warm_schemas import WarmRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CLAUDES = [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}]
FORMAT = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
CHAT = [
    {"role": "system", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "y"},
]

RIGHT: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": CHAT, "tools": [TOOL], "tool_choice": "required", "stop": "a", "seed": 5}),
    (ChatRequest, {"messages": CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    (
        ChatRequest,
        {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
    ),
    (CompletionRequest, {"prompt": [[1, 2], [3]], "logit_bias": {"5": 1.5}, "guided_choice": ["a", "b"]}),
    (CompletionRequest, {"prompt": "naïve 🐧", "structured_outputs": {"regex": "a+"}, "stop_token_ids": [7]}),
    (ChatRequest, {"messages": CHAT[:1], "chat_template_kwargs": {"enable_thinking": False}, "bad_words": ["a"]}),
    (ResponseRequest, {"input": "x", "tools": [{"type": "function", **TOOL["function"]}], "text": {"format": FORMAT}}),
    (
        MessageRequest,
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "system": "y", "tools": CLAUDES},
    ),
    (ResponseRequest, {"input": "x", "instructions": "y", "metadata": {"a": "b"}}),
    (TokenizeRequest, {"messages": CHAT}),
    (DetokenizeRequest, {"tokens": [1, 2, 3]}),
    (WarmRequest, {"prompt": [1, 2, 3], "pin": True, "ttl_s": 5.0}),
]


def told(model: type[BaseModel], body: bytes) -> Answer:
    """What the server gets of it."""
    answer = pickle.loads(pickle.dumps(check(model, body), pickle.HIGHEST_PROTOCOL))
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize(("model", "fields"), RIGHT)
def test_a_right_body_is_the_request_that_it_is(model, fields):
    answer = told(model, json.dumps(fields).encode())
    expected = model.model_validate(fields)
    assert repr(answer) == repr(Answer(asked=expected))  # some of what is in it has no equality
    assert answer.asked.model_fields_set == expected.model_fields_set


def test_of_what_nobody_knows_the_name_is_told():
    answer = told(ChatRequest, json.dumps({"messages": [{**CHAT[0], "b": [[]]}], "a": {"x": [1] * 10}}).encode())
    assert answer.asked.model_extra == {"a": None}
    assert answer.asked.messages[0].model_extra == {"b": None}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": ', Answer(json_error=("Expecting value", 6))),
        (b'{"a": "\xff"}', Answer(is_unreadable=True)),
        (b"[" * 100_000, Answer(is_unreadable=True)),
    ],
    ids=["no end", "no text", "deep"],
)
def test_what_is_no_json(body, expected):
    assert told(ChatRequest, body) == expected


def test_what_is_wrong_comes_with_little_of_the_body():
    answer = told(CompletionRequest, json.dumps({"prompt": "a", "temperature": "hot" * 100_000}).encode())
    assert answer.invalid["loc"] == ("temperature",)
    assert len(pickle.dumps(answer)) < 2000


@pytest.mark.parametrize(
    "value", [[{}] * 60_000, {str(key): 1 for key in range(60_000)}, ["a"] * 60_000, [[]] * 60_000]
)
def test_very_many_values_are_refused(value):
    answer = told(CompletionRequest, json.dumps({"prompt": "a", "x": value}).encode())
    assert isinstance(answer.refused, InvalidRequestError)
    assert "50,000 values" in answer.refused.message
    assert answer.refused.remedy


def test_numbers_are_not_counted():
    assert told(CompletionRequest, json.dumps({"prompt": [5] * 200_000}).encode()).asked is not None
