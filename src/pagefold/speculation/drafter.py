"""Drafter: who guesses what a request will sample."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.request import Request
    from pagefold.speculation.how_many import StepCosts

__all__ = ["NO_DRAFT", "Draft", "Drafter", "Kept"]


class Draft(NamedTuple):
    """A guess of what follows.

    Attributes:
        token_ids: the tokens, in order; empty for no guess.
        kind: what speaks for them, as a number that is the same for drafts that are about as good: whoever learns how
            often drafts are right learns it of each kind. From 0 to ``NUM_KINDS - 1``.
    """

    token_ids: array[int]
    kind: int = 0


NO_DRAFT = Draft(array("i"))


class Kept(NamedTuple):
    """What a drafter keeps beside what it knows of requests' texts.

    Attributes:
        name: of that.
        num_bytes: what it takes now.
        max_bytes: what it may take.
    """

    name: str
    num_bytes: int
    max_bytes: int


class Drafter(Protocol):
    """Guesses, for all requests of a step at once: so one that computes can do so in one batch.

    What it knows of a request it keeps by its id, from the first time that it is asked until :meth:`forget`. One that
    reads hidden states (EAGLE, MTP) is told them by the runner beside this.
    """

    @property
    def costs(self) -> StepCosts | None:
        """What one draft each takes, by how many requests they are for; None where drafts take next to nothing.

        One that has costs is asked for as many drafts as are thought to pay; others for all that there could be.
        """

    def num_unread(self, request: Request) -> int | None:
        """Return how many of a request's tokens it must read before its last one; None where it drafts nothing now.

        Only one that has costs is asked.
        """

    def kept(self) -> Kept | None:
        """Return what it keeps beside what it knows of requests' texts, if anything. Any thread may ask."""

    def draft(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> list[Draft]:
        """Return a guess for each of ``requests``, of at most so many tokens each.

        All of them are about to compute their last token. Until it is told to forget a request, that only gets longer.
        """

    def forget(self, request_id: str) -> None:
        """A request has ended; perhaps one that was never asked for."""

    def reset(self) -> None:
        """What is cached of requests is forgotten: so is what it has cached beside that."""
