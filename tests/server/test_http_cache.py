"""``/v1/cache/``: warm-ups are found by who comes next, pins outlive pressure and give way to requests."""

from __future__ import annotations

import concurrent.futures
import json
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, error_of, post_head, until

from pagefold.config import Account

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

ADMIN = {"Authorization": "Bearer sk-admin"}
ACCOUNTS = (Account(key="sk-acme", tenant="acme"), Account(key="sk-beta", tenant="beta"))
SYSTEM = [{"role": "system", "content": "You are a careful librarian. " * 20 + "Answer in one word."}]


@pytest.fixture(scope="module")
def library(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """64 blocks of 16 tokens, of which 32 may be pinned."""
    server = LocalServer(
        tiny_chat_model,
        door={"accounts": ACCOUNTS, "api_keys": ("sk-plain",), "admin_api_key": "sk-admin", "open_metrics": True},
        kv_cache_memory_bytes=64 * 16 * 2 * 2 * 2 * 8 * 8,
        max_model_len=900,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        eviction_policy="lru",  # a learned one may keep what a test wants gone, by what tests before it asked
    )
    assert server.num_blocks == 64
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _empty(library: LocalServer) -> Iterator[None]:
    """Every test begins with an empty cache, and leaves a core in which everything holds."""
    library.http.post("/reset_prefix_cache", headers=ADMIN).raise_for_status()
    yield
    library.runner.script = None
    library.runner.fail(0)
    library.runner.allow()
    library.check_pool()


def post_warm(server: LocalServer, **fields: object) -> httpx.Response:
    return server.http.post("/v1/cache/warm", json=fields, headers=ADMIN)


def warm(server: LocalServer, **fields: object) -> dict:
    response = post_warm(server, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def pins(server: LocalServer) -> dict:
    return server.http.get("/v1/cache/pins", headers=ADMIN).raise_for_status().json()


def causes(server: LocalServer) -> dict[str, str]:
    return {gone["id"]: gone["cause"] for gone in pins(server)["dropped"]}


def ask(server: LocalServer, prompt: object, key: str = "sk-plain", **fields: object) -> dict:
    path = "/v1/completions" if not isinstance(prompt, list) or isinstance(prompt[0], int) else "/v1/chat/completions"
    name = "prompt" if path == "/v1/completions" else "messages"
    body = {name: prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    response = server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return response.json()


def hit(server: LocalServer, prompt: object, key: str = "sk-plain", **fields: object) -> int:
    return ask(server, prompt, key, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]


def numbers(first: int, num: int) -> list[int]:
    return list(range(first, first + num))


# Warming.


def test_token_ids_are_found_by_who_comes_next(library):
    told = warm(library, prompt=numbers(100, 50))
    assert told == {
        "id": told["id"],
        "object": "cache.warm",
        "num_prompt_tokens": 50,
        "num_kept_tokens": 50,
        "num_cached_tokens": 0,
        "pin": None,
        "cause": None,
    }
    assert hit(library, [*numbers(100, 50), 7, 8, 9]) == 48  # three whole blocks
    assert warm(library, prompt=numbers(100, 50))["num_cached_tokens"] == 48


@pytest.mark.parametrize("more", ["", "s", "ly", " Why?", "\n\nWhy?", "'s", "1", "<|im_end|>"])
def test_a_text_is_found_whatever_follows_it(library, more):
    text = "You are a careful librarian, and you never raise your voice. " * 5 + "Answer brief"
    told = warm(library, prompt=text)
    assert told["num_kept_tokens"] == told["num_prompt_tokens"] - 1  # `brief` may go on
    assert hit(library, text + more + " Where is the door?") >= told["num_kept_tokens"] // 16 * 16


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_chat_is_found_whatever_is_said_next(library, role):
    told = warm(library, messages=SYSTEM)
    assert told["num_kept_tokens"] == told["num_prompt_tokens"]
    assert (
        hit(library, [*SYSTEM, {"role": role, "content": "Where is the door?"}]) >= told["num_kept_tokens"] // 16 * 16
    )


def test_what_was_warmed_is_what_would_have_been_computed(library):
    prompt = "You are a careful librarian. " * 12
    cold = ask(library, prompt + "Where?", max_tokens=12)
    library.http.post("/reset_prefix_cache", headers=ADMIN)
    warm(library, prompt=prompt)
    warmed = ask(library, prompt + "Where?", max_tokens=12)
    assert warmed["choices"] == cold["choices"]
    assert warmed["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_for_a_tenant_and_a_salt(library):
    prompt = numbers(500, 40)
    warm(library, prompt=prompt, tenant="acme", cache_salt="x")
    assert hit(library, prompt, "sk-acme") == 0
    assert hit(library, prompt, "sk-beta", cache_salt="x") == 0
    assert hit(library, prompt, cache_salt="x") == 0
    assert hit(library, prompt, "sk-acme", cache_salt="x") == 32


def test_warm_ups_are_no_latencies(library):
    before = library.metric("vllm:time_to_first_token_seconds_count")
    warm(library, prompt=numbers(700, 40))
    assert library.metric("vllm:time_to_first_token_seconds_count") == before
    hit(library, [1])
    assert library.metric("vllm:time_to_first_token_seconds_count") == before + 1


def test_warm_ups_that_begin_alike_share(library):
    """Both at once, in the middle of others: nothing is computed twice."""
    library.runner.close_gate()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        one = pool.submit(warm, library, prompt=[*numbers(0, 64), 1], pin=True)
        two = pool.submit(warm, library, prompt=[*numbers(0, 64), 2], pin=True)
        three = pool.submit(hit, library, [*numbers(0, 64), 3])
        until(lambda: library.client._queue.num_requests == 3, "all to come")
        library.runner.allow()
        told = [one.result(), two.result()]
        assert three.result() >= 0
    # Both pin the same four blocks, so the later pin has taken the earlier one's place.
    assert sorted(result["pin"] is not None for result in told) in ([False, True], [True, True])
    assert pins(library)["num_blocks"] == 4
    assert [pin["num_blocks"] for pin in pins(library)["data"]] == [4]


# Pins.


def test_a_pin_outlives_pressure(library):
    pin = warm(library, messages=SYSTEM, pin=True)["pin"]
    warm(library, prompt=numbers(5000, 200))
    for first in range(10_000, 14_000, 500):
        ask(library, numbers(first, 500))
    assert hit(library, [*SYSTEM, {"role": "user", "content": "Where?"}]) >= pin["num_tokens"]
    assert hit(library, numbers(5000, 200)) == 0  # not pinned, so long gone
    assert library.metric("pagefold:num_pinned_blocks") == pin["num_blocks"]


def test_pins_are_listed_and_taken_away(library):
    told = warm(
        library, prompt=numbers(0, 33), tenant="acme", cache_salt="x", pin=True, ttl_s=1000, retention_priority=80
    )
    (pin,) = pins(library)["data"]
    assert pin["age_s"] >= told["pin"]["age_s"] >= 0
    assert 0 < pin["ttl_left_s"] <= 1000
    assert 79 < pin["retention_priority"] <= 80
    fixed = {name: pin[name] for name in ("id", "object", "tenant", "cache_salt", "num_tokens", "num_blocks")}
    assert fixed == {
        "id": told["id"],
        "object": "cache.pin",
        "tenant": "acme",
        "cache_salt": "x",
        "num_tokens": 32,
        "num_blocks": 2,
    }
    assert (pins(library)["num_blocks"], pins(library)["max_blocks"]) == (2, 32)
    gone = library.http.delete(f"/v1/cache/pins/{pin['id']}", headers=ADMIN)
    assert gone.json() == {"id": pin["id"], "object": "cache.pin", "deleted": True}
    error_of(library.http.delete(f"/v1/cache/pins/{pin['id']}", headers=ADMIN), 404)
    assert pins(library)["data"] == []
    assert causes(library)[pin["id"]] == "removed"
    assert hit(library, numbers(0, 33), "sk-acme", cache_salt="x") == 32  # still cached


def test_a_pin_expires_by_itself_though_nothing_runs(library):
    pin_id = warm(library, prompt=numbers(0, 33), pin=True, ttl_s=0.05)["id"]
    until(lambda: library.metric("pagefold:num_pinned_blocks") == 0, "the pin to expire")
    assert causes(library)[pin_id] == "expired"
    assert hit(library, numbers(0, 33)) == 32


def test_a_request_that_needs_the_memory_gets_it_and_nobody_is_preempted(library):
    """64 blocks; 32 pinned by three pins; a request of 50 takes those of least priority."""
    ids = [
        warm(library, prompt=numbers(first, num), pin=True, retention_priority=priority)["id"]
        for first, num, priority in ((0, 160, 10), (1000, 192, 90), (2000, 160, 50))
    ]
    assert pins(library)["num_blocks"] == 32
    before = library.metric("vllm:num_preemptions_total")
    ask(library, numbers(20_000, 800))
    assert [pin["num_blocks"] for pin in pins(library)["data"]] == [12]
    assert [causes(library).get(pin_id) for pin_id in ids] == ["memory", None, "memory"]
    assert hit(library, numbers(1000, 192)) == 191
    assert library.metric("vllm:num_preemptions_total") == before


@pytest.mark.long
def test_a_running_request_that_grows_is_not_stopped_by_pins(library):
    for first in (0, 1000):
        warm(library, prompt=numbers(first, 256), pin=True)
    answer = ask(library, numbers(20_000, 480), max_tokens=400)
    assert answer["usage"]["completion_tokens"] == 400
    assert len(pins(library)["data"]) < 2


def test_a_reset_drops_pins(library):
    pin_id = warm(library, prompt=numbers(0, 33), pin=True)["id"]
    library.http.post("/reset_prefix_cache", headers=ADMIN)
    assert pins(library)["data"] == []
    assert causes(library)[pin_id] == "reset"
    assert hit(library, numbers(0, 33)) == 0


def test_to_warm_again_renews_the_pin(library):
    first = warm(library, prompt=numbers(0, 40), pin=True, ttl_s=50)["id"]
    again = warm(library, prompt=numbers(0, 40), pin=True)
    assert [pin["id"] for pin in pins(library)["data"]] == [again["id"]]
    assert again["pin"]["ttl_left_s"] is None
    assert causes(library)[first] == "renewed"


def test_a_failing_step_pins_nothing(library):
    library.runner.fail(3)
    error_of(post_warm(library, prompt=numbers(0, 40), pin=True), 500)
    assert pins(library)["data"] == []
    library.runner.fail(2)
    assert warm(library, prompt=numbers(0, 40), pin=True)["pin"]["num_blocks"] == 2


def test_a_client_that_goes_away_pins_nothing(library):
    library.runner.close_gate()
    body = json.dumps({"prompt": numbers(0, 300), "pin": True}).encode()  # three steps
    with library.raw(post_head("/v1/cache/warm", len(body), "Authorization: Bearer sk-admin") + body):
        library.runner.wait_in_step()
    until(lambda: not library.client._commands.empty(), "the client to be missed")
    library.runner.allow()
    library.check_pool()
    assert pins(library)["data"] == []
    assert hit(library, numbers(0, 300)) == 128  # one step's worth was computed before


def test_caching_off_warms_nothing(tiny_chat_model):
    server = LocalServer(
        tiny_chat_model, door={"admin_api_key": "sk-admin"}, kv_cache_memory_bytes=2**22, enable_prefix_caching=False
    )
    try:
        error = error_of(post_warm(server, prompt=numbers(0, 40)), 400)
        assert "Prefix caching is off" in error["message"]
    finally:
        server.close()


# Bad input.


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "prompt", "Neither"),
        ({"prompt": "a", "messages": SYSTEM}, "prompt", "or both"),
        ({"prompt": 5}, "prompt", "token ids"),
        ({"prompt": [1, "a"]}, "prompt", "ints"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "none can be cached"),
        ({"prompt": "x" * 300}, "prompt", "none can be cached"),
        ({"prompt": "a few words only"}, "prompt", "do not fill a block of 16"),
        ({"prompt": [-1] * 40}, "prompt", "vocabulary"),
        ({"prompt": [99_999] * 40}, "prompt", "vocabulary"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "poet", "content": "a"}]}, "messages.0.role", "poet"),
        ({"prompt": numbers(0, 40), "pin": "yes"}, "pin", "yes"),
        ({"prompt": numbers(0, 40), "pin": True, "ttl_s": -5}, "ttl_s", "-5"),
        ({"prompt": numbers(0, 40), "pin": True, "ttl_s": 0}, "ttl_s", "0"),
        ({"prompt": numbers(0, 40), "ttl_s": 5}, "ttl_s", "pin is not true"),
        ({"prompt": numbers(0, 40), "pin": True, "retention_priority": 101}, "retention_priority", "101"),
        ({"prompt": numbers(0, 40), "pin": True, "retention_priority": -1}, "retention_priority", "-1"),
        ({"prompt": numbers(0, 40), "tenant": "nobody"}, "tenant", "no tenant 'nobody'"),
        ({"prompt": numbers(0, 40), "cache_salt": ""}, "cache_salt", "at least 1"),
        ({"prompt": numbers(0, 40), "ttl": 5}, "ttl", "not permitted"),
        ({"prompt": numbers(0, 900)}, "prompt", "900"),
        ({"prompt": "Too long. " * 1000}, "prompt", "maximum context length is 900"),
        ({"messages": [{"role": "user", "content": "Too long. " * 1000}]}, "messages", "maximum context length is 900"),
    ],
    ids=str,
)
def test_what_cannot_be_warmed_is_refused(library, fields, param, said):
    error = error_of(post_warm(library, **fields), 400)
    assert error["param"] == param
    assert said in error["message"]
    assert pins(library)["data"] == []


