"""What an engine gains that keeps a share of older tokens (``kv_keep``), beside the same engine that keeps all.

SmolLM2-135M-Instruct in float32 on State of the Union addresses and Moby-Dick; where times are compared both engines
take turns, step by step, so that a slow moment is slow for both. The scorer is calibrated first, if it is not kept yet.

* decode attention: seconds of the decoder's phases that pack, attend and merge, in steps in which all requests decode;
  32 requests of 4,096 tokens, and 16 of nearly 8,192. Phases are timed by the decoder itself, by both threads together.
* prefill: a prompt of 8,000 tokens, all of its steps; and what share of it packing takes.
* requests at once: how many run together in one budget, over HTTP, the mean of steps behind which others waited; of
  4,096 tokens and of 8,192, with KV in bfloat16, and in int8 in half of that budget. The formula counts the blocks of
  what is seen whole, and of older chunks so many as ``usage`` says were kept: what units leave empty is in that.
* warm and cold: outputs of prompts whose prefix an earlier request has left, beside those of an engine without prefix
  caching, which has steps of another size.
* mixed: outputs of exact requests that run beside as many of the same prompts that keep a share, beside those of an
  engine that offers nothing else.

    python benchmarks/kept_tokens.py [--only PART] [--num-steps 16] [--num-prompts 20] [--keep 0.5] [--places 6]
        [--json FILE]
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from plan_concurrency import Server
from report import Row, machine, parser, print_report
from rich.progress import Progress, track

from pagefold.bench import LoadSettings, Prompt, run_load
from pagefold.bench.client import Client
from pagefold.cli.fit_scorer import ensure_scorer
from pagefold.cli.models import progress_bar
from pagefold.config import EngineConfig, cache_dir
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.hub.catalog import resolve
from pagefold.masks.rule import CHUNK
from pagefold.quality.reserved import for_evaluating
from pagefold.quality.texts import fetch_default_texts
from pagefold.request import Caller
from pagefold.runner.fused.decoder import FusedDecoder
from pagefold.sampling import SamplingParams
from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.engine.engine import Engine

MODEL = "smollm2-135m"
ATTENTION = ("seal", "attention", "merge")
LONG, SHORT = 8192, 4096
PREFILLED = 8000
TOKEN_BYTES = 46_080
"""Of KV in float32."""
AT_A_TIME = 4
"""Warm prompts that run together, and prompts of each kind, where kinds are mixed."""
_PATIENCE_S = 3600.0
"""The last of those that are sent at once waits for all others."""
ROOM_TO_ANSWER = 200
"""Tokens of an answer: so long that others are computed meanwhile, until memory is short."""
ASKED_OF_DECODING = {SHORT: 0.70, LONG: 0.65}
ASKED_OF_PREFILL, ASKED_OF_PACKING = 0.85, 0.03
ASKED_AT_ONCE, ASKED_OF_INT8, ASKED_OF_FORMULA = {0.5: 1.55, 0.25: 2.4}, 1.85, 0.9


class Texts:
    """Contexts of the default texts, without what scorers are calibrated on."""

    def __init__(self, seed: int) -> None:
        folder = resolve(MODEL, cache_dir())
        tokenizer, self._random = Tokenizer(folder), Random(seed)
        texts = for_evaluating(fetch_default_texts(cache_dir()))
        self._tokenizer = tokenizer
        self._tokens = [tokenizer.encode(text.content) for text in texts]

    def take(self, length: int) -> list[int]:
        """Return so many tokens of any of them, from any place on."""
        tokens = self._random.choice([one for one in self._tokens if len(one) > length])
        first = self._random.randrange(len(tokens) - length)
        return list(tokens[first : first + length])

    def take_text(self, length: int) -> str:
        """Return the text of as many."""
        return self._tokenizer.decode(self.take(length))


@dataclass
class Bench:
    """An engine that is stepped beside another.

    Attributes:
        engine: as it is.
        outputs: token ids by request.
        cached: tokens of the prompt that were found, by request.
    """

    engine: Engine
    outputs: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, prompt: list[int], num_out: int, keep: float | None = None) -> None:
        """Let a request come, of a kind that the engine offers."""
        self.outputs[name] = []
        how = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        self.engine.add(name, prompt, how, Caller(kv_keep=keep))

    def step(self) -> int:
        """Run a step, if there is anything to do; return how many requests got a token."""
        if not self.engine.has_work:
            return 0
        deltas = self.engine.step()
        for delta in deltas:
            self.outputs[delta.request_id] += delta.token_ids
            self.cached[delta.request_id] = delta.num_cached_tokens
        return len(deltas)

    def phases(self) -> dict[str, float]:
        """Return the seconds of the last step's phases."""
        decoder = self.engine.runner.decoder
        assert isinstance(decoder, FusedDecoder), "the fused decoder tells its phases"
        return decoder.profile()


