"""The simulator: steps a second with 200 running requests, a whole trace through the cache, curves, and faults.

Full mode: 400 generated requests (prompts of 50 to 500 tokens under 4 system prompts, outputs of 400 to 600 tokens)
that all come within a second, at most 200 running, 20,000 blocks of 16 tokens, 2,048 tokens a step: the real scheduler
and cache, the null runner, and all that the report counts. Counted are the steps in which 200 run. The same with 2,000
blocks, where memory is short: cached blocks are evicted and requests preempted.

Cache only: the conversation trace of Mooncake (where there is one: PAGEFOLD_TRACES) or 12,000 generated requests, LRU,
3.0M tokens, blocks of 512. Curves: LRU at every size, exact and sampled, on the same.

Process CPU time, since the machine may be shared; medians of the repeats.

    python benchmarks/simulate.py [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import statistics
from time import process_time
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report

from pagefold.sim import ChatWorkload, SimConfig, replay_cache_only, simulate
from pagefold.sim.curves import lru_curve, mean_error
from pagefold.sim.fault_hunt import hunt
from pagefold.sim.step_cost import LinearStepCost
from pagefold.sim.traces import Trace, parse_workload, read_trace, traces_folder

if TYPE_CHECKING:
    from pagefold.steps import StepPlan

WORKLOAD = ChatWorkload(
    num_chats=400,
    num_turns=(1, 1),
    question_tokens=(50, 500),
    answer_tokens=(400, 600),
    chats_per_s=1000.0,
)
RUNNING = 200
NUM_BLOCKS = (20_000, 2_000)
BLOCK_SIZE = 512
CACHE_TOKENS = 3_000_000
RATES = (0.1, 0.01)
FAULT_STEPS = 3_000
ASKED_STEPS_PER_S = 1000
ASKED_REPLAY_S = 10.0


class FullSteps:
    """A step cost that notes the CPU time between steps in which so many requests run."""

    def __init__(self) -> None:
        self._cost = LinearStepCost()
        self._last: float | None = None
        self.taken: list[float] = []

    def __call__(self, plan: StepPlan) -> float:
        """Return the virtual seconds of a plan."""
        now = process_time()
        if self._last is not None:
            self.taken.append(now - self._last)
        self._last = now if plan.num_rows == RUNNING else None
        return self._cost(plan)


def steps_per_s(num_blocks: int) -> tuple[float, float, int]:
    """Return (steps a second while 200 run, steps a second of the whole run, preemptions)."""
    config = SimConfig(num_blocks=num_blocks, max_num_seqs=RUNNING, max_num_batched_tokens=2048)
    requests = WORKLOAD.generate()
    cost = FullSteps()
    begin = process_time()
    report = simulate(requests, config, step_cost=cost)
    seconds = process_time() - begin
    full = len(cost.taken) / sum(cost.taken) if cost.taken else 0.0
    return full, report.num_steps / seconds, report.num_preemptions


def the_trace() -> Trace:
    """Return the conversation trace, or generated requests where there is none."""
    folder = traces_folder()
    if folder is None:
        return parse_workload("chat:num_chats=4000,system_prompt_tokens=1000-9000").trace(BLOCK_SIZE)
    return read_trace(folder / "mooncake_conversation.jsonl")


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    args = arguments.parse_args()
    rows: list[Row] = []
    for num_blocks in NUM_BLOCKS:
        runs = [steps_per_s(num_blocks) for _ in range(args.repeats)]
        full, whole = (statistics.median(run[index] for run in runs) for index in (0, 1))
        is_asked = num_blocks == NUM_BLOCKS[0]
        got = full if is_asked else whole
        what = f"full mode, {RUNNING} running" if is_asked else f"full mode, memory short: {runs[0][2]} preemptions"
        rows.append(
            Row(
                f"{what}: steps a second",
                asked=f">= {ASKED_STEPS_PER_S:,}" if is_asked else "",
                got=f"{got:,.0f}",
                ok=got >= ASKED_STEPS_PER_S if is_asked else None,
                values={"steps_per_s_full": [run[0] for run in runs], "steps_per_s": [run[1] for run in runs]},
            )
        )
    trace = the_trace()
    taken = []
    for _ in range(args.repeats):
        begin = process_time()
        ratio = replay_cache_only(
            trace.requests, policy="lru", block_size=BLOCK_SIZE, cache_tokens=CACHE_TOKENS
        ).token_hit_ratio
        taken.append(process_time() - begin)
    seconds = statistics.median(taken)
    rows.append(
        Row(
            f"cache only, LRU, {trace.name} ({len(trace.requests):,} requests), hit ratio {ratio:.3f}",
            asked=f"<= {ASKED_REPLAY_S:g} s",
            got=f"{seconds:.1f} s",
            ok=seconds <= ASKED_REPLAY_S,
            values={"s": taken, "token_hit_ratio": ratio},
        )
    )
    begin = process_time()
    exact = lru_curve(trace.requests, block_size=BLOCK_SIZE)
    rows.append(Row("LRU at every size, exact", asked="", got=f"{process_time() - begin:.2f} s"))
    sizes = [exact.largest * part // 50 for part in range(1, 51)]
    for block_size in (BLOCK_SIZE, 16):
        whole_curve = exact if block_size == BLOCK_SIZE else lru_curve(trace.requests, block_size=block_size)
        for rate in RATES:
            sampled = lru_curve(trace.requests, block_size=block_size, rate=rate)
            error = mean_error(sampled, whole_curve, sizes)
            what = f"  sampled at {rate:g}, blocks of {block_size}: {sampled.num_blocks:,} of them, mean error"
            rows.append(Row(what, asked="", got=f"{error:.4f}", values={"mean_absolute_error": error}))
    begin = process_time()
    found = hunt(FAULT_STEPS)
    seconds = process_time() - begin
    rows.append(
        Row(
            f"faults: {FAULT_STEPS:,} steps, audited",
            asked="none found",
            got="none" if found is None else found.error,
            ok=found is None,
        )
    )
    rows.append(Row("  a step", asked="", got=f"{seconds / FAULT_STEPS * 1e3:.2f} ms"))
    print_report("simulate", rows, machine(), args.json)


if __name__ == "__main__":
    main()
