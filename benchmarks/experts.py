"""A mixture of experts on a CPU: 8 requests decoding through packed experts, and by transformers' own ``generate``.

Model: the shape of Qwen3-MoE with random weights, 8 of 64 experts a token; ``--layers``, ``--hidden`` and ``--experts``
make it smaller. Both sides have the same weights, the same dtype and the same prompts, which are of one length: 8 rows
of a static batch, which transformers decodes together, without a limit by memory. Greedy, no end of sequence.

Only decoding counts: of ours the steps in which all 8 requests get a token, of transformers the time of ``generate``
for all outputs less that for the first one. The engine goes first in even rounds and last in odd ones.

The limit is what a step must read over what all cores read from memory a second, measured before and behind each round
(``hardware/ceilings.py``): of every matrix outside the experts all, of the experts those that some token goes to, which
are counted. Nobody who reads weights of that size can be faster. KV is so short here that it is left out.

    python benchmarks/experts.py [--dtype bfloat16] [--quantization int4] [--layers 8] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hardware.ceilings import Ceilings
from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    import argparse

    from pagefold.engine.engine import Engine

NUM_REQUESTS, NUM_PROMPT = 8, 64
ASKED = 3.0
VOCAB_SIZE = 32_000
BYTES_A_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "w8a8_int8": 1.0, "int4": 0.625}
"""Of what is read; int8's scales, one a row, are left out."""


