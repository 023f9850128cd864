"""Arrivals: requests of any origin in the order in which they come, with their tokens made when their time has come."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pagefold.request import Request, StopRule
from pagefold.sim.traces.recording import RecordedRequest
from pagefold.sim.traces.request import GREEDY_TO_LENGTH, TraceRequest
from pagefold.sim.traces.segments import GeneratedRequest
from pagefold.sim.traces.tokens import IdTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["AnyRequest", "Arrival", "arrivals"]

AnyRequest: TypeAlias = Request | TraceRequest | GeneratedRequest | RecordedRequest
"""What can be replayed. A request with its tokens is used up by that; the others make a fresh one each time."""


class Arrival(NamedTuple):
    """A request that will come.

    Attributes:
        arrival_s: when it comes.
        num_tokens: of its prompt and its output, at most.
        make: returns it, with all its tokens.
    """

    arrival_s: float
    num_tokens: int
    make: Callable[[], Request]


def arrivals(requests: Iterable[AnyRequest]) -> list[Arrival]:
    """Return when each request comes, in that order; those that come together in the order given."""
    tokens = IdTokens()
    made = [_arrival(index, request, tokens) for index, request in enumerate(requests)]
    made.sort(key=lambda arrival: arrival.arrival_s)
    return made


def _arrival(index: int, request: AnyRequest, tokens: IdTokens) -> Arrival:
    match request:
        case Request():
            return Arrival(request.arrival_s, request.stop.max_total_tokens, lambda: request)
        case GeneratedRequest():
            num_tokens = request.prompt_tokens + request.answer.num_tokens
            return Arrival(request.arrival_s, num_tokens, request.request)
        case RecordedRequest():
            return Arrival(request.arrival_s, request.num_tokens, request.request)
        case TraceRequest():
            num_tokens = request.prompt_tokens + request.output_tokens
            return Arrival(request.arrival_s, num_tokens, partial(_traced, index, request, tokens))


def _traced(index: int, recorded: TraceRequest, tokens: IdTokens) -> Request:
    stop = StopRule(frozenset(), recorded.prompt_tokens + recorded.output_tokens)
    prompt = tokens.prompt(index, recorded)
    return Request(f"r{index}", prompt, GREEDY_TO_LENGTH, stop=stop, seed=index, arrival_s=recorded.arrival_s)
