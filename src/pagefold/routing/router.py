"""Router: where a request goes. It keeps account of what it has sent where, and asks who holds what of a prompt.

The life of a request::

    choice = router.route(request_id, prompt, now)     chosen, and booked there
    router.started(request_id)                         its first token has come: its prompt is computed
    router.ended(request_id, now)                      it has ended, or its replica is not waited for any more
    router.failed(request_id)                          instead: nothing of it was computed
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagefold.routing.choice import Candidate, Choice
from pagefold.routing.expected import ExpectedPrefixes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.routing.choice import ChoiceReason
    from pagefold.routing.policies import RoutingPolicy

__all__ = ["Holdings", "Prompt", "Router"]

_SETTLE_S = 10.0


class Holdings(Protocol):
    """Who holds what: an index of replicas' caches."""

    def match(self, block_hashes: Sequence[bytes]) -> Mapping[str, int]:
        """Return how many of a prompt's blocks, from the first on, each replica holds; those with none left out."""

    def is_known(self, replica: str) -> bool:
        """Whether it is known what ``replica`` holds: its events have come without a gap."""


class Prompt(NamedTuple):
    """What is asked of a prompt.

    Attributes:
        block_hashes: names of its whole blocks, each of all that is before it as well, as holdings know them. They
            differ between those that must not share: tenants, salts, adapters.
        num_tokens: its length.
        is_read: whether it is known what it is: else its length is an estimate, and it has no hashes.
    """

    block_hashes: Sequence[bytes]
    num_tokens: int
    is_read: bool = True


@dataclass(slots=True)
class _Load:
    """What a replica was given.

    Attributes:
        is_open: whether it gets more.
        num_pending_tokens: see :class:`~pagefold.routing.Candidate`.
        num_placed_tokens: likewise, at the last time that it was given any.
        turned: how often caches had been filled anew by then.
        pending: of each request without a first token, the tokens that it computes before that.
        running: requests with a first token, and no end.
    """

    is_open: bool = True
    num_pending_tokens: int = 0
    num_placed_tokens: float = 0.0
    turned: float = 0.0
    pending: dict[str, int] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)


