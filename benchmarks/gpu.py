"""The engine on one NVIDIA card: kernels, codes, decoding steps, throughput, against a limit or peer of the same run.

    python benchmarks/gpu.py [--json gpu.json] [--minutes 9] [--small]

Runs from the source tree, with torch, triton, transformers and numpy alone. First it checks: every kernel against the
reference on the card, with what nobody wrote poisoned; tokens of a tiny model in float64 against ``generate``. Only
then it times. Times are those of CUDA events over five interleaved repeats, medians. Models have the shape of Llama 3
8B in bfloat16, and random weights: speed does not know the difference. ``--small`` takes a model of 16 layers less, to
try the script on a smaller card; its numbers are not the ones that are asked for.

What has no time left is left out, and said so.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from array import array
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("src", "tests")]

import numpy as np  # noqa: E402 - from the source tree
import torch  # noqa: E402 - from the source tree
import transformers  # noqa: E402 - from the source tree

from pagefold.engine.drafting import _NoDrafting  # noqa: E402 - from the source tree
from pagefold.runner.card import Card, choose_device, find_card  # noqa: E402 - from the source tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.engine import Engine
    from pagefold.engine.overlapped import OverlappedEngine
    from pagefold.kv import KVGeometry
    from pagefold.runner.codec_slab import CodecSlab
    from pagefold.runner.sealed_slab import SealedSlab
    from pagefold.runner.slab import AnySlab
    from pagefold.steps import StepPlan, StepResult

REPEATS = 5
CODEC_NAMES = "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "k8v4", "int4_per_token_head"
ROWS: list[dict[str, Any]] = []
BEGAN = time.monotonic()


def tell(what: str, got: float | None, asked: str, unit: str, **more: object) -> None:
    """Note a row of the table, and show it at once."""
    ROWS.append({"what": what, "got": got, "asked": asked, "unit": unit, **more})
    shown = "open" if got is None else f"{got:.3f}"
    print(f"{time.monotonic() - BEGAN:6.1f} s  {what:<58} {shown:>9} {unit:<6} asked {asked:<8} {more}", flush=True)


def seconds(*functions: Callable[[], object], rounds: int = 10) -> list[float]:
    """Return the median time of each function, measured in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        for function, taken in zip(functions, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(rounds):
                function()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3 / rounds)
    return [statistics.median(taken) for taken in times]


# Is it right?


def check_kernels(card: Card) -> None:
    """Hold the kernels to the dense twin in float64, as the tests do on a CPU."""
    from equivalence.attention_cases import Lengths, Shape, make_case

    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.slab import ROWS_LAYOUT

    bounds = {torch.float32: 8e-6, torch.float16: 2 * 2**-9, torch.bfloat16: 2 * 2**-6}
    lengths = [Lengths(300, 1), Lengths(37, 5), Lengths(0, 700), Lengths(640, 1, 640), Lengths(0, 1), Lengths(2000, 90)]
    shapes = [
        Shape(16, 64, 3, 3),
        Shape(16, 128, 8, 4),
        Shape(32, 80, 1, 20),
        Shape(64, 256, 1, 5),
        Shape(16, 32, 4, 1),
    ]
    worst: dict[str, float] = {}
    for shape in shapes:
        for dtype, bound in bounds.items():
            for per_head, softcap in ((False, 0.0), (True, 5.0)):
                case = make_case(shape, lengths, per_head=per_head, seed=len(worst), softcap=softcap)
                case.round_to(dtype)
                heads = HeadShape(
                    dtype,
                    shape.num_kv_heads * shape.group,
                    shape.num_kv_heads,
                    shape.head_dim,
                    card.capability,
                    card.num_processors,
                )
                got = CudaAttention(heads)(*case.to(dtype, ROWS_LAYOUT, "cuda")).double().cpu()
                error = (got - case.expected()).abs().max().item()
                if not error <= bound:  # also of NaN
                    msg = f"{shape} in {dtype}: off by {error:.2e}, more than {bound:.2e}"
                    raise AssertionError(msg)
                worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
    tell(
        "kernels against dense attention: worst error / bound",
        max(worst[str(d)] / b for d, b in bounds.items()),
        "<= 1",
        "",
        **worst,
    )


