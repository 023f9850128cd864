"""Serves a file as it is, and prints a line of JSON: how fast, and how much memory.

    python one_file.py FILE [QUANTIZATION]

Speeds are medians, in tokens a second: of one request that decodes, of 16 that decode together, and of a prompt of 512
tokens. Memory is what the process has more of than before, the mapped file's pages included: the model, and KV.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.engine.engine import Engine

MANY, PROMPT, NUM_STEPS, NUM_PROMPTS = 16, 512, 24, 3
KV_BYTES = 2**29


def resident_bytes() -> int:
    """Return what this process has in memory."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * 1024


def add(engine: Engine, num: int, num_prompt: int, num_outputs: int, rng: random.Random) -> None:
    """Add requests of random prompts."""
    from pagefold import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    for index in range(num):
        engine.add(str(index), [rng.randrange(1000, 40_000) for _ in range(num_prompt)], how)


def decode(engine: Engine, num: int, rng: random.Random) -> float:
    """Return the tokens a second of so many requests that decode."""
    add(engine, num, 32, NUM_STEPS, rng)
    taken = []
    while engine.has_work:
        begin = time.perf_counter()
        if len(engine.step()) == num:
            taken.append(time.perf_counter() - begin)
    return num / statistics.median(taken[2:])  # the first ones have prompts in them


def prefill(engine: Engine, rng: random.Random) -> float:
    """Return the tokens a second of a prompt that is computed in one step."""
    taken = []
    for _ in range(NUM_PROMPTS):
        add(engine, 1, PROMPT, 1, rng)
        begin = time.perf_counter()
        while engine.has_work:
            engine.step()
        taken.append(time.perf_counter() - begin)
    return PROMPT / statistics.median(taken)


def main() -> None:
    """Measure, and print."""
    from pagefold import LLM

    file, quantization = sys.argv[1], (sys.argv[2:] or [None])[0]
    before = resident_bytes()
    engine = LLM(
        file,
        quantization=quantization,
        max_model_len=1024,
        max_num_batched_tokens=PROMPT,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
    ).engine
    rng = random.Random(7)
    decode(engine, 1, rng)  # compiles, and takes pages of memory
    said = {
        "one_tokens_s": decode(engine, 1, rng),
        "many_tokens_s": decode(engine, MANY, rng),
        "prefill_tokens_s": prefill(engine, rng),
        "resident_bytes": resident_bytes() - before,
    }
    engine.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
