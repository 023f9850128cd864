"""How much memory a process holds, and those that it has started."""

from __future__ import annotations

import re
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """The resident set of a process and of its children, and of theirs."""
    folder = Path(f"/proc/{pid}")
    try:
        own = int(re.search(r"VmRSS:\s+(\d+) kB", (folder / "status").read_text())[1]) * 1024
        children = [int(child) for task in folder.glob("task/*/children") for child in task.read_text().split()]
    except (OSError, TypeError):  # it has ended
        return 0
    return own + sum(map(resident_bytes, children))