def check_codes(card: Card) -> None:
    """Hold the kernels to the reference where K and V are codes, and what they encode to it in bits."""
    from equivalence.attention_cases import Lengths, Shape
    from equivalence.coded_cases import attend_coded
    from equivalence.sealed_cases import attend_sealed

    bounds = {"float32": 3e-5, "float16": 8 * 2**-9, "bfloat16": 8 * 2**-6}  # as in tests/gpu
    lengths = [Lengths(300, 1), Lengths(37, 5), Lengths(0, 200), Lengths(640, 1, 640), Lengths(0, 1), Lengths(900, 90)]
    sealed = [(300, 1, 0), (37, 5, 0), (0, 200, 0), (640, 1, 640), (0, 1, 0), (896, 90, 0)]
    worst = dict.fromkeys((*CODEC_NAMES, "kivi2"), 0.0)
    for shape in (Shape(16, 64, 3, 3), Shape(16, 128, 8, 4), Shape(32, 80, 1, 20)):
        for dtype, bound in bounds.items():
            for seed, name in enumerate(CODEC_NAMES):
                made = {"per_head": False, "seed": seed, "card": card}
                worst[name] = max(worst[name], attend_coded(name, shape, lengths, dtype, bound, **made) / bound)
            error = attend_sealed(shape, sealed, dtype, bound, seed=1, card=card)
            worst["kivi2"] = max(worst["kivi2"], error / bound)
    tell("codes against the reference: worst error / bound", max(worst.values()), "<= 1", "", **worst)


def check_tokens() -> None:
    """Float64 with the reference attention on the card: greedy tokens are those of ``generate``, all of them."""
    from equivalence.prompts import short_prompts
    from equivalence.references import References
    from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = save_tiny_model("llama", Path(name))
        prompts = [prompt[:200] for prompt in short_prompts(VOCAB_SIZE)[:12]]
        references = References(folder, 24)
        engine = start(
            str(folder), dtype="float64", max_num_batched_tokens=64, max_num_seqs=8, kv_cache_memory_bytes=2**24
        )
        outputs, _ = complete(engine, prompts, 24)
        wrong = sum(output != references.of(prompt) for output, prompt in zip(outputs, prompts, strict=True))
        if wrong:
            msg = f"{wrong} of {len(prompts)} outputs in float64 differ from generate's"
            raise AssertionError(msg)
    tell("float64 greedy outputs that differ from generate's", 0.0, "0", "", of=len(prompts))


# Kernels.


