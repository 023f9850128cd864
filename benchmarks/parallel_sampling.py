"""KV memory and prompt tokens of several samples of one prompt.

Workload: a prompt of 1,000 tokens with ``n`` = 8 samples of 64 tokens each, an empty cache, 16 tokens a block, 512
tokens a step, memory for all. Blocks held are looked at in the midst of every step, when all of it is planned: the most
that is held at once, blocks that wait for a copy included. Prompt tokens computed are counted from the scheduler's
events. By default the real scheduler and core with a null runner; with ``--model`` the real engine and that model,
which takes some minutes on two cores.

Asked: at most 1.15 x the bound, which is the prompt once and a tail for each sample: the whole blocks of the prompt,
and for each sample as many as its other tokens fill. Beside it one sequence with as many tokens in all, and the same
work as 8 requests of their own: with the prefix cache (which shares whole blocks) and without.

    python benchmarks/parallel_sampling.py [--model smollm2-135m] [--json FILE]
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report

from pagefold.kv import KVCore
from pagefold.kv.geometry import KVGeometry
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner, Tally

if TYPE_CHECKING:
    from pagefold.engine.engine import Engine
    from pagefold.steps import Runner, StepPlan, StepResult

NUM_SAMPLES = 8
NUM_PROMPT = 1000
NUM_OUTPUT = 64
BLOCK_SIZE = 16
BUDGET = 512
NUM_BLOCKS = 1024
ASKED = 1.15
WHOLE = NUM_PROMPT // BLOCK_SIZE
# The last token that a sample draws is never computed, so it has no KV.
BOUND = WHOLE + NUM_SAMPLES * (-(-(NUM_PROMPT + NUM_OUTPUT - 1) // BLOCK_SIZE) - WHOLE)
ONE_SEQUENCE = -(-(NUM_PROMPT + NUM_SAMPLES * NUM_OUTPUT - 1) // BLOCK_SIZE)


@dataclass(frozen=True)
class Cost:
    """What the work took.

    Attributes:
        peak_blocks: the most that was held at once.
        num_computed: prompt tokens computed.
        block_bytes: of one block.
    """

    peak_blocks: int
    num_computed: int
    block_bytes: int


class Watch:
    """A runner around another one that looks at the pool in the midst of each step."""

    def __init__(self, runner: Runner, core: KVCore) -> None:
        self._runner = runner
        self._core = core
        self.peak_blocks = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Look, and run the step."""
        self.peak_blocks = max(self.peak_blocks, self._core.num_active)
        return self._runner.run(plan)


def prompt(vocab_size: int) -> list[int]:
    """Return random tokens."""
    rng = random.Random(0)
    return [rng.randrange(vocab_size) for _ in range(NUM_PROMPT)]


def with_null_runner(*, as_samples: bool, caching: bool) -> Cost:
    """Run it through scheduler and core; bytes are those of SmolLM2-135M in float32."""
    tally = Tally()
    core = KVCore(NUM_BLOCKS, block_size=BLOCK_SIZE, enable_prefix_caching=caching, emit=tally)
    scheduler = Scheduler(core, SchedulerLimits(NUM_SAMPLES, BUDGET), emit=tally)
    watch = Watch(NullRunner(), core)
    tokens, stop = prompt(49_152), StopRule(frozenset(), NUM_PROMPT + NUM_OUTPUT)
    requests = [Request(f"r{index}", tokens, SamplingParams(), stop=stop, seed=index) for index in range(NUM_SAMPLES)]
    if as_samples:
        requests[0].forks = requests[1:]
        requests = requests[:1]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        scheduler.apply(watch.run(scheduler.schedule(0.0)))
    geometry = KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, element_bytes=4, block_size=BLOCK_SIZE)
    return _cost(watch, tally, geometry.bytes_per_block)


def with_engine(model: str, *, as_samples: bool, caching: bool) -> Cost:
    """Run it through the real engine."""
    tally = Tally()
    engine = _engine(model, tally, caching=caching)
    core = engine.scheduler.core
    engine.runner = watch = Watch(engine.runner, core)
    tokens = prompt(engine.limits.vocab_size)
    how = {"max_tokens": NUM_OUTPUT, "ignore_eos": True}
    if as_samples:
        engine.add("r", tokens, SamplingParams(n=NUM_SAMPLES, seed=0, **how))
    else:
        for index in range(NUM_SAMPLES):
            engine.add(f"r{index}", tokens, SamplingParams(seed=index, **how))
    while engine.has_work:
        engine.step()
    return _cost(watch, tally, engine.capacity.kv_budget_bytes // engine.capacity.num_blocks)


def _engine(model: str, tally: Tally, *, caching: bool) -> Engine:
    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    config = EngineConfig(
        model=model,
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=2**30,
        max_num_seqs=NUM_SAMPLES,
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=caching,
    )
    return build_engine(plan_engine(config), emit=tally)


def _cost(watch: Watch, tally: Tally, block_bytes: int) -> Cost:
    report = tally.report()
    assert report.num_output_tokens == NUM_SAMPLES * NUM_OUTPUT
    return Cost(watch.peak_blocks, report.num_computed_tokens, block_bytes)


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", help="use the real engine with this model")
    args = arguments.parse_args()

    def cost(*, as_samples: bool, caching: bool) -> Cost:
        if args.model:
            return with_engine(args.model, as_samples=as_samples, caching=caching)
        return with_null_runner(as_samples=as_samples, caching=caching)

    rows: list[Row] = []
    for caching in (True, False):
        got = cost(as_samples=True, caching=caching)
        ratio = got.peak_blocks / BOUND
        name = f"KV at its peak, n={NUM_SAMPLES}, cache {'on' if caching else 'off'}"
        rows += [
            Row(
                name,
                asked=f"<= {ASKED} x {BOUND} blocks = {_mib(ASKED * BOUND * got.block_bytes)}",
                got=f"{got.peak_blocks} blocks = {_mib(got.peak_blocks * got.block_bytes)} ({ratio:.2f} x)",
                ok=ratio <= ASKED,
                values={"blocks": got.peak_blocks, "bound": BOUND, "block_bytes": got.block_bytes},
            ),
            Row(
                "  prompt tokens computed",
                asked=f"<= {NUM_PROMPT:,}",
                got=f"{got.num_computed:,}",
                ok=got.num_computed <= NUM_PROMPT,
                values={"computed": got.num_computed},
            ),
        ]
    rows.append(
        Row(
            "  one sequence with as many tokens",
            "",
            f"{ONE_SEQUENCE} blocks (the samples hold {got.peak_blocks / ONE_SEQUENCE:.2f} x)",
            values={"blocks": ONE_SEQUENCE},
        )
    )
    for caching in (True, False):
        alone = cost(as_samples=False, caching=caching)
        ratio = alone.peak_blocks / BOUND
        rows.append(
            Row(
                f"  {NUM_SAMPLES} requests of their own, cache {'on' if caching else 'off'}",
                "",
                f"{alone.peak_blocks} blocks ({ratio:.2f} x), {alone.num_computed:,} prompt tokens computed",
                values={"blocks": alone.peak_blocks, "computed": alone.num_computed},
            )
        )
    runner = f"engine, {args.model}" if args.model else "null runner"
    print_report("parallel sampling", rows, {"with": runner} | machine(), args.json)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
