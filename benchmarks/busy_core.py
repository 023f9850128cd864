"""A machine with one busy core: how much slower a decode step gets, by our team of threads and by OpenMP's barriers.

Workload: SmolLM2-135M-Instruct, float32, one request and 32, contexts of 600 tokens; steps of the runner alone, quiet
and beside a process that keeps one core busy, in turns. Of two cores the system then gives our two threads about three
quarters, so 1.33 x is what cannot be helped. Beside it the same for as many products as a step has of torch's
``linear``, whose OpenMP regions wait for every thread at every one of them.

    python benchmarks/busy_core.py [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONTEXT, NUM_STEPS = 600, 12
NUM_LAYERS, HIDDEN, INTERMEDIATE = 30, 576, 1536


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy meanwhile."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(0.3)
        try:
            yield
        finally:
            other.kill()


def runner_steps() -> dict[str, Callable[[], object]]:
    """Return decode steps of the runner, by name."""
    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine
    from pagefold.kv import BlockId, BlockTable
    from pagefold.sampling import SamplingParams
    from pagefold.steps import StepPlan

    config = EngineConfig(model="smollm2-135m", dtype="float32", kv_cache_memory_bytes=2**30, max_model_len=1024)
    runner = build_engine(plan_engine(config), say=lambda _: None).runner

    def plan(num_rows: int) -> StepPlan:
        num_blocks = -(-CONTEXT // 16)
        made = StepPlan(0)
        made.token_ids = array("i", range(num_rows))
        made.num_tokens, made.starts = [1] * num_rows, [CONTEXT - 1] * num_rows
        ids = (range(num_blocks * row, num_blocks * (row + 1)) for row in range(num_rows))
        made.tables = [[BlockTable(map(BlockId, own))] for own in ids]
        made.sampling_rows, made.sampling = list(range(num_rows)), [SamplingParams(temperature=0.0)] * num_rows
        made.seeds, made.draws = [0] * num_rows, [0] * num_rows
        return made

    runner.slab.data.zero_()
    one, many = plan(1), plan(32)
    return {"a step of 1 request": lambda: runner.run(one), "a step of 32 requests": lambda: runner.run(many)}


def torch_steps() -> dict[str, Callable[[], object]]:
    """Return the products of such a step by torch."""
    import torch

    shapes = ((HIDDEN + 384, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    weights = [[torch.ones(shape) for shape in shapes] for _ in range(NUM_LAYERS)]
    inputs = {num_k: torch.ones(32, num_k) for num_k in (HIDDEN, INTERMEDIATE)}

    def step() -> None:
        for layer in weights:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return {"torch's products of a step of 32": step}


def median_s(run: Callable[[], object]) -> float:
    """Return the median seconds of some steps."""
    run()
    taken = []
    for _ in range(NUM_STEPS):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=5)
    args = arguments.parse_args()
    where = machine()
    steps = {**runner_steps(), **torch_steps()}
    quiet: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, step in steps.items():
            quiet[name].append(median_s(step))
            with busy_core():
                busy[name].append(median_s(step))
    rows = []
    for name in steps:
        ratio = statistics.median(b / q for b, q in zip(busy[name], quiet[name], strict=True))
        times = f"{1000 * statistics.median(quiet[name]):.1f} to {1000 * statistics.median(busy[name]):.1f} ms"
        rows.append(Row(f"{name}: slower with a busy core", "", f"{ratio:.2f} x ({times})", values={"ratio": ratio}))
    print_report("busy_core", rows, where, args.json)


if __name__ == "__main__":
    main()
