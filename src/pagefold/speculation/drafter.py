"""Drafter: who guesses what a request will sample."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.request import Request

__all__ = ["NO_DRAFT", "Draft", "Drafter"]


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


class Drafter(Protocol):
    """Guesses, for all requests of a step at once: so one that computes can do so in one batch.

    What it knows of a request it keeps by its id, from the first time that it is asked until :meth:`forget`. One that
    reads hidden states (EAGLE, MTP) is told them by the runner beside this.
    """

    @property
    def num_index_bytes(self) -> int:
        """Bytes of what it keeps beside what it knows of requests."""

    def draft(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> list[Draft]:
        """Return a guess for each of ``requests``, of at most so many tokens each.

        All of them are about to compute their last token.
        """

    def forget(self, request_id: str) -> None:
        """A request has ended; perhaps one that was never asked for."""
