"""What formats of numbers cost in quality: perplexity, divergence and the likeliest next token, against float32.

Workload: SmolLM2-135M-Instruct reads the texts that ``pagefold eval`` reads, public-domain speeches and a novel, cut
into contexts. An engine in float32 and one in each format read them in one process, teacher-forced and side by side,
by the harness of ``pagefold eval`` (see ``docs/quality.md``); nothing of a format is imitated. The divergence is
Kullback and Leibler's, of float32's distribution from the format's, over the whole vocabulary.

    bfloat16             weights, products and KV in bfloat16
    int8                 int8 weights, multiplied as float32
    w8a8_int8            weights and what is multiplied with them in int8; KV in float32
    w8a8_int8, bfloat16  the same, and KV in bfloat16
    as in the file       the 4-bit file that the weights came from (Q4_1), computed with as it is
    int4                 its numbers rounded to Q4_1 anew, by which these lose nothing: the rows' rounding again

The texts are fetched once, 9 MB: ``make texts``; ``--text`` reads a file instead. Formats that the processor has no
instruction for are computed by others, to the same bits.

    python benchmarks/format_quality.py [--contexts 8] [--context-len 2048] [--text FILE] [--json FILE]
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from pagefold.quality.result import SettingResult

MODEL = "smollm2-135m:Q4_1"
SETTINGS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "w8a8_int8": {"quantization": "w8a8_int8"},
    "w8a8_int8, bfloat16": {"quantization": "w8a8_int8", "dtype": "bfloat16"},
    "as in the file": {"quantization": None},
    "int4": {"quantization": "int4"},
}
ASKED = {"bfloat16": 1.001, "w8a8_int8": 1.008, "w8a8_int8, bfloat16": 1.008, "as in the file": 1.002}


def rows_of(one: SettingResult) -> list[Row]:
    """Return what one format made of the texts."""
    asked, change = ASKED.get(one.name), one.perplexity_change
    ratio, error = 1 + change.value, change.standard_error
    return [
        Row(
            f"{one.name}: perplexity over float32's",
            "" if asked is None else f"<= {asked:g}",
            f"{ratio:.4f}" if error is None else f"{ratio:.4f} ± {error:.4f}",
            None if asked is None else ratio <= asked,
            {"ratio": ratio, "standard_error": error, "perplexity": one.perplexity},
        ),
        Row(
            f"{one.name}: positions with the same likeliest token",
            "",
            f"{one.top1_agreement.value:.2%}",
            values={"share": one.top1_agreement.value},
        ),
        Row(
            f"{one.name}: KL divergence, nats",
            "",
            f"{one.kl.value:.2g}; 99 % of positions below {one.kl_99:.2g}",
            values={"kl": one.kl.value, "kl_99": one.kl_99, "kl_max": one.kl_max},
        ),
    ]


def main() -> None:
    """Measure and report."""
    from pagefold.config import EngineConfig, cache_dir
    from pagefold.quality.evaluate import Question, evaluate
    from pagefold.quality.setting import Setting
    from pagefold.quality.texts import fetch_default_texts, read_text

    arguments = parser(__doc__)
    arguments.add_argument("--contexts", type=int, default=8)
    arguments.add_argument("--context-len", type=int, default=2048)
    arguments.add_argument("--text", type=Path, metavar="FILE", help="read this instead")
    args = arguments.parse_args()
    where = machine()
    question = Question(
        [Setting(name, overrides) for name, overrides in SETTINGS.items()],
        [read_text(args.text)] if args.text else fetch_default_texts(cache_dir()),
        args.context_len,
        args.contexts,
        num_greedy_tokens=0,
        num_haystacks=0,
    )
    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("")
        found = evaluate(
            EngineConfig(model=MODEL, dtype="float32", quantization="none"),
            question,
            progress=lambda what, done, total: shown.update(task, description=what, completed=done, total=total),
        )
    exact = found.exact_perplexity.value
    rows = [
        Row("positions read", "", f"{found.num_tokens:,}", values={"positions": found.num_tokens, "text": found.text}),
        Row("float32: perplexity", "", f"{exact:.3f}", values={"perplexity": exact}),
        *(row for one in found.settings for row in rows_of(one)),
    ]
    print_report("format_quality", rows, where, args.json)


if __name__ == "__main__":
    main()
