"""What codecs of the KV cache cost and give: bytes, the attention kernel, decoding, and requests held at once.

* bytes a token of a head of 64 with its scales, against 16 bit: arithmetic, which a test holds the slab to;
* attention: the op alone, SmolLM2's shape (9 query heads, 3 KV heads of 64, blocks of 16), 32 requests of 4,096 tokens,
  each in blocks of its own, one new token each. CPU time of one thread, blocks of every codec against float32's,
  interleaved, the median of the ratio of two neighbours;
* decode: SmolLM2-135M, 32 requests of 2,048 tokens, each in blocks of its own (filled with random K and V, so that no
  prompt has to be computed), one greedy token each a step: the runner's whole step. Codec and float32 step in turn;
* concurrency: how many of 192 requests of 96 + 64 tokens, sent together over HTTP, run at once in the same KV bytes:
  the mean over the later steps after which others wait, against blocks of 16 bit (``float16``). Of ``kivi2`` with as
  many seats as are then taken, since each seat has an unsealed block in 16 bit; and of 416 + 64 tokens too, where these
  weigh less.

* quality: what ``pagefold eval`` says of SmolLM2-135M on its default texts, 4 contexts of 2,048 tokens and 2 of 8,191,
  all codecs beside the exact cache in one run (half an hour).

    python benchmarks/codecs.py [--only bytes,attention,decode,concurrency,quality] [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from array import array
from typing import TYPE_CHECKING

import numpy as np
from report import Row, machine, parser, print_report

if TYPE_CHECKING:
    from pagefold.engine.engine import Engine
    from pagefold.runner.slab import AnySlab
    from pagefold.steps import StepPlan

NUM_REQUESTS, CONTEXT = 32, 4096
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
MODEL = "smollm2-135m"
BYTES_ASKED = {"int8_per_token_head": 0.54, "int4_per_token_head": 0.29, "k8v4": 0.42}
KIVI_ASKED = {16: 0.22, 32: 0.18}
"""Of ``kivi2``, whose scales of K are those of a block: by tokens a block."""
ATTENTION_ASKED = {"int8_per_token_head": 0.6, "int4_per_token_head": 0.6}
HELD_ASKED = {"int8_per_token_head": 1.85, "int4_per_token_head": 3.4}
NUM_HELD = 192
HELD_SETTINGS = {
    "model": MODEL,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
    "force_kv_cache_dtype": True,
    "dtype": "float32",
}
KIVI_SEATS = {96: 40, 416: 52}
"""Tokens of a prompt, and the seats of ``kivi2`` in bytes that hold twelve such requests in 16 bit."""
QUALITY = {2048: 4, 8191: 2}
"""Tokens of a context, and how many are read."""
DECODE_ASKED = {"int8_per_token_head": 1.15}
KL_ASKED = {"int8_per_token_head": 0.001}
PERPLEXITY_ASKED = {"int8_per_token_head": 0.001, "int4_per_token_head": 0.01}
REMOVED_ASKED = 0.8
NAMES = ("float16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "k8v4", "int4_per_token_head", "kivi2")


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="bytes,attention,decode,concurrency,quality")
    arguments.add_argument("--repeats", type=int, default=9)
    args = arguments.parse_args()
    where = machine()
    parts = {"bytes": measure_bytes, "attention": measure_attention, "decode": measure_decode,
             "concurrency": measure_concurrency, "quality": measure_quality}  # fmt: skip
    rows = [row for name in args.only.split(",") for row in parts[name](args.repeats)]
    print_report("codecs", rows, where, args.json)


def measure_bytes(_repeats: int) -> list[Row]:
    """Bytes a token."""
    from pagefold.kv import CODECS

    exact = CODECS["float16"]
    rows = []
    for size, asked in KIVI_ASKED.items():
        ours, theirs = (
            one.key_bytes(HEAD_DIM) + one.value_bytes(HEAD_DIM) for one in (CODECS["kivi2"].in_blocks(size), exact)
        )
        rows.append(_row(f"kivi2, blocks of {size}: bytes against 16 bit", asked, ours / theirs, at_most=True))
    for name in NAMES[1:-1]:
        ours, theirs = (one.key_bytes(HEAD_DIM) + one.value_bytes(HEAD_DIM) for one in (CODECS[name], exact))
        rows.append(_row(f"{name}: bytes against 16 bit", BYTES_ASKED.get(name), ours / theirs, at_most=True))
    return rows


def measure_attention(repeats: int) -> list[Row]:
    """Kernel time over distinct contexts."""
    import torch

    from pagefold.kv import CODECS, KVGeometry
    from pagefold.runner.attention.cpu import CpuAttention
    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.codec_slab import CodecSlab

    width = CONTEXT // BLOCK_SIZE
    num_blocks = NUM_REQUESTS * width
    tables = np.random.default_rng(0).permutation(num_blocks).reshape(NUM_REQUESTS, 1, -1).astype(np.int32)
    inputs = AttentionInputs.of_one_group(
        query_starts=np.arange(NUM_REQUESTS + 1, dtype=np.int32),
        tables=np.broadcast_to(tables, (NUM_REQUESTS, NUM_KV_HEADS, width)),
        lengths=np.broadcast_to(np.int32(CONTEXT), (NUM_REQUESTS, NUM_KV_HEADS)),
        cells=np.broadcast_to(np.arange(NUM_KV_HEADS, dtype=np.int32), (NUM_REQUESTS, 1, NUM_KV_HEADS)),
        residual_ids=np.arange(NUM_REQUESTS, dtype=np.int32),
    )
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(NUM_REQUESTS, NUM_HEADS, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, NUM_REQUESTS, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    block_ids = torch.arange(num_blocks).repeat_interleave(BLOCK_SIZE)
    entries = torch.arange(num_blocks * BLOCK_SIZE)

    def attend(name: str) -> tuple[CpuAttention, AnySlab]:
        if name == "kivi2":
            return CpuAttention(1), _sealed(num_blocks)
        slab = CodecSlab.allocate(KVGeometry(1, NUM_KV_HEADS, HEAD_DIM, 4, BLOCK_SIZE, CODECS[name]), num_blocks)
        for cell in range(NUM_KV_HEADS):
            slab.write(cell, block_ids, entries, tuple(torch.randn(2, len(entries), HEAD_DIM, generator=generator)))
        return CpuAttention(1), slab

    def seconds(attention: CpuAttention, slab: AnySlab) -> float:
        begin = time.process_time()
        attention(query, key, value, slab, inputs, 0, HEAD_DIM**-0.5)
        return time.process_time() - begin

    exact = attend("float32")
    rows = []
    for name in NAMES:
        ours = attend(name)
        pairs = [(seconds(*ours), seconds(*exact)) for _ in range(repeats + 1)][1:]
        ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        mine, theirs = (1000 * statistics.median(one) for one in zip(*pairs, strict=True))
        row = _row(f"{name}: decode attention against fp32 blocks", ATTENTION_ASKED.get(name), ratio, at_most=True)
        rows.append(Row(row.what, row.asked, f"{row.got} ({mine:.1f} of {theirs:.1f} ms)", row.ok, row.values))
    return rows


def _sealed(num_blocks: int) -> AnySlab:
    """Return sealed blocks of random K and V, and residuals: all blocks alike but for their codes."""
    import torch

    from pagefold.kv import CODECS, KVGeometry
    from pagefold.runner.sealed_slab import SealedSlab

    geometry = KVGeometry(1, NUM_KV_HEADS, HEAD_DIM, 4, BLOCK_SIZE, CODECS["kivi2"])
    slab = SealedSlab.allocate(geometry, num_blocks, NUM_REQUESTS)
    slab.residuals.normal_()
    for cell, places in enumerate(slab.places):
        slab.seal(cell, 0, *torch.randn(2, BLOCK_SIZE, HEAD_DIM).half())
        codes = slice(places.keys, places.key_scales)
        slab.data[:, codes] = torch.randint(256, (num_blocks, places.key_scales - places.keys), dtype=torch.uint8)
        scales = slice(places.key_scales, places.end)
        slab.data[:, scales] = slab.data[0, scales].clone()
    return slab


def measure_decode(repeats: int) -> list[Row]:
    """Output tokens a second of the runner, model and sampler included."""
    num_tokens = 2048
    width = num_tokens // BLOCK_SIZE + 1
    runners = {
        name: _engine(name, num_requests=NUM_REQUESTS, num_tokens=2080).runner for name in ("auto", *DECODE_ASKED)
    }
    for runner in runners.values():
        _fill(runner.slab, runner.geometry.groups[0].num_cells, NUM_REQUESTS * width)
    speeds: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(2 * repeats + 2):
        plan = _step(num_tokens + turn % BLOCK_SIZE, width)
        for name, runner in runners.items():
            begin = time.perf_counter()
            runner.run(plan)
            speeds[name].append(NUM_REQUESTS / (time.perf_counter() - begin))
    speeds = {name: told[2:] for name, told in speeds.items()}
    rows = [Row("float32: output tokens/s, 32 requests of 2k", "", f"{statistics.median(speeds['auto']):.0f}")]
    for name, asked in DECODE_ASKED.items():
        ratio = statistics.median(a / b for a, b in zip(speeds[name], speeds["auto"], strict=True))
        rows.append(_row(f"{name}: output tokens/s, 32 requests of 2k, against float32", asked, ratio, at_most=False))
    return rows


def _fill(slab: AnySlab, num_cells: int, num_blocks: int) -> None:
    import torch

    block_ids = torch.arange(num_blocks).repeat_interleave(BLOCK_SIZE)
    entries = torch.arange(num_blocks * BLOCK_SIZE)
    kv = torch.randn(2, len(entries), HEAD_DIM)
    for cell in range(num_cells):
        slab.write(cell, block_ids, entries, (kv[0], kv[1]))


def _step(start: int, width: int) -> StepPlan:
    from pagefold import SamplingParams
    from pagefold.kv import BlockId, BlockTable
    from pagefold.steps import StepPlan

    plan = StepPlan(start)
    plan.token_ids = array("i", range(100, 100 + NUM_REQUESTS))
    plan.starts, plan.num_tokens = [start] * NUM_REQUESTS, [1] * NUM_REQUESTS
    ids = (range(width * row, width * (row + 1)) for row in range(NUM_REQUESTS))
    plan.tables = [[BlockTable(map(BlockId, own))] for own in ids]
    plan.sampling_rows = list(range(NUM_REQUESTS))
    plan.sampling = [SamplingParams(temperature=0.0)] * NUM_REQUESTS
    plan.seeds = plan.draws = [0] * NUM_REQUESTS
    return plan


def measure_concurrency(_repeats: int) -> list[Row]:
    """Requests that run at once on a server with the same bytes."""
    from plan_concurrency import Server, send

    from pagefold.config import EngineConfig
    from pagefold.plan import Workload, draw_lengths

    per_token = 30 * NUM_KV_HEADS * 2 * 128  # in 16 bit

    def held(name: str, num_prompt: int, num_seats: int) -> float:
        num_tokens = num_prompt + 64
        config = EngineConfig(
            kv_cache_dtype=name,
            kv_cache_memory_bytes=12 * num_tokens * per_token,  # twelve requests in 16 bit
            max_model_len=num_tokens,
            max_num_seqs=num_seats,
            **HELD_SETTINGS,
        )
        workload = Workload(name=name, lengths=draw_lengths(str(num_prompt), "64"), prefix_len=0)
        server = Server(config)
        try:
            asyncio.run(send(server.url, workload, NUM_HELD, NUM_HELD))
            return server.reached()
        finally:
            server.close()

    rows = []
    exact = held("float16", 96, 128)
    for name, asked in HELD_ASKED.items():
        ours = held(name, 96, 128)
        what = f"{name}: requests at once, {ours:.1f}, in bytes that hold {exact:.1f} in 16 bit"
        rows.append(_row(what, asked, ours / exact, at_most=False))
    for num_prompt, num_seats in KIVI_SEATS.items():
        exact, ours = held("float16", num_prompt, 128), held("kivi2", num_prompt, num_seats)
        what = f"kivi2: requests of {num_prompt} + 64 tokens at once, {ours:.1f}, where 16 bit holds {exact:.1f}"
        rows.append(_row(what, None, ours / exact, at_most=False))
    return rows


def measure_quality(_repeats: int) -> list[Row]:
    """What reading a text under a codec costs, against the exact cache."""
    from pagefold.config import EngineConfig, cache_dir
    from pagefold.quality.evaluate import Question, evaluate
    from pagefold.quality.setting import Setting
    from pagefold.quality.texts import fetch_default_texts

    names = ("int8_per_token_head", "int4_per_token_head", "int4_plain")
    rows = []
    for context_len, num_contexts in QUALITY.items():
        question = Question(
            [Setting(name, {"kv_cache_dtype": name}) for name in names], fetch_default_texts(cache_dir()), context_len,
            num_contexts, num_greedy_tokens=0, num_haystacks=0,
        )  # fmt: skip
        found = {
            setting.name: setting for setting in evaluate(EngineConfig(model=MODEL, dtype="float32"), question).settings
        }
        where = f"{num_contexts} contexts of {context_len:,}"
        for name, one in found.items():
            asked_kl, asked = KL_ASKED.get(name), PERPLEXITY_ASKED.get(name)
            change, error = one.perplexity_change.value, one.perplexity_change.standard_error
            rows.append(Row(
                f"{name}: KL divergence, {where}", "" if asked_kl is None else f"<= {asked_kl:g}",
                f"{one.kl.value:.2g} (top-1 {one.top1_agreement.value:.1%})",
                None if asked_kl is None else one.kl.value <= asked_kl, {"kl": one.kl.value},
            ))  # fmt: skip
            rows.append(Row(
                f"{name}: perplexity, {where}", "" if asked is None else f"<= +{asked:.1%}",
                f"{change:+.2%} ± {error:.2%}", None if asked is None else change <= asked, {"change": change},
            ))  # fmt: skip
        removed = 1 - found["int4_per_token_head"].perplexity_change.value / found["int4_plain"].perplexity_change.value
        what = f"share of int4_plain's perplexity loss that int4_per_token_head removes, {where}"
        rows.append(Row(what, ">= 80 %", f"{removed:.1%}", removed >= REMOVED_ASKED, {"removed": removed}))
    return rows


def _engine(name: str, *, num_requests: int, num_tokens: int, num_bytes: int | None = None) -> Engine:
    from pagefold import LLM

    llm = LLM(
        MODEL,
        dtype="float32",
        kv_cache_dtype=name,
        max_model_len=num_tokens,
        max_num_seqs=num_requests,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=num_bytes,
        enable_prefix_caching=False,
    )
    return llm.engine


def _row(what: str, asked: float | None, got: float, *, at_most: bool) -> Row:
    if asked is None:
        return Row(what, "", f"{got:.3f} x", values={"ratio": got})
    is_ok = got <= asked if at_most else got >= asked
    return Row(what, f"{'<=' if at_most else '>='} {asked:g} x", f"{got:.3f} x", is_ok, {"ratio": got})


if __name__ == "__main__":
    main()
