"""How near products and whole steps come to the roofline of this processor, in each format of numbers.

Ceilings (see ``hardware/ceilings.py``) are the multiply-adds of the instruction that a format is computed with, and the
bytes that all cores read from memory, a second. They are measured right before and right behind each time, since a
shared machine changes from one second to the next. A time's roofline is the larger of operations over the one and bytes
over the other; its share is the roofline over the time. Reported is the median of the shares. Two operations are a
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
from typing import TYPE_CHECKING, NamedTuple

import llvmlite.binding as llvm
from hardware.ceilings import Ceilings, Rates, cache_bytes, instruction_of
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
STEPS_A_SPAN = 8  # between two measurements of the ceilings
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

    def seconds_by_operations(self, rates: Rates) -> float:
        """Return how long the operations take at least."""
        return sum(number / rates.operations_of(product_format) for product_format, number in self.operations)

    def seconds_by_bytes(self, rates: Rates) -> float:
        """Return how long the bytes take at least."""
        return self.num_bytes / rates.bytes_read

    def roofline(self, rates: Rates) -> float:
        """Return how long it takes at least."""
        return max(self.seconds_by_operations(rates), self.seconds_by_bytes(rates))


@dataclass(frozen=True)
class Sample:
    """Something that was timed once.

    Attributes:
        seconds: how long it took.
        parts: seconds, by name.
        rates: what the machine could do then.
    """

    seconds: float
    parts: Mapping[str, float]
    rates: Rates


@dataclass(frozen=True)
class Timing:
    """Something that was timed, and what it had to do.

    Attributes:
        what: for the table.
        asked: the least share; None for none.
        work: of one time.
        samples: the times.
    """

    what: str
    asked: float | None
    work: Work
    samples: list[Sample]


@dataclass(frozen=True)
class Step:
    """A step of the engine: how many requests got a token, how long it took, and its phases."""

    num_tokens: int
    seconds: float
    phases: dict[str, float]

    def sample(self, rates: Rates) -> Sample:
        """Return it with its parts: products with the SiLU among them, attention, other phases, and Python."""
        products = sum(self.phases[name] for name in MATRICES)
        attention = sum(self.phases[name] for name in ("attention", "merge"))
        decoder = sum(self.phases.values())
        parts = {
            "products": products,
            "attention": attention,
            "other phases": decoder - products - attention,
            "Python": self.seconds - decoder,
        }
        return Sample(self.seconds, parts, rates)


class Model(NamedTuple):
    """A model's name, its config, and of how many of its layers products are timed."""

    name: str
    config: FusedConfig
    num_layers: int


def time_products(model: Model, about: Format, ceilings: Ceilings, repeats: int) -> list[Timing]:
    """Time products alone, of many rows and of one."""
    timings = []
    for num_rows in (NUM_ROWS, 1):
        products = Products(about.products, model.config, model.num_layers, num_rows, has_head=num_rows == 1)
        products.run()
        samples = []
        for _ in range(repeats):
            before, parts = ceilings.now(), products.run()
            samples.append(Sample(sum(parts.values()), parts, before.and_then(ceilings.now())))
        what = f"products of {model.name}, {num_rows} row{'s' if num_rows > 1 else ''}"
        work = Work(((about.products, products.num_operations),), products.num_bytes)
        timings.append(Timing(what, ASKED_PRODUCTS, work, samples))
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


def add_requests(engine: Engine, num: int, num_output_tokens: int, rng: random.Random) -> None:
    """Add so many requests of fresh prompts."""
    from pagefold import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
    for index in range(num):
        engine.add(str(index), [rng.randrange(1000, 40_000) for _ in range(PROMPT)], how)


def step(engine: Engine) -> Step:
    """Run one step."""
    from pagefold.runner.fused.decoder import FusedDecoder

    decoder = engine.runner.decoder
    assert isinstance(decoder, FusedDecoder)
    begin = time.perf_counter()
    deltas = engine.step()
    return Step(len(deltas), time.perf_counter() - begin, decoder.profile())


def prefill_samples(engine: Engine, ceilings: Ceilings, repeats: int, rng: random.Random) -> list[Sample]:
    """Return steps in which all of some prompts were computed."""
    samples = []
    for _ in range(repeats + 1):
        add_requests(engine, NUM_PROMPTS, 1, rng)
        before, one = ceilings.now(), step(engine)
        samples.append(one.sample(before.and_then(ceilings.now())))
        assert one.num_tokens == NUM_PROMPTS, "prompts were cut"
        assert not engine.has_work
    return samples[1:]