class Router:
    """Chooses among replicas, and keeps account of what each was given.

    Args:
        policy: chooses.
        holdings: knows what replicas hold.
        block_size: tokens of the blocks that ``holdings`` knows.
        cache_tokens: tokens that a replica's cache holds.
        settle_s: seconds from a request's end until ``holdings`` must know of it.

    Attributes:
        num_choices: how many requests were routed, by reason.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        holdings: Holdings,
        *,
        block_size: int,
        cache_tokens: int,
        settle_s: float = _SETTLE_S,
    ) -> None:
        self._policy = policy
        self._holdings = holdings
        self._block_size = block_size
        self._cache_tokens = cache_tokens
        self._turned = 0.0  # how often what was computed has filled all caches
        self._expected = ExpectedPrefixes(settle_s)
        self._loads: dict[str, _Load] = {}
        self._replica_of: dict[str, str] = {}
        self.num_choices: dict[str, int] = {}

    @property
    def sees_prefixes(self) -> bool:
        """Whether it matters what prompts are."""
        return self._policy.sees_prefixes

    # Replicas.

    def add(self, replica: str) -> None:
        """A replica is there, and empty. One that drained is open again; its account goes on."""
        self._loads.setdefault(replica, _Load()).is_open = True

    def drain(self, replica: str) -> None:
        """Give a replica nothing more; what it has goes on."""
        if replica in self._loads:
            self._loads[replica].is_open = False

    def remove(self, replica: str) -> list[str]:
        """A replica is gone. Return the requests that it had, which are forgotten here."""
        load = self._loads.pop(replica, None)
        if load is None:
            return []
        lost = [*load.pending, *load.running]
        self._expected.forget_replica(replica)
        for request_id in lost:
            del self._replica_of[request_id]
        return lost

    @property
    def open_replicas(self) -> list[str]:
        """Names of those that get requests."""
        return [name for name, load in self._loads.items() if load.is_open]

    def least_loaded(self, *, without: frozenset[str] = frozenset()) -> str | None:
        """Return the open replica with the fewest requests; None where there is none. Nothing is booked."""
        names = [name for name in self.open_replicas if name not in without]
        return min(names, key=self.num_requests, default=None)

    def num_requests(self, replica: str) -> int:
        """Return how many requests a replica has now."""
        load = self._loads[replica]
        return len(load.pending) + len(load.running)

    # Requests.

    def route(
        self,
        request_id: str,
        prompt: Prompt,
        now: float,
        *,
        without: frozenset[str] = frozenset(),
        is_again: bool = False,
    ) -> Choice:
        """Choose a replica for a request, and book it there.

        Args:
            request_id: its name; of no other request that is under way.
            prompt: what it begins with.
            now: seconds, on any clock that does not go back.
            without: replicas that are not chosen.
            is_again: whether it was tried already: then it is counted already.

        Raises:
            LookupError: no replica is open.
        """
        assert request_id not in self._replica_of, "a request is routed once"
        self._expected.forget_until(now)
        names = [name for name in self.open_replicas if name not in without]
        if not names:
            msg = "no replica is open"
            raise LookupError(msg)
        held = self._held(names, prompt) if self._policy.sees_prefixes and prompt.is_read else {}
        candidates = [self._candidate(name, held) for name in names]
        chosen = self._policy.choose(candidates, prompt.num_tokens)
        reason = self._reason(chosen, held, names) if prompt.is_read else "unread"
        if not is_again:
            self.num_choices[reason] = self.num_choices.get(reason, 0) + 1
        self._book(request_id, chosen, prompt)
        return Choice(chosen.replica, reason, chosen.num_held_tokens)

    def started(self, request_id: str) -> None:
        """A request's first token has come. Again, or of one that is not known, does nothing."""
        load = self._loads.get(self._replica_of.get(request_id, ""))
        if load is not None and request_id in load.pending:
            load.num_pending_tokens -= load.pending.pop(request_id)
            load.running.add(request_id)

    def ended(self, request_id: str, now: float, num_output_tokens: int = 0) -> None:
        """A request has ended, however, after so many output tokens. Of one that is not known it does nothing."""
        replica = self._replica_of.pop(request_id, None)
        if replica is None:
            return
        load = self._loads[replica]
        load.num_pending_tokens -= load.pending.pop(request_id, 0)
        load.running.discard(request_id)
        self._place(load, num_output_tokens)
        self._expected.ended(request_id, now)

    def failed(self, request_id: str) -> None:
        """A request has come to nothing: none of it was computed. Of one that is not known it does nothing."""
        replica = self._replica_of.pop(request_id, None)
        if replica is None:
            return
        load = self._loads[replica]
        num_pending = load.pending.pop(request_id, 0)
        load.num_pending_tokens -= num_pending
        load.num_placed_tokens = max(0.0, self._placed(load) - num_pending)
        load.turned = self._turned
        load.running.discard(request_id)
        self._expected.forget(request_id)

    # Inside.

    def _held(self, names: list[str], prompt: Prompt) -> dict[str, int]:
        """Return the tokens of a prompt that each replica holds, or will when it has computed what it was sent."""
        matched = self._holdings.match(prompt.block_hashes)
        expected = self._expected.match(prompt.block_hashes)
        held: dict[str, int] = {}
        for name in names:
            num_blocks = expected.get(name, 0)
            if self._holdings.is_known(name):
                num_blocks = max(num_blocks, matched.get(name, 0))
            if num_blocks:
                held[name] = min(num_blocks * self._block_size, prompt.num_tokens - 1)  # one token is always computed
        return held

    def _candidate(self, name: str, held: dict[str, int]) -> Candidate:
        load = self._loads[name]
        return Candidate(name, held.get(name, 0), load.num_pending_tokens, len(load.running), self._placed(load))

    def _placed(self, load: _Load) -> float:
        """Return what a replica was given lately: of what filled its cache half is gone when that is filled again."""
        return load.num_placed_tokens * math.exp2(load.turned - self._turned)

    def _place(self, load: _Load, num_tokens: int) -> None:
        """A replica's cache is filled with so many tokens."""
        load.num_placed_tokens = self._placed(load) + num_tokens
        load.turned = self._turned
        self._turned += num_tokens / (self._cache_tokens * len(self._loads))

    def _reason(self, chosen: Candidate, held: dict[str, int], names: list[str]) -> ChoiceReason:
        if not self._policy.sees_prefixes:
            return "policy"
        most = max(held.values(), default=0)
        if most:
            return "prefix" if chosen.num_held_tokens == most else "load"
        return "nothing_held" if any(map(self._holdings.is_known, names)) else "unknown"

    def _book(self, request_id: str, chosen: Candidate, prompt: Prompt) -> None:
        load = self._loads[chosen.replica]
        num_computed = prompt.num_tokens - chosen.num_held_tokens
        load.pending[request_id] = num_computed
        load.num_pending_tokens += num_computed
        self._place(load, num_computed)
        self._replica_of[request_id] = chosen.replica
        self._expected.sent(request_id, chosen.replica, prompt.block_hashes)