def _shares(keep: float | None) -> tuple[float, ...]:
    """Return the share that an engine keeps, or none."""
    return () if keep is None else (keep,)


def make(keep: float | None, **settings: object) -> Bench:
    """Return an engine that keeps a share, or all."""
    return offering(_shares(keep), **settings)


def offering(shares: tuple[float, ...], **settings: object) -> Bench:
    """Return an engine that offers so large shares; none keep all."""
    settings.setdefault("dtype", "float32")
    config = EngineConfig(model=MODEL, kv_keep=shares, kv_quality_floor=0.0, **settings)  # type: ignore[arg-type]
    return Bench(build_engine(plan_engine(config), say=lambda _: None))


def of_attention(phases: dict[str, float]) -> float:
    """Return the seconds of attention in a step."""
    return sum(phases[name] for name in ATTENTION)


def decoding(keep: float, length: int, num: int, num_steps: int, texts: Texts) -> Row:
    """Compare attention in steps in which so many requests of one length decode."""
    budget = num * (length + 64) * TOKEN_BYTES * 5 // 4
    num_before = num * -(-length // SHORT) + 2  # steps in which the first ones decode, and others are computed
    benches = [
        make(
            share, kv_cache_memory_bytes=budget, max_model_len=LONG, max_num_seqs=num, max_num_batched_tokens=SHORT,
            enable_prefix_caching=False,
        )
        for share in (None, keep)
    ]  # fmt: skip
    for at in range(num):
        prompt = texts.take(length - num_before - num_steps - 8)
        for bench in benches:
            bench.add(str(at), prompt, num_before + num_steps)
    ratios: list[float] = []
    for _ in track(_until_done(benches), f"decoding, {num} of {length:,} tokens", total=None):
        seconds = []
        for bench in benches:
            got = bench.step()
            seconds.append(of_attention(bench.phases()) if got == num else 0.0)
        if all(seconds):
            ratios.append(seconds[1] / seconds[0])
    del ratios[:1]  # there the last one's prompt is computed
    ratio, asked = statistics.median(ratios), ASKED_OF_DECODING[length]
    return Row(
        f"decode attention, {num} x {length:,} tokens, {1 - keep:.0%} removed, of all kept",
        f"<= {asked:.2f} x",
        f"{ratio:.2f} x ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} steps)",
        ratio <= asked,
        {"ratios": ratios},
    )


def _until_done(benches: list[Bench]) -> Iterator[None]:
    while any(bench.engine.has_work for bench in benches):
        yield


def prefilling(keep: float, texts: Texts, repeats: int = 3) -> list[Row]:
    """Compare the prefill of a long prompt."""
    benches = [
        make(share, kv_cache_memory_bytes=2**30, max_model_len=LONG, enable_prefix_caching=False)
        for share in (None, keep)
    ]
    ratios, shares = [], []
    for at in track(range(repeats + 1), "prefill"):
        prompt, taken, packing = texts.take(PREFILLED), [0.0, 0.0], 0.0
        for bench in benches:
            bench.add(str(at), prompt, 1)
        while any(bench.engine.has_work for bench in benches):
            for number, bench in enumerate(benches):
                if bench.engine.has_work:
                    bench.step()
                    phases = bench.phases()
                    taken[number] += sum(phases.values())
                    packing += phases["seal"]
        if at:  # the first takes new pages of memory
            ratios.append(taken[1] / taken[0])
            shares.append(packing / taken[1])
    ratio, share = statistics.median(ratios), statistics.median(shares)
    return [
        Row(
            f"prefill of {PREFILLED:,} tokens, {1 - keep:.0%} removed, of all kept",
            f"<= {ASKED_OF_PREFILL:.2f} x",
            f"{ratio:.2f} x ({min(ratios):.2f} to {max(ratios):.2f})",
            ratio <= ASKED_OF_PREFILL,
            {"ratios": ratios},
        ),
        Row(
            "packing, of such a prefill",
            f"<= {ASKED_OF_PACKING:.0%}",
            f"{share:.1%}",
            share <= ASKED_OF_PACKING,
            {"shares": shares},
        ),
    ]


@dataclass(frozen=True)
class Reached:
    """What a server came to.

    Attributes:
        running: requests at once, while others waited.
        formula: how many the budget holds, at the mean length of those that decode.
        kept_share: that ``usage`` tells of older chunks; 1 where all is kept.
    """

    running: float
    formula: float
    kept_share: float


def serve(keep: float | None, length: int, texts: Texts, budget: int, kv_cache_dtype: str = "bfloat16") -> Reached:
    """Return how many requests of one length run at once on a server."""
    config = EngineConfig(
        model=MODEL, dtype="float32", kv_keep=_shares(keep), kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=budget,
        max_model_len=LONG, max_num_batched_tokens=1024, enable_prefix_caching=False, kv_quality_floor=0.0,
    )  # fmt: skip
    server = Server(config)
    num_blocks = server.client.status().num_blocks
    num_prompt = length - ROOM_TO_ANSWER - 8  # a text's tokens may be a few more
    num = max(6, int(3 * num_blocks * 16 / length / (1 if keep is None else keep + 0.2)))
    prompts = [Prompt(texts.take_text(num_prompt), ROOM_TO_ANSWER) for _ in range(num)]
    try:
        usage = asyncio.run(_send(server.url, prompts))
        share = 1.0 if keep is None else float(usage["kv_kept_share"])
        running = server.reached()
    finally:
        server.close()
    blocks = [_blocks_of(n, share, packs=keep is not None) for n in range(num_prompt, num_prompt + ROOM_TO_ANSWER)]
    return Reached(running, num_blocks / statistics.mean(blocks), share)


def _blocks_of(num_tokens: int, share: float, *, packs: bool) -> float:
    """Return how many blocks of 16 tokens a sequence takes, of whose older chunks a share is kept."""
    num_older = max(0, num_tokens // CHUNK - 1) * CHUNK if packs else 0
    return -(-(num_tokens - num_older) // 16) + share * num_older / 16


async def _send(url: str, prompts: list[Prompt]) -> dict[str, Any]:
    """Send all prompts at once; return what ``usage`` tells of one of them."""
    client = Client(url, ignore_eos=True, timeout_s=_PATIENCE_S)
    await client.find_model()
    load = LoadSettings(max_concurrency=len(prompts))
    with Progress() as progress:
        task = progress.add_task("requests at once", total=len(prompts))
        result = await run_load(client, prompts, load, on_done=lambda _: progress.advance(task))
    failed = [record.error for record in result.records if record.error]
    assert not failed, failed[0]
    body = {"model": client.model, "prompt": prompts[0].text, "max_tokens": 1, "temperature": 0}
    answer = await client.http.post("/v1/completions", json=body)
    await client.close()
    return dict(answer.json()["usage"])


def at_once(texts: Texts, places: int) -> list[Row]:
    """Compare how many requests run together in one budget.

    Args:
        texts: of the prompts.
        places: requests of 4,096 tokens that fit into the budget if all is kept, in 16 bit.
    """
    budget = places * SHORT * TOKEN_BYTES // 2
    rows = []
    for length, keeps in ((SHORT, (0.5, 0.25)), (LONG, (0.5,))):
        budget_of = budget * length // SHORT
        exact = serve(None, length, texts, budget_of)
        for keep in keeps:
            kept = serve(keep, length, texts, budget_of)
            asked = ASKED_AT_ONCE[keep] if length == SHORT else None
            rows.append(_compared(f"requests of {length:,} tokens at once, {1 - keep:.0%} removed", kept, exact, asked))
            of_formula = kept.running / kept.formula
            rows.append(
                Row(
                    "  of what the formula with units says",
                    f">= {ASKED_OF_FORMULA}",
                    f"{of_formula:.2f} ({kept.formula:.1f}; {kept.kept_share:.0%} of older blocks kept)",
                    of_formula >= ASKED_OF_FORMULA,
                    {"formula": kept.formula, "kept_share": kept.kept_share},
                )
            )
            if length == SHORT:
                coded = serve(keep, length, texts, budget_of // 2, "int8_per_token_head")
                twice = Reached(2 * coded.running, 2 * coded.formula, coded.kept_share)
                rows.append(_compared("  with int8 besides, of these", twice, kept, ASKED_OF_INT8))
    return rows


def _compared(what: str, ours: Reached, theirs: Reached, asked: float | None) -> Row:
    ratio = ours.running / theirs.running
    return Row(
        what,
        "" if asked is None else f">= {asked} x",
        f"{ratio:.2f} x ({ours.running:.1f}, and {theirs.running:.1f})",
        None if asked is None else ratio >= asked,
        {"running": [ours.running, theirs.running]},
    )


def warm_and_cold(keep: float, texts: Texts, num: int) -> Row:
    """Count outputs that tell whether their prefix was cached, who ran beside them, or of how many tokens steps were.

    Cold ones are computed alone. Warm ones go on from what others have left, several at once. All in bfloat16, where
    another order of sums would show soonest.
    """
    shared = {"kv_cache_memory_bytes": 2**31, "max_model_len": LONG, "dtype": "bfloat16"}
    cold = make(keep, **shared, enable_prefix_caching=False, max_num_batched_tokens=2048, max_num_seqs=1)
    warm = make(keep, **shared)
    random, num_tokens = Random(0), 0
    for first in track(range(0, num, AT_A_TIME), "warm and cold"):
        prompts = {
            str(at): texts.take(min(600 + int(random.expovariate(1 / 250)), 3000))
            for at in range(first, min(num, first + AT_A_TIME))
        }
        for name, prompt in prompts.items():
            warm.add(f"before {name}", prompt[: random.randrange(560, len(prompt))], 1)
        while warm.engine.has_work:
            warm.step()
        for name, prompt in prompts.items():
            num_tokens += len(prompt)
            for bench in (cold, warm):
                bench.add(name, prompt, 16)
        for _ in _until_done([cold, warm]):
            cold.step()
            warm.step()
    differ = sum(cold.outputs[str(at)] != warm.outputs[str(at)] for at in range(num))
    found = sum(warm.cached[str(at)] for at in range(num)) / num_tokens
    told = f"{differ} of {num} (of whose prompts {found:.0%} was found)"
    return Row("outputs that differ, warm and cold", "0", told, differ == 0)


def mixed(keep: float, texts: Texts, num: int) -> Row:
    """Count outputs of exact requests that tell who ran beside them."""
    shared = {"kv_cache_memory_bytes": 2**31, "max_model_len": LONG}
    alone, beside = make(None, **shared), offering((1, keep), **shared)
    random = Random(1)
    for first in track(range(0, num, AT_A_TIME), "mixed"):
        for at in range(first, min(num, first + AT_A_TIME)):
            prompt = texts.take(random.randrange(600, 3000))
            for bench in (alone, beside):
                bench.add(f"{at}", prompt, 24)
            beside.add(f"{at} kept", prompt, 24, keep)
        for _ in _until_done([alone, beside]):
            alone.step()
            beside.step()
    differ = sum(alone.outputs[str(at)] != beside.outputs[str(at)] for at in range(num))
    others = sum(beside.outputs[f"{at} kept"] != beside.outputs[str(at)] for at in range(num))
    told = f"{differ} of {num} (of those that keep a share {others} differ)"
    return Row("exact outputs that differ, beside requests that keep a share", "0", told, differ == 0)


def main() -> None:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("--only", choices=("prefill", "decode", "at-once", "warm", "mixed"), help="a part of it")
    made.add_argument("--num-steps", type=int, default=16, help="steps in which all decode")
    made.add_argument(
        "--num-prompts", type=int, default=20, help="prompts that are computed warm and cold, or by all kinds"
    )
    made.add_argument(
        "--places", type=int, default=6, help="requests of 4,096 tokens that servers have room for if all is kept"
    )
    made.add_argument(
        "--keep",
        type=float,
        default=0.5,
        help="the share of older tokens that is kept; requests at once always take 0.5 and 0.25",
    )
    asked = made.parse_args()
    with progress_bar() as progress:
        ensure_scorer(MODEL, progress)
    texts, rows = Texts(0), []
    if asked.only in (None, "prefill"):
        rows += prefilling(asked.keep, texts)
    if asked.only in (None, "at-once"):
        rows += at_once(texts, asked.places)
    if asked.only in (None, "warm"):
        rows.append(warm_and_cold(asked.keep, texts, asked.num_prompts))
    if asked.only in (None, "mixed"):
        rows.append(mixed(asked.keep, texts, asked.num_prompts))
    if asked.only in (None, "decode"):
        rows.append(decoding(asked.keep, SHORT, 32, asked.num_steps, texts))
        rows.append(decoding(asked.keep, LONG, 16, asked.num_steps, texts))
    print_report("kept tokens", rows, machine(), asked.json)


if __name__ == "__main__":
    main()
