"""Tokens that alone are allowed, bad words, stop strings that stay, special tokens, and tiers of service, over HTTP."""

from __future__ import annotations

import asyncio

import pytest
from local_server import error_of, joined

from pagefold.config import Account
from pagefold.sampling import SamplingParams
from pagefold.server.completion_schemas import CompletionRequest

USER = {"role": "user", "content": "Hi"}
ROUTES = {"/v1/completions": {"prompt": "Say"}, "/v1/chat/completions": {"messages": [USER]}}


def text_of(answer):
    (choice,) = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", ROUTES)
def test_only_allowed_tokens_come(tiny, path):
    some = tiny.tokenizer.encode(" yes no on the cat")
    body = {**ROUTES[path], "allowed_token_ids": some, "max_tokens": 30, "seed": 1, "return_token_ids": True}
    answer = tiny.http.post(path, json=body).json()
    assert set(answer["choices"][0]["token_ids"]) <= set(some)
    assert len(set(answer["choices"][0]["token_ids"])) > 2
    assert joined(tiny.events(path, body)) == text_of(answer)


@pytest.mark.parametrize("path", ROUTES)
def test_bad_words_do_not_come(tiny, path):
    some = tiny.tokenizer.encode(" yes no on the cat")
    body = {**ROUTES[path], "allowed_token_ids": some, "max_tokens": 40, "seed": 1}
    free = text_of(tiny.http.post(path, json=body).json())
    pairs = [f"{first} {second}" for first, second in zip(free.split(), free.split()[1:], strict=False)]
    words = ["cat", *pairs[:3]]
    assert "cat" in free
    held = text_of(tiny.http.post(path, json={**body, "bad_words": words}).json())
    assert len(held.split()) == 40
    assert not any(word in held for word in words)


def test_what_an_output_must_be_and_what_it_may_not_hold_together(tiny):
    wish = {"structured_outputs": {"choice": ["red", "green", "blue"]}, "max_tokens": 9}
    green, red = (tiny.tokenizer.encode_parts([color])[0] for color in ("green", "red"))
    for seed in range(6):
        assert text_of(tiny.complete("Say", seed=seed, allowed_token_ids=green, **wish)) == "green"
        answer = tiny.complete("Say", seed=seed, bad_words=["red"], return_token_ids=True, **wish)
        assert answer["choices"][0]["token_ids"] != red
    refused = tiny.http.post("/v1/completions", json={"prompt": "Say", "allowed_token_ids": [0], **wish})
    assert error_of(refused, 400)["param"] == "allowed_token_ids"


def test_an_output_that_can_go_no_further_is_an_error_that_names_the_field(tiny):
    (a,) = tiny.tokenizer.encode("a")
    body = {"prompt": "x", "allowed_token_ids": [a], "bad_words": ["aa"], "max_tokens": 9}
    sequence = tiny.tokenizer.encode_parts(["aa"])[0]
    if sequence != [a, a]:
        body["structured_outputs"] = {"regex": "[ab][ab]b"}
    error = error_of(tiny.http.post("/v1/completions", json=body), 400)
    assert error["param"] == "allowed_token_ids"
    assert "no token that may come next" in error["message"]


@pytest.mark.parametrize("ends", [{"allowed_token_ids": [2]}, {"allowed_token_ids": [2, 7], "stop_token_ids": [7]}])
def test_where_only_ends_are_allowed_none_comes_before_min_tokens(tiny, ends):
    body = {"prompt": "Say", "max_tokens": 3, **ends}
    assert (
        error_of(tiny.http.post("/v1/completions", json={**body, "min_tokens": 2}), 400)["param"] == "allowed_token_ids"
    )
    assert tiny.complete(**body)["choices"][0]["finish_reason"] == "stop"
    assert tiny.complete(**body, min_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_stays_if_asked_for(tiny, stream):
    tiny.runner.script = tiny.tokenizer.encode("one two three four five")
    body = {"prompt": "x", "max_tokens": 5, "temperature": 0, "stop": ["e f"], "include_stop_str_in_output": True}
    if stream:
        assert joined(tiny.events("/v1/completions", body)) == "one two three f"
    else:
        assert text_of(tiny.complete(**body)) == "one two three f"
    del body["include_stop_str_in_output"]
    assert text_of(tiny.complete(**body)) == "one two thre"


@pytest.mark.parametrize("path", ROUTES)
def test_special_tokens_are_shown_if_asked_for(tiny, path):
    tiny.runner.script = [1, *tiny.tokenizer.encode("hi"), 2]
    alone = {"cache_salt": "scripted"}  # a script computes no KV that others may find
    body = {**ROUTES[path], "max_tokens": 9, "temperature": 0, **alone}
    assert text_of(tiny.http.post(path, json=body).json()) == "hi"
    shown = {**body, "skip_special_tokens": False}
    assert text_of(tiny.http.post(path, json=shown).json()) == "<|im_start|>hi"
    kept = {**shown, "include_stop_str_in_output": True}
    assert text_of(tiny.http.post(path, json=kept).json()) == "<|im_start|>hi<|im_end|>"


# Tiers of service.


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("tier", ["auto", "default", "flex", "scale", "priority"])
def test_a_tier_is_told_back_and_changes_nothing_where_requests_come_in_order(tiny, path, tier):
    body = {**ROUTES[path], "max_tokens": 2, "temperature": 0}
    plain = tiny.http.post(path, json=body).json()
    answer = tiny.http.post(path, json={**body, "service_tier": tier}).json()
    told = "default" if tier == "auto" else tier
    assert answer["service_tier"] == told
    assert "service_tier" not in plain
    assert text_of(answer) == text_of(plain)
    assert {event["service_tier"] for event in tiny.events(path, {**body, "service_tier": tier})} == {told}


@pytest.mark.parametrize(
    ("fields", "offset"),
    [({}, 0), ({"service_tier": "priority"}, -10), ({"service_tier": "flex"}, 10), ({"service_tier": "auto"}, 0)],
)
def test_a_tier_moves_what_the_customer_s_class_says(fields, offset):
    account = Account(key="k", tenant="acme", priority=5)
    caller = CompletionRequest.model_validate({"prompt": "a", **fields}).caller(account)
    assert (caller.priority, caller.tier_offset) == (5, offset)
    both = CompletionRequest.model_validate({"prompt": "a", **fields, "priority": -3}).caller(account)
    assert (both.priority, both.tier_offset) == (-3, 0), "a priority that is said counts"


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", 0), ("priority", -5)])
def test_a_tier_counts_where_requests_are_served_by_priority(tiny, monkeypatch, policy, expected):
    seen = []
    scheduler = tiny.engine.scheduler
    add = scheduler.add
    monkeypatch.setattr(type(scheduler.policy), "heeds_priority", policy == "priority")
    monkeypatch.setattr(scheduler, "add", lambda request: (seen.append(request.priority), add(request)))
    account = Account(key="k", priority=0 if policy == "fcfs" else 5)
    caller = CompletionRequest.model_validate({"prompt": "a", "service_tier": "priority"}).caller(account)

    async def ask():
        how = SamplingParams(max_tokens=1)
        return [delta async for delta in tiny.client.submit("tier", [5, 6], how, caller)]

    asyncio.run(ask())
    assert seen == [expected]
