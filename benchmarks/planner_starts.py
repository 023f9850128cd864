"""The planner against starts of vLLM that others logged: what it says beforehand, beside what each start found.

Reads tests/plan/start_logs.json, which has what public logs say, with the address of each. Prints the table of
docs/planner.md (a test holds that the page has it as it is printed), and what is asked of it. Nothing is measured.

    python benchmarks/planner_starts.py [--json FILE] [--table]
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Row, machine, parser, print_report

from pagefold.plan import PlanSettings, find_device, find_model
from pagefold.plan.memory import Memory, plan_memory

GIB = 2**30
LOGS = Path(__file__).parents[1] / "tests" / "plan" / "start_logs.json"


@dataclass(frozen=True)
class Start:
    """A start, and its plan.

    Attributes:
        row: what its log says.
        memory: what is planned.
    """

    row: dict[str, Any]
    memory: Memory

    @property
    def kv(self) -> float:
        """KV bytes, planned over logged."""
        return self.memory.tightest.kv.likely / GIB / float(self.row["gib"]["kv"])

    @property
    def weights(self) -> float:
        """Weights, planned over logged."""
        return self.memory.tightest.weights.likely / GIB / float(self.row["gib"]["weights"])

    @property
    def requests(self) -> float:
        """Requests of the longest length at once, planned over logged."""
        return self.memory.max_concurrency / float(self.row["concurrency"])


def starts() -> list[Start]:
    """Return every start of the file, planned."""
    found = []
    for row in json.loads(LOGS.read_text(encoding="utf-8")):
        settings = PlanSettings(engine=row["engine"], **row["settings"])
        found.append(Start(row, plan_memory(find_model(row["model"]), find_device(row["device"]), settings)))
    return found


def table(found: list[Start]) -> list[str]:
    """Return the table, line by line: planned / logged, in GiB."""
    lines = [
        "| model | weights | activations | outside | graphs | KV | KV, planned over logged | requests at once |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for start in found:
        device, logged = start.memory.tightest, start.row["gib"]
        cells = [f"{span.likely / GIB:.2f} / {logged[part]:.2f}" for part, span in device.spans.items()]
        requests = f"{start.memory.max_concurrency:.2f} / {start.row['concurrency']:.2f}"
        lines.append(f"| {start.row['model']} | {' | '.join(cells)} | {start.kv:.4f} | {requests} |")
    return lines


def _between(what: str, least: float, most: float, values: list[float]) -> Row:
    ends = (min(values), max(values))
    got = f"{ends[0]:.4f}" if len(values) == 1 else f"{ends[0]:.4f} to {ends[1]:.4f}"
    return Row(what, f"{least} to {most}", got, least <= ends[0] and ends[1] <= most, {"values": values})


def main() -> None:
    """Print the table, and what is asked."""
    arguments = parser(__doc__)
    arguments.add_argument("--table", action="store_true", help="only the table of the page")
    args = arguments.parse_args()
    found = starts()
    print("\n".join(table(found)))
    if args.table:
        return
    refused = [start for start in found if not start.memory.fits]
    rows = [
        _between("KV bytes, planned over logged: median", 0.99, 1.01, [statistics.median(s.kv for s in found)]),
        _between("KV bytes, planned over logged: all", 0.96, 1.04, [start.kv for start in found]),
        _between("weights, planned over logged", 0.99, 1.01, [start.weights for start in found]),
        _between("requests at once, planned over logged", 0.95, 1.05, [start.requests for start in found]),
        Row("starts that ran and are not said to fit", "0", str(len(refused)), not refused, {"starts": len(found)}),
    ]
    print_report("the planner against logged starts", rows, machine(), args.json)


if __name__ == "__main__":
    main()
