"""What an engine gains that keeps a share of older tokens (``kv_keep``), beside the same engine that keeps all.

SmolLM2-135M-Instruct in float32 on State of the Union addresses and Moby-Dick, in this process; both engines take
turns, step by step, so that a slow moment is slow for both. The scorer is calibrated first, if it is not kept yet.

* decode attention: seconds of the decoder's phases that pack, attend and merge, in steps in which all requests decode;
  32 requests of 4,096 tokens, and 16 of nearly 8,192. Phases are timed by the decoder itself, by both threads together.
* prefill: a prompt of 8,000 tokens, all of its steps; and what share of it packing takes.
* requests at once: how many requests of 4,096 tokens run together in one budget, at the most.
* warm and cold: outputs of prompts whose prefix an earlier request has left, beside those of an engine without prefix
  caching, which has steps of another size.

    python benchmarks/kept_tokens.py [--num-steps 16] [--num-prompts 20] [--keep 0.5] [--json FILE]
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report
from rich.progress import track

from pagefold.cli.fit_scorer import fit_scorer
from pagefold.cli.models import progress_bar
from pagefold.config import EngineConfig, cache_dir
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.hub.catalog import resolve
from pagefold.masks.calibration import kept_scorer
from pagefold.quality.reserved import for_evaluating
from pagefold.quality.texts import fetch_default_texts
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
BUDGET_BYTES = 2**30
"""Of the engines that are asked how many requests run at once."""
ASKED_OF_DECODING = {SHORT: 0.70, LONG: 0.65}
ASKED_OF_PREFILL, ASKED_OF_PACKING, ASKED_AT_ONCE = 0.85, 0.03, {0.5: 1.55, 0.25: 2.4}


class Texts:
    """Contexts of the default texts, without what scorers are calibrated on."""

    def __init__(self, seed: int) -> None:
        folder = resolve(MODEL, cache_dir())
        tokenizer, self._random = Tokenizer(folder), Random(seed)
        texts = for_evaluating(fetch_default_texts(cache_dir()))
        self._tokens = [tokenizer.encode(text.content) for text in texts]

    def take(self, length: int) -> list[int]:
        """Return so many tokens of any of them, from any place on."""
        tokens = self._random.choice([one for one in self._tokens if len(one) > length])
        first = self._random.randrange(len(tokens) - length)
        return list(tokens[first : first + length])


@dataclass
class Bench:
    """An engine that is stepped beside another.

    Attributes:
        engine: as it is.
        outputs: token ids by request.
        most_running: requests at once, at the most.
    """

    engine: Engine
    outputs: dict[str, list[int]] = field(default_factory=dict)
    most_running: int = 0

    def add(self, name: str, prompt: list[int], num_out: int) -> None:
        """Let a request come."""
        self.outputs[name] = []
        how = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        self.engine.add(name, prompt, how)

    def step(self) -> int:
        """Run a step, if there is anything to do; return how many requests got a token."""
        if not self.engine.has_work:
            return 0
        deltas = self.engine.step()
        self.most_running = max(self.most_running, len(self.engine.scheduler.running))
        for delta in deltas:
            self.outputs[delta.request_id] += delta.token_ids
        return len(deltas)

    def phases(self) -> dict[str, float]:
        """Return the seconds of the last step's phases."""
        decoder = self.engine.runner.decoder
        assert isinstance(decoder, FusedDecoder), "the fused decoder tells its phases"
        return decoder.profile()


def make(keep: float | None, **settings: object) -> Bench:
    """Return an engine that keeps a share, or all."""
    config = EngineConfig(model=MODEL, dtype="float32", kv_keep=keep, **settings)  # type: ignore[arg-type]
    return Bench(build_engine(plan_engine(config), say=lambda _: None))


def of_attention(phases: dict[str, float]) -> float:
    """Return the seconds of attention in a step."""
    return sum(phases[name] for name in ATTENTION)


