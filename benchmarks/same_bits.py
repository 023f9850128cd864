"""Whether two trees say the same to the bit: tokens, log-probabilities and what lies in the blocks afterwards.

Workload: the tiny models of the equivalence suite but those with windows, in float64 by the reference and in float32 at
the defaults, two of them short of memory and with codes too, and SmolLM2-135M-Instruct by the fused decoder and by
transformers. Each engine is asked eight prompts, half of them sampled, which share prefixes, in chunks of 64 tokens,
and then once more, warm. A case is two digests.

    python benchmarks/same_bits.py --json before.json                       in one tree, or with its src in PYTHONPATH
    python benchmarks/same_bits.py --compare before.json [--json FILE]      in the other
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Row, machine, parser, print_report
from rich.progress import track

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

LENGTHS = (5, 40, 130, 300, 17, 64, 200, 1)
SHARED, STEP = 200, 70
VOCAB_SIZE = 300
TINY = {
    "kv_cache_memory_bytes": 2**24,
    "max_model_len": 1024,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}
REFERENCE = TINY | {"dtype": "float64", "attention_backend": "reference"}
SHORT = REFERENCE | {"kv_cache_memory_bytes": 2**20, "max_model_len": 512}
REAL = {"kv_cache_memory_bytes": 2**27, "max_model_len": 2048, "max_num_batched_tokens": 256}
CODECS = ("int8_per_token_head", "int4_per_token_head", "kivi2")
SLABS = ("Slab", "CodecSlab", "SealedSlab")


def digests(model: str, settings: dict[str, Any], vocab_size: int) -> list[str]:
    """Return the digests of what an engine says, and of its blocks."""
    from pagefold import LLM, SamplingParams

    llm = LLM(model, **settings)
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab_size) for _ in range(SHARED)]
    said = hashlib.sha256()
    for _ in range(2):
        prompts, params = [], []
        for number, length in enumerate(LENGTHS):
            own = [rng.randrange(3, vocab_size) for _ in range(length)]
            prompts.append({"prompt_token_ids": shared[: number % 3 * STEP] + own})
            temperature = 0.0 if number % 2 else 0.8
            params.append(
                SamplingParams(temperature=temperature, seed=number, max_tokens=12, ignore_eos=True, logprobs=5)
            )
        for result in llm.generate(prompts, params, use_tqdm=False):
            (output,) = result.outputs
            said.update(repr((output.token_ids, output.logprobs)).encode())
    blocks = hashlib.sha256()
    for one in gc.get_objects():
        if type(one).__name__ in SLABS:
            for tensor in (one.data, getattr(one, "residuals", None)):
                if tensor is not None:
                    blocks.update(tensor.contiguous().flatten().view(_bytes_of_torch()).numpy().tobytes())
    llm.close()
    del llm
    gc.collect()
    return [said.hexdigest()[:16], blocks.hexdigest()[:16]]


def _bytes_of_torch() -> Any:  # noqa: ANN401 - torch is imported late
    import torch

    return torch.uint8


def cases(folder: Path) -> dict[str, tuple[str, dict[str, Any], int]]:
    """Return each case's model, settings and size of vocabulary."""
    from equivalence.tiny_models import FAMILIES, save_tiny_model

    plain = [family for family in FAMILIES if not family.startswith("gemma")]
    models = {family: str(save_tiny_model(family, folder / family)) for family in plain}
    found = {}
    for family, model in models.items():
        found[f"{family}, float64, reference"] = model, REFERENCE, VOCAB_SIZE
        found[f"{family}, float32"] = model, TINY, VOCAB_SIZE
    for family in plain[:2]:
        found[f"{family}, float64, short of memory"] = models[family], SHORT, VOCAB_SIZE
        for codec in CODECS:
            for impl in ("auto", "transformers"):
                settings = TINY | {"kv_cache_dtype": codec, "model_impl": impl}
                found[f"{family}, {codec}, model_impl {impl}"] = models[family], settings, VOCAB_SIZE
    for impl in ("auto", "transformers"):
        found[f"SmolLM2-135M, model_impl {impl}"] = "smollm2-135m", REAL | {"model_impl": impl}, 49_000
    return found


def main() -> None:
    """Digest all cases, and compare."""
    arguments = parser(__doc__)
    arguments.add_argument("--compare", metavar="FILE", help="what --json wrote in the other tree")
    args = arguments.parse_args()
    theirs = {}
    if args.compare:
        rows = json.loads(Path(args.compare).read_text(encoding="utf-8"))["rows"]
        theirs = {row["what"]: row["values"]["digests"] for row in rows if "digests" in row["values"]}
    rows, num_same = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, settings, vocab_size) in track(cases(Path(folder)).items(), "engines", transient=True):
            ours = digests(model, settings, vocab_size)
            same = theirs.get(name) == ours
            num_same += same
            asked = "the same" if theirs else ""
            rows.append(Row(name, asked, " ".join(ours), same if theirs else None, {"digests": ours}))
    if theirs:
        rows.append(Row("cases that are the same", str(len(rows)), str(num_same), num_same == len(rows)))
    print_report("same_bits", rows, machine(), args.json)


if __name__ == "__main__":
    main()
