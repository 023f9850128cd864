"""A draft model over HTTP: the same answers in fewer steps, who may ask for it, and what a start with one says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, ProcessServer, error_of
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.kv.audit import audit
from pagefold.speculation import SpeculativeParams, StepCosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ANSWER = {"ignore_eos": True, "max_tokens": 40}


@pytest.fixture(scope="module")
def server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """The model drafts for itself; its steps cost nothing, else few drafts would pay."""
    how = {"method": "tree", "model": str(tiny_chat_model)}
    settings = {"kv_cache_memory_bytes": 800 * 2**13, "max_model_len": 512, "max_num_seqs": 8}
    server = LocalServer(tiny_chat_model, speculative_config=how, **settings)
    drafting = server.engine.drafting
    drafting._costs = StepCosts((1, 2), (1.0, 1.0))
    drafter_of(server).costs = StepCosts((1, 2), (1e-9, 1e-9))
    yield server
    server.check_pool()
    server.close()


def drafter_of(server: LocalServer):
    drafting = server.engine.drafting
    return drafting._drafter_for(SpeculativeParams(method="draft_model"))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}])
def test_what_nobody_has_said_before_is_drafted_rightly(server, sampling):
    body = {**ANSWER, **sampling}
    expected = server.complete("Once upon a time", **body, speculative_config={"num_speculative_tokens": 0})
    num_steps = server.runner.num_entered
    asked = {"method": "draft_model", "num_speculative_tokens": 4}
    got = server.complete("Once upon a time", **body, cache_salt=f"alone {sampling}", speculative_config=asked)
    assert got["choices"][0]["text"] == expected["choices"][0]["text"]
    details = got["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 25
    assert server.runner.num_entered - num_steps < 20


def test_it_is_counted_among_what_a_server_remembers(server):
    server.complete("Remember this", **ANSWER, temperature=0, speculative_config={"method": "draft_model"})
    most = server.metric("pagefold:cache_max_bytes", "draft_model")
    assert 0 < server.metric("pagefold:cache_bytes", "draft_model") <= most == server.engine.capacity.draft_bytes
    core = drafter_of(server).core
    audit(core)


def test_it_reads_nothing_for_one_tenant_that_it_read_for_another(server):
    read = []
    runner = drafter_of(server)._runner
    run = runner.run
    runner.run = lambda plan: (read.append(len(plan.token_ids)), run(plan))[1]
    try:
        first = []
        for salt in ("one", "other", "one"):
            read.clear()
            body = {**ANSWER, "max_tokens": 8, "temperature": 0, "cache_salt": f"of {salt}"}
            server.complete("A text of some length " * 8, **body, speculative_config={"method": "draft_model"})
            first.append(read[0])
    finally:
        runner.run = run
    assert first[0] == first[1] > 40
    assert first[2] < 20


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": "another"}, "a draft model is loaded when the server starts"),
        ({"quantization": "int8"}, "a draft model is loaded when the server starts"),
        ({"kv_cache_memory_bytes": 1000}, "a draft model is loaded when the server starts"),
        ({"method": "eagle"}, "speculative_config.method is 'eagle'"),
        ({"method": "draft_model", "num_speculative_tokens": 99}, "num_speculative_tokens is 99"),
    ],
)
def test_what_cannot_be_is_refused(server, asked, said):
    body = {"model": server.model, "prompt": "x", "speculative_config": asked}
    error = error_of(server.http.post("/v1/completions", json=body), 400)
    assert said in error["message"]
    assert error["param"].startswith("speculative_config.")


@pytest.mark.long
def test_a_start_says_what_it_has_and_one_that_cannot_be_is_refused(tiny_chat_model):

    def given(**fields):
        return ("--speculative-config", json.dumps(fields))

    flags = ("--kv-cache-memory-bytes", "8M", "--max-model-len", "256")
    process = ProcessServer(str(tiny_chat_model), *given(model=str(tiny_chat_model)), *flags)
    try:
        text = process.complete("Hello", **ANSWER, temperature=0)["choices"][0]["text"]
        assert text
    finally:
        process.close()
    assert f"draft      {tiny_chat_model.name}: weights " in process.output()  # of one that runs it would wait
    for fields, said in (
        ({"method": "draft_model"}, "Give speculative_config.model too"),
        ({"model": "nobody/has-this"}, "nobody/has-this"),
        ({"model": str(tiny_chat_model), "kv_cache_memory_bytes": 10**7}, "for the draft model"),
    ):
        result = CliRunner().invoke(app, ["serve", str(tiny_chat_model), *given(**fields), *flags])
        assert result.exit_code
        assert said in " ".join(result.output.replace("│", " ").split()), result.output
