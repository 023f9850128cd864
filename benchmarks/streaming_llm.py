"""A conversation without an end: ``streaming_llm`` over 20,000 generated tokens, memory and speed.

SmolLM2-135M-Instruct, made for 8,192 positions, generates 20,000 tokens behind a prompt of 1,100 random ones, with 4
sink tokens and a window of 1,020: the whole engine, one request, greedy, whose end-of-sequence tokens are ignored.

* KV: blocks that the request holds, at most in the first thousand tokens and in all.
* memory: what the process has in the machine's memory, behind the first thousand tokens and at the end. The request's
  own tokens are kept: 4 bytes each here, and what its answer's text takes.
* speed: processor time a token, the median of steps, of the last thousand over the second thousand.

Beside it, in the same run, decode attention of one layer with a window of 1,024 tokens: processor time behind 8,192
tokens over that behind 1,024; and of a layer that sees all, likewise.

    python benchmarks/streaming_llm.py [--num-tokens 20000] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
from report import Row, machine, parser, print_report
from rich.progress import track

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.kv import KEEP_ALL, KeepRule, KVGeometry
from pagefold.runner.attention import AttentionInputs, GroupInputs
from pagefold.runner.attention.cpu import CpuAttention
from pagefold.runner.slab import LAYOUT, Slab
from pagefold.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW, NUM_SINKS, NUM_PROMPT_TOKENS, STRETCH = 1020, 4, 1100, 1000
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
NEAR, FAR, LAYER_WINDOW = 1024, 8192, 1024
NUM_SEQS, NUM_REPEATS = 8, 60


def resident_bytes() -> int:
    """Return the bytes of this process that are in the machine's memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def generate(num_tokens: int) -> list[Row]:
    """Generate, and return what came of it."""
    config = EngineConfig(
        model="smollm2-135m",
        streaming_llm=WINDOW,
        max_model_len=NUM_PROMPT_TOKENS + num_tokens,
        max_num_seqs=1,
        kv_cache_memory_bytes=80 * 10**6,  # little more than it holds: blocks take turns, and all are touched soon
    )
    engine = build_engine(plan_engine(config))
    random = Random(0)
    prompt = [random.randrange(10_000, 40_000) for _ in range(NUM_PROMPT_TOKENS)]
    engine.add("endless", prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    held: list[int] = []
    taken: list[float] = []
    memory: list[int] = []
    core = engine.scheduler.core
    for _ in track(range(num_tokens), description="generating", transient=True):
        begin, deltas = time.process_time(), []
        while not deltas:  # the prompt takes several steps
            deltas = engine.step()
        taken.append(time.process_time() - begin)
        held.append(core.num_active)
        if len(taken) in {STRETCH, num_tokens - 1}:
            memory.append(resident_bytes())
    first, most = max(held[:STRETCH]), max(held)
    second, last = (statistics.median(part) for part in (taken[STRETCH : 2 * STRETCH], taken[-STRETCH:]))
    grown = memory[1] - memory[0]
    engine.close()
    return [
        Row(f"blocks held over {num_tokens:,} tokens, at most", f"{first} as at first", f"{most}", most <= first),
        Row(
            "memory of the process at the end over that behind the first thousand",
            "",
            f"{memory[1] / memory[0]:.3f} ({grown / 2**20:+.1f} MiB)",
            values={"bytes": memory},
        ),
        Row(
            "speed at the end over speed at the begin",
            ">= 0.95 x",
            f"{second / last:.3f} x",
            second / last >= 0.95,
            {"begin_s": second, "end_s": last},
        ),
    ]


def attention_s(rule: KeepRule, num_entries: int) -> float:
    """Return the processor time of one layer's attention where 8 requests decode behind so many entries."""
    first_block = rule.first_seen(num_entries) // BLOCK_SIZE
    num_blocks = -(-(num_entries + 1) // BLOCK_SIZE) - first_block
    geometry = KVGeometry(1, NUM_KV_HEADS, HEAD_DIM, 4, BLOCK_SIZE)
    slab = Slab.allocate(geometry, NUM_SEQS * num_blocks, torch.float32, layout=LAYOUT)
    slab.data.normal_()
    tables = np.random.default_rng(0).permutation(NUM_SEQS * num_blocks).reshape(NUM_SEQS, 1, num_blocks)
    group = GroupInputs(
        np.broadcast_to(tables.astype(np.int32), (NUM_SEQS, NUM_KV_HEADS, num_blocks)),
        np.broadcast_to(np.full((NUM_SEQS, 1), num_entries + 1, np.int32), (NUM_SEQS, NUM_KV_HEADS)),
        np.full(NUM_SEQS, first_block * BLOCK_SIZE, np.int32),
        rule,
    )
    cells = np.broadcast_to(np.arange(NUM_KV_HEADS, dtype=np.int32), (NUM_SEQS, 1, NUM_KV_HEADS))
    starts = np.arange(NUM_SEQS + 1, dtype=np.int32)
    query, key, value = (torch.randn(NUM_SEQS, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    attention, taken = CpuAttention(2), []
    for _ in range(NUM_REPEATS):
        inputs = AttentionInputs(starts, (group,), (0,), cells)
        begin = time.process_time()
        for _ in range(10):
            attention(query, key, value, slab, inputs, 0, HEAD_DIM**-0.5)
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def layers() -> list[Row]:
    """Return what a layer with a window takes far behind it, and one that sees all."""
    rows = []
    for what, rule, asked in (
        (f"a window of {LAYER_WINDOW:,}", KeepRule(LAYER_WINDOW), 1.1),
        ("all tokens", KEEP_ALL, None),
    ):
        near, far = attention_s(rule, NEAR), attention_s(rule, FAR)
        rows.append(
            Row(
                f"decode attention of a layer with {what}, behind {FAR:,} tokens over behind {NEAR:,}",
                f"<= {asked} x" if asked else "",
                f"{far / near:.2f} x",
                far / near <= asked if asked else None,
                {"near_s": near, "far_s": far},
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--num-tokens", type=int, default=20_000, help="how many to generate")
    arguments = made.parse_args(argv)
    rows = layers() + generate(arguments.num_tokens)
    print_report("streaming_llm", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
