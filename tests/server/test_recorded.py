"""A recording of a server, replayed: every step finds and evicts what it did there. Through HTTP, all at once."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, ProcessServer, until
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.errors import TraceError
from pagefold.kv.policies import _FOLLOWED
from pagefold.sim import NullRunner, SimConfig, replay_cache_only, simulate
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces import read_trace
from pagefold.sim.traces.read_recording import read_recording
from pagefold.sim.traces.recording import RecordedCut, RecordedReset, RecordedStep, RecordedUnpin
from pagefold.speculation import StepCosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS = ["the", "cache", "keeps", "what", "others", "will", "ask", "again", "and", "forgets", "nobody", "wants", "more"]
SECRET = "xylophone"
SALT = "a tenant's salt"  # with spaces, so that no digest in a recording looks like it by chance


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
            server.complete(**body, n=2, cache_salt=SALT)
        elif kind < 0.5:
            server.complete(**body, stop=["a", "e"])
        else:
            returns = {"returns_in_s": 0.1} if kind > 0.7 else {}
            answer = server.complete(**body, **returns)["choices"][0]["text"]
            if kind > 0.8:  # and goes on
                server.complete(text + answer + " so", max_tokens=4, ignore_eos=True)


def has_switched(server: LocalServer) -> bool:
    """Whether the policy ``auto`` follows another than at first, or did."""
    metrics = {"/".join(name): value for name, value in server.metrics().items()}
    return any(metrics[f"pagefold:eviction_policy_switches_total/{name}"] for name in _FOLLOWED if name != "lru")


def ask_until_it_switches(server: LocalServer) -> None:
    """Ask until ``auto`` has followed another policy than at first. Mostly it has; which client was first differs."""
    for seed in range(6, 26):
        if has_switched(server):
            return
        ask(server, random.Random(seed), 12)
        until(server.is_idle, "all to end")
    assert has_switched(server)


BLOCK_BYTES = 2**13
LIMITED = {
    "scheduling_policy": "lpm",
    "max_num_partial_prefills": 2,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 20,
}


@pytest.fixture(
    scope="module",
    params=[
        ("learned", 40, None, {"admission": "prompt"}),
        pytest.param(("weighted", 0, {"method": "tree"}, {"admission": "prompt"}), marks=pytest.mark.long),
        pytest.param(("auto", 0, None, {"admission": "prompt"}), marks=pytest.mark.long),
        pytest.param(("learned", 0, None, LIMITED), marks=pytest.mark.long),
    ],
    ids=["with a host tier", "weighted, with drafts", "auto", "with predictions and limits"],
)
def recorded(request, tiny_chat_model: Path, tmp_path_factory) -> Iterator[Path]:
    """Six clients at a server with room for about four of their requests, whose steps sometimes fail.

    The policy ``auto`` goes over to others at once, and begins with one that is seldom the best.

    Bits turn in what its host tier holds, if it has one.
    """
    policy, num_host_blocks, drafts, limited = request.param
    eager = pytest.MonkeyPatch()
    for name, value in {"_BETTER": 0.0, "_CHANCE": 0.0}.items():
        eager.setattr(f"pagefold.kv.policies.auto.{name}", value)
    eager.setattr("pagefold.kv.policies._FOLLOWED", {"lru": _FOLLOWED["lru"], **_FOLLOWED})
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
        speculative_config=drafts,
        **limited,
        door={"admin_api_key": "key"},
    )
    if drafts is not None:
        server.engine.drafting._costs = StepCosts((1, 2), (1.0, 1.0))
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
        if policy == "auto":
            ask_until_it_switches(server)
        texts = [" ".join([word] * 90) for word in WORDS[:4]] if num_host_blocks else []
        for text in texts * 3:  # too many for the device: they come back from the host, and are no more what they were
            server.complete(text, max_tokens=2)
            server.arena.blocks[:, 7] += 1
        server.http.post("/v1/cache/warm", json=body, headers=admin).raise_for_status()
        until(lambda: not server.engine.scheduler.core.pins.num_blocks, "the pin to expire")
        server.complete(" ".join(WORDS * 3), max_tokens=3)
        server.check_pool()
    finally:
        server.close()
    yield file
    eager.undo()


def test_a_replay_finds_and_evicts_what_the_server_did(recorded):
    recording = read_recording(recorded)
    assert recording.is_whole
    report = replay_recording(recording)
    assert report.first_difference == ""
    steps = [each for each in recording.happened if isinstance(each, RecordedStep)]
    assert report.num_equal_steps == report.num_steps == len(steps)
    # And all that timing decides was there.
    assert report.num_requests > 72
    if recording.settings.admission == "prompt":  # predictions are there to avoid them
        assert report.num_preemptions
    assert report.num_failed_steps
    assert any(isinstance(each, RecordedCut) for each in recording.happened)
    assert any(isinstance(each, RecordedReset) for each in recording.happened)
    assert any(isinstance(each, RecordedUnpin) for each in recording.happened)
    assert sum(len(step.evicted) for step in steps) == report.num_evictions > 50
    found = [tokens for step in steps for _, tokens in step.hits]
    assert any(tokens % recording.settings.block_size for tokens in found), "a hit inside a block"
    assert any(step.damaged for step in steps) == bool(recording.settings.num_host_blocks)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("num_samples", [1, 3])
def test_requests_whose_logits_were_no_numbers_are_replayed(poisoned_chat_model, tmp_path, caplog, num_samples):
    """In a prompt that goes on from what is cached, and in what was sampled; beside others."""
    server = LocalServer(
        poisoned_chat_model, kv_cache_memory_bytes=2**20, max_num_seqs=8, record_trace=tmp_path / "trace"
    )
    poison, shared = 777, list(range(300, 340))
    bad = {"n": num_samples, "temperature": 1.0, "seed": 1, "max_tokens": 9}
    others = [threading.Thread(target=server.complete, args=([*shared, 9, own],)) for own in range(3)]
    try:
        server.complete(shared, max_tokens=3)
        server.runner.close_gate()
        for other in others:
            other.start()
        until(lambda: server.engine.scheduler.has_requests, "somebody to come")
        server.runner.allow()
        for fields in ({"prompt": [*shared, poison]}, {"prompt": shared, "logit_bias": {str(poison): 100}}):
            assert server.http.post("/v1/completions", json={**bad, **fields}).status_code == 500
        for other in others:
            other.join()
        server.complete(shared, max_tokens=3)
    finally:
        server.close()
    recording = read_recording(tmp_path / "trace")
    report = replay_recording(recording)
    assert report.first_difference == ""
    steps = [each for each in recording.happened if isinstance(each, RecordedStep)]
    assert sum(len(step.corrupted) for step in steps) == 2 * num_samples
    assert report.num_equal_steps == len(steps)


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
    assert SALT not in content
    tokens = set(Tokenizer(tiny_chat_model).encode(" ".join([SECRET, *WORDS])))
    hashes = [each for stream in read_recording(recorded).tokens.values() for each in stream]
    assert not tokens & set(hashes)


@pytest.mark.quick(every=2)
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


@pytest.mark.quick(every=2)
def test_of_a_recording_that_was_cut_off_all_that_is_there_is_replayed(recorded, tmp_path):
    """Wherever it was cut, in the middle of a line too: requests that were running then have no outputs in it."""
    content = recorded.read_text()
    part = tmp_path / "part.jsonl"
    num_steps = []
    for share in range(1, 12):
        part.write_text(content[: len(content) * share // 12])
        recording = read_recording(part)
        assert not recording.is_whole
        report = replay_recording(recording)
        assert report.first_difference == ""
        num_steps.append(report.num_equal_steps)
        assert report.num_equal_steps == sum(isinstance(each, RecordedStep) for each in recording.happened)
    assert num_steps == sorted(num_steps)
    assert num_steps[-1] > 100


@pytest.mark.long
def test_a_server_that_is_killed_leaves_a_recording_that_is_replayed(tiny_chat_model, tmp_path):
    """By SIGKILL, with requests running that have been preempted."""
    file = tmp_path / "trace.jsonl"
    server = ProcessServer(
        str(tiny_chat_model),
        *("--record-trace", str(file), "--kv-cache-memory-bytes", "64K", "--served-model-name", "tiny"),
        *("--max-model-len", "256", "--log-level", "warning", "--admission", "prompt"),
    )
    try:
        server.complete(" ".join(WORDS), max_tokens=20, ignore_eos=True)
        open_ones = [
            server.post_raw(
                "/v1/completions",
                {"prompt": " ".join(WORDS[: 3 + index]), "max_tokens": 150, "ignore_eos": True, "seed": index, "n": n},
            )
            for index, n in enumerate((1, 2, 1, 1, 1, 1))
        ]
        until(lambda: server.metric("vllm:num_preemptions_total") > 0, "somebody to be preempted")
        assert server.metric("vllm:num_requests_running") > 0
        server.process.kill()
        server.process.wait()
    finally:
        server.close()
    for connection in open_ones:
        connection.close()
    recording = read_recording(file)
    assert not recording.is_whole
    assert "" in recording.ended.values(), "some ran when it was killed"
    report = replay_recording(recording)
    assert report.first_difference == ""
    assert report.num_equal_steps == report.num_steps > 20
    assert report.num_preemptions
    result = CliRunner().invoke(app, ["simulate", str(file)])
    assert result.exit_code == 0, result.output
    assert "was cut off" in result.output


# Damage.

ADD = '{"add":0,"samples":1,"prompt":2,"most":20,"namespace":0,"at":1.0,"hashes":"AQAAAAIAAAA="}'
STEP = '{"step":0,"at":1.0,"rows":1,"computed":2,"read":2,"took":0.1,"hits":[[0,0]]}'
SETTINGS = (
    '{"pagefold_recording":2,"num_blocks":9,"num_host_blocks":2,"block_size":4,"max_num_seqs":4,'
    '"max_num_batched_tokens":16,"enable_prefix_caching":true,"eviction_policy":"lru","scheduling_policy":"fcfs",'
    '"priority_aging_s":60.0,"max_pinned_share":0.5,"pin_half_life_s":3600.0}'
)


def test_a_recording_written_by_hand(tmp_path):
    file = tmp_path / "recording.jsonl"
    file.write_text(f"{SETTINGS}\n{ADD}\n{STEP}\n")
    assert CliRunner().invoke(app, ["simulate", str(file)]).exit_code == 0


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}"], "Line 2 .* is damaged: it is no JSON object that says anything: '{}'"),
        (["[]"], "Line 2 .* it is no JSON object"),
        (["[" * 100_000], "Line 2 .* it is no JSON object"),
        (['{"jump": 1}'], "Line 2 .* nothing is known of 'jump'"),
        (['{"tokens":0,"ended":"stop","hashes":""}'], "Line 2 .* its tokens is 0, a request that never came"),
        ([ADD, '{"tokens":0,"ended":"stop","hashes":"?"}'], "Line 3 .* its hashes are no numbers of 32 bits"),
        ([ADD, '{"tokens":0,"ended":"stop","hashes":"AAA="}'], "Line 3 .* its hashes are no numbers of 32 bits"),
        ([ADD, '{"tokens":0,"ended":"stop","hashes":"/////w=="}'], "Line 3 .* a hash is negative"),
        ([ADD, '{"tokens":0,"ended":7,"hashes":""}'], "Line 3 .* its ended is 7, not a text"),
        ([ADD, *['{"tokens":0,"ended":"stop","hashes":""}'] * 2], "Line 4 .* request 0 has ended before"),
        ([ADD, ADD], "Line 3 .* its add is 0, not 1"),
        ([ADD.replace('"prompt":2', '"prompt":3')], "Line 2 .* 2 hashes of a prompt of 3 tokens"),
        ([ADD.replace('"prompt":2', '"prompt":1e9')], "Line 2 .* its prompt is 1000000000.0, not a whole number"),
        ([ADD.replace('"samples":1', '"samples":5')], "Line 2 .* its samples is 5, not a whole number from 1 to 4"),
        ([ADD.replace('"most":20', '"most":37')], "Line 2 .* its most is 37, not a whole number from 2 to 36"),
        ([ADD.replace('"at":1.0', '"at":NaN')], "Line 2 .* its at is nan, not a number"),
        ([ADD.replace(',"at":1.0', "")], "Line 2 .* it has no at"),
        ([ADD.replace('"at":1.0', '"at":1.0,"pin":[1]')], "Line 2 .* its pin is \\[1\\], not two values"),
        ([ADD, '{"cut":1,"in_step":false}'], "Line 3 .* its cut is 1, a request that never came"),
        ([ADD, '{"cut":0,"in_step":0}'], "Line 3 .* its in_step is 0, not true or false"),
        ([ADD, '{"unpin":"a"}'], "Line 3 .* its unpin is 'a', not a whole number"),
        ([ADD, STEP, STEP.replace('"at":1.0', '"at":0.5')], "Line 4 .* its at is 0.5, not a number from 1 to"),
        ([ADD, STEP.replace("[[0,0]]", "[[3,0]]")], "Line 3 .* its hits is 3"),
        ([ADD, STEP.replace("[[0,0]]", "[0]")], "Line 3 .* its hits is 0, not two values"),
        ([ADD, STEP.replace('"rows":1', '"rows":"1","evicted":[9]')], "Line 3 .* its rows is '1'"),
        ([ADD, STEP.replace('"rows":1', '"rows":1,"evicted":[9]')], "Line 3 .* its evicted is 9"),
        ([ADD, STEP.replace('"rows":1', '"rows":1,"damaged":{}')], "Line 3 .* its damaged is {}, not a list"),
        (['{"end":true}', ADD], "Line 3 .* it comes after the end"),
    ],
)
def test_damage_is_told(tmp_path, lines, message):
    file = tmp_path / "damaged.jsonl"
    file.write_text("".join(f"{line}\n" for line in (SETTINGS, *lines)))
    with pytest.raises(TraceError, match=message):
        read_recording(file)
    result = CliRunner().invoke(app, ["simulate", str(file)])
    assert result.exit_code == 2
    assert result.output.startswith("error: Line ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"pagefold_recording":2', '"pagefold_recording":9', "of version 9; this Pagefold reads version 2"),
        (',"block_size":4', "", "Line 1 .* it has no block_size"),
        ('"block_size":4', '"block_size":0', "Line 1 .* its block_size is 0, not a whole number from 1"),
        ('"block_size":4', '"block_size":4.5', "Line 1 .* its block_size is 4.5, not a whole number from 1"),
        ('"num_blocks":9', '"num_blocks":1000000000000', "Line 1 .* its num_blocks is 1000000000000, not"),
        ('"max_num_batched_tokens":16', '"max_num_batched_tokens":3', "its max_num_batched_tokens is 3"),
        ('"enable_prefix_caching":true', '"enable_prefix_caching":"yes"', "is 'yes', not true or false"),
        ('"eviction_policy":"lru"', '"eviction_policy":"best"', "its eviction_policy is 'best', not one of lru, "),
        ('"scheduling_policy":"fcfs"', '"scheduling_policy":[]', r"its scheduling_policy is \[\], not one of fcfs"),
        ('"max_pinned_share":0.5', '"max_pinned_share":7', "its max_pinned_share is 7, not a number from 0 to 1"),
    ],
)
def test_damaged_settings_are_told(tmp_path, before, after, message):
    file = tmp_path / "damaged.jsonl"
    assert before in SETTINGS
    file.write_text(f"{SETTINGS.replace(before, after)}\n{ADD}\n")
    with pytest.raises(TraceError, match=message):
        read_recording(file)


def test_a_recording_that_contradicts_itself_differs(tmp_path):
    """Each line may be right by itself: then the replay says where it parts."""
    file = tmp_path / "recording.jsonl"
    step = STEP.replace('"rows":1', '"rows":1,"failed":true,"damaged":[1]')
    file.write_text(f"{SETTINGS}\n{ADD}\n{step}\n")
    result = CliRunner().invoke(app, ["simulate", str(file)])
    assert result.exit_code == 1
    assert "step 0 failed of host blocks (1,); the replay does not load them" in result.output


# Flags.


@pytest.mark.parametrize(
    "flags", [["--block-size", "0"], ["--max-num-seqs", "0"], ["--max-num-seqs", "600"], ["--cache-tokens", "1"]]
)
def test_every_flag_counts_with_a_recording_too(tmp_path, flags):
    file = tmp_path / "recording.jsonl"
    file.write_text(f"{SETTINGS}\n{ADD}\n{STEP}\n")
    result = CliRunner().invoke(app, ["simulate", str(file), *flags])
    assert result.exit_code == 2, result.output


def test_lines_of_a_recording_are_not_skipped(tmp_path):
    file = tmp_path / "recording.jsonl"
    file.write_text(f"{SETTINGS}\n{ADD}\n{STEP}\n")
    result = CliRunner().invoke(app, ["simulate", str(file), "--skip-bad-lines"])
    assert result.exit_code == 2
    assert "--skip-bad-lines says nothing to a recording: its replay needs every line. Leave it out." in result.output
