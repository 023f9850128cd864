"""``pagefold plan`` as a user runs it: tables, JSON, a page, refusals, bad input. On the base install."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.plan.this_machine import this_cpu

RUN = CliRunner()
KEYS = {
    "kv_bytes_per_token", "kv_bytes_per_block", "kv_budget_bytes", "num_blocks", "max_concurrency",
    "workload_concurrency", "weight_bytes", "activation_bytes", "expected_waste", "binds", "prefill_floor",
    "decode_floor", "techniques", "break_even_bytes_per_s", "formula", "devices",
}  # fmt: skip


def run(*arguments: str):
    return RUN.invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})


@pytest.mark.long
def test_json_has_every_figure():
    result = run("meta-llama/Llama-3.1-70B", "--device", "H100-80GB", "-tp", "4", "--price-per-hour", "2.5", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures.keys() >= KEYS
    assert figures["kv_bytes_per_token"] == 327_680
    assert figures["devices"][0]["kv_bytes_per_token"] == 81_920
    assert figures["monthly_cost"] == 2.5 * 4 * 720
    assert figures["num_blocks"] * figures["devices"][0]["kv_bytes_per_block"] == figures["kv_budget_bytes"]
    assert "2 (K and V) x 80 layers x 8 KV heads x 256 B" in figures["formula"][0]


def test_tables_are_for_people():
    result = run("Qwen3-8B", "--device", "l40s", "--max-model-len", "8192", "--prefix-len", "100")
    assert result.exit_code == 0, result.output
    for words in ("bytes a token", "147,456", "KV budget", "at max_model_len", "what binds", "--kv-cache-dtype fp8"):
        assert words in result.stdout


@pytest.mark.long
def test_a_page_stands_alone(tmp_path):
    page = tmp_path / "plan.html"
    assert run("Llama-3.1-8B", "--device", "A100-80GB", "--html", str(page)).exit_code == 0
    html = page.read_text()
    assert html.count("<svg") == 3
    assert not re.search(r"<script|<link|<img|src=|url\(|@import", html)
    assert "131,072" in html


def test_a_refusal_is_exit_code_3_with_the_missing_bytes_and_what_fits():
    arguments = ("meta-llama/Llama-3.1-70B", "--device", "H100-80GB")
    result = run(*arguments)
    assert result.exit_code == 3
    assert re.search(r"[\d,]{11,} bytes are missing", result.stderr)
    assert result.stderr.count("requests of") == 3
    as_json = run(*arguments, "--json")
    assert as_json.exit_code == 3
    refusal = json.loads(as_json.stdout)
    assert refusal["fits"] is False
    assert refusal["missing_bytes"] > 6e10
    assert len(refusal["nearest_settings"]) == 3


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "No model is named"),
        (("Qwen3-8B",), "No device is named"),
        (("Llama-3.1-80B", "--device", "H100"), "meta-llama/Llama-3.1-70B"),
        (("Qwen3-8B", "--device", "H101"), "H100"),
        (("Qwen3-8B", "--device", "H100", "--max-model-len", "50000"), "made for 40960 positions"),
        (("Qwen3-8B", "--device", "H100", "--max-model-len", "long"), "or auto"),
        (("Qwen3-8B", "--device", "H100", "--max-model-len", "-4"), "at least 2"),
        (("Qwen3-8B", "--device", "H100", "-tp", "3"), "does not divide the 32 attention heads"),
        (("Qwen3-8B", "--device", "H100", "--weight-dtype", "int5"), "int4"),
        (("Qwen3-8B", "--device", "H100", "--input-len", "none"), "lognormal"),
        (("Qwen3-8B", "--device", "H100", "--device-flops", "-1"), "positive number"),
        (("Qwen3-8B", "--device-memory", "0"), "positive number"),
        (("Qwen3-8B", "--device", "H100", "--trace", "/nowhere.csv"), "cannot be read"),
        (("Qwen3-8B", "--device", "H100", "--from-bench", "/nowhere.json"), "cannot be read"),
        (("Qwen3-8B", "--device", "H100", "--html", "/nowhere/x.html"), "Cannot write"),
        (("/nowhere", "--device", "H100"), "neither a folder"),
        (("Qwen3-8B", "--device", "H100", "--price-per-hour", "nan"), "price_per_hour is nan"),
        (("Qwen3-8B", "--device", "H100", "--price-per-hour", "inf"), "price_per_hour is inf"),
        (("Qwen3-8B", "--device", "H100", "--price-per-hour", "-2"), "price_per_hour is -2"),
        (("Qwen3-8B", "--device", "H100", "--turns", "2", "--pause", "inf"), "pause is inf"),
        (("Qwen3-8B", "--device", "H100", "--device-flops", "1e-300"), "from 1e+06 to 1e+21"),
        (("Qwen3-8B", "--device-memory", "1" + "0" * 29), "from 1 to 1e+21"),
        (("Qwen3-8B", "--device", "H100", "--input-len", "9" * 5000), "lognormal"),
        (("Qwen3-8B", "--device", "H100", "--input-len", "\u0663"), "lognormal"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_a_config_that_lacks_fields_names_them(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    result = run(str(tmp_path), "--device", "H100")
    assert result.exit_code == 2
    assert "lacks num_hidden_layers, num_attention_heads, vocab_size, max_position_embeddings" in result.stderr


def test_a_trace_is_a_workload(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("input_length,output_length\n" + "100,20\n900,100\n" * 5)
    result = run("Qwen3-8B", "--device", "L4", "--max-model-len", "4096", "--trace", str(trace), "--json")
    figures = json.loads(result.stdout)
    assert figures["workload"]["mean_prompt_tokens"] == 500
    assert figures["workload_blocks_per_request"] == (8 + 63) / 2


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "element_bytes"), [("auto", 0), ("float32", 4), ("bfloat16", 2)])
def test_this_machine_is_a_device(dtype, element_bytes):
    figures = json.loads(run("smollm2-135m", "--device", "cpu", "--dtype", dtype, "--json").stdout)
    element_bytes = element_bytes or (2 if this_cpu().multiplies_bfloat16 else 4)  # as the server computes on a CPU
    assert figures["kv_bytes_per_token"] == 11_520 * element_bytes
    tables = 8192 * 64 * 8  # a cosine and a sine of each position, in float32
    assert figures["weight_bytes"] == element_bytes * 134_515_008 + tables
    assert figures["decode_floor"]["seconds"] is None or figures["decode_floor"]["seconds"] > 0


def test_the_tables_are_shown_with_sources():
    result = run("--list")
    assert result.exit_code == 0
    assert "MI300X" in result.stdout
    assert "https:" in result.stdout


def test_planning_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from pagefold.cli import app;"
        "result = CliRunner().invoke(app, ['plan', 'Qwen3-8B', '--device', 'H100', '--json']);"
        "assert result.exit_code == 0, result.output;"
        "heavy = {'torch', 'numpy', 'transformers', 'numba', 'fastapi', 'huggingface_hub'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