def columns_of(lengths: list[int], num_new: list[int], num_kv_heads: int, block_size: int) -> tuple[Any, int]:
    """Return inputs of one layer whose sequences have shuffled blocks, and how many blocks there are."""
    from pagefold.runner.attention import AttentionInputs

    widths = [-(-length // block_size) for length in lengths]
    order = np.random.default_rng(0).permutation(sum(widths)).astype(np.int32)
    tables = np.zeros((len(lengths), max(widths)), np.int32)
    begin = 0
    for row, width in enumerate(widths):
        tables[row, :width] = order[begin : begin + width]
        begin += width
    size = len(lengths), num_kv_heads
    inputs = AttentionInputs.of_one_group(
        query_starts=np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32),
        tables=np.broadcast_to(tables[:, None], (*size, tables.shape[1])),
        lengths=np.broadcast_to(np.array(lengths, np.int32)[:, None], size),
        cells=np.broadcast_to(np.arange(num_kv_heads, dtype=np.int32)[None, None], (len(lengths), 1, num_kv_heads)),
        residual_ids=np.arange(len(lengths), dtype=np.int32),
    )
    return inputs, sum(widths)


def time_attention(card: Card) -> None:
    """Decode against a copy of as many bytes; prefill against torch's fastest attention on contiguous tensors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from pagefold.kv import KVGeometry
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.cuda_graphs import GraphRecorder
    from pagefold.runner.slab import Slab

    heads, kv_heads, dim, dtype, block = 32, 8, 128, torch.bfloat16, 16
    attention = CudaAttention(HeadShape(dtype, heads, kv_heads, dim, card.capability, card.num_processors))
    geometry = KVGeometry(1, kv_heads, dim, 2, block)

    def operands(lengths: list[int], num_new: list[int]) -> tuple[Any, ...]:
        inputs, num_blocks = columns_of(lengths, num_new, kv_heads, block)
        slab = Slab.allocate(geometry, num_blocks, dtype, "cuda")
        slab.data.normal_()
        shapes = (sum(num_new), heads, dim), (sum(num_new), kv_heads, dim), (sum(num_new), kv_heads, dim)
        return *(torch.randn(shape, dtype=dtype, device="cuda") for shape in shapes), slab, inputs, 0, dim**-0.5

    for num_seqs, length in ((64, 4096), (8, 4096), (1, 32768)):
        args = operands([length] * num_seqs, [1] * num_seqs)
        read_bytes = num_seqs * length * 2 * kv_heads * dim * 2
        half = torch.empty(read_bytes // 2, dtype=torch.uint8, device="cuda")  # a copy reads and writes
        to = torch.empty_like(half)
        replay = GraphRecorder()(lambda args=args: attention(*args))  # else the host is what is timed
        ours, copy = seconds(replay, lambda half=half, to=to: to.copy_(half))
        tell(
            f"decode attention, {num_seqs} x {length}: bandwidth / a copy's",
            copy / ours,
            ">= .75" if num_seqs == 64 else "-",
            "x",
            us=ours * 1e6,
            gb_per_s=read_bytes / ours / 1e9,
            copy_gb_per_s=read_bytes / copy / 1e9,
        )
        del args, half, to
    num_seqs, length = 8, 2048
    args = operands([length] * num_seqs, [length] * num_seqs)
    tensors = [
        torch.randn(num_seqs, count, length, dim, dtype=dtype, device="cuda") for count in (heads, kv_heads, kv_heads)
    ]
    query, key, value = tensors
    repeated = [query, *(tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (key, value))]
    backends = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    peers: dict[str, tuple[float, Callable[[], None]]] = {}
    for backend in backends:
        for kind, operands_of_peer, is_grouped in (("grouped", tensors, True), ("repeated", repeated, False)):

            def peer(
                backend: SDPBackend = backend,
                operands_of_peer: list[torch.Tensor] = operands_of_peer,
                is_grouped: bool = is_grouped,  # noqa: FBT001
            ) -> None:
                with sdpa_kernel(backend):
                    torch.nn.functional.scaled_dot_product_attention(
                        *operands_of_peer, is_causal=True, enable_gqa=is_grouped
                    )

            try:
                peers[f"{backend.name}, {kind} heads"] = seconds(peer, rounds=3)[0], peer
            except RuntimeError as error:
                print(f"          {backend.name} with {kind} heads cannot: {str(error)[:80]}")
    fastest = min(peers, key=lambda name: peers[name][0])
    ours, theirs = seconds(lambda: attention(*args), peers[fastest][1])
    tflops = 4 * num_seqs * heads * dim * length * length / 2 / 1e12
    tell(
        f"prefill attention, {num_seqs} x {length}: {fastest} / ours",
        theirs / ours,
        ">= .8",
        "x",
        ms=ours * 1e3,
        tflops=tflops / ours,
        their_tflops=tflops / theirs,
    )


def time_codes(card: Card) -> None:
    """Attention where K and V are codes, against the same where they are bfloat16: fewer bytes must pay."""
    from pagefold.kv import CODECS, KVGeometry
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.attention.cuda.blocks import reads_of
    from pagefold.runner.codec_slab import CodecSlab
    from pagefold.runner.codecs import CELL_CODECS
    from pagefold.runner.cuda_graphs import GraphRecorder
    from pagefold.runner.sealed_slab import SealedSlab
    from pagefold.runner.slab import Slab

    heads, kv_heads, dim, dtype, block = 32, 8, 128, torch.bfloat16, 16
    shape = dtype, heads, kv_heads, dim, card.capability, card.num_processors
    exact = KVGeometry(1, kv_heads, dim, 2, block)
    for what, num_seqs, length, is_decoding in (("decode", 64, 4090, True), ("prefill", 8, 2048, False)):
        num_new = [1 if is_decoding else length] * num_seqs
        inputs, num_blocks = columns_of([length] * num_seqs, num_new, kv_heads, block)
        operands = [
            torch.randn(sum(num_new), count, dim, dtype=dtype, device="cuda") for count in (heads, kv_heads, kv_heads)
        ]
        slab = Slab.allocate(exact, num_blocks, dtype, "cuda")
        slab.data.normal_()
        plain = partial(CudaAttention(HeadShape(*shape)), *operands, slab, inputs, 0, dim**-0.5)
        for name in ("fp8_e4m3", "int8_per_token_head", "k8v4", "int4_per_token_head", "kivi2"):
            geometry = KVGeometry(1, kv_heads, dim, 2, block, CODECS[name])
            if CELL_CODECS[name].seals:
                coded: AnySlab = SealedSlab.allocate(geometry, num_blocks, num_seqs, None, "cuda")
                fill_sealed(coded)
            else:
                coded = CodecSlab.allocate(geometry, num_blocks, None, "cuda")
                fill(coded, exact)
            attention = CudaAttention(HeadShape(*shape, reads_of(CELL_CODECS[name])))
            runs = [plain, partial(attention, *operands, coded, inputs, 0, dim**-0.5)]
            if is_decoding:  # else the host is what is timed
                runs = [GraphRecorder()(run) for run in runs]
            theirs, ours = seconds(*runs, rounds=10 if is_decoding else 3)
            tell(
                f"{what} attention, {num_seqs} x {length}: {name} / bfloat16, time",
                ours / theirs,
                "-",
                "x",
                bytes=geometry.bytes_per_token / exact.bytes_per_token,
                us=ours * 1e6,
            )


def fill(slab: CodecSlab, exact: KVGeometry) -> None:
    """Encode random K and V into all blocks, by the reference."""
    num_blocks, size = len(slab.data), slab.block_size
    blocks, slots = torch.arange(num_blocks).repeat_interleave(size), torch.arange(size).repeat(num_blocks)
    for cell in range(exact.num_kv_heads):
        for part in torch.split(torch.arange(len(blocks)), 2**16):
            kv = torch.randn(2, len(part), exact.head_dim, device="cuda")
            slab.write(cell, blocks[part], slots[part], (kv[0], kv[1]))


def fill_sealed(slab: SealedSlab) -> None:
    """Seal random K and V in one block, copy it to all others, and leave as much in all residuals."""
    for cell in range(len(slab.places)):
        keys, values = torch.randn(2, slab.block_size, slab.head_dim, device="cuda").half()
        slab.seal(cell, 0, keys, values)
    slab.data[1:] = slab.data[0]
    slab.residuals.normal_()


def time_restore() -> None:
    """Restore 4k tokens of an 8B model's KV from pinned memory, with checksums, against one copy of as many bytes."""
    try:
        from pagefold.store.card_arena import CardArena
    except ModuleNotFoundError as error:
        tell("restore of 4k tokens from pinned memory / the link", None, ">= .85", "x", why=f"{error.name} is absent")
        return
    from pagefold.kv import BlockId, HostOps, KVGeometry, LoadOp, StoreOp
    from pagefold.runner.slab import Slab

    geometry = KVGeometry(32, 8, 128, 2, 16)
    num_blocks = 4096 // geometry.block_size
    slab = Slab.allocate(geometry, num_blocks, torch.bfloat16, "cuda")
    slab.data.normal_()
    device = slab.data.device
    arena = CardArena(num_blocks, geometry.bytes_per_block, device)
    arena.carry_out(HostOps([StoreOp(BlockId(i), i) for i in range(num_blocks)], []), slab.as_bytes())
    before = slab.data.clone()
    slab.data.fill_(float("nan"))
    loads = HostOps([], [LoadOp(i, BlockId(i)) for i in range(num_blocks)])
    arena.carry_out(loads, slab.as_bytes())
    if not torch.equal(slab.data, before):
        raise AssertionError("blocks came back as others")  # noqa: TRY003
    pinned = torch.empty(slab.num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(slab.num_bytes, dtype=torch.uint8, device=device)
    ours, link = seconds(
        lambda: arena.carry_out(loads, slab.as_bytes()), lambda: there.copy_(pinned, non_blocking=True), rounds=3
    )
    tell(
        "restore of 4k tokens from pinned memory / the link",
        link / ours,
        ">= .85",
        "x",
        ms=ours * 1e3,
        link_gb_per_s=slab.num_bytes / link / 1e9,
    )

    def restore(last_layer: int) -> None:
        moves = arena.begin(loads, slab.as_bytes(), geometry.layer_ends)
        assert moves is not None
        moves.hold(last_layer)
        torch.cuda.current_stream().synchronize()

    def host_s(last_layer: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        restore(last_layer)
        return time.perf_counter() - began

    times = [(host_s(0), host_s(geometry.num_layers - 1)) for _ in range(REPEATS)]
    first_s, all_s = (statistics.median(taken) for taken in zip(*times, strict=True))
    tell("  until the first layer may begin / until all is there", first_s / all_s, "-", "", first_ms=first_s * 1e3)


# Engines.


def start(folder: str, **settings: Any) -> Engine:  # noqa: ANN401 - of EngineConfig
    """Start an engine on the card, from a folder."""
    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    return build_engine(plan_engine(EngineConfig(model=folder, device="cuda", **settings)), say=lambda _: None)


def complete(engine: Engine, prompts: list[list[int]], num_outputs: int) -> tuple[list[list[int]], list[float]]:
    """Complete prompts greedily; return outputs, and when each step ended."""
    from pagefold.sampling import SamplingParams

    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True))
        tokens[str(index)] = []
    ends = []
    while engine.has_work:
        for delta in engine.step():
            if delta.error:
                raise AssertionError(delta.error)
            tokens[delta.request_id] += delta.token_ids
        ends.append(time.perf_counter())
    return list(tokens.values()), ends


class Big:
    """A model of Llama 3 8B's shape with random weights, on the card, with our attention or torch's."""

    def __init__(self, card: Card, *, is_small: bool) -> None:
        from pagefold.runner.loader import register_attention

        self.card = card
        self.config = transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=16 if is_small else 32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.ours = register_attention()
        with torch.device("cuda"):
            self.model = transformers.AutoModelForCausalLM.from_config(
                self.config, dtype=torch.bfloat16, attn_implementation=self.ours
            ).eval()
        self.weight_bytes = sum(parameter.nbytes for parameter in self.model.parameters())

    def engine(self, **settings: Any) -> OverlappedEngine:  # noqa: ANN401 - of EngineConfig
        """Return an engine over the model, put together as ``build_engine`` does."""
        from pagefold.config import EngineConfig
        from pagefold.engine.blueprint import Blueprint
        from pagefold.engine.limits import ModelLimits
        from pagefold.engine.on_card import bound_use_of, build_runner, capacity_on_card
        from pagefold.engine.overlapped import OverlappedEngine
        from pagefold.kv import KVCore, KVGeometry, Namespace
        from pagefold.memory.capacity import Capacity
        from pagefold.runner.models import ModelSpec
        from pagefold.scheduler import Scheduler, SchedulerLimits

        self.model.set_attn_implementation(self.ours)
        folder = Path(tempfile.mkdtemp())
        self.config.save_pretrained(folder)
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        spec = ModelSpec(
            folder=folder,
            model_type="llama",
            num_layers=self.config.num_hidden_layers,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_positions=8192,
            max_exact_len=8192,
            limit="",
            vocab_size=self.config.vocab_size,
            eos_token_ids=(),
            num_parameters=num_parameters,
            fingerprint="random",
        )
        # The weights are there already: to the plan they are free memory that the weights will take.
        card = find_card()
        assert card is not None
        card = Card(
            card.name, card.capability, card.num_processors, card.total_bytes, card.free_bytes + self.weight_bytes
        )
        config = EngineConfig(model=str(folder), device="cuda", dtype="bfloat16", **settings)
        geometry = KVGeometry(spec.num_layers, 8, 128, 2, config.block_size)
        nothing = Capacity(0, 0, 0, 16, 8192, 1)
        blueprint = Blueprint(config, spec, geometry, nothing, torch.bfloat16, "it is timed", "cuda", card)
        capacity_on_card(blueprint, bound_use_of(blueprint))  # refuses what cannot fit
        runner, capacity = build_runner(blueprint, self.model, lambda line: print(f"          {line}"))
        core = KVCore(capacity.num_blocks, block_size=config.block_size)
        scheduler = Scheduler(core, SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens))
        limits = ModelLimits(spec.vocab_size, (), Namespace(model="random", layout="rows", dtype="bfloat16"))
        return OverlappedEngine(scheduler=scheduler, runner=runner, tokenizer=None, limits=limits, capacity=capacity)


