"""BeamGroup: the requests that hold the beams of one search, step by step in one another's places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pagefold.steps import TokenLogprobs

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from pagefold.beams.search import BeamSearch, Hypothesis, Move

    _Top: TypeAlias = tuple[tuple[int, float], ...]

__all__ = ["BeamGroup", "Seat"]


class Seat(Protocol):
    """What a group knows of a request."""

    token_ids: array[int]
    num_prompt_tokens: int


_Seat = TypeVar("_Seat", bound=Seat)


@dataclass(slots=True, eq=False)
class BeamGroup(Generic[_Seat]):
    """What the beams of one prompt have in common.

    The requests are seats: beam ``i`` of the search has the tokens and the blocks of request ``i``. Which beam that is
    changes with each step, and the results are dealt to them at the end, the best first. All are in a step together, or
    none is; in the order of requests they come one behind the other, the first first.

    Attributes:
        seats: as many as beams run at once. The first computes the prompt, with the others as its forks.
        search: which beams there are.
        num_top: how many alternatives to each token of a result are told.
        tops: those, of each of the beams that each step had; empty where none are told.
        num_held: how many blocks the beams had when somebody else needed them; 0 before.
    """

    seats: list[_Seat]
    search: BeamSearch
    num_top: int = 0
    tops: list[list[_Top]] = field(default_factory=list)
    num_held: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether there is more than the prompt: then all seats run."""
        return self.search.num_tokens > 0

    @property
    def beams(self) -> list[_Seat]:
        """The seats of the search's beams: only the first before it has begun."""
        return self.seats if self.has_begun else self.seats[:1]

    def take(self, told: Sequence[TokenLogprobs]) -> list[Move]:
        """Go one token further, by what a step told of each beam; see :meth:`BeamSearch.take`."""
        if self.num_top:
            self.tops.append([one.top[: self.num_top] for one in told])
        return self.search.take([one.top for one in told])

    def begin_again(self) -> None:
        """Forget all but the prompt: somebody else needs the blocks."""
        self.search.begin_again()
        self.tops.clear()
        for seat in self.seats:
            del seat.token_ids[seat.num_prompt_tokens :]

    def logprobs_of(self, hypothesis: Hypothesis) -> Iterator[TokenLogprobs]:
        """Yield what is told of each token of a result."""
        for at, move in enumerate(hypothesis.moves):
            yield TokenLogprobs(move.logprob, move.rank, self.tops[at][move.parent] if self.num_top else ())
