"""Choice: a replica that was chosen for a request, from what candidates, and why."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Candidate", "Choice", "ChoiceReason"]

ChoiceReason: TypeAlias = Literal["prefix", "load", "nothing_held", "unknown", "unread", "policy"]
"""Why a request went where it went: that replica holds most of its prompt; another held more and had too much to do;
nobody holds any of it; of no replica is known what it holds; nobody could say what its prompt is; or the policy does
not look at what replicas hold."""


class Candidate(NamedTuple):
    """A replica that may be chosen.

    Attributes:
        replica: its name.
        num_held_tokens: of the prompt, from its beginning on, that it holds, as far as is known.
        num_pending_tokens: of prompts that it was given before, to be computed yet.
        num_running: requests that it was given and that have got a first token, and no end.
        num_placed_tokens: that it was given to compute lately, and outputs, which filled its cache: each counts half
            as much whenever all caches have been filled anew.
    """

    replica: str
    num_held_tokens: int
    num_pending_tokens: int
    num_running: int
    num_placed_tokens: float


class Choice(NamedTuple):
    """Where a request goes.

    Attributes:
        replica: the name of the replica.
        reason: why that one.
        num_held_tokens: what it is thought to hold of the prompt.
    """

    replica: str
    reason: ChoiceReason
    num_held_tokens: int
