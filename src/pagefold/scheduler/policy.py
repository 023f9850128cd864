"""Scheduling policies: in which order requests wait, and in which order running ones give way.

A policy gives each request one key when it arrives; the smallest goes first, and never changes. Waiting requests are
admitted in this order; a policy that looks at what the cache holds chooses among the first of them. Who runs is
preempted only for somebody before it. A policy gives each request a level too: of those that could be preempted, the
least urgent level goes first (``victims.py``).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

from pagefold.request import OrderKey
from pagefold.scheduler.fair_shares import FairShares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.request import Request

__all__ = [
    "MAX_RANKED",
    "SCHEDULING_POLICIES",
    "FirstComeFirstServed",
    "LongestPrefixMatch",
    "PriorityWithAging",
    "SchedulingPolicy",
]

MAX_RANKED = 32
"""So many of the queue ``lpm`` looks at, from its head on."""

_RANK_S = 0.25
"""So long ``lpm`` believes what it found of a request: finding costs what an admission does, and the cache changes
little meanwhile."""


class SchedulingPolicy(Protocol):
    """Orders requests.

    Attributes:
        name: in ``--scheduling-policy``.
        heeds_priority: whether a request's ``priority`` counts.
        shares: what tenants have, for whose shares others make way; None where they have none.
    """

    name: str
    heeds_priority: bool

    @property
    def shares(self) -> FairShares | None:
        """See above."""

    def key(self, request: Request) -> OrderKey:
        """Return the key of a request that has just arrived; ``request.index`` is set, and its forks are there.

        The forks have the same key, but for their own place in the order of arrival. Nothing changes by it.
        """

    def arrived(self, request: Request) -> None:
        """``request`` has its key, and will wait, with those that will fork from it."""

    def admitted(self, request: Request) -> None:
        """``request`` was let in, for the first time or again, with those that will fork from it."""

    def left(self, request: Request) -> None:
        """``request`` has no blocks any more, nor a place, if it had one."""

    def ended(self, request: Request) -> None:
        """``request`` has ended, and has left."""

    def level(self, request: Request) -> int:
        """Return how urgent a request is, whenever it came: the smaller, the more."""

    def choose(self, waiting: Sequence[Request], now: float, num_cached: Callable[[Request], int]) -> Request:
        """Return who of those that wait is to be let in next; asked where there are several.

        Args:
            waiting: in the order of their keys.
            now: the time.
            num_cached: tells how many tokens of a request the cache holds.
        """


class _FixedOrder:
    """What a policy does that looks at nothing but what a request brings: it notes nothing of what becomes of it."""

    shares = None

    def arrived(self, request: Request) -> None:
        """See :class:`SchedulingPolicy`."""

    def admitted(self, request: Request) -> None:
        """See :class:`SchedulingPolicy`."""

    def left(self, request: Request) -> None:
        """See :class:`SchedulingPolicy`."""

    def ended(self, request: Request) -> None:
        """See :class:`SchedulingPolicy`."""


class FirstComeFirstServed(_FixedOrder):
    """In order of arrival, whatever their priority."""

    name = "fcfs"
    heeds_priority = False

    def key(self, request: Request) -> OrderKey:
        """See :class:`SchedulingPolicy`."""
        return OrderKey.of(0.0, request.index)

    def level(self, request: Request) -> int:  # noqa: ARG002 - nobody is more urgent
        """See :class:`SchedulingPolicy`."""
        return 0

    def choose(self, waiting: Sequence[Request], now: float, num_cached: Callable[[Request], int]) -> Request:  # noqa: ARG002
        """See :class:`SchedulingPolicy`."""
        return waiting[0]


class PriorityWithAging(_FixedOrder):
    """The smallest ``priority`` first, as in vLLM, but waiting makes a request more urgent, so that none starves.

    A request that has waited ``aging_s`` counts as one level more urgent. Its urgency at time t is
    ``priority - (t - arrival) / aging_s``; the part with t is the same for all, so their order never changes and
    ``priority * aging_s + arrival`` is a key for good.

    Args:
        aging_s: seconds of waiting that are worth one level of priority; positive.
    """

    name = "priority"
    heeds_priority = True

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s

    def key(self, request: Request) -> OrderKey:
        """See :class:`SchedulingPolicy`."""
        return OrderKey.of(request.priority * self._aging_s + request.arrival_s, request.index)

    def level(self, request: Request) -> int:
        """See :class:`SchedulingPolicy`."""
        return request.priority

    def choose(self, waiting: Sequence[Request], now: float, num_cached: Callable[[Request], int]) -> Request:  # noqa: ARG002
        """See :class:`SchedulingPolicy`."""
        return waiting[0]


class LongestPrefixMatch(_FixedOrder):
    """Who has most of its prompt in the cache goes first (SGLang's ``lpm``): so that is used while it is there.

    Only the first ``MAX_RANKED`` of the queue are looked at. Who waits in its head for ``aging_s`` goes next, whatever
    others have: so a request is overtaken only by those that are let in within ``aging_s`` of its arrival, and for that
    long behind each that came before it and waits still. Equals go in order of arrival. Running requests are preempted
    in the order of arrival.

    Args:
        aging_s: seconds of waiting after which nobody overtakes a request; positive.
    """

    name = "lpm"
    heeds_priority = False

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._found: dict[Request, tuple[float, int]] = {}  # of those that wait: when, and how many tokens

    def key(self, request: Request) -> OrderKey:
        """See :class:`SchedulingPolicy`."""
        return OrderKey.of(0.0, request.index)

    def choose(self, waiting: Sequence[Request], now: float, num_cached: Callable[[Request], int]) -> Request:
        """See :class:`SchedulingPolicy`."""
        head = waiting[0]
        if now - head.arrival_s >= self._aging_s:
            return head
        known, self._found = self._found, {}
        for request in islice(waiting, MAX_RANKED):
            if request.num_preemptions and request is not head:  # it may lack room for a while, and the head does not
                continue
            found = known.get(request)
            if found is None or not 0 <= now - found[0] < _RANK_S:
                found = (now, num_cached(request))
            self._found[request] = found
        return max(self._found, key=lambda request: self._found[request][1])

    def level(self, request: Request) -> int:  # noqa: ARG002 - nobody is more urgent
        """See :class:`SchedulingPolicy`."""
        return 0


SCHEDULING_POLICIES: dict[str, Callable[[float], SchedulingPolicy]] = {
    "fcfs": lambda _aging_s: FirstComeFirstServed(),
    "priority": PriorityWithAging,
    "lpm": LongestPrefixMatch,
    "fair": lambda _aging_s: FairShares(),
}
"""Every scheduling policy by its name in ``--scheduling-policy``; called with ``priority_aging_s``."""
