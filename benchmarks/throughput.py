"""Output tokens a second at 32 concurrent requests, against transformers on the same machine in the same run.

Workload: SmolLM2-135M-Instruct, float32 weights and KV on all sides, random prompt tokens (fresh ones in every repeat,
so no prefix is ever hit), 64 greedy output tokens each. Two shapes: ``equal``, 32 prompts of 256 tokens, the best case
for a padded batch; ``mixed``, 32 prompts of 16 to 512 tokens.

Peers, both plain ``transformers.generate`` with its defaults for this model (sdpa attention, dynamic cache):
``one by one`` (8 of the 32, since the rate does not depend on how many there are), and ``batched``: all 32 in one call,
padded on the left. Interleaved repeats, medians.

    python benchmarks/throughput.py [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from pagefold import LLM

NUM_REQUESTS = 32
NUM_OUTPUT_TOKENS = 64
NUM_ONE_BY_ONE = 8
ASKED_ONE_BY_ONE, ASKED_BATCHED = 4.0, 1.2


def prompts(shape: str, rng: random.Random, vocab_size: int) -> list[list[int]]:
    """Return 32 prompts of random tokens; lengths depend on the shape only, so that repeats are alike."""
    lengths_rng = random.Random(0)
    lengths = [256 if shape == "equal" else lengths_rng.randint(16, 512) for _ in range(NUM_REQUESTS)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def run_pagefold(llm: LLM, many: list[list[int]]) -> None:
    """All requests through one engine."""
    from pagefold import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in many], how, use_tqdm=False)
    assert all(len(result.outputs[0].token_ids) == NUM_OUTPUT_TOKENS for result in results)


def run_transformers(model: PreTrainedModel, many: list[list[int]]) -> None:
    """One ``generate`` call, padded on the left where lengths differ."""
    import torch

    width = max(map(len, many))
    token_ids = torch.zeros((len(many), width), dtype=torch.long)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(many):
        token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        token_ids,
        attention_mask=mask,
        max_new_tokens=NUM_OUTPUT_TOKENS,
        min_new_tokens=NUM_OUTPUT_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    assert out.shape == (len(many), width + NUM_OUTPUT_TOKENS)


def rate(run: Callable[[], None], num_requests: int) -> float:
    """Return output tokens a second."""
    start = time.perf_counter()
    run()
    return num_requests * NUM_OUTPUT_TOKENS / (time.perf_counter() - start)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    from pagefold import LLM
    from pagefold.config import cache_dir
    from pagefold.hub.catalog import resolve

    llm = LLM("smollm2-135m", dtype="float32", kv_cache_memory_bytes=2 * 2**30, max_model_len=2048)
    folder = resolve("smollm2-135m", cache_dir())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocab_size = llm.engine.limits.vocab_size
    rng = random.Random(1)
    rows: list[Row] = []
    for shape in ("equal", "mixed"):
        rates: dict[str, list[float]] = {"pagefold": [], "one by one": [], "batched": []}
        with torch.inference_mode():
            repeats = range(-1, args.repeats)  # -1 warms up and is not counted
            for repeat in track(repeats, description=shape, console=Console(stderr=True)):
                many = prompts(shape, rng, vocab_size)
                few = many[:: NUM_REQUESTS // NUM_ONE_BY_ONE]
                got = {
                    "pagefold": rate(lambda many=many: run_pagefold(llm, many), len(many)),
                    "batched": rate(lambda many=many: run_transformers(model, many), len(many)),
                    "one by one": rate(lambda few=few: [run_transformers(model, [p]) for p in few], len(few)),
                }
                if repeat >= 0:
                    for name, value in got.items():
                        rates[name].append(value)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        for peer, asked in (("one by one", ASKED_ONE_BY_ONE), ("batched", ASKED_BATCHED)):
            ratios = [ours / theirs for ours, theirs in zip(rates["pagefold"], rates[peer], strict=True)]
            rows.append(
                Row(
                    f"{shape}: tokens/s, {medians['pagefold']:.0f} over transformers {peer} {medians[peer]:.1f}",
                    asked=f">= {asked} x",
                    got=f"{statistics.median(ratios):.2f} x",
                    ok=statistics.median(ratios) >= asked,
                )
            )
    print_report("throughput", rows, machine(), args.json)


if __name__ == "__main__":
    main()
