"""``/v1/explain`` over HTTP: the cause of every computed token, for whoever may know, and for nobody else."""

from __future__ import annotations

import json
import threading
from random import Random
from typing import TYPE_CHECKING, Any, get_args

import pytest
from local_server import PATIENCE_S, LocalServer, error_of, until

from pagefold.config import Account
from pagefold.events import PreemptionCause, WaitCause
from pagefold.server.explanations import _PREEMPTIONS, _WAITS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNTS = (Account(key="sk-acme", tenant="acme"), Account(key="sk-beta", tenant="beta"))
ACME, BETA, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("sk-acme", "sk-beta", "sk-admin"))
SYSTEM = "You answer in one sentence. Today is {}. " + "Be kind, be brief, and say nothing twice. " * 6


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(
        tiny_chat_model,
        kv_cache_memory_bytes=2**21,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        door={"accounts": ACCOUNTS, "admin_api_key": "sk-admin", "open_metrics": True},
    )
    yield server
    server.close()


def ask(server: LocalServer, prompt: Any, key: dict[str, str] = ACME, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    response = server.http.post("/v1/completions", json=body, headers=key)
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: LocalServer, day: str, question: str, key: dict[str, str] = ACME) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM.format(day)}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    response = server.http.post("/v1/chat/completions", json=body, headers=key)
    assert response.status_code == 200, response.text
    return response.json()


def explain(server: LocalServer, request_id: str, key: dict[str, str] = ACME) -> dict[str, Any]:
    response = server.http.get(f"/v1/explain/{request_id}", headers=key)
    assert response.status_code == 200, response.text
    return response.json()


def causes(told: dict[str, Any]) -> list[tuple[int, int, str]]:
    (request,) = told["requests"]
    assert request["cached_tokens"] + sum(miss["tokens"] for miss in request["misses"]) == request["prompt_tokens"]
    return [(miss["start"], miss["end"], miss["cause"]) for miss in request["misses"]]


