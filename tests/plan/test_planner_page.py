"""The page of the planner has its table as the command prints it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_what_the_command_prints():
    command = [sys.executable, str(ROOT / "benchmarks" / "planner_arithmetic.py")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert len(printed.splitlines()) > 10
    assert printed in (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
