"""``/v1/cache/whatif`` over HTTP: the curve of what was asked, and of another tenant's requests nothing."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from local_server import LocalServer, error_of

from pagefold.config import Account
from pagefold.kv import AUTO, POLICIES
from pagefold.server import whatif

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNTS = (Account(key="sk-acme", tenant="acme"), Account(key="sk-beta", tenant="beta"))
ACME, BETA, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("sk-acme", "sk-beta", "sk-admin"))
PATH = "/v1/cache/whatif"


def ask(server: LocalServer, prompt: list[int], key: dict[str, str]) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    assert server.http.post("/v1/completions", json=body, headers=key).status_code == 200


def told(server: LocalServer, key: dict[str, str] | None = None) -> dict[str, Any]:
    response = server.http.get(PATH, headers=key or {})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(
        tiny_chat_model,
        kv_cache_memory_bytes=2**21,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_offloading_size=0.005,
        door={"accounts": ACCOUNTS, "admin_api_key": "sk-admin", "open_metrics": True},
    )
    yield server
    server.close()


def test_it_says_what_each_size_policy_and_tier_would_find(server: LocalServer) -> None:
    """In turn, so that LRU finds all with room for all, and nothing with less; the pool has more room than that."""
    assert error_of(server.http.get(PATH, headers=ADMIN), 404)["code"] == "no_curve"
    prompts = [[10 + number] * 40 for number in range(6)]
    for _ in range(3):
        for prompt in prompts:
            ask(server, prompt, ACME)
    answer = told(server, ADMIN)
    assert answer["object"] == "cache.whatif"
    assert (answer["block_size"], answer["num_blocks"]) == (16, server.num_blocks)
    assert (answer["num_accesses"], answer["num_tokens"], answer["sampled_share"]) == (36, 18 * 40, 1.0)
    lru, *others = answer["policies"]
    assert lru["policy"] == "lru"
    assert {one["policy"] for one in answer["policies"]} == set(POLICIES) - {AUTO}
    assert [one["policy"] for one in answer["policies"] if one["is_used"]] == ["learned"]
    ratio = 12 * 32 / (18 * 40)
    for point in lru["points"]:
        assert point["hit_ratio"] == pytest.approx(ratio if point["num_blocks"] >= 12 else 0, abs=1e-4)
        assert point["bytes"] == point["num_blocks"] * server.engine.capacity.kv_budget_bytes // server.num_blocks
    assert all(one["points"][-1]["hit_ratio"] == pytest.approx(ratio, abs=1e-4) for one in others)
    device, host = answer["tiers"]
    assert (device["tier"], device["num_blocks"], host["tier"]) == ("device", server.num_blocks, "host")
    assert host["num_blocks"] == server.engine.capacity.num_host_blocks
    assert device["hit_ratio_at_least"] == device["hit_ratio_up_to_it"] == host["hit_ratio_at_least"]
    assert answer["blocks_per_place"] == 1
    assert host["hit_ratio_up_to_it"] == pytest.approx(ratio, abs=1e-4)
    assert "53.3%" in answer["told"]
    assert [one["tenant"] for one in answer["tenants"]] == ["acme"]


def test_a_tenant_sees_his_own_curve_and_nothing_that_hangs_on_others(server: LocalServer) -> None:
    random = Random(0)
    for _ in range(10):
        ask(server, [random.randrange(100) for _ in range(34)], BETA)
    before = told(server, BETA)
    assert (before["num_accesses"], before["policies"], before["tiers"]) == (20, [], [])
    assert [one["tenant"] for one in before["tenants"]] == ["beta"]
    for _ in range(30):
        ask(server, [random.randrange(100) for _ in range(50)], ACME)
    after = told(server, BETA)
    assert "acme" not in json.dumps(after)
    assert {**after, "since_s": 0} == {**before, "since_s": 0}
    assert {one["tenant"] for one in told(server, ADMIN)["tenants"]} == {"acme", "beta"}


def test_ghosts_are_not_played_for_everybody_who_asks(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take so much of a core's time at most; a tenant's question plays none."""
    played = []
    play = whatif.ghost_ratios
    monkeypatch.setattr(whatif, "ghost_ratios", lambda *given: played.append(given) or play(*given))
    for number in range(3):
        ask(server, [number] * 40, ACME)
    told(server, ACME)
    assert not played
    monkeypatch.setattr(whatif, "_MOST_SHARE", 1e-9)
    first = told(server, ADMIN)["policies"]
    for _ in range(3):
        ask(server, [0] * 40, ACME)
    second = told(server, ADMIN)["policies"]
    assert len(played) == 1
    assert second == first, "of one moment, LRU's too"
    monkeypatch.setattr(whatif, "_MOST_SHARE", 1e9)
    assert told(server, ADMIN)["policies"][1:] != first[1:]
    assert len(played) == 2


def test_no_key_is_refused_and_a_tenant_s_key_opens_no_other_route_of_the_cache(server: LocalServer) -> None:
    assert server.http.get(PATH).status_code == 401
    assert server.http.get("/v1/cache/pins", headers=ACME).status_code == 401


def test_without_tenants_everybody_sees_all(tiny_chat_model: Path) -> None:
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**21, max_model_len=64)
    try:
        assert error_of(server.http.get(PATH), 404)["code"] == "no_curve"
        ask(server, [3] * 10, {})
        assert "whole block" in error_of(server.http.get(PATH), 404)["message"]
        ask(server, [3] * 20, {})
        assert len(told(server)["policies"]) == len(POLICIES) - 1, "but for the one that follows them"
    finally:
        server.close()


def test_with_caching_off_there_is_none(tiny_chat_model: Path) -> None:
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**21, max_model_len=64, enable_prefix_caching=False)
    try:
        ask(server, [3] * 20, {})
        assert "caching is off" in error_of(server.http.get(PATH), 404)["message"]
    finally:
        server.close()


def test_a_policy_that_follows_others_says_whom(tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whatif, "_MOST_SHARE", 1e9)
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**21, max_model_len=64, eviction_policy=AUTO)
    try:
        ask(server, [3] * 20, {})
        assert [one["policy"] for one in told(server)["policies"] if one["is_used"]] == ["learned"]
        assert server.http.get("/v1/dashboard").json()["policy"] == "auto (learned)"
        switched = server.engine.scheduler.core.policy._candidates[1]
        switched.found = 1e9
        ask(server, [3] * 40, {})  # whoever found more is followed with the next use
        assert [one["policy"] for one in told(server)["policies"] if one["is_used"]] == ["lru"]
        assert server.http.get("/v1/dashboard").json()["policy"] == "auto (lru)"
        assert server.metric("pagefold:eviction_policy_switches_total", "lru") == 1
    finally:
        server.close()
