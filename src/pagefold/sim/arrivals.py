"""Arrivals: requests of any origin in the order in which they come, with their tokens made when their time has come.

A turn of an agent's session comes a pause after the request that it waits for has ended; all others at their times.
"""

from __future__ import annotations

from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pagefold.request import Request, SessionRef, StopRule
from pagefold.sim.traces.recording import RecordedRequest
from pagefold.sim.traces.request import GREEDY_TO_LENGTH, TraceRequest
from pagefold.sim.traces.segments import GeneratedRequest
from pagefold.sim.traces.tokens import IdTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["AnyRequest", "Arrival", "Arrivals"]

AnyRequest: TypeAlias = Request | TraceRequest | GeneratedRequest | RecordedRequest
"""What can be replayed. A request with its tokens is used up by that; the others make a fresh one each time."""


class Arrival(NamedTuple):
    """A request that will come.

    Attributes:
        arrival_s: when it comes.
        num_tokens: of its prompt and its output, at most.
        make: returns it, with all its tokens.
        name: its id, of one for which others may wait.
        after: the id of the request that it waits for; empty for none.
        pause_s: seconds from the end of that one to its arrival.
        ends: the session that ends with it; None for none.
    """

    arrival_s: float
    num_tokens: int
    make: Callable[[], Request]
    name: str = ""
    after: str = ""
    pause_s: float = 0.0
    ends: SessionRef | None = None


class Arrivals:
    """Requests that are still to come.

    Args:
        requests: all of them, in any order. Who waits for one that is not among them comes at its own time.
    """

    def __init__(self, requests: Iterable[AnyRequest]) -> None:
        tokens = IdTokens()
        self._made = [_arrival(index, request, tokens) for index, request in enumerate(requests)]
        names = {arrival.name for arrival in self._made if arrival.name}
        self._after: dict[str, list[int]] = {}
        self._ends: dict[str, SessionRef] = {}
        self._due: list[tuple[float, int]] = []  # of those whose time is known: those that come together as given
        for index, arrival in enumerate(self._made):
            if arrival.ends is not None:
                self._ends[arrival.name] = arrival.ends
            if arrival.after in names:
                self._after.setdefault(arrival.after, []).append(index)
            else:
                self._due.append((arrival.arrival_s, index))
        heapify(self._due)

    def __bool__(self) -> bool:
        """Whether the time of anybody is known who has not come."""
        return bool(self._due)

    @property
    def next_s(self) -> float:
        """When the next one comes; inf where nobody does before others have ended."""
        return self._due[0][0] if self._due else float("inf")

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest one, prompt and output together."""
        return max((arrival.num_tokens for arrival in self._made), default=0)

    def take(self, now: float) -> Iterator[Request]:
        """Yield those whose time has come, in order."""
        while self._due and self._due[0][0] <= now:
            arrival_s, index = heappop(self._due)
            request = self._made[index].make()
            request.times.arrival_s = arrival_s
            yield request

    def ended(self, names: Iterable[str], now: float) -> list[SessionRef]:
        """Requests have ended: now the pauses of those begin that wait for them. Return whose sessions are over."""
        over: list[SessionRef] = []
        for name in names:
            for index in self._after.pop(name, ()):
                heappush(self._due, (now + self._made[index].pause_s, index))
            if name in self._ends:
                over.append(self._ends.pop(name))
        return over


def _arrival(index: int, request: AnyRequest, tokens: IdTokens) -> Arrival:
    match request:
        case Request():
            return Arrival(request.arrival_s, request.stop.max_total_tokens, lambda: request)
        case GeneratedRequest():
            num_tokens = request.prompt_tokens + request.answer.num_tokens
            return _generated(request, num_tokens)
        case RecordedRequest():
            return Arrival(request.arrival_s, request.num_tokens, request.request)
        case TraceRequest():
            num_tokens = request.prompt_tokens + request.output_tokens
            return Arrival(request.arrival_s, num_tokens, partial(_traced, index, request, tokens))


def _generated(request: GeneratedRequest, num_tokens: int) -> Arrival:
    turn = request.turn
    if turn is None:
        return Arrival(request.arrival_s, num_tokens, request.request)
    ends = turn.session if turn.is_last else None
    return Arrival(request.arrival_s, num_tokens, request.request, request.name, turn.after, turn.pause_s, ends)


def _traced(index: int, recorded: TraceRequest, tokens: IdTokens) -> Request:
    stop = StopRule(frozenset(), recorded.prompt_tokens + recorded.output_tokens)
    prompt = tokens.prompt(index, recorded)
    return Request(f"r{index}", prompt, GREEDY_TO_LENGTH, stop=stop, seed=index, arrival_s=recorded.arrival_s)
