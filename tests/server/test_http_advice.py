"""What costs most: workloads in which one thing is wrong, and what the server says of it."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from local_server import LocalServer

from pagefold.config import Account
from pagefold.server.advices import _kind, _Texts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCOUNTS = (Account(key="sk-acme", tenant="acme"), Account(key="sk-beta", tenant="beta"))
ACME, BETA, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("sk-acme", "sk-beta", "sk-admin"))
RULES = "".join(f"Rule {number}: be kind to number {number * 7919 % 1000}. " for number in range(24))
QUESTIONS = ["What of the rain?", "Who comes first?", "Say why it snows.", "Is there a fourth?", "How far is Oslo?"]


@pytest.fixture
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """A server of its own for each workload, with room for all of it."""
    server = LocalServer(
        tiny_chat_model,
        kv_cache_memory_bytes=2**23,
        max_num_seqs=4,
        door={"accounts": ACCOUNTS, "admin_api_key": "sk-admin", "open_metrics": True},
    )
    yield server
    server.close()


def chat(server: LocalServer, system: str, question: str, key: dict[str, str] = ACME, **fields: Any) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, **fields}
    response = server.http.post("/v1/chat/completions", json=body, headers=key)
    assert response.status_code == 200, response.text


def advice(server: LocalServer, key: dict[str, str] = ACME) -> list[dict[str, Any]]:
    response = server.http.get("/v1/advice", headers=key)
    assert response.status_code == 200, response.text
    return response.json()["data"]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {name: {"type": "string", "description": f"The {name} to look at."}}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Looks at a {name}.", "parameters": parameters},
    }


def test_a_time_in_the_system_prompt(server):
    for minute, question in enumerate(QUESTIONS * 2):
        chat(server, f"You help people. It is 2026-05-01 10:{minute + 11}. {RULES}", question)
    first, *others = advice(server)
    assert (first["cause"], first["section"], first["num_requests"]) == ("differs", "system", 9)
    assert first["told"].startswith(f"A time at token {first['token']} of the prompt, in the system prompt, changes")
    assert first["tokens_per_request"] > 200
    assert 0.5 < first["share_of_prompt_time"] <= 1
    assert "end of the system prompt" in first["remedy"]
    assert first["own_text"] != first["nearest_text"]
    assert all(one["share_of_prompt_time"] <= first["share_of_prompt_time"] for one in others)


def test_an_id_in_the_system_prompt(server):
    random = Random(0)
    for question in QUESTIONS:
        chat(server, f"Session 5f{random.getrandbits(64):016x}. {RULES}", question)
    assert advice(server)[0]["told"].startswith("An id at token")


def test_tools_in_changing_order(server):
    tools = [tool(name) for name in ("rain", "snow", "hail", "wind", "frost", "storm")]
    random = Random(0)
    for question in QUESTIONS:
        chat(server, "You know the weather. " + RULES, question, tools=random.sample(tools, len(tools)))
    (first, *_) = advice(server)
    assert (first["cause"], first["section"]) == ("differs", "tools_order")
    assert first["told"].startswith("tools are sent in changing order")
    assert "sort" in first["remedy"]


def test_tools_that_change(server):
    for number, question in enumerate(QUESTIONS):
        chat(server, RULES, question, tools=[tool("rain"), tool(f"day{number}"), tool("snow")])
    assert advice(server)[0]["section"] == "tools"


def test_questions_that_differ_are_nobodys_fault(server):
    for question in QUESTIONS * 2:
        chat(server, RULES, question)
    assert [one["cause"] for one in advice(server)] == []


def test_a_salt_for_each_request(server):
    for number, question in enumerate(QUESTIONS):
        chat(server, RULES, question, cache_salt=f"request {number}")
    (first, *_) = advice(server)
    assert first["cause"] == "other_namespace"
    assert "cache_salt" in first["told"]


def test_too_little_memory(tiny_chat_model):
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**19, max_num_seqs=2, max_model_len=512)
    try:
        for _ in range(5):  # so that what was evicted is most, however long the first ones took
            for number in range(6):
                chat(server, f"{number} is the first. " + RULES[:1200], QUESTIONS[0], key={})
        (first, *_) = advice(server, {})
        assert first["cause"] == "evicted"
        assert "memory" in first["remedy"]
    finally:
        server.close()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("key", "sections", "tenants"), [(BETA, [], []), (ADMIN, ["system"], ["acme"])])
def test_texts_are_for_their_owner(server, key, sections, tenants):
    for minute, question in enumerate(QUESTIONS):
        chat(server, f"You help people. It is 2026-05-01 10:{minute + 11}. {RULES}", question)
    found = advice(server, key)
    assert all(one["own_text"] is None and one["nearest_text"] is None and "10:" not in one["told"] for one in found)
    assert [one["section"] for one in found] == sections
    assert [one["tenant"] for one in found] == tenants
    assert advice(server)[0]["tenant"] is None


def test_nothing_came(server):
    answer = server.http.get("/v1/advice", headers=ACME).json()
    assert answer == {"object": "list", "data": [], "num_requests": 0, "computed_tokens": 0, "since_s": None}


@pytest.mark.parametrize(
    ("before", "own", "after", "kind"),
    [
        ("It is 10:47:0", "3", " now", "A time"),
        ("It is 10:", "52:11", " now", "A time"),
        ("on 2026-05-", "0", "1, we", "A time"),
        ("at 12:30 user ", "1", " asks", "A text"),
        ("session ", "5f00aa11bb22cc33", " of", "An id"),
        ("a ", "word", " more", "A text"),
    ],
)
def test_what_changes_is_told_by_where_it_lies(before, own, after, kind):
    assert _kind(_Texts(own, "x", before + own + after, len(before))) == kind


def test_where_chats_change_is_known_when_they_are_forgotten(server, monkeypatch):
    """Which part of the request changes is found out when it ends."""
    monkeypatch.setattr("pagefold.server.diagnoses._MOST_CHATS", 4)
    for minute, question in enumerate(QUESTIONS):
        chat(server, f"You help people. It is 2026-05-01 10:{minute + 11}. {RULES}", question)
    for number in range(6):
        messages = [{"role": "user", "content": f"{number} is another one"}]
        body = {"messages": messages, "max_tokens": 1}
        assert server.http.post("/v1/chat/completions", json=body, headers=ACME).status_code == 200
    assert [one["section"] for one in advice(server) if one["cause"] == "differs"] == ["system"]
