"""Which file shall I take? Speed, memory and quality of every kind of file, on one machine, each served by default.

Files of all kinds are made of one by llama.cpp's own ``llama-quantize`` (``make peers``), without an importance matrix:
recipes as people have them. What ``--quantization`` makes of the file in BF16 is measured too.

- Speed and memory: a Llama of 1B shape with random weights, each kind in a process of its own (``kinds/one_file.py``).
- Quality: SmolLM2-135M-Instruct on the texts of ``pagefold eval``, against the same model in float32. Its weights come
  out of a 4-bit file, in whose kind they are exact; they are rearranged first, so that none has that advantage
  (``kinds/rearranged.py``). A model so small loses more than a large one does.

    python benchmarks/file_kinds.py [--parts speed quality] [--contexts 8] [--context-len 1024] [--json FILE]
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hardware.random_llama import write_stored_llama
from kinds.rearranged import write_rearranged
from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

HERE = Path(__file__).parent
PEERS = Path(os.environ.get("PAGEFOLD_PEERS", HERE.parent / ".peers"))
PARTS = ("speed", "quality")


class Kind(NamedTuple):
    """A kind of file: the recipe of llama-quantize, and ``--quantization``."""

    recipe: str
    quantization: str | None = None

    def __str__(self) -> str:
        return self.recipe if self.quantization is None else f"{self.recipe}, --quantization {self.quantization}"


KINDS = (
    *map(Kind, ("BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0")),
    *(Kind("BF16", how) for how in ("int8", "w8a8_int8", "int4")),
)

console = Console(stderr=True)


def quantizer() -> Path:
    """Return llama-quantize."""
    from peers import llamacpp_program

    found = llamacpp_program(PEERS, "llama-quantize")
    if found is None:
        sys.exit(f"llama.cpp is not in {PEERS}: make peers")
    return found


def quantize(source: Path, recipe: str) -> Path:
    """Return ``source`` in that recipe, a file beside it."""
    made = source.with_name(f"{source.stem}-{recipe}.gguf")
    if not made.exists():
        cores = str(len(os.sched_getaffinity(0)))
        subprocess.run([quantizer(), source, made, recipe, cores], check=True, capture_output=True)
    return made


def time_kinds(source: Path) -> dict[Kind, dict[str, Any]]:
    """Return what ``kinds/one_file.py`` says of each kind, and the file's bytes."""
    found = {}
    for kind in track(KINDS, "speed and memory", console=console):
        file = source if kind.recipe == "BF16" else quantize(source, kind.recipe)
        command = [sys.executable, HERE / "kinds" / "one_file.py", file, *filter(None, [kind.quantization])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[kind] = {"file_bytes": file.stat().st_size, **json.loads(done.stdout.splitlines()[-1])}
        if file is not source:
            file.unlink()
    return found


def speed_rows(found: dict[Kind, dict[str, Any]]) -> list[Row]:
    """Return a row a kind, speeds over those of BF16."""
    base = found[KINDS[0]]
    rows = []
    for kind, one in found.items():
        speeds = [f"{one[name] / base[name]:.2f}" for name in ("one_tokens_s", "many_tokens_s", "prefill_tokens_s")]
        sizes = f"file {one['file_bytes'] / 1e9:.2f} GB, memory {one['resident_bytes'] / 1e9:.2f} GB"
        rows.append(Row(f"{kind}: {sizes}; decode of 1, of 16, prefill, over BF16", "", " / ".join(speeds), values=one))
    told = {"one_tokens_s": "decode of 1", "many_tokens_s": "of 16", "prefill_tokens_s": "prefill"}
    own = ", ".join(f"{what} {base[name]:.1f}" for name, what in told.items())
    return [Row("BF16, tokens/s", "", own), *rows]


def read_kinds(source: Path, wheel: Path, num_contexts: int, context_len: int) -> list[Row]:
    """Return what each kind makes of the texts, against ``source`` in float32."""
    from pagefold.config import EngineConfig, cache_dir
    from pagefold.quality.contexts import cut_contexts
    from pagefold.quality.reading import read_side_by_side, stack
    from pagefold.quality.setting import Setting
    from pagefold.quality.subject import Subject
    from pagefold.quality.texts import fetch_default_texts

    plain = EngineConfig(
        model=str(source),
        dtype="float32",
        quantization="none",
        max_model_len=context_len + 1,
        kv_cache_memory_bytes=2**28,
        enable_prefix_caching=False,
        kv_quality_floor=0.0,
    )
    configs = {"float32": plain, "the wheel's own order, float32": replace(plain, model=str(wheel))}
    for kind in KINDS:
        file = quantize(source, kind.recipe)
        configs[str(kind)] = replace(plain, model=str(file), dtype="auto", quantization=kind.quantization)
    with contextlib.ExitStack() as opened:
        subjects: list[Subject] = []
        for name, config in track(configs.items(), "starting engines", console=console):
            subjects.append(Subject(Setting(name), config))
            opened.callback(subjects[-1].close)
        contexts = cut_contexts(
            fetch_default_texts(cache_dir()), subjects[0].engine.tokenizer, context_len, num_contexts
        )
        read = [
            read_side_by_side(subjects, token_ids, lambda _: None)
            for token_ids in track(contexts.token_ids, "reading", console=console)
        ]
    exact, *others = (stack(of_subject) for of_subject in zip(*read, strict=True))
    rows = [Row("float32: perplexity", "", f"{np.exp(exact.surprise.mean()):.3f}")]
    for name, own in zip(list(configs)[1:], others, strict=True):
        figures = {
            "ratio": float(np.exp((own.surprise - exact.surprise).mean())),
            "kl": float(own.kl.mean()),
            "same_top": float(own.same_top.mean()),
        }
        said = f"{figures['ratio']:.4f} / {figures['kl']:.2g} / {figures['same_top']:.1%}"
        rows.append(
            Row(f"{name}: perplexity over float32's, KL in nats, same likeliest token", "", said, values=figures)
        )
    return rows


def main() -> None:
    """Measure and report."""
    from pagefold.config import cache_dir
    from pagefold.hub.catalog import CATALOG

    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    arguments.add_argument("--contexts", type=int, default=8)
    arguments.add_argument("--context-len", type=int, default=1024)
    args = arguments.parse_args()
    wheel = Path(CATALOG["smollm2-135m"].source.find(cache_dir() / "models"))
    rows: list[Row] = []
    where = machine()
    with tempfile.TemporaryDirectory() as made:
        if "speed" in args.parts:
            source = Path(made) / "llama-1b.gguf"
            write_stored_llama(source, wheel, "BF16")
            rows += speed_rows(time_kinds(source))
            source.unlink()
        if "quality" in args.parts:
            source = Path(made) / "rearranged.gguf"
            write_rearranged(source, wheel)
            rows += read_kinds(source, wheel, args.contexts, args.context_len)
    print_report("file_kinds", rows, where, args.json)


if __name__ == "__main__":
    main()
