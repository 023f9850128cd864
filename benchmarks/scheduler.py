"""Time of scheduler and core for each running request and step, while all of them decode.

Workload: 32, 200 and 1,000 running requests with contexts of 600 tokens (600 to 615, so that their blocks fill up at
different steps), 16 tokens a block, memory for all of them; each step gives every request a token. Timed is
``schedule`` and ``apply``: the plan's columns, a new block every 16 tokens, its promise and its commit; what the runner
samples is made outside the clock. Process CPU time, since the machine may be shared; 5 repeats of 64 steps, medians.

Beside it, interleaved: the same, each step planned while the one before is in flight, as for a card. And a floor: a
bare Python loop that appends the same columns from ready values.

The same with another order of requests, another rule of admission, or requests of several tenants in turn; what a
checkout lacks is said.

    python benchmarks/scheduler.py [--repeats 5] [--scheduling-policy NAME] [--admission NAME] [--tenants N]
        [--running N ...] [--json FILE]
"""

from __future__ import annotations

import inspect
import statistics
from array import array
from dataclasses import dataclass
from time import process_time
from typing import Any

from report import Row, machine, parser, print_report

from pagefold.kv import KVCore
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import SCHEDULING_POLICIES, Scheduler, SchedulerLimits
from pagefold.sim import NullRunner
from pagefold.steps import StepPlan

NUM_RUNNING = (32, 200, 1000)
NUM_STEPS = 64
CONTEXT = 600
BLOCK_SIZE = 16
ASKED_US = 1.5
ASKED_AT = (200, 1000)


@dataclass(frozen=True)
class Rules:
    """What decides.

    Attributes:
        policy: the order of requests.
        admission: how they are let in; empty for the scheduler's default.
        num_tenants: whose they are, in turn.
    """

    policy: str
    admission: str
    num_tenants: int

    def lacks(self) -> str:
        """Return what this checkout lacks of it; empty where it has all."""
        if self.policy not in SCHEDULING_POLICIES:
            return f"no scheduling policy {self.policy!r}: there are {', '.join(SCHEDULING_POLICIES)}"
        if self.admission and "admission" not in inspect.signature(Scheduler).parameters:
            return "no rules of admission"
        if self.num_tenants > 1 and "tenant" not in inspect.signature(Request).parameters:
            return "no tenants of requests"
        return ""

    def scheduler(self, core: KVCore, limits: SchedulerLimits) -> Scheduler:
        """Return a scheduler of these rules."""
        settings: dict[str, Any] = {"admission": self.admission} if self.admission else {}
        return Scheduler(core, limits, policy=SCHEDULING_POLICIES[self.policy](60.0), **settings)

    def of_request(self, index: int) -> dict[str, Any]:
        """Return what says whose a request is."""
        return {"tenant": f"t{index % self.num_tenants}"} if self.num_tenants > 1 else {}


def decoding(num_running: int, rules: Rules) -> Scheduler:
    """Return a scheduler whose ``num_running`` requests have their prompts computed."""
    num_blocks = num_running * (CONTEXT + 16 + 8 * NUM_STEPS) // BLOCK_SIZE
    core = KVCore(num_blocks, block_size=BLOCK_SIZE)
    scheduler = rules.scheduler(core, SchedulerLimits(num_running, num_running * 2 * CONTEXT))
    for index in range(num_running):
        first = index * 1024
        prompt = array("i", range(first, first + CONTEXT + index % BLOCK_SIZE))
        stop = StopRule(frozenset({-1}), CONTEXT + 8 * NUM_STEPS if rules.admission else 10**9)
        whose = rules.of_request(index)
        scheduler.add(Request(f"r{index}", prompt, SamplingParams(temperature=0.0), stop=stop, seed=index, **whose))
    scheduler.apply(NullRunner().run(scheduler.schedule(0.0)))
    assert len(scheduler.running) == num_running
    return scheduler


