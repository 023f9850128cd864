"""How every benchmark reports: rows of asked and got, on which machine, as a table and as JSON.

    python benchmarks/NAME.py [--json FILE]

A row that misses what is asked is shown in red; the exit status stays 0, since a machine that others use may be slow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "machine", "parser", "print_report", "read_bandwidth"]

_BANDWIDTH_BYTES = 2**28
_PACKAGES = ("pagefold", "torch", "transformers", "numba", "numpy")


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: what was measured.
        asked: the limit or the peer's figure, with its unit; empty when the row is only there to compare.
        got: the figure, with its unit.
        ok: whether it is within what is asked; None when nothing is.
        values: the numbers behind it, for JSON.
    """

    what: str
    asked: str
    got: str
    ok: bool | None = None
    values: dict[str, object] = field(default_factory=dict)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--json``, whose help is the benchmark's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="FILE", help="write the rows, and what they were measured on, to FILE")
    return made


def machine() -> dict[str, object]:
    """Return what a figure depends on besides the code: processor, versions, who else is working, when."""
    facts: dict[str, object] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    facts["date"] = time.strftime("%Y-%m-%d")
    return facts


def read_bandwidth() -> float:
    """Return bytes a second that a plain sum of 256 MiB reads: what floors by bytes are counted with."""
    import torch

    numbers = torch.ones(_BANDWIDTH_BYTES // 4)
    taken = []
    for _ in range(6):
        begin = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - begin)
    return _BANDWIDTH_BYTES / min(taken)


def print_report(name: str, rows: list[Row], where: dict[str, object], json_file: str | None = None) -> None:
    """Print ``rows`` as a table, and write them to ``json_file`` if there is one."""
    table = Table(
        "what", title=f"benchmark: {name}", caption=", ".join(f"{key} {value}" for key, value in where.items())
    )
    table.add_column("asked", justify="right")
    table.add_column("got", justify="right")
    for row in rows:
        style = {True: "green", False: "bold red", None: ""}[row.ok]
        table.add_row(row.what, row.asked, f"[{style}]{row.got}[/]" if style else row.got)
    Console().print(table)
    if json_file:
        result = {"benchmark": name, "machine": where, "rows": [asdict(row) for row in rows]}
        Path(json_file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
