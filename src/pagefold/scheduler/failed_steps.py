"""FailedSteps: takes back all that a step had promised and let in, and finds who ends by its failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import Emit, StepAbandoned
from pagefold.request import RequestStatus

if TYPE_CHECKING:
    from pagefold.kv import KVCore
    from pagefold.request import Request
    from pagefold.scheduler.leaving import Leaving
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.scheduler.streamer import Streamer
    from pagefold.scheduler.suspicion import Suspicion

__all__ = ["FailedSteps"]

_NO_IDS: frozenset[int] = frozenset()


class FailedSteps:
    """Takes back steps that failed.

    Args:
        core: the KV core.
        queues: who runs, and who waits.
        streamer: knows whether requests that stream are whole.
        leaving: lets those go that end, or wait again.
        suspicion: is told who was in the step.
        emit: where events go.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it holds together
        self,
        core: KVCore,
        queues: Queues,
        streamer: Streamer,
        leaving: Leaving,
        suspicion: Suspicion,
        emit: Emit,
    ) -> None:
        self._core = core
        self._queues = queues
        self._streamer = streamer
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
            self._note_overwritten(behind)
        self._take_back(step, damaged_ids)
        self._let_go_of_broken()
        self._begin_lost_blocks_again()
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
        core.residuals.failed(step.plan.residual_copies)
        for promise in reversed(step.promises):
            core.publishing.abandon(promise)
        for promise in step.joins:  # what the step before wrote stays, and nobody reads these caches any more
            core.publishing.join(promise)
        for request in reversed(step.admitted):
            self._queues.running.remove(request)
            self._leaving.wait_again(request)

    def _note_overwritten(self, behind: StepInFlight) -> None:
        """Note in whose residual the step behind a failed one may have begun a block."""
        for request, start in zip(behind.requests, behind.plan.starts, strict=True):
            if request.cache is not None and start % self._core.block_size == 0:
                self._core.residuals.overwritten(request.cache)

    def _let_go_of_broken(self) -> None:
        """Let those wait again that stream and have lost cold blocks."""
        for request in [one for one in self._queues.running if not self._streamer.is_intact(one)]:
            self._queues.running.remove(request)
            self._leaving.wait_again(request, is_preempted=True)

    def _begin_lost_blocks_again(self) -> None:
        """Let those whose residual is lost compute their last block from its beginning."""
        residuals, size = self._core.residuals, self._core.block_size
        for request in self._queues.running:
            if request.cache is not None and residuals.take_lost(request.cache):
                request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
                request.num_computed_tokens -= request.num_computed_tokens % size

    def _blame(self, step: StepInFlight) -> None:
        """Give those a finish reason who are found to have made steps fail."""
        for request, why in self._suspicion.failed(step.requests, step.admitted).items():
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
