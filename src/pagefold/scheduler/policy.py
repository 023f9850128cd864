"""Scheduling policies: in which order requests wait, and in which order running ones give way.

A policy gives each request one key when it arrives; the smallest goes first, and never changes. Waiting requests are
admitted in this order, and running ones are preempted from its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from pagefold.scheduler.fair_shares import FairShares

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.request import Request

__all__ = ["SCHEDULING_POLICIES", "FirstComeFirstServed", "OrderKey", "PriorityWithAging", "SchedulingPolicy"]

OrderKey: TypeAlias = tuple[float, int]
"""What a request is ordered by; the second part is its place in the order of arrival, so no two are equal."""


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

        The forks have the same key, but for their own place in the order of arrival.
        """

    def admitted(self, request: Request) -> None:
        """``request`` was let in, for the first time or again, with those that will fork from it."""

    def left(self, request: Request) -> None:
        """``request`` has no blocks any more, nor a place, if it had one."""

    def ended(self, request: Request) -> None:
        """``request`` has ended, and has left."""


class _FixedOrder:
    """What a policy does that looks at nothing but what a request brings: it notes nothing of what becomes of it."""

    shares = None

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
        return (0.0, request.index)


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
        return (request.priority * self._aging_s + request.arrival_s, request.index)


SCHEDULING_POLICIES: dict[str, Callable[[float], SchedulingPolicy]] = {
    "fcfs": lambda _aging_s: FirstComeFirstServed(),
    "priority": PriorityWithAging,
    "fair": lambda _aging_s: FairShares(),
}
"""Every scheduling policy by its name in ``--scheduling-policy``; called with ``priority_aging_s``."""
