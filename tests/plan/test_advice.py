"""``pagefold plan --from-bench`` with files that are no measurement, or a broken one: one line says so."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pagefold.cli import app

RUN = CliRunner()
GOOD = {
    "start_times": [0.0, 0.5],
    "input_lens": [100, 120],
    "output_lens": [10, 0],
    "hash_ids": [[0, 1], [0, 2]],
    "errors": ["", ""],
    "median_itl_ms": 20.0,
}


def plan(tmp_path, measured: object, *flags: str):
    file = tmp_path / "result.json"
    file.write_text(measured if isinstance(measured, str) else json.dumps(measured))
    return RUN.invoke(app, ["plan", "Qwen3-0.6B", "--device", "L4", "--from-bench", str(file), *flags])


def test_a_measurement_is_advice(tmp_path):
    result = plan(tmp_path, GOOD, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["workload"]["mean_prompt_tokens"] == 110
    assert figures["workload"]["mean_output_tokens"] == 5.5  # a request without an output still has a step
    assert figures["workload"]["prefix_len"] == 50  # the first of two ids
    assert len(figures["advice"]) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start_times": [0.0]}, "is damaged"),
        ({"input_lens": ["x", 5]}, "is damaged"),
        ({"input_lens": [-4, 5]}, "is damaged"),
        ({"input_lens": [1e300, 5]}, "is damaged"),
        ({"input_lens": [0, None]}, "counted no tokens"),
        ({"output_lens": [None, 5]}, "is damaged"),
        ({"start_times": [float("nan"), 5]}, "is damaged"),
        ({"start_times": ["x", 5]}, "is damaged"),
        ({"hash_ids": [None, []]}, "is damaged"),
        ({"hash_ids": [["x"], []]}, "is damaged"),
        ({"median_itl_ms": "x"}, "is damaged"),
        ({"errors": ["lost", "lost"]}, "No request of the measurement"),
        ({"errors": 5}, "is no measurement"),
    ],
)
def test_a_damaged_measurement_is_said(tmp_path, changes, words):
    result = plan(tmp_path, GOOD | changes)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "null", "[" * 100_000, "\x00"])
def test_what_is_no_measurement_at_all(tmp_path, content):
    result = plan(tmp_path, content)
    assert result.exit_code == 2, result.output
    assert "is no measurement" in result.stderr
