"""Sessions over HTTP: every API takes them, their client ends them, and nobody ends another tenant's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, until

from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces.read_recording import read_recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = {"temperature": 0, "ignore_eos": True}
KEYS = {
    "accounts": ({"key": "sk-a", "tenant": "acme"}, {"key": "sk-b", "tenant": "beta"}),
    "admin_api_key": "sk-admin",
    "open_metrics": True,
}
BODIES = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 2, **GREEDY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 2, **GREEDY},
    "/v1/responses": {"input": "Go.", "max_output_tokens": 2, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 2, "temperature": 0},
}


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    from pagefold.config import Account

    door = {**KEYS, "accounts": tuple(Account(**account) for account in KEYS["accounts"])}
    served = LocalServer(tiny_chat_model, door=door, kv_cache_memory_bytes=2**22, max_num_seqs=8, max_model_len=256)
    yield served
    served.check_pool()
    served.close()


def post(server: LocalServer, path: str, key: str = "sk-a", **fields: object) -> object:
    return server.http.post(path, json={**BODIES[path], **fields}, headers={"Authorization": f"Bearer {key}"})


def end(server: LocalServer, session_id: str, key: str = "sk-a") -> object:
    return server.http.delete(f"/v1/sessions/{session_id}", headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("path", BODIES)
def test_every_api_takes_a_session_and_it_ends_once(server, path):
    name = f"agent of {path}"
    answer = post(server, path, session_id=name, returns_in_s=1.5)
    assert answer.status_code == 200, answer.text
    assert "x-pagefold-ignored" not in answer.headers
    assert post(server, path, session_id=f"{name}, sub", parent_session_id=name).status_code == 200
    assert end(server, name, "sk-b").status_code == 404, "a foreign session is another session"
    ended = end(server, name)
    assert ended.status_code == 200, ended.text
    told = ended.json()
    assert (told["id"], told["object"], told["deleted"]) == (name, "session", True)
    assert (told["num_sessions"], told["num_running"]) == (2, 0)
    for again in (name, f"{name}, sub"):
        refused = end(server, again)
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "session_not_found"


def test_a_session_changes_no_answer(server):
    body = {"prompt": list(range(40, 80)), "max_tokens": 12, **GREEDY}
    told = []
    for fields in ({}, {"session_id": "x"}, {"session_id": "x", "returns_in_s": 9.0}):
        answer = post(server, "/v1/completions", **body, **fields)
        told.append(answer.json()["choices"][0]["text"])
    assert len(set(told)) == 1


def test_a_session_ends_while_a_request_of_it_runs(server):
    superseded = server.engine.scheduler.core.blocks.expectations
    before = superseded.num_superseded
    body = {"prompt": list(range(100, 140)), "max_tokens": 100, "session_id": "long", **GREEDY}
    server.runner.close_gate()
    with ThreadPoolExecutor() as pool:
        try:
            going = pool.submit(post, server, "/v1/completions", **body)
            server.runner.wait_in_step()
            ending = pool.submit(end, server, "long")
            until(lambda: not server.client._commands.empty(), "its end to reach the engine")
        finally:
            server.runner.allow()
        assert ending.result().json()["num_running"] == 1
        answer = going.result().json()
    assert answer["usage"]["completion_tokens"] == 100, "it goes on"
    assert end(server, "long").status_code == 404
    until(lambda: not server.engine.scheduler.sessions._open, "the request has ended")
    assert superseded.num_superseded > before, "its blocks lose their value when it ends"


def test_what_is_edited_away_is_superseded(server):
    expectations = server.engine.scheduler.core.blocks.expectations
    before = expectations.num_superseded
    prompt = list(range(300, 380))
    for last in (prompt, prompt[:32] + list(range(500, 548))):
        body = {"prompt": last, "max_tokens": 1, "session_id": "edits", **GREEDY}
        assert post(server, "/v1/completions", **body).status_code == 200
    assert expectations.num_superseded - before == 3
    assert server.metric("pagefold:num_superseded_blocks") == expectations.num_superseded
    assert server.metric("pagefold:num_paused_sessions") == server.engine.scheduler.sessions.counts.num_paused > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"session_id": "abc\n"}, "session_id"),
        ({"session_id": "a\x00b"}, "session_id"),
        ({"session_id": "."}, "session_id"),
        ({"session_id": "y", "parent_session_id": ".."}, "parent_session_id"),
        ({"parent_session_id": "y"}, "parent_session_id"),
        ({"session_id": "y", "parent_session_id": "y"}, "parent_session_id"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_bad_sessions(server, path, fields, param):
    refused = post(server, path, **fields)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert param in (error.get("param") or error["message"])


def test_a_session_that_nobody_began(server):
    for name in ("never", "x" * 500, "a/b", "%00", "a%0Ab"):
        assert end(server, name).status_code == 404


def test_a_newline_behind_the_name_of_another_session_ends_nothing(server):
    for name in ("abc", "...", "a.b", "a/..b"):
        assert post(server, "/v1/completions", session_id=name).status_code == 200
        assert end(server, f"{name}%0A").status_code == 404
        assert end(server, name).status_code == 200


def test_a_recording_carries_sessions_without_their_names(tiny_chat_model, tmp_path):
    """With so little memory that it matters what goes first; and the replay lets the same blocks go."""
    path = tmp_path / "recording"
    server = LocalServer(
        tiny_chat_model,
        record_trace=path,
        kv_cache_memory_bytes=2**17,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=96,
    )
    for turn in range(4):
        for agent in range(4):
            prompt = [1000 * agent + i for i in range(40 + 10 * turn)]
            if turn == 3:
                prompt[20:] = range(7000, 7030)
            fields = {"session_id": f"very secret {agent}", "returns_in_s": 0.5 * agent} if agent else {}
            server.complete(prompt, max_tokens=2, **GREEDY, **fields)
    assert server.http.delete("/v1/sessions/very secret 1").status_code == 200
    server.complete(list(range(9000, 9080)), max_tokens=2, **GREEDY)
    server.close()
    assert "secret" not in path.read_text()
    recording = read_recording(path)
    adds = list(recording.adds())
    assert {add.returns_in_s for add in adds} == {None, 0.5, 1.0, 1.5}
    assert len({add.session for add in adds}) == 4
    report = replay_recording(recording)
    assert not report.first_difference
    assert report.num_evictions


EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def text(words: str, control: object) -> dict[str, object]:
    return {"type": "text", "text": words, "cache_control": control}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_control": {"type": "for ever"}}, "ephemeral"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "5m or 1h"),
        ({"cache_control": {"type": "ephemeral", "ttl": []}}, "5m or 1h"),
        ({"system": [text("a", {"type": "ephemeral", "ttl": {}})]}, "5m or 1h"),
        ({"cache_control": {}}, "type"),
        ({"system": [text("a", EPHEMERAL)] * 5}, "5 blocks with cache_control"),
        ({"system": [text("a", EPHEMERAL)] * 4, "cache_control": EPHEMERAL}, "5 blocks with cache_control"),
        ({"system": [text("a", EPHEMERAL), text("b", HOUR)]}, "1h comes behind"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "x", "cache_control": EPHEMERAL},
                            {"type": "text", "text": "b"},
                        ],
                    },
                    {"role": "user", "content": "c"},
                ]
            },
            "block of thinking",
        ),
    ],
)
def test_breakpoints_that_cannot_be(server, fields, message):
    refused = post(server, "/v1/messages", **fields)
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
    assert message in refused.json()["error"]["message"]


def test_breakpoints_within_a_result_lie_before_its_own(server):
    def asked(inner: object, outer: object) -> object:
        call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen", inner)], "cache_control": outer}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        return post(server, "/v1/messages", messages=messages)

    assert asked(HOUR, EPHEMERAL).status_code == 200
    refused = asked(EPHEMERAL, HOUR)
    assert refused.status_code == 400
    assert "1h comes behind" in refused.json()["error"]["message"]


def test_usage_tells_new_tokens_under_the_lifetime_of_the_last_breakpoint(server):
    for control, name in ((HOUR, "ephemeral_1h_input_tokens"), (EPHEMERAL, "ephemeral_5m_input_tokens"), (None, None)):
        system = [text(f"Talk about {name}, and about the sea, the sun and the wind, at length. " * 2, control)]
        answer = post(server, "/v1/messages", system=system)
        assert answer.status_code == 200, answer.text
        assert "x-pagefold-ignored" not in answer.headers
        usage = answer.json()["usage"]
        assert usage["cache_creation_input_tokens"] > 0
        told = usage["cache_creation"]
        assert sum(told.values()) == usage["cache_creation_input_tokens"]
        assert told[name or "ephemeral_5m_input_tokens"] == usage["cache_creation_input_tokens"]
