"""What LoRA adapters cost: output tokens a second of 32 requests that have eight of them, and the memory of each.

Workload: SmolLM2-135M-Instruct, 32 requests of 64 random tokens each, 32 output tokens, all decoding together. With
adapters each four of them have another one: eight of rank 16 on all seven kinds of modules, with random weights, as
``peft`` would write them. The peer is the same engine started without ``--enable-lora``, in turns; prompts share
nothing. What is told besides is the same engine with adapters while no request names one.

Memory is what a loaded adapter takes, in the dtype of its file, over that file.

    python benchmarks/adapters.py [--repeats 3] [--dtype F32|BF16|F16] [--requests 32] [--outputs 32] [--json FILE]
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.engine.engine import Engine

NUM_ADAPTERS, RANK, PROMPT = 8, 16, 64
ASKED_SPEED, ASKED_MEMORY = 0.7, 1.1
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, base: Path, seed: int, dtype: str) -> Path:
    """Write an adapter of random weights for the model of ``base``; return its folder."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    kind = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(base / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no mapping
            path = name.removesuffix(".weight")
            if not path.endswith(MODULES):
                continue
            num_out, num_in = weights.get_slice(name).get_shape()
            down = torch.randn(RANK, num_in, generator=generator) / num_in**0.5
            up = torch.randn(num_out, RANK, generator=generator) / 100
            tensors[f"base_model.model.{path}.lora_A.weight"] = down.to(kind)
            tensors[f"base_model.model.{path}.lora_B.weight"] = up.to(kind)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def tokens_a_second(engine: Engine, names: Sequence[str], num_outputs: int, rng: random.Random, vocab: int) -> float:
    """Run a request for each name of an adapter; return the output tokens a second while all of them decode."""
    from pagefold.request import Caller
    from pagefold.sampling import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    for index, name in enumerate(names):
        prompt = [rng.randrange(vocab) for _ in range(PROMPT)]
        engine.add(str(index), prompt, how, Caller(adapter=name))
    taken = []  # seconds of steps that all had a token of; the first of them may have computed prompts too
    while engine.has_work:
        begin = time.perf_counter()
        if len(engine.step()) == len(names):
            taken.append(time.perf_counter() - begin)
    return len(names) * (len(taken) - 1) / sum(taken[1:])


def main() -> None:
    """Measure and report."""
    from pagefold.config import EngineConfig, cache_dir
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine
    from pagefold.hub.catalog import resolve

    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--dtype", choices=("F32", "BF16", "F16"), default="BF16")
    arguments.add_argument("--requests", type=int, default=32)
    arguments.add_argument("--outputs", type=int, default=32)
    args = arguments.parse_args()
    where = machine()
    base = resolve("smollm2-135m", cache_dir())
    rng = random.Random(3)
    with tempfile.TemporaryDirectory() as root:
        folders = [write_adapter(Path(root) / f"a{at}", base, at, args.dtype) for at in range(NUM_ADAPTERS)]
        file_bytes = sum((folder / "adapter_model.safetensors").stat().st_size for folder in folders)
        settings = {"kv_cache_memory_bytes": 2**28, "max_model_len": 512, "max_num_seqs": args.requests}
        plain = build_engine(plan_engine(EngineConfig(model="smollm2-135m", **settings)), say=lambda _: None)
        modules = tuple(f"{folder.name}={folder}" for folder in folders)
        settings |= {"enable_lora": True, "lora_modules": modules, "max_loras": NUM_ADAPTERS}
        engine = build_engine(plan_engine(EngineConfig(model="smollm2-135m", **settings)), say=lambda _: None)
        status = engine.adapters.status(engine.scheduler)
        assert status is not None, "there are adapters"
        vocab = engine.limits.vocab_size
        none = [""] * args.requests
        mixed = [folders[at % NUM_ADAPTERS].name for at in range(args.requests)]
        ways = {"without": (plain, none), "none named": (engine, none), "mixed": (engine, mixed)}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in track(range(args.repeats), "decoding", console=Console(stderr=True), transient=True):
            for name, (one, names) in ways.items():
                speeds[name].append(tokens_a_second(one, names, args.outputs, rng, vocab))

    def ratio(name: str) -> float:
        pairs = zip(speeds[name], speeds["without"], strict=True)
        return statistics.median(each / other for each, other in pairs)

    speed, idle, memory = ratio("mixed"), ratio("none named"), status.num_bytes / file_bytes
    per_second = {name: round(statistics.median(each), 1) for name, each in speeds.items()}
    what = f"{args.requests} requests, {NUM_ADAPTERS} adapters of rank {RANK} ({args.dtype})"
    rows = [
        Row(
            f"output tokens a second, {what}, over none",
            f">= {ASKED_SPEED} x",
            f"{speed:.2f} x",
            speed >= ASKED_SPEED,
            {"tokens_per_second": per_second},
        ),
        Row("the same where no request names one, over an engine without", "", f"{idle:.2f} x"),
        Row(
            "memory of adapters over their files",
            f"<= {ASKED_MEMORY} x",
            f"{memory:.3f} x",
            memory <= ASKED_MEMORY,
            {"bytes": status.num_bytes, "file_bytes": file_bytes},
        ),
    ]
    print_report("adapters", rows, where, args.json)


if __name__ == "__main__":
    main()
