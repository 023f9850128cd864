"""The planner's arithmetic on claims that are often read: what is said, and what the formulas say.

Prints the table of docs/planner.md (a test holds that the page has it as it is printed). Nothing is measured: the same
code plans a server.

    python benchmarks/planner_arithmetic.py [--json FILE]
"""

from __future__ import annotations

import json
from pathlib import Path

from report import parser

from pagefold.kv import CODECS, KVGeometry
from pagefold.plan import PlanSettings, find_device, find_model
from pagefold.plan.floors import decode_bytes, ttft_bound
from pagefold.plan.memory import plan_memory
from pagefold.plan.money import throughput_gain_of_less
from pagefold.plan.weights import WEIGHT_DTYPES

GB = 10**9


def rows() -> list[tuple[str, str, str]]:
    """Return (what is read, the sum, what is right) of each claim."""
    gqa = KVGeometry(80, 8, 128, element_bytes=2).layout
    mha = KVGeometry(80, 64, 128, element_bytes=2).layout
    h100 = find_device("H100-80GB")
    llama = find_model("meta-llama/Llama-2-70b-hf")
    int4, grouped = (WEIGHT_DTYPES[name].num_bytes(llama.num_parameters) for name in ("int4", "int4-g128"))
    settings = PlanSettings(weight_dtype="int4-g128", max_model_len=4096)
    planned = plan_memory(llama, h100, settings).tightest
    context = decode_bytes(0, 1, gqa.num_bytes_for(3000)) / h100.bandwidth
    bits = {name: CODECS[name].bits_per_element(128) for name in ("int4_g128", "int8_per_token_head", "nvfp4")}
    small = find_model("meta-llama/Llama-2-7b-hf").layout(CODECS["float16"], block_size=16, max_len=4096)
    num_blocks, of_700 = gqa.num_blocks(45 * GB), gqa.num_blocks_for(700)
    saved = f"int4 with scale and zero {1 - bits['int4_g128'] / 16:.1%}; int8 with a scale "
    saved += f"{16 / bits['int8_per_token_head']:.2f} x; NVFP4 {16 / bits['nvfp4']:.2f} x"
    return [
        (
            "a request of 5,000 tokens on a 70B takes 40 to 60 MB",
            "2 x 80 layers x 8 KV heads x 128 x 2 B x 5,000",
            f"{gqa.num_bytes_for(5000) / 1e6:,.1f} MB; {mha.num_bytes_for(5000) / 1e6:,.0f} MB with 64 KV heads",
        ),
        (
            "a token of a 70B takes 10 KB, 12 KB, 1.2 MB",
            "2 x 80 x 8 x 128 x 2 B",
            f"{gqa.bytes_per_token:,} B = {gqa.bytes_per_token // 1024} KiB; {mha.bytes_per_token / 2**20} MiB with 64",
        ),
        (
            "45 GB are 235,000 blocks of 16 tokens",
            f"45 GB / (16 x {gqa.bytes_per_token:,} B)",
            f"{num_blocks:,} blocks: {num_blocks // of_700} requests of 700 tokens",
        ),
        (
            "4-bit weights of a 70B leave 40 to 45 GB of an 80 GB GPU",
            f"0.9 x 80 GB - {int4 / GB:.1f} GB; with scales and zero points {grouped / GB:.1f} GB; less activations",
            f"{0.9 * 80 - int4 / GB:.1f} GB; {planned.capacity.kv_budget_bytes / GB:.1f} GB for KV in the end",
        ),
        (
            "Llama-2-70B in float16 runs on one 80 GB GPU",
            f"{llama.num_parameters:,} parameters x 2 B",
            f"{2 * llama.num_parameters / GB:.0f} GB of weights: refused",
        ),
        ("10 % less KV is 10 % more users", "1 / (1 - 0.10)", f"{throughput_gain_of_less(0.1) - 1:.1%} more"),
        ("60 % waste is twice the GPUs", "1 / (1 - 0.60)", f"{throughput_gain_of_less(0.6):.1f} x the GPUs"),
        (
            "decode goes from 1 ms to 10 ms over 3,000 tokens of context",
            f"{int4 / GB:.1f} GB / 3.35 TB/s, and 3,000 x {gqa.bytes_per_token:,} B / 3.35 TB/s more",
            f"from {int4 / h100.bandwidth * 1e3:.1f} ms at best to {context * 1e3:.2f} ms more",
        ),
        (
            "8K x 128 requests of a 70B take 336 GB",
            f"8,192 x 128 x {gqa.bytes_per_token:,} B",
            f"{128 * gqa.num_bytes_for(8192) / GB:.1f} GB = {128 * gqa.num_bytes_for(8192) // 2**30} GiB",
        ),
        (
            "int4 saves 75 %, 8-bit saves up to 4 x, FP4 8 x",
            "bits with their scales, of 16",
            saved,
        ),
        (
            "more parameters need more KV",
            "layers x KV heads x head_dim",
            f"Llama-2-7B {small.bytes_per_token // 1024} KiB a token, Llama-3-70B {gqa.bytes_per_token // 1024} KiB",
        ),
        (
            "a prompt of 200 tokens in 1,000 requests saves 200,000",
            "the first computes it; blocks of 16 share 192",
            f"{200 * 999:,}; {200 // 16 * 16 * 999:,} in whole blocks",
        ),
        (
            "prefix hits make the first token 3 to 5 x sooner",
            "1 / (1 - share of work spared)",
            f"{ttft_bound(0.5):.0f} x for a half",
        ),
    ]


def main() -> None:
    """Print the table."""
    args = parser(__doc__).parse_args()
    print("| what is read | the sum | what is right |\n| --- | --- | --- |")
    for row in rows():
        print("| " + " | ".join(row) + " |")
    if args.json:
        names = ("read", "sum", "right")
        found = [dict(zip(names, row, strict=True)) for row in rows()]
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
