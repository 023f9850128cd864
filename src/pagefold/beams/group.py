"""BeamGroup: the requests that hold the beams of one search, step by step in one another's places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from array import array

    from pagefold.beams.search import BeamSearch, Hypothesis
    from pagefold.steps import TokenLogprobs

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
    none is.

    Attributes:
        seats: as many as beams run at once. The first computes the prompt, with the others as its forks.
        search: which beams there are.
        told: what each step told of the likeliest tokens of each of its beams: for the logprobs of results.
    """

    seats: list[_Seat]
    search: BeamSearch
    told: list[list[TokenLogprobs]] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        """Whether there is more than the prompt: then all seats run."""
        return self.search.num_tokens > 0

    @property
    def beams(self) -> list[_Seat]:
        """The seats of the search's beams: only the first before it has begun."""
        return self.seats if self.has_begun else self.seats[:1]

    def begin_again(self) -> None:
        """Forget all but the prompt: somebody else needs the blocks."""
        self.search.begin_again()
        self.told.clear()
        for seat in self.seats:
            del seat.token_ids[seat.num_prompt_tokens :]

    def logprobs_of(self, hypothesis: Hypothesis, num_top: int) -> list[TokenLogprobs]:
        """Return what was told of each token of a result, with so many alternatives."""
        found = []
        for step, move in zip(self.told, hypothesis.moves, strict=False):
            told = step[move.parent]
            token_id, logprob = told.top[move.place]
            assert token_id == move.token_id
            found.append(told._replace(logprob=logprob, rank=move.place + 1, top=told.top[:num_top]))
        return found