def test_a_changing_day_in_the_system_prompt_is_found(server: LocalServer) -> None:
    """What users report as 0 % hits: the answer names the place, both texts, and what to do."""
    first = chat(server, "the first of May", "What is a cache?")
    second = chat(server, "the second of May", "What is a cache?")
    told = explain(server, second["id"])
    assert told["id"] == second["id"]
    (request,) = told["requests"]
    miss = request["misses"][-1]
    assert miss["cause"] == "differs"
    assert "behind what stays" in miss["remedy"]
    difference = miss["difference"]
    assert difference["nearest"] == first["id"] + "-0"
    assert difference["text_before"].endswith("Today is the")
    assert difference["own_text"].strip().startswith("second of May")
    assert difference["nearest_text"].strip().startswith("first of May")
    assert request["cached_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_every_cause_of_a_wait_and_of_a_preemption_is_told() -> None:
    assert set(get_args(WaitCause)) <= set(_WAITS)
    assert set(get_args(PreemptionCause)) == set(_PREEMPTIONS)


def test_every_prompt_of_a_request_is_told(server: LocalServer) -> None:
    answer = ask(server, [[5] * 40, [5] * 40 + [6]])
    told = explain(server, answer["id"])
    assert [request["id"] for request in told["requests"]] == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert all(request["finish_reason"] == "length" for request in told["requests"])
    assert all(request["ttft_s"] > 0 for request in told["requests"])


def test_a_request_goes_by_the_id_of_its_header_too(server: LocalServer) -> None:
    response = server.http.post(
        "/v1/completions", json={"prompt": [7] * 20, "max_tokens": 1}, headers={**ACME, "x-request-id": "mine-1"}
    )
    until(lambda: server.http.get("/v1/explain/mine-1", headers=ACME).status_code == 200, "its line in the log")
    assert explain(server, "mine-1")["id"] == response.json()["id"]
    assert error_of(server.http.get("/v1/explain/mine-1", headers=BETA), 404)["code"] == "request_not_found"
    assert explain(server, "mine-1", ADMIN)["id"] == response.json()["id"]


def test_other_terms_are_named(server: LocalServer) -> None:
    ask(server, [8] * 40, cache_salt="one")
    second = ask(server, [8] * 40, cache_salt="two")
    (miss, _) = explain(server, second["id"])["requests"][0]["misses"]
    assert (miss["cause"], miss["fields"], miss["end"]) == ("other_namespace", ["cache_salt"], 32)


def test_logprobs_of_a_prompt_are_computed_again(server: LocalServer) -> None:
    ask(server, [9] * 40)
    second = ask(server, [9] * 40, prompt_logprobs=0)
    assert causes(explain(server, second["id"])) == [(0, 40, "prompt_logprobs")]


@pytest.mark.long
def test_a_reset_and_an_eviction_are_told(server: LocalServer) -> None:
    first = ask(server, [10] * 40)
    assert causes(explain(server, first["id"])) == [(0, 40, "never_seen")]
    assert server.http.post("/reset_prefix_cache", headers=ADMIN).status_code == 200
    assert causes(explain(server, ask(server, [10] * 40)["id"])) == [(0, 32, "reset"), (32, 40, "partial_block")]
    num_blocks = server.engine.scheduler.core.pool.num_blocks
    taker = ""
    for number in range(num_blocks):
        taker = ask(server, [20 + number % 40, number // 40, *[11] * 60])["id"]
    told = explain(server, ask(server, [10] * 40)["id"])
    (miss, _) = told["requests"][0]["misses"]
    assert miss["cause"] == "evicted"
    assert miss["eviction"]["for"].startswith("cmpl-")
    assert miss["eviction"]["policy"] == "learned"
    assert taker
    other = explain(server, ask(server, [12] * 40, BETA)["id"], BETA)
    assert causes(other) == [(0, 40, "never_seen")]


def test_whoever_waited_is_told_for_what(server: LocalServer) -> None:
    ids: list[str] = []

    def post(number: int) -> None:
        ids.append(ask(server, [13, number] * 10, max_tokens=20, ignore_eos=True)["id"])

    threads = [threading.Thread(target=post, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    waits = [wait for one in ids for wait in explain(server, one)["requests"][0]["waits"]]
    assert {wait["cause"] for wait in waits} >= {"seats"}
    assert all(wait["ms"] > 0 and wait["told"] for wait in waits)


def test_a_refusal_is_told(server: LocalServer) -> None:
    bad = {"prompt": [5] * 10, "max_tokens": -1}
    response = server.http.post("/v1/completions", json=bad, headers={**ACME, "x-request-id": "bad-1"})
    assert response.status_code == 400
    until(lambda: server.http.get("/v1/explain/bad-1", headers=ACME).status_code == 200, "its line in the log")
    told = explain(server, "bad-1")
    assert told["refused"] == {"status": 400, "message": error_of(response, 400)["message"]}
    assert told["requests"] == []
    assert server.http.get("/v1/explain/bad-1", headers=BETA).status_code == 404


def test_one_answer_for_ids_that_are_unknown_and_those_of_others(server: LocalServer) -> None:
    answer = ask(server, [14] * 20)
    unknown = server.http.get("/v1/explain/cmpl-nobody", headers=BETA)
    others = server.http.get(f"/v1/explain/{answer['id']}", headers=BETA)
    assert unknown.status_code == others.status_code == 404
    assert unknown.json() == others.json()
    assert "X-Request-Id" in error_of(unknown, 404)["message"]


def test_it_asks_for_a_key_where_there_are_any(server: LocalServer) -> None:
    assert server.http.get("/v1/explain/x").status_code == 401
    assert server.http.get("/v1/explain").status_code == 401


def test_the_last_and_the_worst(server: LocalServer) -> None:
    first = chat(server, "Monday", "What is a cache?")
    second = chat(server, "Friday", "What is a cache?")
    third = ask(server, [15] * 20)
    other = chat(server, "Friday", "Whose is this?", BETA)

    def ids(query: str, key: dict[str, str] = ACME) -> list[str]:
        told = server.http.get(f"/v1/explain?{query}", headers=key).json()
        return [one["id"].removesuffix("-0") for one in told["data"]]

    assert ids("") == [third["id"]]
    assert ids("last=2") == [third["id"], second["id"]]
    assert ids("last=3") == [third["id"], second["id"], first["id"]]
    assert ids("last=1", BETA) == [other["id"]] == ids("last=1", ADMIN)
    worst = server.http.get("/v1/explain?worst=100", headers=ACME).json()["data"]
    avoidable = [
        sum(miss["tokens"] for request in one["requests"] for miss in request["misses"] if miss["remedy"])
        for one in worst
    ]
    assert avoidable == sorted(avoidable, reverse=True)
    assert avoidable[0] > 0


@pytest.mark.parametrize("query", ["last=0", "worst=-1", "last=two", "worst=1000"])
def test_a_number_that_is_none(server: LocalServer, query: str) -> None:
    response = server.http.get(f"/v1/explain?{query}", headers=ACME)
    assert query.split("=", maxsplit=1)[0] in error_of(response, 400)["message"]


def test_no_tenant_learns_anything_of_another(server: LocalServer) -> None:
    """Random requests of two tenants on the same texts: no answer holds an id of the other's, or changes by it."""
    random = Random(1)
    ids: dict[str, set[str]] = {"acme": set(), "beta": set()}
    keys = {"acme": ACME, "beta": BETA}
    answers: dict[str, list[str]] = {"acme": [], "beta": []}
    for _ in range(60):
        who = random.choice(("acme", "beta"))
        prompt = [random.randrange(3) for _ in range(random.randrange(20, 60))]
        ids[who].add(ask(server, prompt, keys[who], max_tokens=1)["id"])
    for who, other in (("acme", "beta"), ("beta", "acme")):
        for one in [*ids[who], *ids[other]]:
            answers[who].append(server.http.get(f"/v1/explain/{one}", headers=keys[who]).text)
        answers[who].append(server.http.get("/v1/explain?last=100", headers=keys[who]).text)
        answers[who].append(server.http.get("/v1/explain?worst=100", headers=keys[who]).text)
        text = " ".join(answers[who])
        assert not [one for one in ids[other] if one in text]
        assert other not in text
        fields = {field for answer in answers[who] for request in _requests(answer) for field in _fields(request)}
        assert "tenant" not in fields


def _requests(answer: str) -> list[dict[str, Any]]:
    told = json.loads(answer)
    listed = told.get("data", [told])
    return [request for one in listed for request in one.get("requests", [])]


def _fields(request: dict[str, Any]) -> list[str]:
    return [field for miss in request["misses"] for field in miss["fields"]]


def test_the_admin_sees_that_another_tenant_had_the_same(server: LocalServer) -> None:
    ask(server, [16] * 40, ACME)
    second = ask(server, [16] * 40, BETA)
    assert causes(explain(server, second["id"], BETA)) == [(0, 40, "never_seen")]
    (miss, _) = explain(server, second["id"], ADMIN)["requests"][0]["misses"]
    assert (miss["cause"], miss["fields"]) == ("other_namespace", ["tenant"])


def foretell(server: LocalServer, body: dict[str, Any], key: dict[str, str] = ACME) -> dict[str, Any]:
    response = server.http.post("/v1/explain", json=body, headers=key)
    assert response.status_code == 200, response.text
    told = response.json()
    assert told["cached_tokens"] + sum(miss["tokens"] for miss in told["misses"]) == told["prompt_tokens"]
    assert told["cached_tokens"] + told["computed_tokens"] == told["prompt_tokens"]
    return told


@pytest.mark.parametrize("form", ["ids", "text", "chat"])
def test_what_is_foretold_comes_to_pass(server: LocalServer, form: str) -> None:
    """Nothing is done for it: asked twice the answer is the same, and then the request finds just that."""
    words = f"A {form} that nobody has sent before, and that goes on for some blocks. " * 3
    if form == "chat":
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}
    else:
        prompt = server.tokenizer.encode(words) if form == "ids" else words
        path, body = "/v1/completions", {"prompt": prompt}
    body |= {"max_tokens": 1, "temperature": 0.0}
    first = foretell(server, body)
    assert foretell(server, body) | {"prefill_s": 0} == first | {"prefill_s": 0}
    answer = server.http.post(path, json=body, headers=ACME).json()
    assert answer["usage"]["prompt_tokens"] == first["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == first["cached_tokens"]
    again = foretell(server, body)
    num_tokens = first["prompt_tokens"]
    assert again["cached_tokens"] == min(num_tokens - 1, num_tokens // 16 * 16)
    assert {miss["cause"] for miss in again["misses"]} <= {"last_token", "partial_block"}
    assert again["cached_tokens_by_tier"] == {"device": again["cached_tokens"], "host": 0}
    answer = server.http.post(path, json=body, headers=ACME).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == again["cached_tokens"]


def test_what_is_foretold_says_nothing_of_other_salts_and_tenants(server: LocalServer) -> None:
    prompt = [17, 18] * 20
    ask(server, prompt, cache_salt="one")
    before = foretell(server, {"prompt": prompt, "cache_salt": "two"})
    assert [miss["cause"] for miss in before["misses"]] == ["never_seen"]
    assert [miss["cause"] for miss in foretell(server, {"prompt": prompt}, BETA)["misses"]] == ["never_seen"]
    assert foretell(server, {"prompt": prompt, "cache_salt": "one"})["cached_tokens"] == 32


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": [1] * 100_000}, "prompt"),
        ({"prompt": "a", "kv_quality": "coarse"}, "kv_quality"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_what_cannot_be_foretold(server: LocalServer, body: dict[str, Any], param: str) -> None:
    assert error_of(server.http.post("/v1/explain", json=body, headers=ACME), 400)["param"] == param


def test_explain_switched_off(tiny_chat_model: Path) -> None:
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**21, door={"enable_explain": False})
    try:
        answer = ask(server, [5] * 40, {})
        for path in (f"/v1/explain/{answer['id']}", "/v1/explain?last=2", "/v1/advice"):
            error = error_of(server.http.get(path), 404)
            assert error["code"] == "explain_off"
            assert "--no-enable-explain" in error["message"]
        error_of(server.http.post("/v1/explain", json={"prompt": [5] * 40}), 404)
        assert "--no-enable-explain" in error_of(server.http.get("/v1/cache/whatif"), 404)["message"]
        assert server.ledger.reach().num_requests == 0
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "diagnostics": {}}
        first = server.http.post("/v1/messages", json=body).json()
        body |= {"system": "y", "diagnostics": {"previous_message_id": first["id"]}}
        told = server.http.post("/v1/messages", json=body).json()["diagnostics"]
        assert (told["cache_miss_reason"]["type"], told["misses"]) == ("system_changed", [])
    finally:
        server.close()