def save_model(folder: Path, args: argparse.Namespace) -> int:
    """Write the model with random weights; return its parameters."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        moe_intermediate_size=3 * args.hidden // 8,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 512),
        head_dim=128,
        num_experts=args.experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(one.numel() for one in model.parameters())


def build(folder: Path, args: argparse.Namespace) -> Engine:
    """Return an engine of ours."""
    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_memory_bytes=2**28,
        max_model_len=NUM_PROMPT + args.outputs + 1,
        max_num_batched_tokens=NUM_REQUESTS * NUM_PROMPT,
        enable_prefix_caching=False,
    )
    return build_engine(plan_engine(config))


def ours(engine: Engine, prompts: list[list[int]], num_outputs: int) -> list[float]:
    """Return the seconds of each step in which all requests decode."""
    from pagefold.sampling import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, how)
    steps = []
    while engine.has_requests:
        begin = time.perf_counter()
        deltas = engine.step()
        taken = time.perf_counter() - begin
        if len(deltas) == NUM_REQUESTS:
            steps.append(taken)
    return steps[1:]  # the first is the prompts'


def theirs(model: Any, prompts: list[list[int]], num_outputs: int) -> float:  # noqa: ANN401 - transformers' models have no common type
    """Return the seconds that transformers takes for a token of each prompt."""
    ids = torch.tensor(prompts)

    def generate(num_tokens: int) -> float:
        begin = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        return time.perf_counter() - begin

    first = generate(1)
    return (generate(num_outputs) - first) / (num_outputs - 1)


@torch.inference_mode()
def weights_of_a_step(model: Any, prompts: list[list[int]]) -> float:  # noqa: ANN401 - likewise
    """Return how many weights a decoding step needs: of the experts those that a token goes to, in the mean."""
    chosen: list[int] = []
    routers = [one for name, one in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, output: chosen.append(len(output[-1].unique())))
        for router in routers
    ]
    ids = torch.tensor(prompts)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    for hook in hooks:
        hook.remove()
    matrices = {name: one for name, one in model.named_parameters() if one.dim() > 1 and "embed_tokens" not in name}
    in_experts = {name: one for name, one in matrices.items() if ".experts." in name}
    share = statistics.mean(chosen[len(routers) :]) / model.config.num_experts  # the prompts come first
    dense = sum(one.numel() for name, one in matrices.items() if name not in in_experts)
    return dense + share * sum(one.numel() for one in in_experts.values())


def main() -> None:
    """Measure, and print the report."""
    arguments = parser(__doc__)
    arguments.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments.add_argument("--quantization", default=None, choices=("int8", "w8a8_int8", "int4"))
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--hidden", type=int, default=1024, help="a multiple of 512")
    arguments.add_argument("--experts", type=int, default=64)
    arguments.add_argument("--outputs", type=int, default=32, help="tokens a request")
    arguments.add_argument("--repeats", type=int, default=3)
    args = arguments.parse_args()
    from transformers import AutoModelForCausalLM

    from pagefold.runner.fused.formats import decoder_formats

    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT)] for _ in range(NUM_REQUESTS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_parameters = save_model(folder, args)
        engine = build(folder, args)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
        rounds_ours: list[float] = []
        rounds_theirs: list[float] = []
        num_bytes = weights_of_a_step(peer, prompts) * BYTES_A_WEIGHT[args.quantization or args.dtype]
        plain = decoder_formats("float32", None).products
        ceilings = Ceilings(plain)
        speeds = [ceilings.now().bytes_read]
        ours(engine, prompts, args.outputs)  # compiles, and takes pages of memory
        for number in track(range(args.repeats), "measuring", console=Console(stderr=True), transient=True):
            if number % 2:
                rounds_theirs.append(theirs(peer, prompts, args.outputs))
            rounds_ours.append(statistics.median(ours(engine, prompts, args.outputs)))
            if not number % 2:
                rounds_theirs.append(theirs(peer, prompts, args.outputs))
            speeds.append(ceilings.now().bytes_read)
        gap = difference(engine, peer, prompts[0])
    own, other = statistics.median(rounds_ours), statistics.median(rounds_theirs)
    ratio = other / own
    form = args.quantization or args.dtype
    least = num_bytes / statistics.median(speeds)
    rows = [
        Row("parameters, and experts a layer", "", f"{num_parameters / 1e9:.2f} G, 8 of {args.experts}"),
        Row(
            f"a decoding step of {NUM_REQUESTS} requests, transformers in {args.dtype}", "", f"{1e3 * other:.1f} ms",
            values={"rounds_s": rounds_theirs},
        ),
        Row(
            f"the same, packed in {form}", "", f"{1e3 * own:.1f} ms", values={"rounds_s": rounds_ours},
        ),
        Row(
            "tokens/s over transformers", f">= {ASKED:g} x", f"{ratio:.2f} x", ratio >= ASKED,
            {"ours_tokens_per_s": NUM_REQUESTS / own, "theirs_tokens_per_s": NUM_REQUESTS / other, "ratio": ratio},
        ),
        Row(
            f"the limit: a step that only reads its {num_bytes / 1e6:.0f} MB of weights, {1e3 * least:.1f} ms",
            "", f"{other / least:.2f} x", values={"bytes": num_bytes, "bytes_read_per_s": speeds},
        ),
        Row("largest difference of a prompt's logits, over their standard deviation", "", f"{gap:.3g}"),
    ]  # fmt: skip
    print_report("experts", rows, machine(), args.json)


@torch.inference_mode()
def difference(engine: Engine, peer: Any, prompt: list[int]) -> float:  # noqa: ANN401 - likewise
    """Return how far the logits behind a prompt are from transformers' own."""
    from array import array

    from pagefold.kv import BlockId, BlockTable
    from pagefold.sampling import SamplingParams
    from pagefold.steps import StepPlan

    plan = StepPlan(0)
    plan.token_ids, plan.starts, plan.num_tokens = array("i", prompt), [0], [len(prompt)]
    num_blocks = -(-len(prompt) // engine.runner.geometry.block_size)
    plan.tables = [[BlockTable(map(BlockId, range(num_blocks)))]]
    plan.residual_ids, plan.sampling_rows, plan.sampling = [0], [0], [SamplingParams(temperature=0.0)]
    plan.seeds, plan.draws = [0], [0]
    own = engine.runner.logits(plan)[0].float()
    other = peer(torch.tensor([prompt]), use_cache=False).logits[0, -1].float()
    return float((own - other).abs().max() / other.std())


if __name__ == "__main__":
    main()
