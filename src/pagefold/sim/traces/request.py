"""TraceRequest: one request of a trace; Trace: all of them, and what was left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pagefold.sampling import SamplingParams
from pagefold.sim.size_limits import MAX_TOKENS

__all__ = ["GREEDY_TO_LENGTH", "MAX_TOKENS", "TOKENS_PER_ID", "Trace", "TraceRequest", "request_of"]

GREEDY_TO_LENGTH = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
"""What a simulated request samples: as many tokens as its ``StopRule`` lets it have."""

TOKENS_PER_ID = 512
"""Tokens that one id of a block stands for in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        arrival_s: seconds after the first one.
        prompt_tokens, output_tokens: its lengths.
        prefix_ids: a chain of ids, one for so many tokens of the prompt: equal ids mean equal prompts up to there. The
            last one may stand for fewer. Empty where nobody knows what prompts share.
        tokens_per_id: tokens that an id stands for.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    tokens_per_id: int = TOKENS_PER_ID


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: of the file or the generator, for people.
        requests: the requests, one at least.
        num_bad_lines: lines that were skipped because nothing could be made of them.
        first_bad_line: what was wrong with the first of them; empty if there was none.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    num_bad_lines: int = 0
    first_bad_line: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)


def request_of(arrival_s: Any, prompt: Any, output: Any, ids: Any, tokens_per_id: Any) -> TraceRequest:  # noqa: ANN401
    """Return a request of what a file says; one without an output still has a step.

    Raises:
        ValueError: it says what is no number, or none that a request can have; the message says which.
    """
    if not isinstance(arrival_s, (int, float)) or not math.isfinite(arrival_s):
        msg = f"its time is {arrival_s!r}"
        raise ValueError(msg)
    num_prompt = _whole("input length", prompt, 1)
    num_output = _whole("output length", output, 0)
    size = _whole("tokens_per_id", tokens_per_id, 1)
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        msg = f"its ids are {str(ids)[:40]!r}, no list"
        raise ValueError(msg)  # noqa: TRY004 - a file's fault
    try:
        chain = tuple(_exactly(each) for each in ids)
    except (TypeError, ValueError, OverflowError):
        msg = "an id is no whole number"
        raise ValueError(msg) from None
    return TraceRequest(float(arrival_s), num_prompt, max(1, num_output), chain, size)


def _exactly(value: Any) -> int:  # noqa: ANN401 - a cell of a file
    """Return the whole number that a cell holds. Half a token was never asked for: nothing is rounded.

    Raises:
        TypeError, ValueError, OverflowError: it holds none.
    """
    number = int(value)
    if isinstance(value, float) and number != value:
        raise ValueError
    return number


def _whole(what: str, value: Any, least: int) -> int:  # noqa: ANN401 - a cell of a file
    try:
        number = _exactly(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if isinstance(value, bool) or not least <= number <= MAX_TOKENS:
        msg = f"its {what} is {str(value)[:40]!r}, not a number from {least} to {MAX_TOKENS:,}"
        raise ValueError(msg)
    return number
