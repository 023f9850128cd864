"""What /v1/dashboard tells over HTTP, and to whom; and that the page is for everybody and holds nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx
import pytest
from dashboard_stage import BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, Stage
from local_server import PATIENCE_S, LocalServer, error_of, until

from pagefold.config import Account
from pagefold.observe.misses import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = list(range(20_000, 20_100))
ACCOUNTS = (Account(key="sk-acme", tenant="acme"), Account(key="sk-blue", tenant="blue"))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def small(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=40 * 2**13, max_model_len=512, max_num_seqs=4)
    yield server
    server.close()


def told(server: LocalServer, **headers: str) -> dict:
    return server.http.get("/v1/dashboard", headers=headers).raise_for_status().json()


def test_it_tells_what_requests_did(small: LocalServer) -> None:
    before = told(small)
    assert before["requests"] == before["prefixes"] == before["misses"] == []
    assert before["tiers"][0]["now"] == {"held": 0, "pinned": 0, "cached": 0, "free": 40}
    first = small.complete(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
    second = small.complete(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
    after = told(small)
    assert [request["id"] for request in after["requests"]] == [f"{second['id']}-0", f"{first['id']}-0"]
    newest, oldest = after["requests"]
    assert (oldest["device_tokens"], newest["device_tokens"]) == (0, 96)
    assert (oldest["cause"], newest["cause"]) == ("never_seen", "partial_block")
    assert (newest["prompt_tokens"], newest["output_tokens"], newest["finish_reason"]) == (100, 4, "length")
    parts = sum(newest[part] for part in ("queue_s", "fetch_s", "prefill_s", "decode_s"))
    explained = small.http.get(f"/v1/explain/{newest['id']}").json()["requests"][0]
    assert parts == pytest.approx(explained["e2e_s"], abs=0.05)
    assert [sum(after["lookups"][name]) for name in ("device", "tiers", "computed")] == [96, 0, 104]
    causes = {miss["cause"]: miss["tokens"] for miss in after["misses"]}
    assert causes == {"never_seen": 100, "partial_block": 4}
    assert sum(after["output_tokens"]) == 8
    device = after["tiers"][0]
    assert device["now"]["held"] == 0
    assert device["now"]["cached"] == device["series"]["cached"][-1] >= 6
    assert sum(device["now"].values()) == device["num_blocks"] == 40
    (prefix,) = after["prefixes"]
    assert (prefix["blocks"], prefix["tokens"], prefix["finds"], prefix["is_cached"]) == (6, 96, 1, True)


def test_what_had_to_go_is_told_with_its_rule(small: LocalServer) -> None:
    for number in range(4):
        small.complete([30_000 + 1000 * number + i for i in range(250)], max_tokens=1)
    after = told(small)
    assert {one["rule"] for one in after["evictions"]} == {"policy"}
    assert sum(one["blocks"] for one in after["evictions"]) == small.metric(
        "pagefold:blocks_evicted_total", "allocation"
    )
    small.http.post("/reset_prefix_cache", headers=bearer("x"))


def test_what_a_disk_has_is_told_over_time(tiny_chat_model: Path, tmp_path: Path) -> None:
    """As its index has it, which a restart finds again."""
    tiers = {"kv_offloading_size": 0.01, "kv_disk_path": str(tmp_path), "kv_disk_size": 0.01}
    small = {"kv_cache_memory_bytes": 40 * 2**13, "max_model_len": 512, "max_num_seqs": 4}

    def disk_of(server: LocalServer) -> dict:
        return next(one for one in told(server)["tiers"] if one["name"] == "disk")

    server = LocalServer(tiny_chat_model, **small, **tiers, kv_write_policy="write_through")
    try:
        empty = disk_of(server)
        assert (empty["now"]["cached"], empty["series"]["cached"][0]) == (0, None)
        assert empty["num_blocks"] == empty["now"]["free"] > 100
        for number in range(4):
            server.complete([30_000 + 1000 * number + i for i in range(250)], max_tokens=1)
        until(lambda: disk_of(server)["now"]["cached"] == 4 * 15, "what was computed to be written")
        full = disk_of(server)
        assert full["series"]["cached"][-1] == 4 * 15
        assert full["now"]["free"] == full["num_blocks"] - 4 * 15
        assert full["now"]["written"] == sum(full["series"]["written"]) == 4 * 15
    finally:
        server.close()
    server = LocalServer(tiny_chat_model, **small, **tiers)
    try:
        assert disk_of(server)["now"]["cached"] == 4 * 15
    finally:
        server.close()


def test_ten_minutes_fit_into_a_small_answer(stage: Stage) -> None:
    """12 answers a minute."""
    with httpx.Client(base_url=stage.url, timeout=PATIENCE_S) as client:
        response = client.get("/v1/dashboard")
    assert len(response.content) < 15_000
    body = response.json()
    assert [tier["name"] for tier in body["tiers"]] == ["device", "host"]
    assert (body["tiers"][0]["num_blocks"], body["tiers"][1]["num_blocks"]) == (NUM_BLOCKS, NUM_HOST_BLOCKS)
    for tier in body["tiers"]:
        assert sum(tier["now"].get(name, 0) for name in ("held", "pinned", "cached", "free")) == tier["num_blocks"]
        for series in tier["series"].values():
            assert len(series) == body["num_pieces"]
            assert all(0 <= num <= tier["num_blocks"] for num in series)
    assert len(body["requests"]) == 20
    assert len(body["prefixes"]) == 10
    assert all(one["tokens"] == one["blocks"] * BLOCK_SIZE for one in body["prefixes"])
    assert all(miss["told"] == Cause(miss["cause"]).told for miss in body["misses"])
    assert sum(miss["tokens"] for miss in body["misses"]) == sum(body["lookups"]["computed"])


def test_without_keys_it_is_open(tiny: LocalServer) -> None:
    assert tiny.http.get("/v1/dashboard").status_code == 200


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "keys", [{"api_keys": ("sk-acme", "sk-blue")}, {"accounts": ACCOUNTS}], ids=["keys", "tenants"]
)
@pytest.mark.parametrize("has_admin", [True, False], ids=["admin", "no admin"])
def test_with_keys_it_is_the_admin_s(tiny_chat_model: Path, keys: dict, has_admin: bool) -> None:
    door = keys | {"open_metrics": True} | ({"admin_api_key": "sk-admin"} if has_admin else {})
    server = LocalServer(tiny_chat_model, door=door, kv_cache_memory_bytes=2**21, max_num_seqs=2)
    try:
        body = {"prompt": PROMPT, "max_tokens": 1}
        id_ = server.http.post("/v1/completions", json=body, headers=bearer("sk-acme")).json()["id"]
        for headers in ({}, bearer("sk-blue"), bearer("sk-acme"), bearer("sk-wrong")):
            response = server.http.get("/v1/dashboard", headers=headers)
            error = error_of(response, 401 if has_admin else 403)
            assert error["code"] == ("invalid_api_key" if has_admin else "no_admin_key")
            assert id_ not in response.text
        assert "--admin-api-key" in error["message"] or has_admin
        response = server.http.get("/v1/dashboard", headers=bearer("sk-admin"))
        assert response.status_code == (200 if has_admin else 403)
        assert (id_ in response.text) is has_admin
        if has_admin:
            assert response.json()["requests"][0]["tenant"] == ("acme" if "accounts" in keys else "")
        page = server.http.get("/dashboard")
        assert page.status_code == 200
        assert id_ not in page.text
    finally:
        server.close()


def test_the_page_stands_alone(tiny: LocalServer) -> None:
    page = tiny.http.get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert set(re.findall(r"(?:src|href)=\"(.{5})", page.text.split("<script")[0])) <= {"data:", "#bloc"}
    assert not re.findall(r"<[^>]+\s(?:style|on\w+)=", page.text.split("<script")[0])
    assert "innerHTML" not in page.text
    assert not re.findall(r"https?://(?!www\.w3\.org/)", page.text)


def test_polls_are_quiet_in_the_log(tiny: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    def paths() -> list[str]:
        return [record.path for record in caplog.records if record.name == "pagefold.request"]

    with caplog.at_level("INFO", logger="pagefold.request"):
        tiny.http.get("/v1/dashboard")
        tiny.http.get("/v1/models")
        until(lambda: "/v1/models" in paths(), "the line in the log, which is written when the answer has been sent")
    assert "/v1/dashboard" not in paths()


def test_a_server_that_loads_tells_that_nothing_runs() -> None:
    """The door is open before the model is there: see test_http_doors.py."""
    from pagefold.engine.status import EngineStatus
    from pagefold.observe.ledger import Ledger
    from pagefold.observe.overview import Overview
    from pagefold.server.dashboard.told import told as tell

    overview = Overview(Ledger())
    overview.watch(EngineStatus)
    seen = overview.see()
    assert seen is not None
    body = tell(seen, "tiny")
    assert body["tiers"][0]["num_blocks"] == 0
    assert set(body["tiers"][0]["series"]["held"]) == {None}


def test_every_rule_of_an_eviction_has_words() -> None:
    from typing import get_args

    from pagefold.events import EvictionCause, EvictionRule
    from pagefold.server.dashboard.told import EVICTIONS

    assert set(EVICTIONS) == {*get_args(EvictionRule), *get_args(EvictionCause)} - {"allocation"}


def test_where_only_the_metrics_have_a_key_the_dashboard_is_not_open() -> None:
    from pagefold.config import ServerConfig
    from pagefold.server.keys import Locks

    lock = Locks.of(ServerConfig(metrics_key="for-metrics")).at("/v1/dashboard")
    assert lock is not None
    assert lock.closed
    assert Locks.of(ServerConfig()).at("/v1/dashboard") is None