def prompts_of(num: int, length: int, seed: int) -> list[list[int]]:
    """Return random prompts, no two alike."""
    return np.random.default_rng(seed).integers(10, 128000, (num, length)).tolist()


def time_engine(big: Big, deadline: float) -> None:
    """Time output tokens a second, and what of a decoding step is the memory's; then the peers."""
    num_seqs, length, num_outputs = 64, 1024, 128
    engine = big.engine(max_num_seqs=num_seqs, max_num_batched_tokens=8192, max_model_len=2048)
    complete(engine, prompts_of(num_seqs, length, 1), 4)  # compiles what the largest step did not
    rates = []
    for repeat in range(3):
        began = time.perf_counter()
        outputs, ends = complete(engine, prompts_of(num_seqs, length, 2 + repeat), num_outputs)
        rates.append(sum(map(len, outputs)) / (time.perf_counter() - began))
    ours = statistics.median(rates)
    tell("output tokens/s, 64 x 1k in, 128 out", ours, "-", "tok/s")

    steps = np.diff(ends)[-num_outputs + 8 :]
    step_s = float(np.median(steps))
    kv_bytes = num_seqs * (length + num_outputs / 2) * engine.runner.geometry.bytes_per_token
    bandwidth = copy_bandwidth()
    embedding_bytes = big.model.get_input_embeddings().weight.nbytes  # of which a step reads only its rows
    limit_s = (big.weight_bytes - embedding_bytes + kv_bytes) / bandwidth
    tell(
        "decode step, 64 requests: limit by bytes / step",
        limit_s / step_s,
        ">= .6",
        "x",
        step_ms=step_s * 1e3,
        limit_ms=limit_s * 1e3,
        copy_gb_per_s=bandwidth / 1e9,
    )
    time_host(engine, num_seqs, length)
    time_drafts(engine, length, num_outputs)
    del engine
    gc.collect()
    torch.cuda.empty_cache()

    big.model.set_attn_implementation("sdpa")
    for name, peer in (("generate", peer_generate), ("generate_batch", peer_generate_batch)):
        if time.monotonic() > deadline:
            tell(f"tokens/s against {name}", None, "-", "x", why="no time left")
            continue
        asked = ">= 5" if name == "generate" else ">= 1.5"
        try:
            theirs = peer(big, prompts_of(num_seqs, length, 2), num_outputs)
        except Exception as error:  # noqa: BLE001 - a peer that cannot is told, not ours to mend
            tell(f"tokens/s against {name}", None, asked, "x", why=f"{type(error).__name__}: {str(error)[:120]}")
        else:
            tell(
                f"tokens/s against {name}",
                ours / theirs,
                asked,
                "x",
                theirs=theirs,
                transformers=transformers.__version__,
            )
        gc.collect()
        torch.cuda.empty_cache()


