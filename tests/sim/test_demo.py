"""``pagefold demo``: what it prints, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

from pagefold.cli.demo import demo

app = typer.Typer()
app.command()(demo)

ALONE = """
import sys
import typer
from pagefold.cli.demo import demo
app = typer.Typer()
app.command()(demo)
app(standalone_mode=False)
heavy = {"torch", "numpy", "transformers", "numba"} & set(sys.modules)
print("heavy:", sorted(heavy), file=sys.stderr)
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_newcomer_sees_what_sharing_gives():
    output = run()
    assert "160 chats under 4 system prompts: 483 requests" in output
    for what in ("prefix hits", "evicted", "preempted", "in use", "waste", "first token", "without"):
        assert what in output
    for cell in "█▒·":
        assert cell in output


def test_json_has_both_runs():
    result = json.loads(run("--json", "--num-blocks", "500", "--seed", "3", "--num-chats", "40"))
    assert (result["workload"]["seed"], result["workload"]["num_chats"]) == (3, 40)
    assert result["config"]["num_blocks"] == 500
    assert result["sharing"]["hit_share"] > 0.3
    assert result["no_sharing"]["num_hit_tokens"] == 0
    assert result["sharing"]["num_requests"] == result["no_sharing"]["num_requests"]


def test_the_picture_stands_alone(tmp_path):
    file = tmp_path / "demo.svg"
    result = json.loads(run("--json", "--svg", str(file)))
    svg = ET.fromstring(file.read_text())
    text = "".join(svg.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert f"{result['sharing']['num_hit_tokens']:,}" in text
    assert "█" in text
    assert "url(" not in file.read_text().replace("url(#", "")  # fetches nothing


def test_a_picture_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["--svg", str(tmp_path / "no-folder" / "demo.svg")])
    assert result.exit_code == 2
    assert result.output.startswith("error: Cannot write ")
    assert result.output.count("\n") == 1


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("arguments", [("--num-chats", "1"), ("--num-blocks", "4000"), ("--seed", "-1")])
def test_other_settings_are_drawn_too(arguments):
    assert "blocks over time" in run(*arguments)


def test_a_pool_that_is_too_small_is_refused_in_one_line():
    result = CliRunner().invoke(app, ["--num-blocks", "10"])
    assert result.exit_code == 2
    assert result.output.startswith("error: The pool has 10 blocks")
    assert "Give at least" in result.output
    assert result.output.count("\n") == 1


def test_the_whole_command_imports_nothing_heavy():
    """That is what makes it quick: it answers before a server would have loaded torch."""
    result = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr.strip() == "heavy: []"
    assert "prefix hits" in result.stdout
