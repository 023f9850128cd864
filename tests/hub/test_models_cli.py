"""``pagefold models``: what goes to stdout, what to stderr, and the exit codes."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from pagefold.cli.models import app
from pagefold.hub.catalog import CATALOG
from pagefold.hub.convert import convert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

runner = CliRunner()


@pytest.fixture
def local(tiny_gguf: Callable[..., Path], tmp_path: Path) -> Path:
    return convert(tiny_gguf(), tmp_path / "tiny")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # half a gigabyte, which pytest would keep


def test_list_shows_a_table(empty_cache: Path) -> None:
    result = runner.invoke(app, ["list"])
    assert result.exit_code == 0
    assert "smollm2-135m" in result.stdout
    assert "Apache-2.0" in result.stdout
    assert "134.5 M" in result.stdout
    assert not empty_cache.exists()  # to look is not to write


def test_list_as_json(empty_cache: Path) -> None:
    result = runner.invoke(app, ["list", "--json"])
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == ["smollm2-135m", "gemma-3-270m", "smollm2-135m:Q4_1", "gemma-3-270m:Q4_K_M"]
    for gemma in (rows["gemma-3-270m"], rows["gemma-3-270m:Q4_K_M"]):
        assert gemma["terms"] == "https://ai.google.dev/gemma/terms"
    for row in (rows["smollm2-135m"], rows["smollm2-135m:Q4_1"]):
        assert row["terms"] is None
        assert row["num_params"] == 134_515_008
        assert row["path"] is None
    assert not empty_cache.exists()


def test_list_knows_what_is_here(real_folder: Path) -> None:
    result = runner.invoke(app, ["list", "--json"])
    assert json.loads(result.stdout)[0]["path"] == str(real_folder)


def test_path_prints_only_the_folder(local: Path, real_folder: Path) -> None:
    result = runner.invoke(app, ["path", str(local)])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{local}\n", "")
    result = runner.invoke(app, ["path", "smollm2-135m"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{real_folder}\n", "")


def test_get_converts_and_reports_on_stderr(empty_cache: Path) -> None:
    result = runner.invoke(app, ["get", "smollm2-135m"])
    assert result.exit_code == 0
    folder = CATALOG["smollm2-135m"].folder(empty_cache)
    assert result.stdout == f"smollm2-135m is in {folder}\n"
    assert result.stderr == "converting SmolLM2-135M-Instruct.Q4_1.gguf ...\n"
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("command", ["get", "path"])
@pytest.mark.usefixtures("empty_cache")
def test_a_name_that_is_nothing_is_one_line_and_exit_code_2(command: str) -> None:
    result = runner.invoke(app, [command, "nope"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: There is no model 'nope'")
    assert result.stderr.count("\n") == 1


def test_get_says_which_terms_must_be_accepted(empty_cache: Path) -> None:
    result = runner.invoke(app, ["get", "gemma-3-270m"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Gemma Terms of Use" in result.stderr
    assert "https://ai.google.dev/gemma/terms" in result.stderr
    assert "pagefold models get gemma-3-270m --accept-license" in result.stderr
    assert not empty_cache.exists()
