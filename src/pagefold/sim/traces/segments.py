"""GeneratedRequest: a prompt as segments of text that others may share. Tokens are made when somebody wants them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pagefold.request import Request, StopRule
from pagefold.sim.null_runner import hashed_token
from pagefold.sim.traces.request import GREEDY_TO_LENGTH, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["GeneratedRequest", "Segment", "as_trace"]


class Segment(NamedTuple):
    """Some text: token ``i`` of it is ``hashed_token(seed, i)``, which is also what the null runner answers.

    Attributes:
        seed: segments of equal seeds begin alike.
        num_tokens: how long it is.
    """

    seed: int
    num_tokens: int

    def tokens(self) -> Iterator[int]:
        """Yield its tokens."""
        return (hashed_token(self.seed, place) for place in range(self.num_tokens))


@dataclass(frozen=True, slots=True)
class GeneratedRequest:
    """One request of a generated workload.

    Attributes:
        name: the request's id.
        arrival_s: when it comes.
        segments: the segments of its prompt.
        answer: what the null runner will answer, to the token: a later prompt may hold it.
    """

    name: str
    arrival_s: float
    segments: tuple[Segment, ...]
    answer: Segment

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return sum(segment.num_tokens for segment in self.segments)

    def request(self) -> Request:
        """Return a fresh request with all its tokens, for a scheduler."""
        prompt = array("i")
        for segment in self.segments:
            prompt.extend(segment.tokens())
        stop = StopRule(frozenset(), len(prompt) + self.answer.num_tokens)
        return Request(self.name, prompt, GREEDY_TO_LENGTH, stop=stop, seed=self.answer.seed, arrival_s=self.arrival_s)


def as_trace(requests: Iterable[GeneratedRequest], tokens_per_id: int) -> tuple[TraceRequest, ...]:
    """Return the requests with chains of ids instead of segments: one for so many tokens, the last perhaps for fewer.

    Equal ids mean equal prompts up to there, as in Mooncake's traces; nothing is said of answers.
    """
    known: dict[tuple[object, ...], int] = {}
    return tuple(
        TraceRequest(
            request.arrival_s,
            request.prompt_tokens,
            request.answer.num_tokens,
            tuple(_chain(request.segments, tokens_per_id, known)),
            tokens_per_id,
        )
        for request in requests
    )


def _chain(segments: tuple[Segment, ...], size: int, known: dict[tuple[object, ...], int]) -> Iterator[int]:
    """Yield the ids of a prompt: a number for every new pair of the chain so far and the next ``size`` tokens."""
    parent = -1
    pieces: list[tuple[int, int, int]] = []  # of the chunk: (seed, first token, how many)
    room = size
    for segment in segments:
        at = 0
        while at < segment.num_tokens:
            taken = min(room, segment.num_tokens - at)
            pieces.append((segment.seed, at, taken))
            at += taken
            room -= taken
            if not room:
                parent = known.setdefault((parent, *pieces), len(known))
                yield parent
                pieces, room = [], size
    if pieces:
        yield known.setdefault((parent, *pieces), len(known))
