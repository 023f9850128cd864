"""RoutingPolicy: which candidate gets a request."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.routing.choice import Candidate

__all__ = ["ROUTING_POLICIES", "LoadRouting", "PrefixRouting", "RandomRouting", "RoundRobinRouting", "RoutingPolicy"]


class RoutingPolicy(Protocol):
    """Chooses a replica.

    Attributes:
        sees_prefixes: whether it looks at what candidates hold: else nobody need find that out.
    """

    sees_prefixes: bool

    def choose(self, candidates: Sequence[Candidate], num_tokens: int) -> Candidate:
        """Return the one of ``candidates``, at least one, that gets a prompt of ``num_tokens`` tokens."""


class PrefixRouting:
    """Where the first token is expected soonest: the least tokens to compute before it, those of others included.

    A candidate costs what it has pending, what it lacks of the prompt, and some tokens for each request that it
    decodes. That is the cost of Dynamo's KV router (its documentation, "KV cache routing", the cost function) with
    what was sent and not computed in the place of all that was sent. It costs a part, too, of what it was lately given
    to compute beyond others: else whatever all prompts begin with would draw them all to the first that has it, whose
    cache is full while others' are empty. Of candidates that cost nearly the same the one goes that holds most of the
    prompt.

    Args:
        running_tokens: of computing, what a request costs that is decoded.
        slack: candidates cost nearly the same within this share of the prompt's tokens.
        evenness: of computing, the tokens that each token costs that a candidate's cache was filled with beyond others.
    """

    sees_prefixes = True

    def __init__(self, running_tokens: int = 32, slack: float = 0.05, evenness: float = 0.2) -> None:
        self._running_tokens = running_tokens
        self._slack = slack
        self._evenness = evenness

    def choose(self, candidates: Sequence[Candidate], num_tokens: int) -> Candidate:
        """Return the one that costs least, or nearly so."""
        least_placed = min(each.num_placed_tokens for each in candidates)
        costs = [self._cost(each, num_tokens, least_placed) for each in candidates]
        most = min(costs) + self._slack * num_tokens
        near = (each for each, cost in zip(candidates, costs, strict=True) if cost <= most)
        return min(near, key=lambda each: (-each.num_held_tokens, each.num_placed_tokens))

    def _cost(self, candidate: Candidate, num_tokens: int, least_placed: float) -> float:
        return (
            candidate.num_pending_tokens
            + num_tokens
            - candidate.num_held_tokens
            + self._running_tokens * candidate.num_running
            + self._evenness * (candidate.num_placed_tokens - least_placed)
        )


class LoadRouting:
    """Where least is to be computed, whatever is held: the least of pending tokens and running requests."""

    sees_prefixes = False

    def __init__(self) -> None:
        self._by_load = PrefixRouting(slack=0.0, evenness=0.0)

    def choose(self, candidates: Sequence[Candidate], num_tokens: int) -> Candidate:
        """Return the one with the least to do."""
        return self._by_load.choose(candidates, num_tokens)


class RoundRobinRouting:
    """One after another, in the order of their names."""

    sees_prefixes = False

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate], num_tokens: int) -> Candidate:  # noqa: ARG002
        """Return the one whose name follows that of the last; the first again behind all."""
        ordered = sorted(candidates, key=lambda each: each.replica)
        chosen = next((each for each in ordered if each.replica > self._last), ordered[0])
        self._last = chosen.replica
        return chosen


class RandomRouting:
    """Any, with equal chances.

    Args:
        seed: of the draws.
    """

    sees_prefixes = False

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)  # noqa: S311 - a choice, no secret

    def choose(self, candidates: Sequence[Candidate], num_tokens: int) -> Candidate:  # noqa: ARG002
        """Return a drawn one."""
        return self._random.choice(candidates)


ROUTING_POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "prefix": PrefixRouting,
    "load": LoadRouting,
    "round_robin": RoundRobinRouting,
    "random": RandomRouting,
}
"""By name, what makes each."""
