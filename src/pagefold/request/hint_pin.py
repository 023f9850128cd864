"""HintPin: up to where a client expects its prompt to be of use again, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HintPin", "hints_within"]


class HintPin(NamedTuple):
    """A wish that the beginning of a prompt stays cached. It never turns a request away.

    Attributes:
        num_tokens: of that beginning, at least 1; its whole blocks are pinned.
        ttl_s: seconds until the pin expires, from the end of the request on; positive.
    """

    num_tokens: int
    ttl_s: float


def hints_within(hints: Iterable[HintPin], num_prompt_tokens: int) -> tuple[HintPin, ...]:
    """Return those of ``hints`` that a prompt is long enough for: each beginning once, for the longest time."""
    longest: dict[int, float] = {}
    for num_tokens, ttl_s in hints:
        if num_tokens <= num_prompt_tokens:
            longest[num_tokens] = max(ttl_s, longest.get(num_tokens, 0.0))
    return tuple(HintPin(*each) for each in longest.items())
