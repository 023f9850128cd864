"""Prompt tokens computed by a cold burst that shares a prefix.

Workload: 32 requests that come at once, 512 shared and 64 own tokens each, 16 output tokens, an empty cache, 16 tokens
a block; with token budgets of 512 (the default) and 8,192 (the whole burst in one step). Counted from the scheduler's
events, so whatever was computed counts. By default the real scheduler and core with a null runner; with ``--model`` the
real engine and that model, which takes about a minute on two cores, counted from the same events.

Asked: 512 + 32 x 64, plus at most one block a request. Beside it the same without prefix caching (null runner only).

    python benchmarks/shared_prefix.py [--model smollm2-135m] [--json FILE]
"""

from __future__ import annotations

import random

from report import Row, machine, parser, print_report

from pagefold.kv import KVCore
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import LinearStepCost, NullRunner, Tally, VirtualClock, replay

NUM_REQUESTS = 32
NUM_SHARED = 512
NUM_OWN = 64
NUM_OUTPUT = 16
BLOCK_SIZE = 16
BUDGETS = (512, 8192)
IDEAL = NUM_SHARED + NUM_REQUESTS * NUM_OWN
ASKED = IDEAL + NUM_REQUESTS * BLOCK_SIZE
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


def prompts(vocab_size: int) -> list[list[int]]:
    """Return the burst, with random tokens."""
    rng = random.Random(0)
    shared = [rng.randrange(vocab_size) for _ in range(NUM_SHARED)]
    return [shared + [rng.randrange(vocab_size) for _ in range(NUM_OWN)] for _ in range(NUM_REQUESTS)]


def with_null_runner(budget: int, *, caching: bool) -> int:
    """Return how many prompt tokens the scheduler has a runner compute."""
    tally = Tally()
    core = KVCore(4096, block_size=BLOCK_SIZE, enable_prefix_caching=caching, emit=tally)
    scheduler = Scheduler(core, SchedulerLimits(NUM_REQUESTS, budget), emit=tally)
    stop = StopRule(frozenset(), NUM_SHARED + NUM_OWN + NUM_OUTPUT)
    burst = [Request(f"r{i}", prompt, SAMPLING, stop=stop, seed=i) for i, prompt in enumerate(prompts(49_152))]
    report = replay(burst, scheduler, NullRunner(), VirtualClock(), LinearStepCost(), tally=tally)
    assert report.num_output_tokens == NUM_REQUESTS * NUM_OUTPUT
    return report.num_computed_tokens


def with_engine(model: str, budget: int) -> int:
    """Return how many prompt tokens the real engine computes."""
    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    config = EngineConfig(
        model=model,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=2**30,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=budget,
    )
    tally = Tally()
    engine = build_engine(plan_engine(config), emit=tally)
    for index, prompt in enumerate(prompts(engine.limits.vocab_size)):
        engine.add(f"r{index}", prompt, SAMPLING)
    while engine.has_work:
        engine.step()
    report = tally.report()
    assert report.num_output_tokens == NUM_REQUESTS * NUM_OUTPUT
    return report.num_computed_tokens


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", help="use the real engine with this model")
    args = arguments.parse_args()
    rows: list[Row] = []
    for budget in BUDGETS:
        computed = with_engine(args.model, budget) if args.model else with_null_runner(budget, caching=True)
        rows.append(
            Row(
                f"prompt tokens computed, {budget:,} a step",
                asked=f"<= {IDEAL:,} + {NUM_REQUESTS} x {BLOCK_SIZE} = {ASKED:,}",
                got=f"{computed:,}",
                ok=computed <= ASKED,
                values={"computed": computed, "ideal": IDEAL},
            )
        )
        if not args.model:
            alone = with_null_runner(budget, caching=False)
            rows.append(Row("  without prefix caching", "", f"{alone:,}", values={"computed": alone}))
    runner = f"engine, {args.model}" if args.model else "null runner"
    print_report("shared prefix", rows, {"with": runner} | machine(), args.json)


if __name__ == "__main__":
    main()
