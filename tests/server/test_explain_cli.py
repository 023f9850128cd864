"""``pagefold explain``, as users type it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from local_server import PATIENCE_S, LocalServer, start_cli

from pagefold.cli.explain import lines_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**21, max_num_seqs=4, max_num_batched_tokens=64)
    yield server
    server.close()


def run(server: LocalServer, *arguments: str, status: int = 0) -> str:
    process = start_cli("explain", "--url", server.url, *arguments)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, output
    return output


def test_a_request_is_told_in_lines_and_in_json(server: LocalServer) -> None:
    first = server.chat("On Monday the cache was warm, as it was on all days before.", max_tokens=2)
    second = server.chat("On Sunday the cache was warm, as it was on all days before.", max_tokens=2)
    output = run(server, second["id"])
    assert output.startswith(f"{second['id']}-0: {second['usage']['prompt_tokens']} tokens in the prompt: ")
    assert f"differs from {first['id']}-0" in output
    assert "here   " in output
    assert "Sunday" in output
    assert "Put what changes from request to request behind what stays" in output
    assert run(server) == output == run(server, "--last", "1") == run(server, "--worst", "1")
    told = json.loads(run(server, second["id"], "--json"))
    assert told["id"] == second["id"]
    assert [one["id"] for one in json.loads(run(server, "--last", "2", "--json"))["data"]] == [
        f"{second['id']}-0",
        f"{first['id']}-0",
    ]
    assert "".join(f"{line}\n" for line in lines_of(told)) == output


def test_advice_is_told_in_lines_and_in_json(tiny_chat_model: Path) -> None:
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**21)
    try:
        _check_advice(server)
    finally:
        server.close()


def _check_advice(server: LocalServer) -> None:
    rules = "".join(f"Rule {number}: be kind to number {number * 7919 % 1000}. " for number in range(24))
    for minute in range(4):
        server.chat(f"It is 2026-05-01 10:{minute + 11}. {rules}", max_tokens=2)
    output = run(server, "--advice")
    assert "A time at token" in output
    assert "of all prompt time" in output
    told = json.loads(run(server, "--advice", "--json"))
    assert told["data"][0]["remedy"] in output
    assert f"{told['num_requests']} requests of the last" in output


@pytest.mark.long
def test_what_is_wrong_is_said(server: LocalServer) -> None:
    assert "No request of yours has that id" in run(server, "cmpl-nobody", status=2)
    assert "four questions" in run(server, "cmpl-nobody", "--last", "2", status=2)
    assert "four questions" in run(server, "--advice", "--worst", "2", status=2)
    process = start_cli("explain", "--url", "http://127.0.0.1:9", "x")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "No Pagefold server answers" in output
