"""Waste: the share of allocated KV positions that hold no token, on the lengths and arrivals of a real chat service.

Workload: azure_conv_2023.csv (19,366 requests in an hour: arrival, prompt and output lengths; tokens are made up and
never shared) from the folder $PAGEFOLD_TRACES, else ../shared/traces beside the repository; all of it, unless
``--requests`` says less. Without the file, 5,000 requests of generated lengths much like it, and the table says so.

The real scheduler and core run it with a null runner on virtual time, as a Llama-2-7B in fp16 on one A100 might:
75,520 tokens of KV (39.6 GB) in blocks of 16, 256 sequences, 2,048 tokens a step; a step takes 8 ms (weights), 90 us a
computed token and 0.26 us a token of context. Waste is looked at after every step and summed over steps.

Asked is 1.1 x the rounding bound: on average 7.5 positions of a last block of 16 are empty, so 7.5 / mean tokens that a
running request holds, measured in the same run. Beside it what the same sequences would waste, at the same steps, in
blocks of 128 tokens, and if each had its prompt and its whole output (known in advance) reserved in one piece.

    python benchmarks/waste.py [--requests N] [--json FILE]
"""

from __future__ import annotations

import csv
import os
import random
from array import array
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report

from pagefold.kv import KVCore
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import LinearStepCost, NullRunner, Report, Tally, VirtualClock, replay

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE = "azure_conv_2023.csv"
NUM_GENERATED = 5000
BLOCK_SIZE = 16
NUM_BLOCKS = 75_520 // BLOCK_SIZE
LIMITS = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=2048)
COST = LinearStepCost(step_s=8e-3, token_s=90e-6, context_token_s=0.26e-6)
ROUNDING = (BLOCK_SIZE - 1) / 2
ASKED = 1.1
SAMPLING = SamplingParams(temperature=0.0, max_tokens=None)

Arrival = tuple[float, int, int]
"""Seconds, prompt tokens, output tokens."""


def traces_dir() -> Path:
    """Return where traces are."""
    named = os.environ.get("PAGEFOLD_TRACES")
    return Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "traces"


def read_trace(path: Path) -> list[Arrival]:
    """Return the trace's requests."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [
            (datetime.fromisoformat(line["TIMESTAMP"][:26]), int(line["ContextTokens"]), int(line["GeneratedTokens"]))
            for line in csv.DictReader(file)
        ]
    began = lines[0][0]
    return [((came - began).total_seconds(), prompt, output) for came, prompt, output in lines]


def generate() -> list[Arrival]:
    """Return requests of log-normal lengths around the trace's: prompts near 1,000 tokens, outputs near 200."""
    rng = random.Random(0)
    now_s = 0.0
    arrivals: list[Arrival] = []
    for _ in range(NUM_GENERATED):
        now_s += rng.expovariate(5.4)
        prompt = min(8000, 1 + int(rng.lognormvariate(6.5, 1.0)))
        arrivals.append((now_s, prompt, min(1500, 1 + int(rng.lognormvariate(5.0, 0.8)))))
    return arrivals


def requests(arrivals: list[Arrival]) -> Iterator[Request]:
    """Yield a request for each arrival, with tokens that no other has."""
    first = 0
    for index, (came_s, num_prompt, num_output) in enumerate(arrivals):
        first = first if first + num_prompt < 2**31 else 0
        stop = StopRule(frozenset(), num_prompt + max(1, num_output))
        prompt = array("i", range(first, first + num_prompt))
        yield Request(f"r{index}", prompt, SAMPLING, stop=stop, seed=index, arrival_s=came_s)
        first += num_prompt


class Lengths(Tally):
    """Counts as a tally does, and looks at what other ways to hold the same sequences would waste."""

    def __init__(self) -> None:
        super().__init__()
        self.num_held: dict[str, int] = {"128": 0, "reserved": 0}
        self.num_tokens = 0

    def look(self, scheduler: Scheduler, now_s: float) -> None:
        """Record where all blocks are, and where they might be; called after each step."""
        super().look(scheduler, now_s)
        for request in scheduler.running:
            num_tokens = request.num_computed_tokens
            self.num_tokens += num_tokens
            self.num_held["128"] += -(-num_tokens // 128) * 128
            self.num_held["reserved"] += request.stop.max_total_tokens

    def waste(self, name: str) -> float:
        """Return the share of positions that would hold no token."""
        return 1 - self.num_tokens / self.num_held[name]


def run(arrivals: list[Arrival]) -> tuple[Report, Lengths]:
    """Replay ``arrivals``."""
    tally = Lengths()
    core = KVCore(NUM_BLOCKS, block_size=BLOCK_SIZE, emit=tally)
    scheduler = Scheduler(core, LIMITS, emit=tally)
    return replay(requests(arrivals), scheduler, NullRunner(), VirtualClock(), COST, tally=tally), tally


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, help="only the first so many")
    args = arguments.parse_args()
    path = traces_dir() / TRACE
    arrivals = read_trace(path) if path.is_file() else generate()
    source = TRACE if path.is_file() else f"generated lengths ({path} is not there)"
    num_all = len(arrivals)
    arrivals = arrivals[: args.requests]
    report, tally = run(arrivals)
    bound = ROUNDING / report.mean_resident_tokens
    source += f", {'all' if len(arrivals) == num_all else f'the first {len(arrivals):,} of'} {num_all:,} requests"
    rows = [
        Row(
            f"waste in blocks of {BLOCK_SIZE}",
            asked=f"<= {ASKED} x {bound:.3%} = {ASKED * bound:.3%}",
            got=f"{report.waste:.3%} ({report.waste / bound:.2f} x)",
            ok=report.waste <= ASKED * bound,
            values={"waste": report.waste, "bound": bound, "report": report.figures()},
        ),
        Row("  in blocks of 128", "", f"{tally.waste('128'):.3%}"),
        Row("  reserved in one piece", "", f"{tally.waste('reserved'):.3%}"),
        Row("tokens of a running request", "", f"{report.mean_resident_tokens:,.0f} (mean)"),
        Row("requests, steps", "", f"{report.num_requests:,}, {report.num_steps:,}"),
        Row("preemptions", "", f"{report.num_preemptions:,}"),
        Row("pool in use, mean and peak", "", f"{report.mean_use:.0%}, {report.peak_use:.0%}"),
    ]
    print_report("waste", rows, {"workload": source} | machine(), args.json)


if __name__ == "__main__":
    main()
