"""What changed since an earlier request, as hosted APIs spell it, with what the cache did beside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from local_server import LocalServer, error_of

from pagefold.config import Account

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNTS = (Account(key="sk-acme", tenant="acme"), Account(key="sk-beta", tenant="beta"))
ACME, BETA = ({"Authorization": f"Bearer {key}"} for key in ("sk-acme", "sk-beta"))
SYSTEM = "You know the tools by heart and answer in one sentence. " * 3


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": f"It is about {name}.", "input_schema": {"type": "object", "properties": {}}}


TOOLS = [tool("rain"), tool("snow"), tool("hail")]


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(
        tiny_chat_model,
        kv_cache_memory_bytes=2**23,
        max_num_seqs=4,
        door={"accounts": ACCOUNTS, "admin_api_key": "sk", "open_metrics": True},
    )
    yield server
    server.close()


def send(server: LocalServer, question: str | list[Any] = "Will it rain?", key: dict[str, str] = ACME, **fields: Any):
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    body = {"messages": messages, "system": SYSTEM, "max_tokens": 4, "diagnostics": {}, "tools": TOOLS, **fields}
    response = server.http.post("/v1/messages", json=body, headers=key)
    assert response.status_code == 200, response.text
    return response.json()


def compared(server: LocalServer, previous: dict[str, Any], *args: Any, **fields: Any) -> dict[str, Any]:
    answer = send(server, *args, **fields, diagnostics={"previous_message_id": previous["id"]})
    told = answer["diagnostics"]
    num_read = answer["usage"]["cache_read_input_tokens"]
    num_tokens = num_read + answer["usage"]["input_tokens"] + answer["usage"]["cache_creation_input_tokens"]
    assert sum(miss["tokens"] for miss in told["misses"]) == num_tokens - num_read
    return told


def test_a_first_message_is_told_nothing_and_others_have_no_such_field(server):
    assert send(server)["diagnostics"] is None
    assert send(server, diagnostics={"previous_message_id": None})["diagnostics"] is None
    assert "diagnostics" not in send(server, diagnostics=None)


def test_a_chat_that_goes_on_has_no_reason(server):
    first = send(server)
    turns = [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And snow?"},
    ]
    assert compared(server, first, turns)["cache_miss_reason"] is None


def test_what_changed_is_named_the_first_of_it_first(server):
    first = send(server, "What of hail?")
    cases = {
        "tools_changed": {"tools": [TOOLS[1], TOOLS[0], TOOLS[2]], "system": "Another."},
        "system_changed": {"system": "It is noon. " + SYSTEM, "question": "Something else?"},
        "messages_changed": {"question": "Or of sleet?"},
    }
    for reason, fields in cases.items():
        told = compared(server, first, **fields)["cache_miss_reason"]
        assert told["type"] == reason
        num_tokens = sum(v for k, v in first["usage"].items() if k.endswith("input_tokens"))
        assert 0 <= told["cache_missed_input_tokens"] <= num_tokens


def test_missed_tokens_are_those_of_the_earlier_prompt_that_were_not_found(server):
    question = "Tell me all about the weather in the north. " * 20
    first = send(server, question)
    num_tokens = sum(v for k, v in first["usage"].items() if k.endswith("input_tokens"))
    answer = send(server, question, system="x" + SYSTEM, diagnostics={"previous_message_id": first["id"]})
    reason = answer["diagnostics"]["cache_miss_reason"]
    size = server.engine.scheduler.core.block_size
    expected = num_tokens // size * size - answer["usage"]["cache_read_input_tokens"]
    assert reason == {"type": "system_changed", "cache_missed_input_tokens": expected}
    assert expected > num_tokens // 2


def test_what_the_cache_did_stands_beside(server):
    """The request is the same, and hosted APIs would have nothing to say: the cache was reset, and that is said."""
    question = "How deep is the snow? " * 10
    first = send(server, question)
    assert server.http.post("/reset_prefix_cache", headers={"Authorization": "Bearer sk"}).status_code == 200
    told = compared(server, first, question)
    assert told["cache_miss_reason"] is None
    assert {miss["cause"] for miss in told["misses"]} == {"reset", "partial_block"}


def test_other_terms_are_no_change_of_the_request(server):
    question = "How salty is the sea? " * 10
    first = send(server, question)
    told = compared(server, first, question, cache_salt="pepper")
    assert told["cache_miss_reason"] == {"type": "unavailable"}
    assert told["misses"][0]["fields"] == ["cache_salt"]


def test_unknown_and_others_are_one_answer(server):
    mine = send(server, "Whose is this?")
    gone = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    for previous in ({"id": "msg_nothing"}, mine):
        told = compared(server, previous, "Whose is this?", key=BETA)
        assert {"cache_miss_reason": told["cache_miss_reason"]} == gone
        assert mine["id"] not in json.dumps(told["misses"])
        assert "other_namespace" not in {miss["cause"] for miss in told["misses"]}


def test_a_stream_tells_it_at_its_start(server):
    first = send(server, "One by one?")
    body = {
        "messages": [{"role": "user", "content": "Two by two?"}], "system": SYSTEM, "max_tokens": 4, "stream": True,
        "tools": TOOLS, "diagnostics": {"previous_message_id": first["id"]},
    }  # fmt: skip
    with server.http.stream("POST", "/v1/messages", json=body, headers=ACME) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"


def test_a_previous_message_must_be_a_text(server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "diagnostics": {"previous_message_id": 5}}
    response = server.http.post("/v1/messages", json=body, headers=ACME)
    assert response.status_code == 400
    assert "previous_message_id" in response.json()["error"]["message"]


# OpenAI's.


def respond(server: LocalServer, text: str, key: dict[str, str] = ACME, **fields: Any) -> dict[str, Any]:
    body = {"input": text, "instructions": SYSTEM, "max_output_tokens": 4, "store": False, **fields}
    response = server.http.post("/v1/responses", json=body, headers=key)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_response_is_compared_with_an_earlier_one(server):
    first = respond(server, "It was a dark and stormy night. " * 10)
    assert "prompt_cache_diagnostics" not in first
    options = {"comparison_response_id": first["id"]}
    same = respond(server, "It was a dark and stormy night. " * 10, prompt_cache_options=options)
    assert same["prompt_cache_diagnostics"]["type"] == "cache_hit"
    other = respond(
        server,
        "It was a dark and stormy night. " * 5 + "Then came day.",
        prompt_cache_options={**options, "ttl": "30m"},
    )
    told = other["prompt_cache_diagnostics"]
    assert (told["type"], told["reason"]) == ("cache_miss", "input_changed")
    num_tokens = other["usage"]["input_tokens"]
    assert told["cache_missed_tokens"] + told["comparison_reusable_tokens"] == num_tokens
    assert 0 < told["comparison_reusable_tokens"] < num_tokens
    cached = other["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached <= told["comparison_reusable_tokens"]
    assert sum(miss["tokens"] for miss in told["misses"]) == num_tokens - cached
    tools = [{"type": "function", "name": "rain", "parameters": {"type": "object", "properties": {}}, "strict": False}]
    changed = respond(server, "It was", tools=tools, prompt_cache_options=options)["prompt_cache_diagnostics"]
    assert changed["reason"] == "tools_changed"


def test_a_response_of_nobody_or_of_others_is_not_found(server):
    mine = respond(server, "Mine alone.")
    for response_id in ("resp_nothing", mine["id"]):
        told = respond(server, "Mine alone.", BETA, prompt_cache_options={"comparison_response_id": response_id})
        assert told["prompt_cache_diagnostics"]["type"] == "comparison_response_not_found"
    body = {"input": "x", "prompt_cache_options": {"comparison_response_id": 5}}
    assert error_of(server.http.post("/v1/responses", json=body, headers=ACME), 400)["param"].endswith("response_id")


def test_a_streamed_response_tells_it_at_its_end(server):
    first = respond(server, "The first of two.")
    body = {
        "input": "The other of two.", "instructions": SYSTEM, "max_output_tokens": 4, "stream": True,
        "prompt_cache_options": {"comparison_response_id": first["id"]},
    }  # fmt: skip
    with server.http.stream("POST", "/v1/responses", json=body, headers=ACME) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert "prompt_cache_diagnostics" not in events[0]["response"]
    assert events[-1]["response"]["prompt_cache_diagnostics"]["reason"] == "input_changed"
