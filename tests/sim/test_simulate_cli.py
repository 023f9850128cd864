"""``pagefold simulate``: what it prints and writes, what it refuses, and that it says the same twice."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.kv.policies import DEFAULT_POLICY
from pagefold.sim import fault_hunt
from pagefold.sim.traces import traces_folder

MOONCAKE = """{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 900, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 2000, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}
"""
SMALL = "chat:num_chats=30"


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == code, result.output
    return result


def answer(*arguments: str) -> dict:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text(MOONCAKE)
    return str(file)


# What it says.


def test_cache_only_by_hand(trace):
    told = answer(trace, "--cache-only", "--policy", "lru", "--block-size", "512", "--cache-tokens", "1536")
    assert told["token_hit_ratio"] == (1000 + 1024) / (1024 + 1000 + 1500)
    assert (told["mode"], told["policy"], told["num_evictions"], told["num_bad_lines"]) == ("cache-only", "lru", 0, 0)
    assert told["runs"][0]["token_hit_ratio"] == told["token_hit_ratio"]


def test_policies_and_sizes_are_compared_with_their_bounds(trace):
    told = answer(
        *(trace, "--cache-only", "--policy", "lru,fifo", "--policy", "belady", "--block-size", "512"),
        *("--cache-tokens", "1k", "--cache-tokens", "2k,2048", "--bounds"),
    )
    assert [(each["policy"], each["cache_tokens"]) for each in told["runs"][:3]] == [
        ("lru", 512),
        ("lru", 1536),
        ("lru", 2048),
    ]
    assert len(told["runs"]) == 9
    for each in told["runs"]:
        assert each["token_hit_ratio"] <= each["belady_token_hit_ratio"] <= told["infinite_token_hit_ratio"]
        assert each["fraction_of_belady"] <= 1
        if each["policy"] == "belady":
            assert each["fraction_of_belady"] == 1
    assert told["runs"][-1]["fraction_of_infinite"] == 1


def test_full_mode_tells_what_requests_met():
    told = answer(SMALL, "--policy", "lru", "--cache-tokens", "4000")
    assert told["mode"] == "full"
    assert told["num_requests"] > 30
    for name in ("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s", "mean_waiting", "mean_use", "num_preemptions"):
        assert told[name] >= 0, name
    assert told["num_evictions"]["allocation"] > 0
    over_time = told["runs"][0]["over_time"]
    assert 64 <= len(over_time) <= 256
    assert [each["end_s"] for each in over_time] == sorted(each["end_s"] for each in over_time)
    assert sum(each["num_evictions"] for each in over_time) == told["num_evictions"]["allocation"]
    assert sum(each["num_preemptions"] for each in over_time) == told["num_preemptions"]
    assert all(0 <= each["use"] <= 1 for each in over_time)


@pytest.mark.long
def test_admission_and_scheduling_policy_are_the_servers():
    asked = SMALL, "--policy", "lru", "--cache-tokens", "4000"
    told = {rule: answer(*asked, "--admission", rule) for rule in ("predicted", "prompt", "max_tokens")}
    assert answer(*asked) == told["predicted"]
    assert told["prompt"]["num_preemptions"] > told["max_tokens"]["num_preemptions"] == 0
    assert {rule: each["admission"] for rule, each in told.items()} == {rule: rule for rule in told}
    many = "chat:num_chats=80", "--policy", "lru", "--cache-tokens", "6k", "--max-num-seqs", "8"
    found = {name: answer(*many, "--scheduling-policy", name) for name in ("fcfs", "lpm")}
    assert answer(*many) == found["fcfs"]
    assert found["lpm"]["scheduling_policy"] == "lpm"
    assert found["lpm"]["token_hit_ratio"] > found["fcfs"]["token_hit_ratio"]
    output = run(*asked, "--scheduling-policy", "fair", "--admission", "prompt").output
    assert "scheduling policy: fair, admission: prompt" in output
    assert "admission" not in answer(SMALL, "--cache-only", "--cache-tokens", "4k")


@pytest.mark.long
def test_where_a_share_of_older_tokens_is_kept_more_run_at_once():
    asked = "retrieval:num_requests=120,seed=1", "--policy", "lru", "--cache-tokens", "10k"
    running = [answer(*asked, *keep)["mean_running"] for keep in ((), ("--kv-keep", "0.5"), ("--kv-keep", "0.25"))]
    assert running[1] > 1.5 * running[0]
    assert running[2] > 1.3 * running[1]


def test_tables_for_people():
    output = run(SMALL, "--policy", "default,lfu", "--cache-tokens", "4k,40k", "--bounds", "--curve", "0.5").output
    for what in ("default", "lfu", "Belady", "infinite", "TTFT 50/95", "queue", "evicted", "sampled at 0.5"):
        assert what in output, what
    assert "mean absolute error of the sampled curve" in output
    assert max(map(len, output.splitlines())) <= 120


def test_what_policies_are_compared_by_default_is_the_servers():
    names = ("default", DEFAULT_POLICY)
    told = [answer(SMALL, "--cache-only", "--policy", name, "--cache-tokens", "4k") for name in names]
    assert told[0]["token_hit_ratio"] == told[1]["token_hit_ratio"]


def test_curves(trace):
    told = answer(SMALL, "--cache-only", "--cache-tokens", "9000", "--policy", "lru", "--curve", "1")
    curves = told["curves"]
    assert curves["mean_absolute_error"] == 0
    assert curves["exact_token_hit_ratio"] == curves["sampled_token_hit_ratio"]
    assert curves["exact_token_hit_ratio"] == sorted(curves["exact_token_hit_ratio"])


def test_without_sizes_parts_of_the_whole_are_tried(trace):
    sizes = [each["cache_tokens"] for each in answer("agents:num_tasks=5", "--cache-only")["runs"]]
    assert len(sizes) == 5
    assert sizes == sorted(sizes)


def test_fewer_requests(trace):
    assert answer(trace, "--cache-only", "--max-requests", "2")["num_requests"] == 2
    assert answer(SMALL, "--max-requests", "7", "--cache-tokens", "9k")["num_requests"] == 7


def test_a_device_of_the_planner():
    told = answer(SMALL, "--device", "H100-80GB", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    slower = answer(SMALL, "--device", "A100-80GB", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert told["cache_tokens"] > 100_000
    assert 0.003 < told["itl_p50_s"] < slower["itl_p50_s"] < 0.02  # 16 GB of weights, at 3.35 and 2.0 TB/s


def test_a_step_cost_of_a_file(tmp_path):
    file = tmp_path / "cost.json"
    file.write_text('{"kind": "linear", "step_s": 1.0, "token_s": 0, "context_token_s": 0, "source": "by hand"}')
    told = answer(SMALL, "--step-cost", str(file), "--cache-tokens", "9k")
    assert told["itl_p50_s"] == 1.0


# What it writes.


@pytest.mark.long
def test_the_same_question_has_the_same_answer(tmp_path):
    """Byte for byte, also in another process: nothing depends on the order of hashes, or the time."""
    arguments = ["agents:num_tasks=8", "--policy", "lru,lfu", "--cache-tokens", "6k,9k", "--curve", "0.5", "--bounds"]
    first = run(*arguments, "--json", "--html", str(tmp_path / "first.html")).stdout
    command = [sys.executable, "-m", "pagefold.cli", "simulate", *arguments, "--json", "--html"]
    again = subprocess.run(
        [*command, str(tmp_path / "second.html")], capture_output=True, text=True, check=True, timeout=120
    )
    assert again.stdout == first
    assert again.stderr == ""
    page = (tmp_path / "first.html").read_bytes()
    assert page == (tmp_path / "second.html").read_bytes()
    assert page.count(b"<svg") == 10
    for attribute in (b"src=", b"href=", b"url(", b"@import", b"<script"):
        assert attribute not in page
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["first.html", "second.html"]
    for svg in page.decode().split("<svg")[1:]:
        ET.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")


@pytest.mark.long
def test_a_picture_is_the_same_twice(tmp_path):
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed: pip install pagefold[sim]")
    for name in ("first.png", "second.png"):
        run(SMALL, "--policy", "lru,lfu", "--cache-tokens", "4k,9k", "--png", str(tmp_path / name))
    first = (tmp_path / "first.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert first == (tmp_path / "second.png").read_bytes()


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr("pagefold.sim.figure.find_spec", lambda name: None)
    output = run("chat:num_chats=5000", "--png", str(tmp_path / "a.png"), code=2).output
    assert "matplotlib must be installed. pip install" in output
    assert list(tmp_path.iterdir()) == []


# What it refuses.


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such.jsonl"], "error: The trace /no/such.jsonl cannot be read: No such file or directory."),
        (["chta"], "error: The trace chta cannot be read"),
        (["chat:chats=3"], "has no parameter 'chats'"),
        ([SMALL, "--policy", "clever"], "There is no policy 'clever'. There are default, "),
        ([SMALL, "--policy", "belady"], "Ask for it with --cache-only"),
        ([SMALL, "--cache-tokens", "lots"], "cache_tokens is 'lots'"),
        ([SMALL, "--cache-tokens", "8"], "cache_tokens is 8. It must be at least a block of 16 tokens"),
        ([SMALL, "--cache-tokens", "500"], "The pool has 31 blocks of 16 tokens; the longest request"),
        ([SMALL, "--block-size", "0"], "block_size is 0"),
        ([SMALL, "--curve", "2"], "sample_rate is 2.0"),
        ([SMALL, "--kv-keep", "1.5"], "kv_keep is 1.5"),
        ([SMALL, "--kv-keep", "0.5", "--cache-only"], "kv_keep does not go with --cache-only"),
        ([SMALL, "--kv-keep", "0.5", "--host-tokens", "9k"], "kv_keep does not go with tiers"),
        ([SMALL, "--kv-keep", "0.5", "--block-size", "24"], "kv_keep takes chunks of 256 tokens apart"),
        ([SMALL, "--max-num-seqs", "600"], "max_num_seqs is 600"),
        ([SMALL, "--admission", "all"], "admission is 'all'. It must be one of predicted, "),
        ([SMALL, "--admission", ""], "admission is ''."),
        ([SMALL, "--scheduling-policy", "lifo"], "scheduling_policy is 'lifo'. It must be one of fcfs, priority, "),
        ([SMALL, "--cache-only", "--admission", "prompt"], "--admission says nothing to the cache alone"),
        ([SMALL, "--device", "H100-80GB"], "No model is named"),
        ([SMALL, "--model", "gpt2"], "Give --device or --calibrate"),
        ([SMALL, "--device", "H100", "--step-cost", "x"], "Several flags"),
        ([SMALL, "--step-cost", "/no/such.json"], "cannot be read"),
        ([SMALL, "--step-cost", __file__], "is no step cost"),
        ([SMALL, "--cache-tokens", "9k", "--html", "/no/such/a.html"], "error: Cannot write /no/such/a.html"),
        (["faults:runs=3"], "'runs=3' is nothing that faults take"),
        (["faults:seed=" + "9" * 5000], "is nothing that faults take"),
        (["faults", "--policy", "lru", "--html", "a"], "--policy, --html say nothing to runs with faults"),
        (
            [SMALL, "--cache-tokens", "1" + "0" * 18],
            "cache_tokens is 1000000000000000000. It must be at most 160,000,000",
        ),
        ([SMALL, "--cache-tokens", "9" * 29 + "G"], "It must be at most 160,000,000 tokens"),
        ([SMALL, "--block-size", "1" + "0" * 18, "--cache-tokens", "9" * 20], "block_size is 1000000000000000000"),
        (["chat:num_chats=1000000000000"], "num_chats is 1000000000000"),
        (["bursts:num_bursts=1000000"], "Choose parameters for at most 2,000,000"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, message):
    output = run(*arguments, code=2).output
    assert message in output
    assert output.startswith("error: ")
    assert output.count("\n") == 1


@pytest.mark.parametrize("flag", ["--html", "--png", "--calibrate"])
def test_what_cannot_be_written_is_refused_before_anything_runs(flag, tmp_path, monkeypatch):
    if flag == "--png" and find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed: pip install pagefold[sim]")
    monkeypatch.setattr("pagefold.sim.comparison.compare", lambda *_: pytest.fail("it ran"))
    for target in ("/no/such/a", str(tmp_path), f"{tmp_path}/{'a' * 300}"):
        output = run(SMALL, flag, target, "--model", "/no/such", "--cache-tokens", "9k", code=2).output
        assert output.startswith(f"error: Cannot write {target}: ")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_into_memory_is_said(monkeypatch):
    def compare(*_, **__):
        raise MemoryError

    monkeypatch.setattr("pagefold.sim.comparison.compare", compare)
    assert (
        run(SMALL, code=2).output
        == "error: This is too large for this machine. Ask for less: fewer requests or tokens.\n"
    )


def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text(MOONCAKE + '{"timestamp": 1, "input_length": 9, "output_length": 5}\n')
    out = tmp_path / "page.html"
    output = run(str(file), "--cache-only", "--html", str(out), code=2).output
    assert f"error: Line 4 of the trace {file}: time goes backwards, by 1.999 s." in output
    assert "--skip-bad-lines" in output
    assert not out.exists()
    assert answer(str(file), "--cache-only", "--skip-bad-lines")["num_bad_lines"] == 1
    assert "1 bad lines were skipped. Line 4" in run(str(file), "--cache-only", "--skip-bad-lines").output


def test_nothing_heavy_is_imported():
    program = """
