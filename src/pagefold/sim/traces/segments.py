"""GeneratedRequest: a prompt as segments of text that others may share. Tokens are made when somebody wants them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pagefold.request import Request, SessionRef, StopRule, session_ref
from pagefold.sim.null_runner import hashed_token
from pagefold.sim.traces.request import GREEDY_TO_LENGTH, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["GeneratedRequest", "Segment", "SessionTurn", "as_trace"]


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


class SessionTurn(NamedTuple):
    """What one request is to its session.

    Attributes:
        session_id: as its client names it.
        parent_session_id: of the agent that called this one; empty for none.
        after: the name of the request that it waits for, which may be of another session; empty if it waits for nobody.
        pause_s: seconds from the end of ``after`` to its arrival, or from the beginning of all.
        returns_in_s: what its client says of the next one of the session; None for nothing.
        is_last: its session ends with it.
    """

    session_id: str
    parent_session_id: str = ""
    after: str = ""
    pause_s: float = 0.0
    returns_in_s: float | None = None
    is_last: bool = False

    @property
    def session(self) -> SessionRef | None:
        """Its session, of a tenant without a name; None of who says nothing of sessions."""
        return session_ref("", self.session_id, self.parent_session_id) if self.session_id else None


@dataclass(frozen=True, slots=True)
class GeneratedRequest:
    """One request of a generated workload.

    Attributes:
        name: the request's id.
        arrival_s: when it comes; of one that waits for another, when it would come if answers took no time.
        segments: the segments of its prompt.
        answer: what the null runner will answer, to the token: a later prompt may hold it.
        turn: what it is to its session; None if it has none.
    """

    name: str
    arrival_s: float
    segments: tuple[Segment, ...]
    answer: Segment
    turn: SessionTurn | None = None

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
        turn = self.turn
        return Request(
            self.name,
            prompt,
            GREEDY_TO_LENGTH,
            stop=stop,
            seed=self.answer.seed,
            arrival_s=self.arrival_s,
            session=None if turn is None else turn.session,
            returns_in_s=None if turn is None else turn.returns_in_s,
        )


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
