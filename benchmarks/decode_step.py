"""Where a decode step of 32 requests goes: the share of it that is neither matrix products nor attention.

Workload: SmolLM2-135M-Instruct, float32, 32 requests of 512 shared and 64 own random tokens, all of them decoding: 48
steps of the whole engine, from scheduling to the finished text. The decoder says when each of its phases was over; what
is left of a step's wall time is Python: scheduling, inputs, sampling, outputs. SiLU happens inside a matrix phase; it
is timed alone over as many rows, and counted as what it is: neither. Rope shares a phase with the writing of K and V
into blocks; it is timed alone too. That writing is attention's, as it is in the attention op of models that
transformers computes; the share is told with it and without.

Floors, in the same run: the bytes of weights and KV over the bandwidth that a plain sum of 256 MiB reaches; and the
operations over the rate of torch's best matrix product here.

    python benchmarks/decode_step.py [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from report import Row, machine, parser, print_report, read_bandwidth
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.engine import Engine

NUM_REQUESTS, SHARED, OWN, NUM_STEPS = 32, 512, 64, 48
ASKED = 0.06
MATRICES = ("qkv", "out", "gate_up", "down", "head")
ATTENTION = ("attention", "merge")
MATRIX_SIZE = 1024


@dataclass(frozen=True)
class Step:
    """Seconds of one decode step: the whole, and the decoder's phases."""

    whole: float
    phases: dict[str, float]


def decode_steps(engine: Engine, rng: random.Random, vocab_size: int) -> list[Step]:
    """Run 32 requests; return the steps in which all of them decoded."""
    from pagefold.runner.fused.decoder import FusedDecoder
    from pagefold.sampling import SamplingParams

    decoder = engine.runner.decoder
    assert isinstance(decoder, FusedDecoder)
    prefix = [rng.randrange(vocab_size) for _ in range(SHARED)]
    how = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + 8, ignore_eos=True)
    for index in range(NUM_REQUESTS):
        engine.add(str(index), prefix + [rng.randrange(vocab_size) for _ in range(OWN)], how)
    steps = []
    while engine.has_work:
        begin = time.perf_counter()
        deltas = engine.step()
        whole = time.perf_counter() - begin
        phases = decoder.profile()
        if len(deltas) == NUM_REQUESTS and sum(phases[name] for name in MATRICES) < whole:
            steps.append(Step(whole, phases))
    return steps[-NUM_STEPS:]


def silu_s(num_rows: int, width: int, num_layers: int) -> float:
    """Return the seconds that SiLU takes for so many rows in all layers, on one core."""
    from pagefold.kernels.formats import call
    from pagefold.kernels.rows import row_tiles

    gate, up = np.ones((2, num_rows, width), np.float32)
    arguments = gate.ctypes.data, gate.strides[0], up.ctypes.data, up.strides[0], width, num_rows
    return num_layers * best_s(lambda: call(row_tiles().silu, *arguments), 20)


def rope_s(num_rows: int, num_heads: int, head_dim: int, num_layers: int) -> float:
    """Return the seconds that rope takes for so many heads of so many rows in all layers, on one core."""
    from numba import njit

    from pagefold.runner.fused.kernel import rotate

    @njit
    def rows(heads: np.ndarray, rope: np.ndarray) -> None:  # type: ignore[type-arg]
        for head in range(len(heads)):
            rotate(heads[head], rope)

    heads, rope = np.ones((num_rows * num_heads, head_dim), np.float32), np.ones((2, head_dim), np.float32)
    return num_layers * best_s(lambda: rows(heads, rope), 20)


def best_s(run: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of so many runs, after one that is not counted."""
    run()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def main() -> None:
    """Measure and report."""
    import torch
    from transformers import AutoConfig

    from pagefold.config import EngineConfig, available_cpus
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    args = arguments.parse_args()
    where = machine()
    config = EngineConfig(model="smollm2-135m", dtype="float32", kv_cache_memory_bytes=2**30, max_model_len=2048)
    blueprint = plan_engine(config)
    engine = build_engine(blueprint, say=lambda _: None)
    spec = blueprint.spec
    rng = random.Random(7)
    steps: list[Step] = []
    for _ in track(range(args.repeats), "decoding", console=Console(stderr=True), transient=True):
        steps += decode_steps(engine, rng, spec.vocab_size)
    bandwidth = read_bandwidth()
    left, right = torch.ones(2, MATRIX_SIZE, MATRIX_SIZE)
    peak = 2 * MATRIX_SIZE**3 / best_s(lambda: left @ right, 10)
    weight_bytes = 4 * spec.num_parameters
    kv_tokens = SHARED + NUM_REQUESTS * (OWN + NUM_STEPS // 2)
    kv_bytes = kv_tokens * blueprint.geometry.bytes_per_token
    width = AutoConfig.from_pretrained(spec.folder).intermediate_size
    silu = silu_s(NUM_REQUESTS, width, spec.num_layers) / available_cpus()
    rope = rope_s(NUM_REQUESTS, spec.num_heads + spec.num_kv_heads, spec.head_dim, spec.num_layers) / available_cpus()

    whole = statistics.median(step.whole for step in steps)
    matrices = statistics.median(sum(step.phases[name] for name in MATRICES) for step in steps) - silu
    attention = statistics.median(sum(step.phases[name] for name in ATTENTION) for step in steps)
    write = statistics.median(step.phases["place"] for step in steps) - rope
    small = rope + statistics.median(step.phases["embed"] + step.phases["norm"] for step in steps)
    python = statistics.median(step.whole - sum(step.phases.values()) for step in steps)
    share = statistics.median(
        1 - (sum(step.phases[name] for name in (*MATRICES, *ATTENTION, "place")) - silu - rope) / step.whole
        for step in steps
    )
    floor_bytes, floor_operations = (weight_bytes + kv_bytes) / bandwidth, 2 * spec.num_parameters * NUM_REQUESTS / peak

    def ms(seconds: float) -> str:
        return f"{1000 * seconds:.2f} ms"

    rows = [
        Row("a step of 32 requests", "", ms(whole), values={"seconds": whole}),
        Row("matrix products", "", ms(matrices), values={"seconds": matrices}),
        Row("  their floor by operations (torch's rate)", "", ms(floor_operations), values={"flops": peak}),
        Row("  floor by bytes of weights and KV", "", ms(floor_bytes), values={"bytes_per_s": bandwidth}),
        Row("attention", "", ms(attention), values={"seconds": attention}),
        Row("K and V into their blocks", "", ms(write), values={"seconds": write}),
        Row("norms, rope, embedding", "", ms(small), values={"seconds": small}),
        Row("SiLU, timed alone", "", ms(silu), values={"seconds": silu}),
        Row("scheduling, inputs, sampling, outputs, waking threads", "", ms(python), values={"seconds": python}),
        Row(
            "neither matrix products nor attention",
            f"<= {ASKED:.0%}",
            f"{share:.1%}",
            share <= ASKED,
            {"share": share, "steps": len(steps)},
        ),
        Row("  if the writing of K and V is not attention", "", f"{share + write / whole:.1%}"),
    ]
    print_report("decode_step", rows, where, args.json)


if __name__ == "__main__":
    main()
