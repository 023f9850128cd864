"""Beams: what they hold of the KV pool, and how long a search takes.

SmolLM2-135M-Instruct in float32, prompts of 1,000 random tokens, 4 beams, 64 tokens out whatever ends them.

* KV: the most bytes that the beams hold at once, over those of the prompt once and a tail for each beam: what 4 samples
  of the prompt would hold that had parted at once.
* KV over that of one sample, and over that of 4 prompts.
* time: the whole search over transformers' of the same prompts, in the same run, turn by turn; and whether both find
  the same. Prompts are cold: each is another one.

    python benchmarks/beams.py [--num-prompts 3] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from random import Random
from typing import TYPE_CHECKING

import torch
from report import Row, machine, parser, print_report
from rich.progress import track
from transformers import AutoModelForCausalLM

from pagefold import LLM, SamplingParams
from pagefold.config import cache_dir
from pagefold.hub.catalog import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.steps import StepPlan, StepResult

MODEL, WIDTH, NUM_PROMPT_TOKENS, NUM_OUTPUTS = "smollm2-135m", 4, 1000, 64
BEAMS = SamplingParams(use_beam_search=True, n=WIDTH, temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)
ONE = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)


def prompts_of(num_prompts: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    random = Random(0)
    return [[random.randrange(10_000, 40_000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_prompts)]


def search(llm: LLM, prompt: list[int], how: SamplingParams) -> tuple[list[list[int]], int, float]:
    """Return what was found, the most blocks that were held, and seconds."""
    engine, core = llm.engine, llm.engine.scheduler.core
    run, most = engine.runner.run, 0

    def watch(plan: StepPlan) -> StepResult:
        nonlocal most
        most = max(most, core.num_active)  # in the midst of a step: blocks that wait for a copy are held too
        return run(plan)

    engine.runner.run = watch  # type: ignore[method-assign]
    begin = time.perf_counter()
    engine.add("it", prompt, how)
    found: list[list[int]] = [[] for _ in range(how.n)]
    while engine.has_requests:
        for delta in engine.step():
            found[delta.index] += delta.token_ids
    taken = time.perf_counter() - begin
    engine.runner.run = run  # type: ignore[method-assign]
    engine.reset_prefix_cache()
    return found, most, taken


def search_with_transformers(model: torch.nn.Module, prompt: list[int]) -> tuple[list[list[int]], float]:
    """Return what transformers finds, and seconds."""
    ids = torch.tensor([prompt])
    begin = time.perf_counter()
    with torch.inference_mode():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
        )
    return result[:, len(prompt) :].tolist(), time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--num-prompts", type=int, default=3, help="how many to search behind")
    arguments = made.parse_args(argv)
    llm = LLM(MODEL, dtype="float32", max_model_len=2048, max_num_seqs=8, kv_cache_memory_bytes=2**29)
    model = AutoModelForCausalLM.from_pretrained(resolve(MODEL, cache_dir()), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompts = prompts_of(arguments.num_prompts + 1)
    search(llm, prompts[-1], BEAMS)  # to warm up
    ratios, mosts, ones, num_equal = [], [], [], 0
    for prompt in track(prompts[:-1], description="searching", transient=True):
        ours, most, taken = search(llm, prompt, BEAMS)
        theirs, their_taken = search_with_transformers(model, prompt)
        ratios.append(their_taken / taken)
        mosts.append(most)
        ones.append(search(llm, prompt, ONE)[1])
        num_equal += sum(own == other for own, other in zip(ours, theirs, strict=True))
    size = llm.engine.capacity.block_size
    most, one = max(mosts), max(ones)
    whole = NUM_PROMPT_TOKENS // size
    parted = whole + WIDTH * (-(-(NUM_PROMPT_TOKENS + NUM_OUTPUTS) // size) - whole)
    block_bytes = llm.engine.capacity.block_bytes // llm.engine.capacity.num_blocks
    values: dict[str, object] = {"most_blocks": mosts, "one_blocks": ones, "block_bytes": block_bytes}
    rows = [
        Row(
            f"KV of {WIDTH} beams over the prompt once and {WIDTH} tails",
            "<= 1.15 x",
            f"{most / parted:.3f} x ({most * block_bytes / 2**20:.1f} MiB)",
            most <= 1.15 * parted,
            values,
        ),
        Row(f"KV of {WIDTH} beams over one sample's", "", f"{most / one:.3f} x"),
        Row(f"KV of {WIDTH} beams over {WIDTH} prompts'", "", f"{most / (WIDTH * one):.3f} x"),
        Row("speed of a search over transformers'", "", f"{statistics.median(ratios):.2f} x", values={"all": ratios}),
        Row("results that are transformers'", "", f"{num_equal} of {WIDTH * arguments.num_prompts}"),
    ]
    print_report("beams", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
