"""A recording of a server, replayed: every step finds and evicts what it did there. Through HTTP, all at once."""

from __future__ import annotations

import json
import random
import threading
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, until

from pagefold.sim import NullRunner, SimConfig, replay_cache_only, simulate
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces import read_trace
from pagefold.sim.traces.read_recording import read_recording
from pagefold.sim.traces.recording import RecordedCut, RecordedReset, RecordedStep, RecordedUnpin

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ["the", "cache", "keeps", "what", "others", "will", "ask", "again", "and", "forgets", "nobody", "wants", "more"]
SECRET = "xylophone"


def ask(server: LocalServer, rng: random.Random, num_requests: int) -> None:
    """One client: prompts that begin alike and part inside blocks, some of several samples, some abandoned half-way."""
    for _ in range(num_requests):
        topic = [WORDS[rng.randrange(3)]] * rng.choice([5, 20, 30])
        text = " ".join([*topic, SECRET, *rng.choices(WORDS, k=rng.randrange(1, 40))])
        body = {"prompt": text, "max_tokens": rng.randrange(2, 70), "ignore_eos": True, "seed": rng.randrange(100)}
        kind = rng.random()
        if kind < 0.2:
            connection = server.post_raw("/v1/completions", {**body, "max_tokens": 200, "stream": True})
            connection.recv(rng.choice([1, 400]))
            connection.close()
        elif kind < 0.35:
            server.complete(**body, n=2, cache_salt="salt")
        elif kind < 0.5:
            server.complete(**body, stop=["a", "e"])
        else:
            answer = server.complete(**body)["choices"][0]["text"]
            if kind > 0.8:  # and goes on
                server.complete(text + answer + " so", max_tokens=4, ignore_eos=True)


BLOCK_BYTES = 2**13


@pytest.fixture(scope="module", params=[("learned", 40), ("weighted", 0)], ids=["with a host tier", "weighted"])
def recorded(request, tiny_chat_model: Path, tmp_path_factory) -> Path:
    """Six clients at a server with room for about four of their requests, whose steps sometimes fail.

    Bits turn in what its host tier holds, if it has one.
    """
    policy, num_host_blocks = request.param
    file = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    server = LocalServer(
        tiny_chat_model,
        record_trace=file,
        eviction_policy=policy,
        kv_cache_memory_bytes=20 * BLOCK_BYTES,
        kv_offloading_size=num_host_blocks * BLOCK_BYTES / 2**30,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        door={"admin_api_key": "key"},
    )
    try:
        clients = [threading.Thread(target=ask, args=(server, random.Random(seed), 12)) for seed in range(6)]
        for client in clients:
            client.start()
        admin = {"Authorization": "Bearer key"}
        body = {"prompt": " ".join(WORDS * 3), "pin": True, "ttl_s": 0.3}
        for index in range(6):
            server.runner.fail(1)
            response = server.http.post("/v1/cache/warm", json=body, headers=admin)
            assert response.status_code in (200, 429), response.text
            if num_host_blocks:
                server.arena.blocks[:, 7] += 1 + index
            if index == 3:
                server.http.post("/reset_prefix_cache", headers=admin).raise_for_status()
        for client in clients:
            client.join()
        until(server.is_idle, "all to end")
        server.http.post("/v1/cache/warm", json=body, headers=admin).raise_for_status()
        until(lambda: not server.engine.scheduler.core.pins.num_blocks, "the pin to expire")
        server.complete(" ".join(WORDS * 3), max_tokens=3)
        server.check_pool()
    finally:
        server.close()
    return file


def test_a_replay_finds_and_evicts_what_the_server_did(recorded):
    recording = read_recording(recorded)
    assert recording.is_whole
    report = replay_recording(recording)
    assert report.first_difference == ""
    steps = [each for each in recording.happened if isinstance(each, RecordedStep)]
    assert report.num_equal_steps == report.num_steps == len(steps)
    # And all that timing decides was there.
    assert report.num_requests > 72
    assert report.num_preemptions
    assert report.num_failed_steps
    assert any(isinstance(each, RecordedCut) for each in recording.happened)
    assert any(isinstance(each, RecordedReset) for each in recording.happened)
    assert any(isinstance(each, RecordedUnpin) for each in recording.happened)
    assert sum(len(step.evicted) for step in steps) == report.num_evictions > 50
    found = [tokens for step in steps for _, tokens in step.hits]
    assert any(tokens % recording.settings.block_size for tokens in found), "a hit inside a block"
    assert any(step.damaged for step in steps) == bool(recording.settings.num_host_blocks)


def test_a_difference_is_told(recorded):
    recording = read_recording(recorded)
    index = next(i for i, each in enumerate(recording.happened) if isinstance(each, RecordedStep) and each.evicted)
    step = recording.happened[index]
    assert isinstance(step, RecordedStep)
    recording.happened[index] = RecordedStep(
        step.step_id, step.now_s, step.num_rows, step.num_computed, 0, 0.0, step.has_failed, step.hits, (-1,)
    )
    report = replay_recording(recording)
    assert f"step {step.step_id} evicted blocks (-1,)" in report.first_difference
    assert report.num_equal_steps == report.num_steps - 1


def test_a_recording_holds_no_text(recorded, tiny_chat_model):
    from pagefold.tokenizer import Tokenizer

    content = recorded.read_text()
    assert SECRET not in content
    assert "salt" not in content
    tokens = set(Tokenizer(tiny_chat_model).encode(" ".join([SECRET, *WORDS])))
    hashes = [each for stream in read_recording(recorded).tokens.values() for each in stream]
    assert not tokens & set(hashes)


def test_a_recording_is_a_trace(recorded):
    trace = read_trace(recorded)
    assert len(trace.requests) > 72
    report = replay_cache_only(trace.requests, policy="lru", block_size=16, cache_tokens=10**6)
    assert report.token_hit_ratio > 0.2


def test_a_recording_is_simulated_with_other_settings_too(recorded):
    recording = read_recording(recorded)
    requests = recording.requests()
    config = SimConfig(num_blocks=4000, eviction_policy="lru")
    report = simulate(requests, config, runner=NullRunner(recording.sampled))
    assert report.num_output_tokens == sum(each.num_tokens - each.num_prompt_tokens for each in requests)
    by_ids = simulate(recording.trace().requests, config)
    assert report.num_hit_tokens > by_ids.num_hit_tokens  # which do not tell inside blocks, nor what was answered


def test_of_a_recording_that_was_cut_off_all_that_is_there_is_replayed(recorded, tmp_path):
    content = recorded.read_text()
    part = tmp_path / "part.jsonl"
    part.write_text(content[: len(content) // 2])
    recording = read_recording(part)
    assert not recording.is_whole
    assert replay_recording(recording).num_steps > 10


@pytest.mark.parametrize(
    ("line", "message"),
    [("{}", "Line 2 .* damaged"), ('{"tokens":0,"ended":"","hashes":"?"}', "damaged"), ("[]", "damaged")],
)
def test_damage_is_told(recorded, tmp_path, line, message):
    from pagefold.errors import TraceError

    head = recorded.read_text().splitlines()[0]
    file = tmp_path / "damaged.jsonl"
    file.write_text(f"{head}\n{line}\n")
    with pytest.raises(TraceError, match=message):
        read_recording(file)
    file.write_text(json.dumps({"pagefold_recording": 9}) + "\n")
    with pytest.raises(TraceError, match="version 9"):
        read_recording(file)