def steps_s(scheduler: Scheduler) -> float:
    """Return the seconds that ``NUM_STEPS`` steps take."""
    runner = NullRunner()
    seconds = 0.0
    for _ in range(NUM_STEPS):
        begin = process_time()
        plan = scheduler.schedule(0.0)
        seconds += process_time() - begin
        result = runner.run(plan)
        begin = process_time()
        scheduler.apply(result)
        seconds += process_time() - begin
    return seconds


def ahead_s(scheduler: Scheduler) -> float:
    """Return the seconds that ``NUM_STEPS`` steps take, each planned while the one before is in flight."""
    runner = NullRunner()
    seconds = 0.0
    flight = scheduler.schedule(0.0)
    for _ in range(NUM_STEPS):
        begin = process_time()
        ahead = scheduler.schedule_ahead(0.0)
        seconds += process_time() - begin
        assert ahead is not None, "nothing hides the next step"
        result = runner.run(flight)
        begin = process_time()
        scheduler.apply(result)
        seconds += process_time() - begin
        flight = ahead
    scheduler.apply(runner.run(flight))
    return seconds


def floor_s(scheduler: Scheduler) -> float:
    """Return the seconds that it takes to append the same columns, so many times."""
    ready = [
        (request.token_ids[-1], request.num_computed_tokens, request.cache.tables, request.sampling, request.seed)
        for request in scheduler.running
        if request.cache is not None
    ]
    begin = process_time()
    for step in range(NUM_STEPS):
        plan = StepPlan(step)
        for row, (token_id, start, tables, sampling, seed) in enumerate(ready):
            plan.token_ids.append(token_id)
            plan.starts.append(start)
            plan.num_tokens.append(1)
            plan.tables.append(tables)
            plan.sampling_rows.append(row)
            plan.sampling.append(sampling)
            plan.seeds.append(seed)
            plan.draws.append(start)
    return process_time() - begin


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--scheduling-policy", default="fcfs", help="the order of requests")
    arguments.add_argument("--admission", default="", help="how they are let in; the default is the scheduler's")
    arguments.add_argument("--tenants", type=int, default=1, help="whose requests they are, in turn")
    arguments.add_argument("--running", type=int, nargs="+", default=NUM_RUNNING)
    args = arguments.parse_args()
    rules = Rules(args.scheduling_policy, args.admission, args.tenants)
    if rules.lacks():
        arguments.exit(0, f"left out: this checkout has {rules.lacks()}\n")
    rows: list[Row] = []
    for num_running in args.running:
        scale = 1e6 / (NUM_STEPS * num_running)
        ours: list[float] = []
        floors: list[float] = []
        aheads: list[float] = []
        scheduler = decoding(num_running, rules)
        steps_s(scheduler)  # warm
        for repeat in range(args.repeats):
            if repeat % 2 == 1:  # before contexts outgrow the pool
                scheduler = decoding(num_running, rules)
                steps_s(scheduler)
            ours.append(steps_s(scheduler) * scale)
            floors.append(floor_s(scheduler) * scale)
            aheads.append(ahead_s(scheduler) * scale)
        got, floor = statistics.median(ours), statistics.median(floors)
        is_asked = num_running in ASKED_AT
        rows.append(
            Row(
                f"{num_running:,} running: a request and step",
                asked=f"<= {ASKED_US} us" if is_asked else "",
                got=f"{got:.2f} us",
                ok=got <= ASKED_US if is_asked else None,
                values={"us": ours},
            )
        )
        ahead = statistics.median(aheads)
        rows.append(
            Row(
                "  planned while the step before is in flight",
                asked="",
                got=f"{ahead:.2f} us",
                values={"us": aheads},
            )
        )
        rows.append(
            Row(
                "  floor: append the same columns",
                asked="",
                got=f"{floor:.2f} us ({got / floor:.1f} x)",
                values={"us": floors},
            )
        )
    said = [args.scheduling_policy, args.admission, f"{args.tenants} tenants" if args.tenants > 1 else ""]
    print_report(", ".join(["scheduler", *filter(None, said)]), rows, machine(), args.json)


if __name__ == "__main__":
    main()
