"""What int8 weights cost in quality: perplexity and the likeliest next token, against float32 weights.

Workload: SmolLM2-135M-Instruct reads this project's own documents, in pieces of 512 tokens, with ``prompt_logprobs``:
once with float32 matrices, once with ``quantization="int8"`` (rounded symmetrically, one scale an output channel). The
text is English about software, not what a published perplexity is measured on: the ratio of the two is what counts.

    python benchmarks/int8_quality.py [--pieces 32] [--json FILE]
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTH = 512
TEXTS = ("ARCHITECTURE.md", "README.md", "GLOSSARY.md", "docs/server.md", "docs/configuration.md", "docs/testing.md")


def read(quantization: str | None, num_pieces: int) -> tuple[list[float], list[int]]:
    """Return the logprob of each token but the first of each piece, and the likeliest token there."""
    from pagefold import LLM, SamplingParams

    llm = LLM("smollm2-135m", kv_cache_memory_bytes=2**30, max_model_len=1024, quantization=quantization)
    root = Path(__file__).parent.parent
    token_ids = llm.engine.tokenizer.encode("\n\n".join((root / name).read_text(encoding="utf-8") for name in TEXTS))
    pieces = [token_ids[at : at + LENGTH] for at in range(0, len(token_ids) - LENGTH, LENGTH)][:num_pieces]
    how = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    results = llm.generate([{"prompt_token_ids": piece} for piece in pieces], how, use_tqdm=False)
    logprobs: list[float] = []
    likeliest: list[int] = []
    for piece, result in zip(pieces, results, strict=True):
        told = result.prompt_logprobs or []
        for token_id, found in zip(piece[1:], told[1:], strict=True):
            assert found is not None
            logprobs.append(found[token_id].logprob)
            likeliest.append(next(one for one, logprob in found.items() if logprob.rank == 1))
    return logprobs, likeliest


def perplexity(logprobs: Sequence[float]) -> float:
    """Return the exponential of the mean surprise."""
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--pieces", type=int, default=32)
    args = arguments.parse_args()
    where = machine()
    plain, plain_tokens = read(None, args.pieces)
    rounded, rounded_tokens = read("int8", args.pieces)
    ratio = perplexity(rounded) / perplexity(plain)
    same = sum(a == b for a, b in zip(plain_tokens, rounded_tokens, strict=True)) / len(plain_tokens)
    rows = [
        Row("tokens read", "", f"{len(plain):,}", values={"tokens": len(plain)}),
        Row("perplexity, float32", "", f"{perplexity(plain):.3f}", values={"perplexity": perplexity(plain)}),
        Row("perplexity, int8", "", f"{perplexity(rounded):.3f}", values={"perplexity": perplexity(rounded)}),
        Row("int8 / float32", "", f"{ratio:.4f}", values={"ratio": ratio}),
        Row("positions where both find the same token likeliest", "", f"{same:.1%}", values={"share": same}),
    ]
    print_report("int8_quality", rows, where, args.json)


if __name__ == "__main__":
    main()