class KnownDrafts(_NoDrafting):
    """Drafts what one request will say, as if somebody knew.

    Args:
        engine: that runs it.
        coming: its output.
        num_drafts: in each step.
    """

    def __init__(self, engine: OverlappedEngine, coming: list[int], num_drafts: int) -> None:
        super().__init__()
        self._scheduler, self._coming, self._num = engine.scheduler, coming, num_drafts

    @property
    def drafts_for_any(self) -> bool:
        """Always: so no step is planned ahead."""
        return True

    def prepare(self) -> None:
        """Give all that run their drafts."""
        for request in self._scheduler.running:
            begin = request.num_output_tokens
            request.drafts = array("i", self._coming[begin : begin + self._num])


def time_drafts(engine: OverlappedEngine, length: int, num_outputs: int) -> None:
    """Time one request whose drafts are all right: what a step with drafts costs, which no graph has."""
    (prompt,) = prompts_of(1, length, 9)
    nothing = engine.drafting
    (coming,), _ = complete(engine, [prompt], num_outputs)  # and from now on the prompt is cached
    for num_drafts in (1, 4, 8):
        rates = {True: [], False: []}
        for _ in range(3):
            for is_on, rate in rates.items():
                engine.drafting = KnownDrafts(engine, coming, num_drafts) if is_on else nothing
                began = time.perf_counter()
                complete(engine, [prompt], num_outputs)
                rate.append(num_outputs / (time.perf_counter() - began))
        engine.drafting = nothing
        on, off = (statistics.median(rates[is_on]) for is_on in (True, False))
        told = {"off_tokens_s": off, "could_be": num_drafts + 1}
        tell(f"one request, {num_drafts} drafts a step, all right: over off", on / off, "-", "x", **told)


