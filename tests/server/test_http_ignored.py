"""Fields that nobody knows: left alone, and named in a header that they cannot abuse."""

from __future__ import annotations

import json
from urllib.parse import unquote

import pytest
from local_server import error_of

USER = {"role": "user", "content": "Hi"}
HEADER = "x-pagefold-ignored"

BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/explain": {"prompt": "a", "temperature": 0.5},
}
"""A body that is taken, for every route that takes one."""

STREAMED = {
    "/v1/completions": "[DONE]",
    "/v1/chat/completions": "[DONE]",
    "/v1/responses": "response.incomplete",
    "/v1/messages": "message_stop",
}
"""How the streams of routes that have them end."""


def test_every_route_that_takes_a_body_is_here(tiny):
    paths = tiny.http.get("/openapi.json").json()["paths"]
    taking = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    of_admin = {"/v1/cache/warm", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # see test_http_cache.py
    assert taking == {*BODIES, *of_admin}


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_named_and_change_nothing(tiny, path):
    body = {**BODIES[path], "temperature": 0} if path in STREAMED else BODIES[path]
    plain = tiny.http.post(path, json=body)
    assert plain.status_code == 200
    assert HEADER not in plain.headers
    odd = tiny.http.post(path, json={**body, "favourite_colour": "blue", "shoe_size": 0, "nothing": None})
    assert odd.headers[HEADER] == "favourite_colour, shoe_size"
    assert _without_ids(odd.json()) == _without_ids(plain.json())


@pytest.mark.parametrize("path", STREAMED)
def test_streams_name_them_too(tiny, path):
    with tiny.http.stream("POST", path, json={**BODIES[path], "stream": True, "mood": "good"}) as response:
        assert response.headers[HEADER] == "mood"
        assert STREAMED[path] in response.read().decode()


def test_errors_name_them_too(tiny):
    response = tiny.http.post("/v1/completions", json={"prompt": "a", "temprature": 0.5, "max_tokens": 5000})
    assert response.status_code == 400
    assert response.headers[HEADER] == "temprature"


def test_fields_inside_of_others(tiny):
    """All items of a list have one name; what is known to mean nothing is not named."""
    messages = [
        {**USER, "nickname": "Ann", "audio": None},
        {**USER, "nickname": "Bob", "name": "Robert"},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    ]
    body = {"messages": messages, "max_tokens": 2, "stream": True, "stream_options": {"speed": 9}, "n": 1, "tools": []}
    response = tiny.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    expected = {"messages.*.nickname", "messages.*.content.*.cache_control", "stream_options.speed"}
    assert set(response.headers[HEADER].split(", ")) == expected


@pytest.mark.parametrize(
    "name",
    [
        "a\r\nSet-Cookie: x=1",
        "a, b",
        "naïve",
        "日本語",
        "",
        "\x00",
        " ",
        "x" * 100_000,
        "\U0001f468" * 1000,
        "model_fields_set",
        "__class__",
        "sampling",
        "prompts",
    ],
    ids=ascii,
)
def test_a_name_cannot_abuse_the_header(tiny, name):
    content = json.dumps({"prompt": "a", "max_tokens": 2, name: 1})
    response = tiny.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    shown = response.headers[HEADER]
    assert shown.isascii()
    assert len(shown) <= 64
    if len(name) < 60:
        assert unquote(shown) == (name or '""')
        assert ", " not in shown


def test_a_name_that_is_no_text_is_refused(tiny):
    content = json.dumps({"prompt": "a", "\ud83d": 1})
    response = tiny.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert "surrogate" in error_of(response, 400)["message"]


def test_names_without_letters_among_others(tiny):
    """A header's value must not end with white space."""
    for names in (["a", ""], ["", "a"], ["a", " "]):
        response = tiny.http.post("/tokenize", json={"prompt": "a", **dict.fromkeys(names, 1)})
        assert len(response.headers[HEADER].split(", ")) == 2


def test_many_names_are_cut(tiny):
    fields = {f"field_{number}": number for number in range(250)}
    named = tiny.http.post("/v1/completions", json={"prompt": "a", **fields}).headers[HEADER].split(", ")
    assert named == [f"field_{number}" for number in range(16)] + ["..."]


def _without_ids(answer: dict) -> dict:
    ids = ("id", "created", "created_at", "usage")
    for item in answer.get("output", []):
        item.pop("id")
    return {name: value for name, value in answer.items() if name not in ids}
