"""Breakpoints and retentions over HTTP: what they name stays cached, for so long, and nobody else's goes for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer

from pagefold.config import Account
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces.read_recording import read_recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOOR = {
    "accounts": (Account(key="sk-a", tenant="acme"), Account(key="sk-b", tenant="beta")),
    "admin_api_key": "sk-admin",
    "open_metrics": True,
}
FEW = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_cache_memory_bytes": 2**18}
HOUR = {"type": "ephemeral", "ttl": "1h"}
SHORT = {"type": "ephemeral"}
SEA = "Talk about the sea, the sun and the wind, at length. "


@pytest.fixture(scope="module")
def served(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(tiny_chat_model, door=DOOR, **FEW)
    yield server
    server.check_pool()
    server.close()


@pytest.fixture
def server(served: LocalServer) -> LocalServer:
    """Return the server, which has cached and pinned nothing."""
    assert served.http.post("/reset_prefix_cache", headers={"Authorization": "Bearer sk-admin"}).status_code == 200
    return served


def text(words: str, control: object = None) -> dict[str, object]:
    return {"type": "text", "text": words, **({} if control is None else {"cache_control": control})}


def post(server: LocalServer, path: str, key: str = "sk-a", **fields: object) -> dict[str, object]:
    answer = server.http.post(path, json=fields, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    assert "x-pagefold-ignored" not in answer.headers
    return answer.json()


def message(server: LocalServer, system: list[object], words: str = "Go.", key: str = "sk-a", **fields: object) -> dict:
    messages = [{"role": "user", "content": words}]
    return post(
        server,
        "/v1/messages",
        key,
        **{"messages": messages, "system": system, "max_tokens": 2, "temperature": 0} | fields,
    )


def pins(server: LocalServer) -> list[dict[str, object]]:
    answer = server.http.get("/v1/cache/pins", headers={"Authorization": "Bearer sk-admin"})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def flood(server: LocalServer) -> None:
    """Evict all that is not pinned."""
    num_blocks = server.engine.scheduler.core.pool.num_blocks
    for first in range(0, 2 * 16 * num_blocks, 240):
        post(
            server, "/v1/completions", "sk-b", prompt=[(first * 7 + i * i) % 500 + 3 for i in range(240)], max_tokens=1
        )


def test_a_beginning_with_a_breakpoint_outlives_a_flood(server):
    asked = [text(SEA * 3, HOUR)]
    plain = message(server, asked)
    (pin,) = pins(server)
    assert pin["is_hint"]
    assert pin["tenant"] == "acme"
    assert 3500 < pin["ttl_left_s"] <= 3600
    other = [text("Say nothing. " * 8)]
    message(server, other)
    flood(server)
    again = message(server, asked, "Go on, and on, and on.")
    assert again["usage"]["cache_read_input_tokens"] >= pin["num_tokens"] > 0
    assert message(server, other)["usage"]["cache_read_input_tokens"] < plain["usage"]["cache_creation_input_tokens"]
    assert message(server, asked)["content"] == plain["content"], "a hint changes no answer"


def test_each_breakpoint_is_where_it_says(server):
    history = [
        {"role": "user", "content": [text(SEA * 2), text("Now. ", SHORT)]},
        {"role": "assistant", "content": "It is blue. " * 4},
        {"role": "user", "content": "And?"},
    ]
    counted = message(server, [text(SEA, HOUR)], messages=history, cache_control=SHORT)
    found = sorted(pins(server), key=lambda pin: pin["num_tokens"])
    assert [round(pin["ttl_left_s"], -2) for pin in found] == [3600, 300, 300]
    usage = counted["usage"]
    block = found[-1]["num_tokens"] / found[-1]["num_blocks"]
    total = sum(usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))
    assert total - block < found[-1]["num_tokens"] <= total
    assert 0 < found[0]["num_tokens"] < found[1]["num_tokens"] < found[2]["num_tokens"]
    for at, beginning in ((0, [{"role": "user", "content": "x"}]), (1, history[:1])):
        answer = server.http.post(
            "/v1/messages/count_tokens",
            json={"messages": beginning, "system": SEA},
            headers={"Authorization": "Bearer sk-a"},
        )
        num_tokens = answer.json()["input_tokens"]
        assert num_tokens - 2 * block - 16 < found[at]["num_tokens"] <= num_tokens


def test_a_breakpoint_again_renews_its_pin(server):
    message(server, [text(SEA * 2, SHORT)])
    (first,) = pins(server)
    message(server, [text(SEA * 2, HOUR)], "Again.")
    (second,) = pins(server)
    assert second["id"] != first["id"]
    assert second["num_tokens"] == first["num_tokens"]
    assert second["ttl_left_s"] > 3500


def test_own_oldest_yields_and_another_tenants_never(server):
    message(server, [text("Beta's own words. " * 6, SHORT)], key="sk-b")
    for number in range(30):
        message(server, [text(f"{number} is the number of this one. " * 6, SHORT)])
    told = pins(server)
    assert told[0]["tenant"] == "beta"
    assert 1 < len(told) < 31
    report = server.http.get("/v1/cache/pins", headers={"Authorization": "Bearer sk-admin"}).json()
    assert report["num_blocks"] <= report["max_blocks"]
    assert all(gone["cause"] == "reset" for gone in report["dropped"])
    warmed = server.http.post(
        "/v1/cache/warm",
        json={"prompt": list(range(300, 420)), "pin": True},
        headers={"Authorization": "Bearer sk-admin"},
    )
    assert warmed.status_code == 200, "nobody was promised a hint"


def test_nobody_else_sees_or_takes_pins(server):
    message(server, [text(SEA * 2, SHORT)])
    (pin,) = pins(server)
    for key in ("sk-a", "sk-b"):
        headers = {"Authorization": f"Bearer {key}"}
        assert server.http.get("/v1/cache/pins", headers=headers).status_code in (401, 403)
        assert server.http.delete(f"/v1/cache/pins/{pin['id']}", headers=headers).status_code in (401, 403)
    assert pins(server)


def test_what_a_session_edits_away_is_not_pinned_any_more(server):
    system = [text(SEA, HOUR)]

    def turn(words: str) -> None:
        message(server, system, session_id="a", messages=[{"role": "user", "content": [text(words, SHORT)]}])

    turn("One long history, which is told here. " * 3)
    assert len(pins(server)) == 2
    turn("Short, and other words. " * 3)
    told = pins(server)
    assert len(told) == 2
    assert sorted(round(pin["ttl_left_s"], -2) for pin in told) == [300, 3600]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SEA * 2}], "max_tokens": 2}),
        ("/v1/responses", {"input": SEA * 2, "max_output_tokens": 2}),
    ],
)
def test_a_retention_of_a_day_pins_the_prompt(server, path, body):
    for kept in ("in_memory", "in-memory"):
        post(server, path, **body, prompt_cache_retention=kept)
        assert not pins(server)
    post(server, path, **body, prompt_cache_retention="24h")
    (pin,) = pins(server)
    assert pin["is_hint"]
    assert 86_000 < pin["ttl_left_s"] <= 86_400
    headers = {"Authorization": "Bearer sk-a"}
    for wrong in ("48h", 24, ["24h"], {}):
        refused = server.http.post(path, json={**body, "prompt_cache_retention": wrong}, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_cache_retention"


def test_a_replay_pins_the_same(tiny_chat_model, tmp_path):
    path = tmp_path / "recording"
    server = LocalServer(tiny_chat_model, record_trace=path, door=DOOR, **FEW | {"kv_cache_memory_bytes": 2**17})
    for turn in range(3):
        for agent in range(6):
            system = [text(f"You are agent {agent}. " * 6, HOUR), text("Be short. " * (turn + 1), SHORT)]
            key = "sk-a" if agent % 2 else "sk-b"
            message(server, system, "Go. " * (turn + 1), key, session_id=f"{agent}", cache_control=SHORT)
        (pin, *_) = pins(server)
        headers = {"Authorization": "Bearer sk-admin"}
        assert server.http.delete(f"/v1/cache/pins/{pin['id']}", headers=headers).status_code == 200
    server.close()
    recording = read_recording(path)
    assert any(add.hint_pins for add in recording.adds())
    report = replay_recording(recording)
    assert not report.first_difference
    assert report.num_evictions
