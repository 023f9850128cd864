"""The page of the planner has its tables as the commands print them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", [["planner_arithmetic.py"], ["planner_starts.py", "--table"]])
def test_the_table_is_what_the_command_prints(command):
    command = [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert len(printed.splitlines()) > 10
    assert printed in (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