def decode_samples(engine: Engine, num: int, ceilings: Ceilings, repeats: int, rng: random.Random) -> list[Sample]:
    """Return steps in which so many sequences decoded, and nothing else was done.

    Ceilings are measured behind some of them. The first one after that finds nothing in the caches, and is left out.
    """
    samples: list[Sample] = []
    num_output_tokens = NUM_STEPS + num // NUM_PROMPTS + 4  # the first request begins so many steps before the last
    for repeat in range(repeats + 1):
        add_requests(engine, num, num_output_tokens, rng)
        while engine.has_work and step(engine).num_tokens < num:
            pass
        step(engine)  # the one before has computed prompts too
        before = ceilings.now()
        for _ in range(NUM_STEPS // STEPS_A_SPAN):
            steps = [step(engine) for _ in range(STEPS_A_SPAN)]
            assert all(one.num_tokens == num for one in steps), "too few steps in which all decoded"
            after = ceilings.now()
            samples += [one.sample(before.and_then(after)) for one in steps[1:]] if repeat else []
            before = after
        while engine.has_work:
            engine.step()
    return samples


def time_steps(about: Format, config: FusedConfig, ceilings: Ceilings, repeats: int) -> list[Timing]:
    """Time whole steps of the small model."""
    engine = make_engine("smollm2-135m", about, 2**30)
    rng = random.Random(7)
    timings = [Timing(
        f"{SMALL}, {PREFILL}", about.asked.get(PREFILL), work_of(about, config, PROMPT, NUM_PROMPTS, (PROMPT + 1) / 2),
        prefill_samples(engine, ceilings, repeats, rng),
    )]  # fmt: skip
    for what, num in ((ONE, 1), (MANY, NUM_DECODING)):
        work = work_of(about, config, 1, num, PROMPT + NUM_STEPS / 2)
        samples = decode_samples(engine, num, ceilings, repeats if num == 1 else max(1, repeats // 4), rng)
        timings.append(Timing(f"{SMALL}, {what}", about.asked.get(what), work, samples))
    engine.close()
    return timings


def time_large(about: Format, folder: Path, config: FusedConfig, ceilings: Ceilings, repeats: int) -> list[Timing]:
    """Time decoding on the large model."""
    engine = make_engine(str(folder), about, 2**28)
    samples = decode_samples(engine, 1, ceilings, max(1, repeats // 4), random.Random(7))
    engine.close()
    work = work_of(about, config, 1, 1, PROMPT + NUM_STEPS / 2)
    return [Timing(f"{LARGE}, {ONE}", ASKED_LARGE, work, samples)]


def row_of(name: str, timing: Timing) -> Row:
    """Return a time beside its roofline."""
    work, samples = timing.work, timing.samples
    shares = [work.roofline(one.rates) / one.seconds for one in samples]
    share, seconds = statistics.median(shares), statistics.median(one.seconds for one in samples)
    roofline = statistics.median(work.roofline(one.rates) for one in samples)
    is_by_operations = [work.seconds_by_operations(one.rates) > work.seconds_by_bytes(one.rates) for one in samples]
    bound = "operations" if statistics.median(is_by_operations) else "bytes"
    parts = {part: statistics.median(one.parts[part] for one in samples) for part in samples[0].parts}
    told = ", ".join(f"{part} {1000 * taken:.1f}" for part, taken in parts.items() if taken)
    bytes_read = statistics.median(one.rates.bytes_read for one in samples)
    return Row(
        f"{name}: {timing.what}\n  {told} ms; {bytes_read / 1e9:.0f} GB/s",
        "" if timing.asked is None else f">= {timing.asked:.2f}",
        f"{share:.2f}: {1000 * roofline:.1f} of {1000 * seconds:.1f} ms, by {bound}",
        None if timing.asked is None else share >= timing.asked,
        {
            "share": share,
            "shares": shares,
            "seconds": [one.seconds for one in samples],
            "bytes_read": [one.rates.bytes_read for one in samples],
            "multiply_adds": [one.rates.multiply_adds for one in samples],
            "operations": sum(number for _, number in work.operations),
            "bytes": work.num_bytes,
            "parts": parts,
        },
    )


def ceiling_rows(names: list[str], timings: list[tuple[str, Timing]]) -> list[Row]:
    """Return the ceilings, and how far they went up and down."""
    every = [one.rates for _, timing in timings for one in timing.samples]
    rows = [_ceiling("bytes read from memory", "GB/s", [one.bytes_read for one in every], 1e9)]
    for instruction in dict.fromkeys(name for one in every for name in one.multiply_adds):
        used_by = [name for name in names if instruction_of(FORMATS[name].products) == instruction]
        rates = [2 * one.multiply_adds[instruction] for one in every if instruction in one.multiply_adds]
        rows.append(_ceiling(f"{instruction} ({', '.join(used_by) or 'attention'})", "G operations/s", rates, 1e9))
    return rows


def _ceiling(what: str, unit: str, rates: list[float], by: float) -> Row:
    low, middle, high = (one / by for one in (min(rates), statistics.median(rates), max(rates)))
    return Row(f"ceiling: {what}", "", f"{middle:,.0f} {unit}; {low:,.0f} to {high:,.0f}", values={"rates": rates})


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
    where = facts()
    folder = resolve("smollm2-135m", cache_dir())
    small, large = (
        read_fused_config(facts) for facts in (json.loads((folder / "config.json").read_text("utf-8")), LLAMA_1B)
    )
    assert isinstance(small, FusedConfig)
    assert isinstance(large, FusedConfig)
    timings: list[tuple[str, Timing]] = []

    def measure(part: str, run: Callable[[Format, Ceilings], list[Timing]]) -> None:
        for name in names if part in parts else ():
            console.print(f"{part}: {name}")
            about = FORMATS[name]
            timings.extend((name, one) for one in run(about, Ceilings(about.products, about.attention)))
            gc.collect()

    def products(about: Format, ceilings: Ceilings) -> list[Timing]:
        return [
            *time_products(Model(SMALL, small, small.num_layers), about, ceilings, args.repeats),
            *time_products(Model(LARGE, large, LARGE_LAYERS), about, ceilings, args.repeats),
        ]

    measure("products", products)
    measure("steps", lambda about, ceilings: time_steps(about, small, ceilings, args.repeats))
    if "1b" in parts:
        with tempfile.TemporaryDirectory() as made:
            write_llama(Path(made), folder)
            measure("1b", lambda about, ceilings: time_large(about, Path(made), large, ceilings, args.repeats))
    rows = [*ceiling_rows(names, timings), *(row_of(name, timing) for name, timing in timings)]
    print_report("roofline", rows, where, args.json)


if __name__ == "__main__":
    main()