def test_another_model(library):
    assert error_of(post_warm(library, prompt=numbers(0, 40), model="other"), 404)["param"] == "model"


def test_no_tenants_without_a_key_file(tiny_chat_model):
    server = LocalServer(tiny_chat_model, door={"admin_api_key": "sk-admin"}, kv_cache_memory_bytes=2**22)
    try:
        assert "without a key file" in error_of(post_warm(server, prompt=numbers(0, 40), tenant="a"), 400)["message"]
        assert warm(server, prompt=numbers(0, 40))["num_kept_tokens"] == 40
    finally:
        server.close()


def test_a_pin_beyond_the_quota_is_refused_before_it_is_computed(library):
    kept = warm(library, prompt=numbers(0, 320), pin=True)["id"]
    entered = library.runner.num_entered
    error = error_of(post_warm(library, prompt=numbers(1000, 320), pin=True), 409)
    assert error["code"] == "pin_quota_exceeded"
    assert "20 of at most 32 blocks are pinned, and this prompt would pin 20 more" in error["message"]
    assert error_of(post_warm(library, prompt=numbers(2000, 560), pin=True), 409)["code"] == "pin_quota_exceeded"
    assert library.runner.num_entered == entered
    assert [pin["id"] for pin in pins(library)["data"]] == [kept]
    assert (
        warm(library, prompt=[*numbers(0, 320), *numbers(7000, 160)], pin=True)["pin"]["num_blocks"] == 30
    )  # shared once


