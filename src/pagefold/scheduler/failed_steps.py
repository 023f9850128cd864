"""FailedSteps: takes back all that a step had promised and let in, and finds who ends by its failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import Emit, StepAbandoned
from pagefold.request import RequestStatus
from pagefold.scheduler.beams import leaders

if TYPE_CHECKING:
    from pagefold.kv import KVCore
    from pagefold.request import Request
    from pagefold.scheduler.leaving import Leaving
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.scheduler.suspicion import Suspicion

__all__ = ["FailedSteps"]

_NO_IDS: frozenset[int] = frozenset()


class FailedSteps:
    """Takes back steps that failed.

    Args:
        core: the KV core.
        queues: who runs, and who waits.
        leaving: lets those go that end, or wait again.
        suspicion: is told who was in the step.
        emit: where events go.
    """

    def __init__(self, core: KVCore, queues: Queues, leaving: Leaving, suspicion: Suspicion, emit: Emit) -> None:
        self._core = core
        self._queues = queues
        self._leaving = leaving
        self._suspicion = suspicion
        self._emit = emit

    def abandon(
        self,
        step: StepInFlight,
        behind: StepInFlight | None,
        error: str,
        damaged_ids: frozenset[int],
        *,
        is_blamed: bool,
    ) -> list[Request]:
        """Take back ``step``, and first the step behind it. See :meth:`Scheduler.abandon`, whose arguments these are.

        Returns the requests that end by it.
        """
        if behind is not None:
            self._take_back(behind)
        self._take_back(step, damaged_ids)
        self._go_on_from_what_is_left()
        if is_blamed and not damaged_ids:
            self._blame(step)
        else:
            self._suspicion.spoiled()
        ended = self._end(step, behind)
        self._emit(StepAbandoned(step.plan.step_id, len(step.requests), error))
        if behind is not None:
            self._emit(StepAbandoned(behind.plan.step_id, len(behind.requests), "the step before it failed"))
        return ended

    def _take_back(self, step: StepInFlight, damaged_ids: frozenset[int] = _NO_IDS) -> None:
        """Take back what a step had promised, and let those that it admitted wait again. The newest step first."""
        core = self._core
        core.moves.copies_failed(step.plan.copies)
        core.moves.host_failed(step.plan.host_ops, damaged_ids)
        rows = zip(step.requests, step.plan.starts, strict=True)
        written = [(request.cache, start) for request, start in rows if request.cache is not None]
        core.lodgers.on_failed(written, step.plan.residual_copies)
        for promise in reversed(step.promises):
            core.publishing.abandon(promise)
        for promise in step.joins:  # what the step before wrote stays, and nobody reads these caches any more
            core.publishing.join(promise)
        for request in reversed(step.admitted):
            self._queues.running.remove(request)
            self._leaving.wait_again(request)

    def _go_on_from_what_is_left(self) -> None:
        """Let those that run compute again what they have lost; those that lost too much for that wait again."""
        queues = self._queues
        for request, num_left in [(one, self._num_left(one)) for one in queues.running]:
            has_lost = num_left is None or num_left < request.num_computed_tokens
            if request.cache is None:  # another beam of its group has lost something
                continue
            if num_left is None or (has_lost and request.beams is not None and request.beams.has_begun):
                queues.running.remove(request)
                self._leaving.wait_again(request, is_preempted=True)
            elif num_left < request.num_computed_tokens:
                request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
                request.num_computed_tokens = num_left

    def _num_left(self, request: Request) -> int | None:
        assert request.cache is not None
        return self._core.lodgers.num_left(request.cache, request.num_computed_tokens)

    def _blame(self, step: StepInFlight) -> None:
        """Give those a finish reason who are found to have made steps fail."""
        for blamed, why in self._suspicion.failed(leaders(step.requests), step.admitted).items():
            for request in [blamed] if blamed.beams is None else blamed.beams.beams:
                if request.status is not RequestStatus.FINISHED and not request.is_aborted:
                    request.finish_reason, request.error = "error", why

    def _end(self, step: StepInFlight, behind: StepInFlight | None) -> list[Request]:
        """Let all go that have a finish reason now, and return them."""
        queues = self._queues
        took_part = [*step.requests, *(behind.requests if behind is not None else ())]
        here = [*queues.running, *queues.waiting]
        ended = [request for request in dict.fromkeys([*took_part, *here]) if request.finish_reason is not None]
        self._leaving.drop_ended()
        for request in ended:
            if request.status is not RequestStatus.FINISHED:
                queues.waiting.remove(request)
                self._leaving.finish(request, request.finish_reason or "error")
        return ended
