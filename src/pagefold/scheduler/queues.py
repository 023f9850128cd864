"""Queues: which requests are here, who of them runs, and in which order the others wait."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

from pagefold.request import RequestStatus
from pagefold.scheduler.deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.request import Request

__all__ = ["Queues"]

_ORDER = attrgetter("order")


class Queues:
    """Requests by where they are.

    Always: ``waiting`` is in the policy's order, and so is ``running`` after :meth:`sort`; those that the step being
    planned admits come behind.

    Attributes:
        waiting: could be admitted, in order.
        running: have blocks, in order.
        set_aside: have blocks too, and are not planned: for the moment in which others are, while a culprit is
            looked for.
        fetching: wait for blocks that slow tiers bring, by id.
        deadlines: when each one's time is up.
    """

    __slots__ = ("_by_id", "deadlines", "fetching", "running", "set_aside", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.set_aside: list[Request] = []
        self.fetching: dict[str, Request] = {}
        self.deadlines = Deadlines()
        self._by_id: dict[str, Request] = {}

    def __bool__(self) -> bool:
        """Whether any request is here."""
        return bool(self._by_id)

    @property
    def with_blocks(self) -> list[Request]:
        """All that have blocks."""
        return [*self.running, *self.set_aside] if self.set_aside else self.running

    def get(self, request_id: str) -> Request | None:
        """Return the request of that id, if it is here."""
        return self._by_id.get(request_id)

    def enter(self, request: Request) -> None:
        """From now on ``request`` is found by its id and ends when its time is up."""
        assert request.request_id not in self._by_id, f"request id {request.request_id!r} is in use"
        self._by_id[request.request_id] = request
        if request.deadline_s is not None:
            self.deadlines.add(request.deadline_s, request.index, request.request_id, self._by_id)

    def forget(self, request: Request) -> None:
        """Do not find ``request`` any more. It stands in no queue."""
        del self._by_id[request.request_id]

    def take_late(self, now: float) -> Iterator[Request]:
        """Yield those whose time is up, each once."""
        for request_id, index in self.deadlines.take(now):
            request = self._by_id.get(request_id)
            if request is not None and request.index == index:  # and not a later one of the same name
                yield request

    def wait(self, request: Request) -> None:
        """Put a request in its place among those that wait: nearly always one of the ends."""
        waiting = self.waiting
        if not waiting or waiting[-1].order < request.order:
            waiting.append(request)
        elif request.order < waiting[0].order:
            waiting.appendleft(request)
        else:
            waiting.insert(bisect(waiting, request.order, key=_ORDER), request)

    def take(self, request: Request) -> None:
        """Take ``request`` out of those that wait: nearly always the first."""
        if self.waiting[0] is request:
            self.waiting.popleft()
        else:
            self.waiting.remove(request)

    def hold(self, request: Request) -> None:
        """Let a request that waits not be admitted before :meth:`ready`: blocks are brought for it."""
        self.waiting.remove(request)
        request.to(RequestStatus.FETCHING)
        self.fetching[request.request_id] = request

    def ready(self, request: Request) -> None:
        """Let a held request be admitted, in its place among those that wait."""
        del self.fetching[request.request_id]
        request.to(RequestStatus.WAITING)
        self.wait(request)

    def remove(self, request: Request) -> None:
        """Take a request out of the queue that it stands in."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.FETCHING:
            del self.fetching[request.request_id]
        else:
            self.waiting.remove(request)

    def take_out(self, request: Request) -> None:
        """Let ``request`` run no more, if it does."""
        for queue in (self.running, self.set_aside):
            if request in queue:
                queue.remove(request)

    def sort(self) -> None:
        """Put those that run in order; they are but for those that the last step admitted."""
        self.running.sort(key=_ORDER)

    def choose(self, chosen: set[Request]) -> list[Request]:
        """Leave nobody but ``chosen`` to be planned. Return who else waits, for :meth:`unchoose`."""
        self.set_aside = [request for request in self.running if request not in chosen]
        self.running = [request for request in self.running if request in chosen]
        others = [request for request in self.waiting if request not in chosen]
        self.waiting = deque(request for request in self.waiting if request in chosen)
        return others

    def unchoose(self, others: list[Request]) -> None:
        """Put those back who were not chosen, as :meth:`choose` returned them."""
        self.running = sorted([*self.running, *self.set_aside], key=_ORDER)
        self.waiting = deque(sorted([*self.waiting, *others], key=_ORDER))
        self.set_aside = []
