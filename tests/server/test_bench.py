"""``pagefold bench`` against a real server; and what a plan makes of the measurement."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from typer.testing import CliRunner

from pagefold.bench import LoadSettings, Prompt, generate_prompts, read_prompts, run_load, summarize
from pagefold.bench.client import Client
from pagefold.bench.gauge import Gauge
from pagefold.bench.load import LoadResult
from pagefold.bench.prompts import prefix_chains
from pagefold.bench.record import Record
from pagefold.cli import app
from pagefold.errors import ConfigError
from pagefold.plan.advice import workload_of_bench

RUN = CliRunner()
VLLM_KEYS = {
    "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration",
    "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
    "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "errors", "mean_ttft_ms",
    "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms",
    "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
}  # fmt: skip
"""What scripts that read ``vllm bench serve``'s results look for."""


def bench(server, *arguments: str):
    return RUN.invoke(app, ["bench", "--url", server.url, *arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def measured(tiny_server, tmp_path_factory):
    """A small workload with a shared beginning, measured once; its file."""
    folder = tmp_path_factory.mktemp("bench")
    file, page = folder / "result.json", folder / "page.html"
    flags = ["--num-prompts", "12", "--input-len", "60-90", "--output-len", "4-8", "--prefix-len", "40", "--ignore-eos"]
    more = ["--max-concurrency", "4", "--result-filename", str(file), "--html", str(page), "--json"]
    result = bench(tiny_server, *flags, *more)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(file.read_text())
    return file


def test_figures_have_vllm_s_names_and_add_up(measured):
    figures = json.loads(measured.read_text())
    assert figures.keys() >= VLLM_KEYS
    assert (figures["completed"], figures["failed"]) == (12, 0)
    assert figures["total_output_tokens"] == sum(figures["output_lens"])
    assert all(4 <= length <= 8 for length in figures["output_lens"])
    assert all(50 <= length <= 105 for length in figures["input_lens"]), "about as many tokens as were asked for"
    assert figures["output_throughput"] == pytest.approx(figures["total_output_tokens"] / figures["duration"])
    assert figures["total_cached_tokens"] == sum(figures["cached_lens"]) > 12 * 16
    assert figures["server"]["max_num_requests_running"] <= 4
    for index in range(12):
        assert len(figures["itls"][index]) < figures["output_lens"][index]
        assert figures["ttfts"][index] > 0


def test_the_page_stands_alone(measured):
    html = (measured.parent / "page.html").read_text()
    assert html.count("<svg") == 2
    assert not re.search(r"<script|<link|<img|src=|url\(", html)


def test_a_table_has_the_words_that_vllm_prints(tiny):
    result = bench(tiny, "--num-prompts", "2", "--input-len", "20", "--output-len", "3")
    assert result.exit_code == 0, result.output
    for words in ("Successful requests", "Benchmark duration (s)", "Total generated tokens", "Mean TTFT (ms)",
                  "P99 ITL (ms)", "Cached input tokens", "Output token throughput (tok/s)"):  # fmt: skip
        assert words in result.stdout


def test_chat_and_a_file_of_prompts(tiny, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one two three", "output_tokens": 3}, {"messages": [{"role": "user", "content": "four"}]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--backend", "openai-chat", "--dataset-path", str(file), "--output-len", "5", "--ignore-eos", "--json"]
    result = bench(tiny, *flags, "--request-rate", "50")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["output_lens"] == [3, 5]


@pytest.mark.long
def test_a_plan_from_the_measurement(measured):
    workload = workload_of_bench(measured)
    assert len(workload.lengths) == 12
    assert 20 <= workload.prefix_len <= 60
    assert workload.prefix_share > 0.9
    arguments = ["plan", "Qwen3-0.6B", "--device", "L4", "--max-model-len", "4096", "--from-bench", str(measured)]
    result = RUN.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    advice = {each["what"]: each for each in json.loads(result.stdout)["advice"]}
    assert advice.keys() == {"block size", "budget", "policy", "tiers", "codec"}
    assert "--block-size" in advice["block size"]["advice"]
    assert "half of it would do" in advice["budget"]["advice"], "an L4 is far more than twelve short prompts need"
    assert "memory is not short" in advice["codec"]["advice"]
    tables = RUN.invoke(app, arguments, env={"COLUMNS": "140"})
    assert "Advice from the measurement" in tables.stdout


def test_failed_requests_are_counted_and_are_exit_code_1(tiny):
    result = bench(tiny, "--num-prompts", "2", "--input-len", "3000", "--output-len", "3", "--json")
    assert result.exit_code == 1
    figures = json.loads(result.stdout)
    assert (figures["completed"], figures["failed"]) == (0, 2)
    assert "HTTP 400" in figures["errors"][0]
    assert figures["mean_ttft_ms"] is None


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--backend", "grpc"], "openai-chat"),
        (["--input-len", "x"], "lognormal"),
        (["--request-rate", "0"], "above 0"),
        (["--burstiness", "-1"], "above 0"),
        (["--max-concurrency", "0"], "at least 1"),
        (["--model", "other"], "does not have 'other'"),
        (["--dataset-path", "/nowhere.jsonl"], "cannot be read"),
        (["--num-prompts", "1", "--input-len", "9", "--output-len", "2", "--html", "/nowhere/x"], "Cannot write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tiny, flags, words):
    result = bench(tiny, *flags)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.strip().count("\n") == 0


def test_no_server_is_said(tmp_path):
    result = RUN.invoke(app, ["bench", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "no server that names its models" in result.stderr


def test_a_closed_loop_keeps_so_many_under_way(tiny):
    """While the gate is closed, no more requests have come than were allowed."""
    tiny.runner.close_gate()
    prompts = [Prompt("a b c", 2)] * 5

    async def run() -> LoadResult:
        client = Client(tiny.url, ignore_eos=True)
        await client.find_model()
        load = asyncio.create_task(run_load(client, prompts, LoadSettings(max_concurrency=2), on_done=lambda _: None))
        await asyncio.get_running_loop().run_in_executor(None, tiny.runner.wait_in_step)
        await asyncio.sleep(0.2)
        scheduler = tiny.engine.scheduler
        assert len(scheduler.running) + len(scheduler.waiting) <= 2
        tiny.runner.allow()
        result = await load
        await client.close()
        return result

    result = asyncio.run(run())
    assert [record.error for record in result.records] == [""] * 5
    assert [record.output_tokens for record in result.records] == [2] * 5


# Parts.


def test_prompts_are_drawn_alike_from_equal_seeds():
    def make(seed: int):
        return generate_prompts(
            6,
            lambda rng: rng.randint(50, 90),
            lambda _: 4,
            tokens_per_word=1.5,
            prefix_len=30,
            prefix_share=0.5,
            seed=seed,
        )

    assert make(1) == make(1) != make(2)
    beginnings = [" ".join(prompt.text.split()[:20]) for prompt in make(1)]
    assert 1 < beginnings.count(max(set(beginnings), key=beginnings.count)) < 6
    assert all(33 <= len(prompt.text.split()) <= 60 for prompt in make(1))


def test_chains_are_equal_as_far_as_prompts_are():
    text = "x" * 300
    chains = prefix_chains([Prompt(text, 1), Prompt(text + "y" * 200, 1), Prompt("z" + text, 1)])
    assert chains[0][:2] == chains[1][:2]
    assert chains[0][2] != chains[1][2]
    assert not set(chains[2]) & set(chains[0])


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": 5}', '{"prompt": "x", "output_tokens": -1}']
)
def test_bad_lines_of_prompts_are_named(tmp_path, line):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="Line 2 of"):
        read_prompts(file, num_prompts=None, output_len=8)
    assert read_prompts(file, num_prompts=1, output_len=8) == [Prompt("good", 8)]


def test_percentiles_are_by_nearest_rank():
    records = [Record(i, ttft_s=(i + 1) / 1000, latency_s=1.0, prompt_tokens=5, output_tokens=3) for i in range(100)]
    figures = summarize(LoadResult(records, 2.0), LoadSettings(), backend="openai", model="m", chains=[[]] * 100)
    assert figures["p99_ttft_ms"] == pytest.approx(99)
    assert figures["p50_ttft_ms"] == pytest.approx(50)
    assert figures["mean_ttft_ms"] == figures["median_ttft_ms"] == pytest.approx(50.5)
    assert figures["request_throughput"] == 50
    assert figures["mean_tpot_ms"] == pytest.approx(1e3 * (1 - 0.0505) / 2)


def test_a_gauge_reads_what_a_server_says():
    gauge = Gauge()
    lines = 'vllm:num_requests_running{{model_name="m"}} {0}', 'vllm:num_requests_waiting{{a="b"}} {1}'
    text = "\n".join([*lines, "vllm:num_preemptions_total {2}", ""])
    for reading in ((3, 1, 5), (4, 1, 6), (4, 2, 7), (9, 0, 8)):
        gauge.look(text.format(*(float(number) for number in reading)))
    figures = gauge.figures()
    assert figures["max_num_requests_running"] == 9
    assert figures["mean_running_while_waiting"] == pytest.approx(4.0)
    assert figures["num_preemptions"] == 3
    assert Gauge().figures() == {}