def copy_bandwidth() -> float:
    """Return bytes a second that a copy of 4 GiB inside the card reads and writes together."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (copy_s,) = seconds(lambda: target.copy_(source), rounds=3)
    return 2 * source.nbytes / copy_s


def time_host(engine: OverlappedEngine, num_seqs: int, length: int) -> None:
    """Tell how much of the host's time a decoding step is behind the card; beside it, without planning ahead.

    The card's time a step is that between events before and behind all that the step queues. What the step takes longer
    than that is the host's that nothing hides; the host's whole time is the step's less what it waited for the result.
    """
    _time_host(engine, num_seqs, length, "planned ahead", ">= .95")
    engine.decide_in_order()
    _time_host(engine, num_seqs, length, "in order", "-")


def _time_host(engine: OverlappedEngine, num_seqs: int, length: int, how: str, asked: str) -> None:
    from pagefold.sampling import SamplingParams

    launch = engine.runner.launch
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    waited: list[float] = []

    def timed(plan: StepPlan) -> Callable[[], StepResult]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        wait = launch(plan)
        end.record()
        spans.append((begin, end))

        def land() -> StepResult:
            began = time.perf_counter()
            try:
                return wait()
            finally:
                waited.append(time.perf_counter() - began)

        return land

    for index, prompt in enumerate(prompts_of(num_seqs, length, 9)):
        engine.add(f"{how} {index}", prompt, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    while engine.scheduler.waiting or any(request.num_output_tokens < 4 for request in engine.scheduler.running):
        engine.step()
    engine.runner.launch = timed
    engine.step()
    engine.step()  # from here on each step that lands is one that was timed
    spans.clear()
    waited.clear()
    num_before = engine.num_ahead
    began = time.perf_counter()
    for _ in range(40):
        engine.step()
    wall_s = (time.perf_counter() - began) / 40
    num_ahead = engine.num_ahead - num_before
    del engine.runner.launch
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    card_s = statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in spans)
    host_s = wall_s - statistics.mean(waited)
    shown_s = max(0.0, wall_s - card_s)
    tell(
        f"host time of a decoding step behind the card, {how}",
        max(0.0, 1 - shown_s / host_s),
        asked,
        "",
        wall_ms=wall_s * 1e3,
        card_ms=card_s * 1e3,
        host_ms=host_s * 1e3,
        host_not_hidden_ms=shown_s * 1e3,
        steps_ahead=num_ahead,
    )


def peer_generate(big: Big, prompts: list[list[int]], num_outputs: int) -> float:
    """Return the tokens/s of transformers' batched ``generate``, its default attention (sdpa), one batch."""
    input_ids = torch.tensor(prompts, device="cuda")
    how = {"do_sample": False, "max_new_tokens": num_outputs, "min_new_tokens": num_outputs}
    big.model.generate(
        input_ids[:, :64],
        attention_mask=torch.ones_like(input_ids[:, :64]),
        **(how | {"max_new_tokens": 4, "min_new_tokens": 4}),
    )
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = big.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **how)
    torch.cuda.synchronize()
    return (out.shape[1] - input_ids.shape[1]) * len(prompts) / (time.perf_counter() - began)


