"""Admission: who is let in, with which blocks.

That is whom the scheduling policy has go next: mostly the head of the queue. Where the head waits for a place among
long prompts, those behind it may overtake it (``overtaking.py``). Who waits only since its tenant has as many blocks as
its cap allows (``quotas.py``) holds up that tenant alone. Else nobody overtakes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import Emit, RequestStreamed, WaitCause
from pagefold.request import RequestStatus
from pagefold.scheduler import overtaking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import KVCore, PrefixHit
    from pagefold.request import Request
    from pagefold.scheduler.growth import AdmissionRule
    from pagefold.scheduler.limits import SchedulerLimits
    from pagefold.scheduler.policy import SchedulingPolicy
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.relief import Relief
    from pagefold.scheduler.sessions import Sessions
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.scheduler.streamer import Streamer

__all__ = ["Admission"]


class Admission:
    """Lets requests in, one after another.

    Args:
        core: the KV core.
        queues: who waits, and who runs.
        streamer: knows who must stream.
        relief: finds memory.
        sessions: know for whom blocks are used.
        rule: is told who runs.
        policy: says who is next.
        limits: of a step.
        emit: where events go.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it holds together
        self,
        core: KVCore,
        queues: Queues,
        streamer: Streamer,
        relief: Relief,
        sessions: Sessions,
        rule: AdmissionRule,
        policy: SchedulingPolicy,
        limits: SchedulerLimits,
        emit: Emit,
    ) -> None:
        self._core = core
        self._queues = queues
        self._streamer = streamer
        self._relief = relief
        self._sessions = sessions
        self._rule = rule
        self._policy = policy
        self._max_num_seqs = limits.max_num_seqs
        self._prefills = limits.prefills
        self._emit = emit

    def num_seats(self, step: StepInFlight) -> int:
        """Return how many sequences more may run."""
        with_blocks = self._queues.with_blocks
        num_seats = self._max_num_seqs - len(with_blocks)
        if num_seats:
            num_seats -= sum(len(request.forks) for request in with_blocks)
        if self._core.residuals.is_on:  # those who leave have theirs until the step in flight has ended
            num_seats -= step.num_leaving
        return num_seats

    def admit(self, step: StepInFlight, budget: int) -> WaitCause | None:
        """Let somebody run, as the last of those that do; or return why who is next must wait.

        Its cache has room for what it may compute of ``budget`` tokens.
        """
        if budget <= 0:
            return "tokens"
        waiting: Sequence[Request] = self._queues.waiting
        while True:
            if step.capped:  # whoever is at its cap is passed in all of the step, whatever else it waits for
                waiting = [other for other in waiting if other.tenant not in step.capped]
                if not waiting:
                    return "kv_cap"
            request = waiting[0] if len(waiting) == 1 else self._policy.choose(waiting, step.now, self._num_cached)
            cause = self._admit_next(request, waiting, step, budget)
            if cause != "kv_cap":
                return cause
            step.capped.add(request.tenant)

    def _admit_next(
        self, request: Request, waiting: Sequence[Request], step: StepInFlight, budget: int
    ) -> WaitCause | None:
        """Let ``request`` run, which is next of ``waiting``, or who may overtake it; or return why it must wait."""
        cause = self._let_in(request, step, budget)
        if cause != "prefills" or not self._lacks_long_place(request, step):
            return cause
        for other in overtaking.beside(request, waiting):
            if not self._lacks_long_place(other, step):
                if self._let_in(other, step, budget, beside=request) is not None:
                    return cause
                overtaking.has_passed(other, waiting)
                return None
        return cause

    def _num_cached(self, request: Request) -> int:
        """Return how many tokens of a request that waits need not be computed."""
        found = self._core.match(request.namespace, request.packed(), request.max_hit_tokens, mask=request.mask)
        return found.num_blocks * self._core.block_size + found.num_partial_tokens

    def _lacks_long_place(self, request: Request, step: StepInFlight) -> bool:
        if not self._prefills.is_long(request.num_tokens):  # whatever is found of it
            return False
        return self._prefills.lacks_long_place(request.num_tokens - self._num_cached(request), self._partial(step))

    def _partial(self, step: StepInFlight) -> list[Request]:
        """Return whose prompts are partly computed behind a step."""
        set_aside = self._queues.set_aside
        return [*step.partial, *(one for one in set_aside if one.num_computed_tokens + 1 < one.num_tokens)]

    def _let_in(
        self, request: Request, step: StepInFlight, budget: int, beside: Request | None = None
    ) -> WaitCause | None:
        """Let ``request`` run; or return why it must wait.

        Args:
            request: that waits.
            step: being planned.
            budget: tokens that are left of it.
            beside: who waits before it, and keeps the memory that it is going to get.
        """
        if request.num_seqs > self.num_seats(step):
            return "seats"
        streams = self._streamer.streams(request)
        if streams and not self._relief.room_to_stream(request, step.now):
            return "memory"
        found = self._core.match(request.namespace, request.packed(), request.max_hit_tokens, mask=request.mask)
        if self._prefills.is_on:
            num_begun = found.num_blocks * self._core.block_size + found.num_partial_tokens
            if not self._prefills.lets_begin(request.num_tokens - num_begun, budget, self._partial(step)):
                return "prefills"
            budget = min(budget, self._prefills.long_threshold or budget)
        if streams:
            return self._begin(request, step, budget, found, found.num_blocks)
        cause = self._relief.lacks(request, found, step, beside)
        if cause is not None:
            return cause
        hit = self._relief.room_for_all(request, found, step.now, beside)
        return "memory" if hit is None else self._begin(request, step, budget, hit, found.num_blocks)

    def _begin(
        self, request: Request, step: StepInFlight, budget: int, hit: PrefixHit, num_found: int
    ) -> WaitCause | None:
        """Let ``request`` run with what can be used of what was found; or return why it must wait all the same."""
        core, streams = self._core, self._streamer.streams(request)
        if streams:
            cache, start = core.begin_streaming(hit, owner=request.request_id)
        else:
            hit = core.worth(hit)
            is_return = request.num_cached_tokens >= 0
            cache, start = core.acquire(
                hit,
                request.message_ends,
                is_return=is_return,
                owner=request.request_id,
                tenant=request.tenant,
                session=self._sessions.owner_of(request),
            )
        request.cache = cache
        num_tokens = core.lodgers.limit(cache, start, min(request.num_tokens - start, budget), request.num_tokens)
        if not core.extend(cache, start, start + num_tokens):
            request.cache = None
            core.release(cache)
            return "memory"
        self._queues.take(request)
        if streams:
            self._emit(RequestStreamed(request.request_id, request.num_tokens, len(cache.cold)))
        request.num_lost_tokens = hit.num_lost * core.block_size
        request.num_declined_tokens = (num_found - hit.num_blocks) * core.block_size
        if request.status is not RequestStatus.PREEMPTED:
            request.num_cached_tokens = start
            request.num_loaded_tokens = cache.num_loaded_tokens
        request.to(RequestStatus.RUNNING)
        request.num_computed_tokens = start
        if request.times.scheduled_s is None:
            request.times.scheduled_s = step.now
        self._queues.running.append(request)
        self._policy.admitted(request)
        self._rule.note(request, step.plan.step_id)
        return None
