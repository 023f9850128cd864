"""Traffic for ``benchmarks/load.py``: how long requests are, when they come, and what became of them.

Lengths are drawn from those of the Azure LLM inference trace of 2023 (conversations), each halved and cut at 4,096
tokens; where there is no trace, from logarithmic normal ones of about its means. A client does not know how long its
output will be: it gives a bound, the power of two that is at least twice as long, 128 at least.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from statistics import mean
from typing import TYPE_CHECKING

from pagefold.sim.traces import read_trace

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Lengths", "Outcome", "Sent", "Targets", "bursty", "goodput", "percentile", "poisson", "read_lengths"]

MAX_TOKENS = 4096
LEAST_BOUND = 128
CV = 3.0
"""Of the gaps between bursty arrivals: their standard deviation over their mean."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and outputs, in pairs, and where they are from."""

    pairs: tuple[tuple[int, int], ...]
    source: str

    def draw(self, rng: Random) -> tuple[int, int]:
        """Return the lengths of a prompt and its output."""
        return rng.choice(self.pairs)

    def describe(self) -> str:
        """Say what they are."""
        prompts, outputs = zip(*self.pairs, strict=True)
        return f"{self.source}: prompts of {mean(prompts):.0f} tokens on average, outputs of {mean(outputs):.0f}"


@dataclass(frozen=True)
class Sent:
    """A request that will be sent.

    Attributes:
        at_s: when.
        prompt_tokens: of its prompt.
        output_tokens: how long its output will be, which nobody knows.
        max_tokens: what its client bounds it by.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int


@dataclass
class Outcome:
    """What became of a request.

    Attributes:
        sent: the request.
        ttft_s: until its first token; None for none.
        gaps_s: between its tokens.
        end_s: when it was over, on the clock of ``sent``; None if it never was.
        is_shed: whether it was refused since there was too much to do.
        error: what went wrong; empty if nothing did.
        num_preemptions: how often it gave its blocks back, where that is known.
    """

    sent: Sent
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    is_shed: bool = False
    error: str = ""
    num_preemptions: int = 0

    @property
    def has_answer(self) -> bool:
        """Whether it ended, or was refused in words."""
        return self.is_shed or self.end_s is not None

    def is_good(self, targets: Targets) -> bool:
        """Whether it has its whole output within the targets."""
        if self.ttft_s is None or self.end_s is None or self.error or self.ttft_s > targets.ttft_s:
            return False
        return not self.gaps_s or percentile(self.gaps_s, 0.99) <= targets.itl_s


@dataclass(frozen=True)
class Targets:
    """What a request is good within: seconds to its first token, and between two tokens (the 99th of its hundred)."""

    ttft_s: float
    itl_s: float


def percentile(values: list[float], share: float) -> float:
    """Return the value that so large a share of the values are not above; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def goodput(outcomes: list[Outcome], targets: Targets, seconds: float) -> float:
    """Return requests a second that were good."""
    return sum(outcome.is_good(targets) for outcome in outcomes) / seconds


def read_lengths(path: Path | None) -> Lengths:
    """Return the lengths of a trace; generated ones where there is none."""
    if path is not None:
        trace = read_trace(path, lengths_only=True)
        pairs = [(each.prompt_tokens, each.output_tokens) for each in trace.requests if each.output_tokens > 1]
        return Lengths(tuple((_halved(prompt), _halved(output)) for prompt, output in pairs), path.name)
    rng = Random(0)
    made = [(int(rng.lognormvariate(6.5, 1.0)), int(rng.lognormvariate(5.0, 0.8))) for _ in range(20_000)]
    return Lengths(tuple((_halved(prompt), _halved(output)) for prompt, output in made), "generated lengths (no trace)")


def _halved(num_tokens: int) -> int:
    return max(2, min(MAX_TOKENS, num_tokens // 2))


def poisson(lengths: Lengths, rate: float, seconds: float, seed: int) -> list[Sent]:
    """Return requests that come independently, so many a second."""
    rng = Random(seed)
    return _sent(lengths, rng, lambda: rng.expovariate(rate), seconds)


def bursty(lengths: Lengths, rate: float, seconds: float, seed: int) -> list[Sent]:
    """Return as many that come in bursts: gaps between them have a gamma distribution, and vary ``CV`` times."""
    rng = Random(seed)
    shape = 1 / CV**2
    return _sent(lengths, rng, lambda: rng.gammavariate(shape, 1 / (rate * shape)), seconds)


def _sent(lengths: Lengths, rng: Random, gap_s, seconds: float) -> list[Sent]:  # noqa: ANN001 - a function
    sent = []
    now_s = gap_s()
    while now_s < seconds:
        prompt_tokens, output_tokens = lengths.draw(rng)
        bound = max(LEAST_BOUND, 1 << (2 * output_tokens - 1).bit_length())
        sent.append(Sent(now_s, prompt_tokens, output_tokens, min(bound, MAX_TOKENS)))
        now_s += gap_s()
    return sent
