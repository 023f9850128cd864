"""What the machine has for this process: cores and memory, as far as its cgroup lets it."""

from __future__ import annotations

import math
import os
from pathlib import Path

from pagefold.errors import ConfigError

__all__ = ["available_cpus", "available_memory_bytes"]


def available_cpus() -> int:
    """Return how many cores this process may use: those of its affinity, or fewer where its cgroup has a quota."""
    num_cpus = float(len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders():
        try:
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        except (OSError, ValueError):  # absent, as in v1
            continue
        if quota != "max":
            num_cpus = min(num_cpus, int(quota) / int(period))
    return max(1, math.ceil(num_cpus))


def available_memory_bytes() -> int:
    """Return the memory that a new process can take without swapping: what the machine and its cgroup both leave."""
    available = _meminfo_available(Path("/proc/meminfo").read_text(encoding="ascii"))
    for folder in _cgroup_folders():
        left = _cgroup_left(folder)
        if left is not None:
            available = min(available, left)
    return available


def _meminfo_available(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    msg = "/proc/meminfo has no MemAvailable line."
    raise ConfigError(msg, remedy="Give kv_cache_memory_bytes.")


def _cgroup_folders() -> list[Path]:
    """Return this process's cgroup folders (v2, and v1's memory controller) and their parents, which limit it too."""
    folders: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            base = Path("/sys/fs/cgroup/memory")
        else:
            continue
        folder = base / path.lstrip("/")
        folders += [parent for parent in (folder, *folder.parents) if parent == base or base in parent.parents]
    return folders


def _cgroup_left(folder: Path) -> int | None:
    """Return what a cgroup's limit leaves, counting reclaimable file cache as free; None where there is no limit."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = int((folder / limit_name).read_text(encoding="ascii"))
            used = int((folder / used_name).read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):  # absent, or "max"
            continue
        inactive = [int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")]
        return max(0, limit - used + sum(inactive))
    return None