def test_of_two_that_do_not_both_fit_one_is_pinned(library):
    library.runner.close_gate()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [pool.submit(post_warm, library, prompt=numbers(first, 320), pin=True) for first in (0, 1000)]
        until(lambda: library.client._queue.num_requests == 2, "both to come")
        library.runner.allow()
        answers = sorted((future.result() for future in asked), key=lambda response: response.status_code)
    assert [response.status_code for response in answers] == [200, 409]
    error = error_of(answers[1], 409)
    assert "The prompt is cached, but not pinned" in error["message"]
    assert pins(library)["num_blocks"] == 20
    assert hit(library, numbers(0, 320)) == hit(library, numbers(1000, 320)) == 319


# For the admin only.


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/cache/warm"), ("GET", "/v1/cache/pins"), ("DELETE", "/v1/cache/pins/x"), ("GET", "/v1/cache/other")],
)
def test_only_for_the_admin(library, tiny, method, path):
    body = {"prompt": numbers(0, 40)} if method == "POST" else None
    for headers in ({}, {"Authorization": "Bearer sk-acme"}, {"Authorization": "Bearer sk-plain"}):
        error_of(library.http.request(method, path, json=body, headers=headers), 401)
    error = error_of(tiny.http.request(method, path, json=body), 403)
    assert "--admin-api-key" in error["message"]
