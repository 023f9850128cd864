"""What a JSON schema costs: output tokens a second with one against without, and what grammars cost by themselves.

Workload: MODEL in float32, 8 requests at once, each a chat that asks for a record, 128 output tokens each, greedy, with
``ignore_eos``. ``json`` has a schema of nested objects, enums, bounded numbers and an array so long that every request
gives as many tokens as ``free`` does (checked: one that ends sooner is an error). Prompts are made anew in each repeat,
alike on both sides, and the prefix cache is off. Both are run in every repeat, in turns first and second; the ratio of
each repeat is of its two runs; medians.

By itself, on the same vocabulary: compiling a schema that was not seen before, with and without the process that vets
it, and a mask with the token before it, by llguidance; and by xgrammar where that is installed.

    python benchmarks/structured_output.py [--model smollm2-135m] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold import LLM

NUM_REQUESTS = 8
NUM_OUTPUT_TOKENS = 128
ASKED = 0.9
NUM_SCHEMAS = 20
NUM_MASKS = 400


def schema(number: int) -> dict[str, Any]:
    """Return a schema that no other number has; its array lets an output go on."""
    entry = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["person", "place", "thing", f"kind {number}"]},
            "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "kind", "year", "score", "tags"],
        "additionalProperties": False,
    }
    record = {
        "type": "object",
        "properties": {"title": {"type": "string", "maxLength": 24}, "entries": {"type": "array", "items": entry}},
        "required": ["title", "entries"],
        "additionalProperties": False,
    }
    record["properties"]["entries"]["minItems"] = 1000  # type: ignore[index]
    return record


def chats(llm: LLM, rng: random.Random) -> list[dict[str, Any]]:
    """Return 8 prompts, fresh ones."""
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    asks = (f"List what you know of number {rng.randrange(10**6)}, as a JSON record." for _ in range(NUM_REQUESTS))
    return [{"prompt_token_ids": tokenizer.encode_chat([{"role": "user", "content": ask}])} for ask in asks]


def rate(llm: LLM, prompts: list[dict[str, Any]], wish: Any) -> float:  # noqa: ANN401 - params or None
    """Return output tokens a second."""
    from pagefold import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, structured_outputs=wish)
    start = time.perf_counter()
    results = llm.generate(prompts, how, use_tqdm=False)
    elapsed = time.perf_counter() - start
    counts = [len(result.outputs[0].token_ids) for result in results]
    if counts != [NUM_OUTPUT_TOKENS] * NUM_REQUESTS:
        msg = f"Outputs have {counts} tokens; the figure needs {NUM_OUTPUT_TOKENS} of each."
        raise SystemExit(msg)
    return sum(counts) / elapsed


def decoding(llm: LLM, repeats: int) -> list[Row]:
    """Measure tokens a second, with and without a schema."""
    from pagefold import StructuredOutputsParams

    wish = StructuredOutputsParams(json=schema(0))
    rng = random.Random(1)
    rates: dict[str, list[float]] = {"free": [], "json": []}
    for repeat in track(range(-1, repeats), description="decoding", console=Console(stderr=True)):
        prompts = chats(llm, rng)
        sides = [("free", None), ("json", wish)]
        for name, asked in sides if repeat % 2 else reversed(sides):
            got = rate(llm, prompts, asked)
            if repeat >= 0:
                rates[name].append(got)
    ratios = [ours / free for ours, free in zip(rates["json"], rates["free"], strict=True)]
    free, ours = (statistics.median(rates[name]) for name in ("free", "json"))
    ratio = statistics.median(ratios)
    what = f"{NUM_REQUESTS} requests, tokens/s: JSON schema {ours:.0f} over free {free:.0f}"
    return [Row(what, f">= {ASKED} x", f"{ratio:.3f} x", ratio >= ASKED, {"ratios": ratios, "rates": rates})]


def milliseconds(what: Callable[[], object]) -> float:
    """Return how long ``what`` takes."""
    start = time.perf_counter()
    what()
    return (time.perf_counter() - start) * 1e3


def by_itself(llm: LLM) -> list[Row]:
    """Measure compiling and masks."""
    from pagefold import StructuredOutputsParams
    from pagefold.structured.grammar import Grammar, GrammarTokenizer, grammar_source

    limits, tokenizer = llm.engine.limits, llm.engine.tokenizer
    assert tokenizer is not None
    many = [StructuredOutputsParams(json=schema(number)) for number in range(1, NUM_SCHEMAS + 1)]
    vetted = [milliseconds(lambda params=params: llm.engine.compile_grammar(params)) for params in many]
    vocabulary = GrammarTokenizer(tokenizer.to_json(), limits.vocab_size, limits.eos_token_ids)
    sources = [grammar_source(params) for params in many]
    alone = [milliseconds(lambda source=source: Grammar(source, vocabulary)) for source in sources]
    matcher = Grammar(sources[0], vocabulary).matcher(ignore_eos=True)

    def step() -> None:
        matcher.accept(one_of(matcher.mask(), rng))

    rng = random.Random(0)
    masks = [milliseconds(step) for _ in range(NUM_MASKS)]
    rows = [
        Row("a new schema: vetted and compiled, median ms", "", f"{statistics.median(vetted):.1f}"),
        Row("a new schema: compiled by llguidance, median ms", "", f"{statistics.median(alone):.2f}"),
        _mask_row("llguidance", masks),
    ]
    return rows + by_xgrammar(llm, many)


def by_xgrammar(llm: LLM, many: list[Any]) -> list[Row]:
    """Measure the other library, with its cache of whole schemas off, as every schema is new."""
    try:
        import xgrammar
    except ImportError:
        return [Row("xgrammar", "", "not installed")]
    from transformers import PreTrainedTokenizerFast

    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    from tokenizers import Tokenizer

    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.to_json()))
    info = xgrammar.TokenizerInfo.from_huggingface(
        fast, vocab_size=llm.engine.limits.vocab_size, stop_token_ids=list(llm.engine.limits.eos_token_ids)
    )
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False, max_threads=1)
    compiled = [
        milliseconds(lambda params=params: compiler.compile_json_schema(json.dumps(params.json))) for params in many
    ]
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(many[0].json)))
    mask = xgrammar.allocate_token_bitmask(1, llm.engine.limits.vocab_size)
    matcher.fill_next_token_bitmask(mask)
    rng = random.Random(0)

    def step() -> None:
        matcher.accept_token(one_of(mask.numpy().tobytes(), rng))
        matcher.fill_next_token_bitmask(mask)

    masks = [milliseconds(step) for _ in range(NUM_MASKS)]
    return [
        Row("a new schema: compiled by xgrammar, median ms", "", f"{statistics.median(compiled):.2f}"),
        _mask_row("xgrammar", masks),
    ]


def _mask_row(library: str, masks: list[float]) -> Row:
    median, mean, most = statistics.median(masks) * 1e3, statistics.mean(masks) * 1e3, max(masks) * 1e3
    got = f"{median:.0f}, {mean:.0f}, {most:.0f}"
    return Row(f"a token and the next mask, {library}, median, mean, most in microseconds", "", got)


def one_of(mask: bytes, rng: random.Random) -> int:
    """Return a random token of a mask: the first from a random place on."""
    bits = int.from_bytes(mask, "little")
    place = rng.randrange(len(mask) * 8)
    bits = bits >> place << place or bits
    return (bits & -bits).bit_length() - 1


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()

    from pagefold import LLM

    llm = LLM(args.model, dtype="float32", kv_cache_memory_bytes=2**28, max_model_len=512, enable_prefix_caching=False)
    print_report("structured_output", by_itself(llm) + decoding(llm, args.repeats), machine(), args.json)


if __name__ == "__main__":
    main()
