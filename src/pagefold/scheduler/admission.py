"""Admission: who is let in from the head of the queue, with which blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import Emit, RequestStreamed, WaitCause
from pagefold.request import RequestStatus

if TYPE_CHECKING:
    from pagefold.kv import KVCore
    from pagefold.scheduler.policy import SchedulingPolicy
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.relief import Relief
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.scheduler.streamer import Streamer

__all__ = ["Admission"]


class Admission:
    """Lets requests in, one after another: nobody overtakes the head of the queue.

    Args:
        core: the KV core.
        queues: who waits, and who runs.
        streamer: knows who must stream.
        relief: finds memory.
        policy: is told who was let in.
        max_num_seqs: sequences running at once.
        emit: where events go.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it holds together
        self,
        core: KVCore,
        queues: Queues,
        streamer: Streamer,
        relief: Relief,
        policy: SchedulingPolicy,
        max_num_seqs: int,
        emit: Emit,
    ) -> None:
        self._core = core
        self._queues = queues
        self._streamer = streamer
        self._relief = relief
        self._policy = policy
        self._max_num_seqs = max_num_seqs
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
        """Let the head of the queue run, as the last of those that do; or return why it must wait.

        Its cache has room for what it may compute of ``budget`` tokens.
        """
        if budget <= 0:
            return "tokens"
        core, now = self._core, step.now
        request = self._queues.waiting[0]
        if request.num_seqs > self.num_seats(step):
            return "seats"
        streams = self._streamer.streams(request)
        if streams and not self._relief.room_to_stream(request, now):
            return "memory"
        found = core.match(request.namespace, request.packed(), request.max_hit_tokens, mask=request.mask)
        hit = found if streams else self._relief.room_for_all(request, found, now)
        if hit is None:
            return "memory"
        num_found = hit.num_blocks
        if streams:
            cache, start = core.begin_streaming(hit, owner=request.request_id)
        else:
            hit = core.worth(hit)
            is_return = request.num_cached_tokens >= 0
            cache, start = core.acquire(hit, request.message_ends, is_return=is_return, owner=request.request_id)
        request.cache = cache
        num_tokens = core.lodgers.limit(cache, start, min(request.num_tokens - start, budget), request.num_tokens)
        if not core.extend(cache, start, start + num_tokens):
            request.cache = None
            core.release(cache)
            return "memory"
        self._queues.waiting.popleft()
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
            request.times.scheduled_s = now
        self._queues.running.append(request)
        self._policy.admitted(request)
        return None