import sys
from pagefold.cli import app
try:
    app(["simulate", "chat:num_chats=5", "--json", "--cache-tokens", "9k"])
except SystemExit:
    pass
print("heavy:", sorted({"torch", "numpy", "matplotlib", "transformers"} & set(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr.strip() == "heavy: []"


# Faults.


@pytest.mark.long
def test_faults_from_the_command_line():
    assert "400 steps with faults, from seed 3 on: every invariant held." in run("faults:steps=400,seed=3").output
    assert answer("faults:steps=200") == {"steps": 200, "seed": 0, "error": None, "test": None}


def test_what_faults_find_is_printed_as_a_test(monkeypatch):
    def broken(_) -> int:
        msg = "as planted"
        raise AssertionError(msg)

    monkeypatch.setattr(fault_hunt, "run_faulty", broken)
    output = run("faults:steps=200", code=1).output
    assert "def test_run_0_holds():" in output
    assert "Seed 0 fails: AssertionError: as planted" in output


# The published tables.


def test_the_conversation_trace_is_as_others_replay_it():
    """From the file to the answer; every policy and size of the table is in the tests of the policies."""
    folder = traces_folder()
    if folder is None:
        pytest.skip("no traces here: set PAGEFOLD_TRACES")
    told = answer(
        *(str(folder / "mooncake_conversation.jsonl"), "--cache-only", "--policy", "lru,belady"),
        *("--block-size", "512", "--cache-tokens", "3.0M", "--bounds"),
    )
    got = [each["token_hit_ratio"] for each in told["runs"]]
    assert got == pytest.approx([0.139, 0.360], abs=0.005)
    assert told["infinite_token_hit_ratio"] == pytest.approx(0.3736, abs=0.0005)


# Several servers.


def test_routing_policies_are_compared_beside_one_cache():
    told = answer(SMALL, "--replicas", "3", "--cache-tokens", "8k", "--routing", "prefix,round_robin")
    assert [each["routing"] for each in told["runs"]] == ["prefix", "round_robin"]
    assert all(len(each["replicas"]) == told["num_replicas"] == 3 for each in told["runs"])
    best = told["together"]["token_hit_ratio"]
    ours, theirs = (each["token_hit_ratio"] for each in told["runs"])
    assert best >= ours > theirs
    assert told["runs"][0]["hits_over_together"] == ours / best
    shown = run(SMALL, "--replicas", "3", "--cache-tokens", "8k").stdout
    assert "one cache" in shown
    assert f"{ours:.1%}" in shown


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--routing", "prefix"), "--replicas is missing"),
        (("--replicas", "2"), "one --cache-tokens"),
        (("--replicas", "2", "--cache-tokens", "8k,9k"), "one --cache-tokens"),
        (("--replicas", "2", "--cache-tokens", "8k", "--policy", "lru,fifo"), "at most one --policy"),
        (("--replicas", "2", "--cache-tokens", "8k", "--routing", "magic"), "round_robin"),
        (("--replicas", "2", "--cache-tokens", "8k", "--bounds"), "--bounds says nothing"),
        (("--replicas", "2", "--cache-tokens", "8k", "--host-tokens", "9k"), "--host-tokens says nothing"),
        (("--replicas", "2", "--cache-only"), "--replicas says nothing"),
        (("--replicas", "99999", "--cache-tokens", "8k"), "99999"),
        (("--replicas", "2", "--cache-tokens", "100"), "needs"),
    ],
)
def test_what_says_nothing_to_several_servers_is_refused(flags, told):
    result = run(SMALL, *flags, code=2)
    assert told in " ".join(result.output.split())
