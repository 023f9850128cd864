"""Workload: how long prompts and outputs are, what they share, and whether they come back."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.sim.traces import MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Lengths", "Workload", "draw_lengths", "parse_length", "spread"]

_NUM_DRAWN = 512
_Z95 = 1.6448536269514722
"""The 95th percentile of the normal distribution."""
_LONGEST_PAUSE_S = 366 * 24 * 3600


class Lengths(NamedTuple):
    """Tokens of one request.

    Attributes:
        prompt: of the prompt.
        output: of the output.
    """

    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests as they come.

    Attributes:
        name: what it was made from, for people.
        lengths: of requests, each as likely as the next.
        prefix_len: tokens that prompts begin with alike.
        prefix_share: share of the requests that begin so.
        turns: requests of one conversation; each one's prompt begins with all that was said before.
        pause_s: seconds between an answer and the next question.

    Raises:
        ConfigError: a value is out of range.
    """

    name: str
    lengths: tuple[Lengths, ...]
    prefix_len: int = 0
    prefix_share: float = 1.0
    turns: int = 1
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.lengths:
            message = "The workload has no requests."
            raise ConfigError(message, remedy="Give lengths, or a trace that holds some.")
        if not 0 <= self.prefix_share <= 1:
            raise _bad("prefix_share", self.prefix_share, "between 0 and 1")
        if self.prefix_len < 0:
            raise _bad("prefix_len", self.prefix_len, "at least 0 tokens")
        if self.prefix_len and self.prefix_len >= max(lengths.prompt for lengths in self.lengths):
            raise _bad("prefix_len", self.prefix_len, "shorter than the prompts, of which it is a part")
        if self.turns < 1:
            raise _bad("turns", self.turns, "at least 1")
        if not 0 <= self.pause_s <= _LONGEST_PAUSE_S:
            raise _bad("pause", self.pause_s, "between 0 seconds and a year")

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, on average."""
        return self.mean(lambda lengths: lengths.prompt)

    @property
    def mean_output(self) -> float:
        """Tokens of an output, on average."""
        return self.mean(lambda lengths: lengths.output)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(lengths.prompt + lengths.output for lengths in self.lengths)

    def mean(self, of: Callable[[Lengths], float]) -> float:
        """Return the mean of a function of lengths."""
        return sum(of(lengths) for lengths in self.lengths) / len(self.lengths)

    def shared_tokens(self, lengths: Lengths) -> float:
        """Return how many tokens of such a request's prompt others begin with too, on average."""
        return self.prefix_share * min(self.prefix_len, lengths.prompt - 1)

    def up_to(self, max_model_len: int) -> Workload:
        """Return the requests that are not longer than ``max_model_len``.

        Raises:
            ConfigError: there are none.
        """
        kept = tuple(lengths for lengths in self.lengths if sum(lengths) <= max_model_len)
        if len(kept) == len(self.lengths):
            return self
        if not kept:
            shortest = min(sum(lengths) for lengths in self.lengths)
            message = f"Every request of the workload is longer than max_model_len = {max_model_len:,} tokens."
            raise ConfigError(message, remedy=f"The shortest has {shortest:,}: give a max_model_len of that or more.")
        prefix_len = min(self.prefix_len, max(lengths.prompt for lengths in kept) - 1)
        return replace(self, lengths=kept, prefix_len=prefix_len)

    def shrunk(self, times: float) -> Workload:
        """Return a workload whose requests, and what they share, are so many times shorter."""
        lengths = tuple(Lengths(*(max(1, round(each / times)) for each in whole)) for whole in self.lengths)
        prefix_len = min(round(self.prefix_len / times), max(each.prompt for each in lengths) - 1)
        return replace(self, lengths=lengths, prefix_len=prefix_len)


_NUMBER = r"[0-9]{1,20}"
_FIXED = re.compile(_NUMBER)
_RANGE = re.compile(f"({_NUMBER})-({_NUMBER})")
_LOGNORMAL = re.compile(f"lognormal:({_NUMBER}),({_NUMBER})")


def parse_length(name: str, text: str) -> Callable[[Random], int]:
    """Return what draws a length: ``700``, ``200-800`` (evenly), or ``lognormal:MEDIAN,P95``.

    Raises:
        ConfigError: it is none of them.
    """
    if _FIXED.fullmatch(text):
        number = _length(name, text)
        return lambda _: number
    if match := _RANGE.fullmatch(text):
        least, most = _length(name, match[1]), _length(name, match[2])
        if least <= most:
            return lambda rng: rng.randint(least, most)
    if match := _LOGNORMAL.fullmatch(text):
        median, p95 = _length(name, match[1]), _length(name, match[2])
        if median <= p95:
            sigma = math.log(p95 / median) / _Z95
            return lambda rng: max(1, round(rng.lognormvariate(math.log(median), sigma)))
    raise _bad(name, repr(text), "a number of tokens, LEAST-MOST, or lognormal:MEDIAN,P95")


def _length(name: str, text: str) -> int:
    number = int(text)
    if not 1 <= number <= MAX_TOKENS:
        raise _bad(name, text, f"between 1 and {MAX_TOKENS:,} tokens")
    return number


def draw_lengths(input_len: str, output_len: str, *, seed: int = 0) -> tuple[Lengths, ...]:
    """Return requests of drawn lengths: one if both are fixed, some hundreds else.

    Raises:
        ConfigError: a length is neither a number nor a distribution.
    """
    draw_prompt, draw_output = parse_length("input_len", input_len), parse_length("output_len", output_len)
    rng = Random(seed)  # noqa: S311 - a workload, no secret
    num_drawn = 1 if _FIXED.fullmatch(input_len) and _FIXED.fullmatch(output_len) else _NUM_DRAWN
    return tuple(Lengths(draw_prompt(rng), draw_output(rng)) for _ in range(num_drawn))


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value}.", remedy=f"It must be {allowed}.")


def spread(lengths: Iterable[Lengths], at_most: int) -> tuple[Lengths, ...]:
    """Return at most so many of the lengths, evenly spread over them."""
    every = tuple(lengths)
    if len(every) <= at_most:
        return every
    return tuple(every[index * len(every) // at_most] for index in range(at_most))
