"""Scheduling policies: in which order requests wait, and in which order running ones give way.

A policy gives each request one key when it arrives; the smallest goes first, and never changes. Waiting requests are
admitted in this order, and who runs is preempted only for somebody before it. It gives each a level too: of those that
could be preempted, the least urgent level goes first (``victims.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.request import Request

__all__ = ["SCHEDULING_POLICIES", "FirstComeFirstServed", "OrderKey", "PriorityWithAging", "SchedulingPolicy"]

OrderKey: TypeAlias = tuple[float, int]
"""What a request is ordered by; the second part is its place in the order of arrival, so no two are equal."""


class SchedulingPolicy(Protocol):
    """Orders requests."""

    name: str

    def key(self, request: Request) -> OrderKey:
        """Return the key of a request that has just arrived; ``request.index`` is set."""

    def level(self, request: Request) -> int:
        """Return how urgent a request is, whenever it came: the smaller, the more."""


class FirstComeFirstServed:
    """In order of arrival, whatever their priority."""

    name = "fcfs"

    def key(self, request: Request) -> OrderKey:
        """See :class:`SchedulingPolicy`."""
        return (0.0, request.index)

    def level(self, request: Request) -> int:  # noqa: ARG002 - nobody is more urgent
        """See :class:`SchedulingPolicy`."""
        return 0


class PriorityWithAging:
    """The smallest ``priority`` first, as in vLLM, but waiting makes a request more urgent, so that none starves.

    A request that has waited ``aging_s`` counts as one level more urgent. Its urgency at time t is
    ``priority - (t - arrival) / aging_s``; the part with t is the same for all, so their order never changes and
    ``priority * aging_s + arrival`` is a key for good.

    Args:
        aging_s: seconds of waiting that are worth one level of priority; positive.
    """

    name = "priority"

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s

    def key(self, request: Request) -> OrderKey:
        """See :class:`SchedulingPolicy`."""
        return (request.priority * self._aging_s + request.arrival_s, request.index)

    def level(self, request: Request) -> int:
        """See :class:`SchedulingPolicy`."""
        return request.priority


SCHEDULING_POLICIES: dict[str, Callable[[float], SchedulingPolicy]] = {
    "fcfs": lambda _aging_s: FirstComeFirstServed(),
    "priority": PriorityWithAging,
}
"""Every scheduling policy by its name in ``--scheduling-policy``; called with ``priority_aging_s``."""