def peer_generate_batch(big: Big, prompts: list[list[int]], num_outputs: int) -> float:
    """Return the tokens/s of transformers' continuous batching, ``generate_batch``, as its documentation calls it."""
    how = transformers.GenerationConfig(do_sample=False, max_new_tokens=num_outputs, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    outputs = big.model.generate_batch(inputs=prompts, generation_config=how)
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return num_tokens / (time.perf_counter() - began)


def main() -> None:
    """Check, time, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--minutes", type=float, default=9.0, help="what is not begun by then, less one, is left out")
    parser.add_argument("--small", action="store_true", help="half the layers")
    asked = parser.parse_args()
    card = find_card()
    choose_device("cuda", card)  # says what is missing
    assert card is not None
    deadline = BEGAN + 60 * (asked.minutes - 1)
    machine = {
        "card": card.name,
        "capability": card.capability,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": __import__("triton").__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "model": "Llama 3 8B's shape, half its layers" if asked.small else "Llama 3 8B's shape",
    }
    print(machine)
    big: Big | None = None

    def engines() -> None:
        nonlocal big
        big = Big(card, is_small=asked.small)
        time_engine(big, deadline)

    is_right = True
    parts = [check_kernels, check_codes, lambda _: check_tokens(), time_attention, time_codes, lambda _: time_restore()]
    for part in (*parts, lambda _: engines()):
        if time.monotonic() > deadline:
            tell("the rest", None, "-", "", why="no time left")
            break
        try:
            part(card)
        except Exception:  # noqa: BLE001 - the other parts still say something
            traceback.print_exc()
            is_right = False
        gc.collect()
        torch.cuda.empty_cache()
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine, "rows": ROWS}, indent=1, default=str), encoding="utf-8")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
