"""How small blocks become on their way to a remote pool, and how fast: lossless, and with codes rounded first.

Workload: SmolLM2-135M reads contexts of 1,024 tokens of State of the Union addresses and Moby-Dick (``make texts``)
with ``kv_cache_dtype=int8_per_token_head``; its full blocks are packed and restored one by one, on one thread.

The bound is the entropy of each channel's codes over all tokens (each layer, KV head, K or V, and channel a source
without memory), which no coder of single codes can beat; one that looks along tokens can. Its tables, which a coder
would have to know, are for free, and it is measured on the very codes that it bounds. Speeds are bytes of blocks as
they were; medians.

    python benchmarks/transport.py [--contexts 8] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from report import Row, machine, parser, print_report

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.transport.block_form import BlockForm

LENGTH = 1024
MODEL = "smollm2-135m"
LEVELS = {"lossless": 0, "lossy7": 1, "lossy6": 2}


def read_blocks(codec: str, num_contexts: int) -> tuple[NDArray[np.uint8], BlockForm]:
    """Return the blocks of all contexts, ``[num_blocks, block_bytes]``, and of what they are made."""
    from pagefold import LLM, SamplingParams
    from pagefold.config import cache_dir
    from pagefold.quality.contexts import cut_contexts
    from pagefold.quality.texts import fetch_default_texts
    from pagefold.runner.block_form import block_form

    llm = LLM(
        MODEL,
        dtype="float32",
        kv_cache_dtype=codec,
        kv_quality_floor=0.0,
        kv_cache_memory_bytes=2**30,
        max_model_len=LENGTH + 16,
    )
    engine = llm.engine
    assert engine.tokenizer is not None
    contexts = cut_contexts(fetch_default_texts(cache_dir()), engine.tokenizer, LENGTH, num_contexts)
    runner: Any = engine.runner
    how = SamplingParams(temperature=0.0, max_tokens=1)
    for token_ids in contexts.token_ids:
        llm.generate({"prompt_token_ids": list(token_ids)}, how, use_tqdm=False)
    core = engine.scheduler.core
    used = [block.block_id for block in core.pool.blocks if block.state.name == "CACHED"]
    return runner.slab.as_bytes()[used], block_form(runner.geometry)


def channel_bound(blocks: NDArray[np.uint8], form: BlockForm) -> float:
    """Return the bytes of one block's codes if every channel's codes cost what their entropy is."""
    bits = 0.0
    for begin, _, num_rows, num_slots, row_stride, slot_stride in form.parts:
        for row in range(num_rows):
            at = begin + row * row_stride + slot_stride * np.arange(num_slots)
            counts = np.bincount(blocks[:, at].ravel(), minlength=256)
            shares = counts[counts > 0] / counts.sum()
            bits += num_slots * float(-(shares * np.log2(shares)).sum())
    return bits / 8


def measure(blocks: NDArray[np.uint8], form: BlockForm, dropped_bits: int) -> tuple[float, float, float]:
    """Return the packed share of the bytes, and the bytes a second packed and restored."""
    from pagefold.transport.packing import Packing

    packing = Packing(form, dropped_bits)
    into = memoryview(bytearray(form.block_bytes))
    packing.unpack(memoryview(packing.pack(memoryview(packing.trial_block()))), into)  # compiles
    sizes, pack_s, unpack_s = [], [], []
    for block in blocks:
        begin = time.perf_counter()
        restored = packing.coarsened(block.data)
        packed = packing.pack(restored)
        pack_s.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        done = packing.unpack(memoryview(packed), into)
        unpack_s.append(time.perf_counter() - begin)
        assert done
        assert into == restored
        sizes.append(len(packed))
    size = form.block_bytes
    return sum(sizes) / (size * len(sizes)), size / statistics.median(pack_s), size / statistics.median(unpack_s)


def codes_share(blocks: NDArray[np.uint8], form: BlockForm) -> float:
    """Return the packed share of the bytes of codes alone."""
    from pagefold.transport.packing import Packing

    packing = Packing(form._replace(planes=()))
    num_codes = sum(num_rows * num_slots for _, _, num_rows, num_slots, *_ in form.parts)
    return sum(len(packing.pack(block.data)) for block in blocks) / (num_codes * len(blocks))


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--contexts", type=int, default=8)
    args = arguments.parse_args()
    where = machine()
    blocks, form = read_blocks("int8_per_token_head", args.contexts)
    num_codes = sum(num_rows * num_slots for _, _, num_rows, num_slots, *_ in form.parts)
    bound = 1 - channel_bound(blocks, form) / num_codes
    saved = 1 - codes_share(blocks, form)
    rows = [
        Row("blocks", "", f"{len(blocks)} of {form.block_bytes:,} bytes", values={"blocks": len(blocks)}),
        Row("the bound's saving, of codes", "", f"{bound:.1%}", values={"share": bound}),
        Row("saved of codes, lossless", ">= 0.9 of that", f"{saved:.1%} = {saved / bound:.3f}", saved >= 0.9 * bound),
    ]
    rows[-1].values.update(saved=saved, of_bound=saved / bound)
    for name, dropped_bits in LEVELS.items():
        share, pack, unpack = measure(blocks, form, dropped_bits)
        asked = ">= 300 MB/s" if name == "lossless" else ""
        for what, speed in (("pack", pack), ("restore", unpack)):
            ok = speed >= 300e6 if asked else None
            rows.append(Row(f"{name}: {what}", asked, f"{speed / 1e6:.0f} MB/s", ok, {"bytes_per_s": speed}))
        rows.append(Row(f"{name}: size of blocks", "", f"{share:.1%}", values={"share": share}))
    for codec in ("auto", "int4_per_token_head"):
        share, pack, unpack = measure(*read_blocks(codec, 2), 0)
        told = f"{share:.1%}; packs {pack / 1e6:.0f} MB/s, restores {unpack / 1e6:.0f} MB/s"
        rows.append(Row(f"{codec}, lossless", "", told, values={"share": share, "pack": pack, "unpack": unpack}))
    print_report("transport", rows, where, args.json)


if __name__ == "__main__":
    main()
