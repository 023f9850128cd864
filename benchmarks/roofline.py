"""How near products and whole steps come to the roofline of this processor, in each format of numbers.

Ceilings, measured in the same run (see ``hardware/ceilings.py``): the multiply-adds of the instruction that a format
is computed with, and the bytes that all cores read from memory, a second. A time's roofline is the larger of operations
over the one and bytes over the other; its share is the roofline over the median of the times. Two operations are a
multiply-add. What is counted is what any implementation must do:

* operations: of every matrix, two a weight and row; in the last layer and the head only for the rows whose logits are
  wanted, but for q, k and v. Of attention, four a query head, number of it, and token that is attended to, at the
  ceiling of what KV is multiplied in: float32, or bfloat16 where that is the dtype.
* bytes: of every matrix once a step, as it is packed, scales included; KV that is attended to once, and KV that is
  written. Activations stay in caches, and are not counted.

Norms, rope, SiLU, the softmax and all that Python does are in the times and not in the roofline. Where the last-level
cache holds a good part of the weights, shares by bytes come out too high: its size stands below the table.

    products   alone, of SmolLM2-135M's layers and of four layers of a 1B Llama: 512 rows; one row, with the head
    steps      SmolLM2-135M, whole steps of the engine: 4 prompts of 512 tokens; 1 and 32 sequences that decode behind
               prompts of 512 tokens of their own
    1b         a Llama of 1B shape with random weights (2.5 GB in a temporary folder), as one sequence decodes

Formats: float32; int8 weights that are multiplied as float32; bfloat16; and w8a8_int8, with the rest in bfloat16. One
that the processor has no instruction for is computed by others, and named so.

    python benchmarks/roofline.py [--formats A,B] [--parts products,steps,1b] [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import llvmlite.binding as llvm
from hardware.ceilings import Ceilings, cache_bytes, instruction_of
from hardware.products import Products, Sizes, layer_matrices
from hardware.random_llama import LLAMA_1B, write_llama
from report import Row, machine, parser, print_report
from rich.console import Console

from pagefold.runner.fused.families import FusedConfig, read_fused_config
from pagefold.runner.fused.formats import decoder_formats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pagefold.engine.engine import Engine
    from pagefold.kernels.formats import ProductFormat

SMALL, LARGE = "SmolLM2-135M", "Llama 1B"
NUM_ROWS, PROMPT, NUM_PROMPTS, NUM_DECODING, NUM_STEPS = 512, 512, 4, 32, 32
LARGE_LAYERS = 4
MATRICES = ("qkv", "out", "gate_up", "down", "head")
FEATURES = ("avx2", "fma", "avx512f", "avx512bf16", "avx512vnni", "avxvnni", "amx-bf16", "amx-int8")

console = Console(stderr=True)


@dataclass(frozen=True)
class Format:
    """A format of numbers, as it is asked for.

    Attributes:
        dtype, quantization: of the engine.
        asked: least shares of whole steps.
    """

    dtype: str
    quantization: str | None = None
    asked: Mapping[str, float] = field(default_factory=dict)

    @property
    def products(self) -> ProductFormat:
        """What matrices are multiplied in."""
        return decoder_formats(self.dtype, self.quantization).products

    @property
    def attention(self) -> ProductFormat:
        """What KV is multiplied in."""
        return decoder_formats(self.dtype, None).products


PREFILL, ONE, MANY = f"prefill of {NUM_PROMPTS} x {PROMPT}", "decode of 1", f"decode of {NUM_DECODING}"
FORMATS = {
    "float32": Format("float32"),
    "int8": Format("float32", "int8"),
    "bfloat16": Format("bfloat16", None, {PREFILL: 0.75, ONE: 0.70, MANY: 0.65}),
    "w8a8_int8": Format("bfloat16", "w8a8_int8", {PREFILL: 0.45, ONE: 0.55, MANY: 0.55}),
}
ASKED_PRODUCTS, ASKED_LARGE = 0.80, 0.80


@dataclass(frozen=True)
class Work:
    """What must be done.

    Attributes:
        operations: seconds' worth of them come from ceilings, by the format that they are in.
        num_bytes: that must come from memory.
    """

    operations: tuple[tuple[ProductFormat, float], ...]
    num_bytes: float

    def seconds_by_operations(self, ceilings: Ceilings) -> float:
        """Return how long the operations take at least."""
        return sum(number / ceilings.operations_of(product_format) for product_format, number in self.operations)

    def seconds_by_bytes(self, ceilings: Ceilings) -> float:
        """Return how long the bytes take at least."""
        return self.num_bytes / ceilings.bytes_read.all_cores


@dataclass(frozen=True)
class Timing:
    """Something that was timed, and what it had to do.

    Attributes:
        what: for the table.
        asked: the least share; None for none.
        work: of one time.
        seconds: the times.
        parts: medians of seconds, by name.
    """

    what: str
    asked: float | None
    work: Work
    seconds: list[float]
    parts: dict[str, float]


@dataclass(frozen=True)
class Step:
    """A step of the engine: how many requests got a token, how long it took, and its phases."""

    num_tokens: int
    seconds: float
    phases: dict[str, float]


def time_products(name: str, about: Format, config: FusedConfig, num_layers: int, repeats: int) -> list[Timing]:
    """Time products alone, of many rows and of one."""
    timings = []
    for num_rows in (NUM_ROWS, 1):
        products = Products(about.products, config, num_layers, num_rows, has_head=num_rows == 1)
        runs = [products.run() for _ in range(repeats + 1)][1:]
        timings.append(Timing(
            f"products of {name}, {num_rows} row{'s' if num_rows > 1 else ''}", ASKED_PRODUCTS,
            Work(((about.products, products.num_operations),), products.num_bytes),
            [sum(run.values()) for run in runs],
            {kind: statistics.median(run[kind] for run in runs) for kind in runs[0]},
        ))  # fmt: skip
    return timings


def work_of(about: Format, config: FusedConfig, num_prompt: int, num_sequences: int, context: float) -> Work:
    """Return what a step must do, of sequences that are alike.

    Args:
        about: the format.
        config: of the model.
        num_prompt: tokens of each that are computed.
        num_sequences: sequences; one row of logits each.
        context: tokens that a token attends to, its own included, in the mean.
    """
    matrices = layer_matrices(config)
    head = Sizes(config.vocab_size, config.hidden_size)
    num_tokens, num_layers = num_prompt * num_sequences, config.num_layers
    in_layer = sum(one.num_weights for one in matrices.values())
    multiply_adds = num_tokens * ((num_layers - 1) * in_layer + matrices["qkv"].num_weights)
    multiply_adds += num_sequences * (in_layer - matrices["qkv"].num_weights + head.num_weights)
    attended = 4 * num_layers * config.num_heads * config.head_dim * num_tokens * context
    weights = num_layers * sum(one.num_bytes(about.products) for one in matrices.values()) + head.num_bytes(
        about.products
    )
    kv_bytes = 2 * num_layers * config.num_kv_heads * config.head_dim * (2 if about.dtype == "bfloat16" else 4)
    longest = num_prompt if num_prompt > 1 else context
    kv = num_sequences * kv_bytes * (longest + num_prompt)
    return Work(((about.products, 2 * multiply_adds), (about.attention, attended)), weights + kv)


def make_engine(model: str, about: Format, kv_bytes: int) -> Engine:
    """Return an engine that computes prompts in one step, and caches none."""
    from pagefold import LLM

    return LLM(
        model,
        dtype=about.dtype,
        quantization=about.quantization,
        kv_cache_memory_bytes=kv_bytes,
        max_model_len=1024,
        max_num_batched_tokens=NUM_PROMPTS * PROMPT,
        enable_prefix_caching=False,
    ).engine


def run_requests(engine: Engine, num: int, num_output_tokens: int, rng: random.Random) -> list[Step]:
    """Run so many requests of fresh prompts; return all steps."""
    from pagefold import SamplingParams
    from pagefold.runner.fused.decoder import FusedDecoder

    decoder = engine.runner.decoder
    assert isinstance(decoder, FusedDecoder)
    how = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    for index in range(num):
        engine.add(str(index), [rng.randrange(1000, 40_000) for _ in range(PROMPT)], how)
    steps = []
    while engine.has_work:
        begin = time.perf_counter()
        deltas = engine.step()
        steps.append(Step(len(deltas), time.perf_counter() - begin, decoder.profile()))
    return steps


def prefill_steps(engine: Engine, repeats: int, rng: random.Random) -> list[Step]:
    """Return steps in which all of some prompts were computed."""
    steps = [run_requests(engine, NUM_PROMPTS, 1, rng)[0] for _ in range(repeats + 1)][1:]
    assert all(step.num_tokens == NUM_PROMPTS for step in steps), "prompts were cut"
    return steps


def decode_steps(engine: Engine, num: int, repeats: int, rng: random.Random) -> list[Step]:
    """Return steps in which so many sequences decoded, and nothing else was done."""
    steps: list[Step] = []
    num_output_tokens = NUM_STEPS + num // NUM_PROMPTS + 4  # the first request begins so many steps before the last
    for repeat in range(repeats + 1):
        full = [step for step in run_requests(engine, num, num_output_tokens, rng) if step.num_tokens == num]
        assert len(full) > NUM_STEPS, "too few steps in which all decoded"
        steps += full[1 : NUM_STEPS + 1] if repeat else []  # the first has computed prompts too
    return steps


def timing_of(what: str, asked: float | None, work: Work, steps: list[Step]) -> Timing:
    """Return steps with their parts: products with the SiLU among them, attention, other phases, and Python."""
    products = [sum(step.phases[name] for name in MATRICES) for step in steps]
    attention = [sum(step.phases[name] for name in ("attention", "merge")) for step in steps]
    decoder = [sum(step.phases.values()) for step in steps]
    parts = {
        "products": statistics.median(products),
        "attention": statistics.median(attention),
        "other phases": statistics.median(a - b - c for a, b, c in zip(decoder, products, attention, strict=True)),
        "Python": statistics.median(step.seconds - one for step, one in zip(steps, decoder, strict=True)),
    }
    return Timing(what, asked, work, [step.seconds for step in steps], parts)


def time_steps(about: Format, config: FusedConfig, repeats: int) -> list[Timing]:
    """Time whole steps of the small model."""
    engine = make_engine("smollm2-135m", about, 2**30)
    rng = random.Random(7)
    timings = [timing_of(
        f"{SMALL}, {PREFILL}", about.asked.get(PREFILL), work_of(about, config, PROMPT, NUM_PROMPTS, (PROMPT + 1) / 2),
        prefill_steps(engine, repeats, rng),
    )]  # fmt: skip
    for what, num in ((ONE, 1), (MANY, NUM_DECODING)):
        work = work_of(about, config, 1, num, PROMPT + NUM_STEPS / 2)
        steps = decode_steps(engine, num, repeats if num == 1 else max(1, repeats // 4), rng)
        timings.append(timing_of(f"{SMALL}, {what}", about.asked.get(what), work, steps))
    engine.close()
    return timings


def time_large(about: Format, folder: Path, config: FusedConfig, repeats: int) -> list[Timing]:
    """Time decoding on the large model."""
    engine = make_engine(str(folder), about, 2**28)
    steps = decode_steps(engine, 1, max(1, repeats // 4), random.Random(7))
    engine.close()
    work = work_of(about, config, 1, 1, PROMPT + NUM_STEPS / 2)
    return [timing_of(f"{LARGE}, {ONE}", ASKED_LARGE, work, steps)]


def row_of(name: str, timing: Timing, ceilings: Ceilings) -> Row:
    """Return a time beside its roofline."""
    operations, by_bytes = timing.work.seconds_by_operations(ceilings), timing.work.seconds_by_bytes(ceilings)
    roofline, seconds = max(operations, by_bytes), statistics.median(timing.seconds)
    share = roofline / seconds
    bound = "operations" if operations > by_bytes else "bytes"
    parts = ", ".join(f"{part} {1000 * one:.1f}" for part, one in timing.parts.items() if one)
    return Row(
        f"{name}: {timing.what}\n  {parts} ms",
        "" if timing.asked is None else f">= {timing.asked:.2f}",
        f"{share:.2f}: {1000 * roofline:.1f} of {1000 * seconds:.1f} ms, by {bound}",
        None if timing.asked is None else share >= timing.asked,
        {
            "share": share,
            "seconds": timing.seconds,
            "seconds_by_operations": operations,
            "seconds_by_bytes": by_bytes,
            "operations": sum(number for _, number in timing.work.operations),
            "bytes": timing.work.num_bytes,
            "parts": timing.parts,
        },
    )


def ceiling_rows(names: list[str], ceilings: Ceilings) -> list[Row]:
    """Return the ceilings."""
    one_core, all_cores = ceilings.bytes_read
    rows = [Row(
        "ceiling: bytes read from memory", "", f"{all_cores / 1e9:.1f} GB/s; one core {one_core / 1e9:.1f}",
        values={"all_cores": all_cores, "one_core": one_core},
    )]  # fmt: skip
    for instruction, rate in ceilings.multiply_adds.items():
        used_by = [name for name in names if instruction_of(FORMATS[name].products) == instruction]
        what = f"ceiling: {instruction} ({', '.join(used_by) or 'attention'})"
        one_core, all_cores = (2 * each for each in rate)
        got = f"{all_cores / 1e9:,.0f} G operations/s; one core {one_core / 1e9:,.0f}"
        rows.append(Row(what, "", got, values={"all_cores": all_cores, "one_core": one_core}))
    return rows


def facts() -> dict[str, object]:
    """Return what a roofline depends on: the machine's facts, the processor's features, its largest cache."""
    features = llvm.get_host_cpu_features()
    return machine() | {
        "features": " ".join(name for name in FEATURES if features.get(name)),
        "largest cache": f"{cache_bytes() / 2**20:.0f} MiB",
    }


def main() -> None:
    """Measure and report."""
    from pagefold.config import cache_dir
    from pagefold.hub.catalog import resolve

    arguments = parser(__doc__)
    arguments.add_argument("--formats", default=",".join(FORMATS), help=f"of {','.join(FORMATS)}; without: all")
    arguments.add_argument("--parts", default="products,steps,1b", help="of products,steps,1b; without: all")
    arguments.add_argument("--repeats", type=int, default=9)
    args = arguments.parse_args()
    names, parts = args.formats.split(","), args.parts.split(",")
    for wanted, known in ((names, tuple(FORMATS)), (parts, ("products", "steps", "1b"))):
        if unknown := set(wanted) - set(known):
            arguments.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    where, ceilings = facts(), Ceilings()
    folder = resolve("smollm2-135m", cache_dir())
    small, large = (
        read_fused_config(facts) for facts in (json.loads((folder / "config.json").read_text("utf-8")), LLAMA_1B)
    )
    assert isinstance(small, FusedConfig)
    assert isinstance(large, FusedConfig)
    timings: list[tuple[str, Timing]] = []

    def measure(part: str, run: Callable[[str], list[Timing]]) -> None:
        """Run a part in each format, with the ceilings before and behind it."""
        for name in names if part in parts else ():
            console.print(f"{part}: {name}")
            ceilings.measure(FORMATS[name].products, FORMATS[name].attention)
            timings.extend((name, timing) for timing in run(name))
            gc.collect()
            ceilings.measure(FORMATS[name].products, FORMATS[name].attention)

    def products(name: str) -> list[Timing]:
        return [
            *time_products(SMALL, FORMATS[name], small, small.num_layers, args.repeats),
            *time_products(LARGE, FORMATS[name], large, LARGE_LAYERS, args.repeats),
        ]

    measure("products", products)
    measure("steps", lambda name: time_steps(FORMATS[name], small, args.repeats))
    if "1b" in parts:
        with tempfile.TemporaryDirectory() as made:
            write_llama(Path(made), folder)
            measure("1b", lambda name: time_large(FORMATS[name], Path(made), large, args.repeats))
    rows = [*ceiling_rows(names, ceilings), *(row_of(name, timing, ceilings) for name, timing in timings)]
    print_report("roofline", rows, where, args.json)


if __name__ == "__main__":
    main()