def decoding(keep: float, length: int, num: int, num_steps: int, texts: Texts) -> Row:
    """Compare attention in steps in which so many requests of one length decode."""
    budget = num * (length + 64) * 46_080 * 5 // 4
    benches = [
        make(share, kv_cache_memory_bytes=budget, max_model_len=LONG, max_num_seqs=num, enable_prefix_caching=False)
        for share in (None, keep)
    ]
    for at in range(num):
        prompt = texts.take(length - num_steps - 8)
        for bench in benches:
            bench.add(str(at), prompt, num_steps + 4)
    ratios: list[float] = []
    for _ in track(_until_done(benches), f"decoding, {num} of {length:,} tokens", total=None):
        seconds = []
        for bench in benches:
            got = bench.step()
            seconds.append(of_attention(bench.phases()) if got == num else 0.0)
        if all(seconds):
            ratios.append(seconds[1] / seconds[0])
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


def at_once(keep: float, texts: Texts, num: int = 24) -> Row:
    """Compare how many requests run together in one budget."""
    most = []
    prompts = [texts.take(SHORT - 40) for _ in range(num)]
    for share in (None, keep):
        bench = make(share, kv_cache_memory_bytes=BUDGET_BYTES, max_model_len=SHORT, enable_prefix_caching=False)
        for at, prompt in enumerate(prompts):
            bench.add(str(at), prompt, 32)
        for _ in track(_until_done([bench]), "requests at once", total=None):
            bench.step()
        most.append(bench.most_running)
    ratio, asked = most[1] / most[0], ASKED_AT_ONCE.get(keep)
    return Row(
        f"requests of {SHORT:,} tokens at once, {1 - keep:.0%} removed, of all kept",
        "" if asked is None else f">= {asked} x",
        f"{ratio:.2f} x ({most[1]}, and {most[0]})",
        None if asked is None else ratio >= asked,
        {"most": most},
    )


def warm_and_cold(keep: float, texts: Texts, num: int) -> Row:
    """Count outputs that tell whether their prefix was cached, or of how many tokens steps were."""
    shared = {"kv_cache_memory_bytes": 2 * BUDGET_BYTES, "max_model_len": LONG}
    cold = make(keep, **shared, enable_prefix_caching=False, max_num_batched_tokens=2048)
    warm = make(keep, **shared)
    random = Random(0)
    for at in track(range(num), "warm and cold"):
        prompt = texts.take(random.randrange(600, 3000))
        warm.add(f"before {at}", prompt[: random.randrange(560, len(prompt))], 1)
        while warm.engine.has_work:
            warm.step()
        for bench in (cold, warm):
            bench.add(f"{at}", prompt, 24)
        for _ in _until_done([cold, warm]):
            cold.step()
            warm.step()
    differ = sum(cold.outputs[str(at)] != warm.outputs[str(at)] for at in range(num))
    return Row("outputs that differ, warm and cold", "0", f"{differ} of {num}", differ == 0)


def main() -> None:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("--num-steps", type=int, default=16, help="steps in which all decode")
    made.add_argument("--num-prompts", type=int, default=20, help="prompts that are computed warm and cold")
    made.add_argument("--keep", type=float, default=0.5, help="the share of older tokens that is kept")
    asked = made.parse_args()
    if kept_scorer(resolve(MODEL, cache_dir())) is None:
        with progress_bar() as progress:
            fit_scorer(MODEL, progress)
    texts = Texts(0)
    rows = [
        *prefilling(asked.keep, texts),
        at_once(asked.keep, texts),
        warm_and_cold(asked.keep, texts, asked.num_prompts),
        decoding(asked.keep, SHORT, 32, asked.num_steps, texts),
        decoding(asked.keep, LONG, 16, asked.num_steps, texts),
    ]
    print_report("kept tokens", rows, machine(), asked.json)


if __name__ == "__main__":
    main()
