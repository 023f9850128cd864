"""LookAhead: plans the step behind the one in flight, whose tokens are not known yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.scheduler.ending import is_over
from pagefold.scheduler.step_in_flight import StepInFlight

if TYPE_CHECKING:
    from pagefold.kv import KVCore
    from pagefold.scheduler.making_way import AnyMakingWay
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.rows import RowPlanner
    from pagefold.steps import StepPlan

__all__ = ["LookAhead"]


class LookAhead:
    """Plans steps by foresight: as all others are planned, for requests as the step in flight will leave them.

    Args:
        core: the KV core.
        queues: who runs, and who waits.
        rows: plans the rows.
        making_way: knows for whom others are to make way.
    """

    def __init__(self, core: KVCore, queues: Queues, rows: RowPlanner, making_way: AnyMakingWay) -> None:
        self._core = core
        self._queues = queues
        self._rows = rows
        self._making_way = making_way

    def may_follow(self, before: StepInFlight, now: float) -> bool:
        """Whether a step may be planned behind ``before``.

        Not where its tokens decide, a request's time is up, or somebody is to make way for another tenant's share.
        """
        if before.hides_too_much or self._queues.deadlines.next_s <= now or self._making_way.is_due():
            return False
        return not self._core.streaming.is_on  # which looks at one step at a time

    def plan(self, before: StepInFlight, plan: StepPlan, now: float) -> StepInFlight | None:
        """Fill ``plan`` behind ``before``; None, and nothing has changed, where somebody would have to be preempted."""
        step = StepInFlight(plan, now, before.places())
        queues, all_running = self._queues, self._queues.running
        with before.foreseen():
            queues.running = [request for request in all_running if not is_over(request)]
            num_running = len(queues.running)
            step.num_leaving = len(all_running) - num_running
            queues.sort()
            self._making_way.reserve(step)
            self._rows.plan(step)
        admitted = queues.running[num_running:]
        queues.running = all_running
        if len(step.requests) < num_running + len(admitted) or not step.requests:
            assert not admitted, "admitted, and somebody who runs has no row"
            for promise in reversed(step.promises):
                self._core.publishing.abandon(promise)
            self._give_back_grants()
            return None
        queues.running += admitted
        step.note_late()
        return step

    def _give_back_grants(self) -> None:
        """Nobody packs: the step in flight does not, or nothing would be planned behind it."""
        if self._core.packing.is_on:
            for request in self._queues.running:
                if request.cache is not None:
                    self._core.packing.give_back(request.cache)
