"""Leaving: how a request gives back what it has: for good, until it is admitted again, or what lies behind a window."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

from pagefold.events import Emit, RequestFinished
from pagefold.kv.eviction import RequestFacts
from pagefold.kv.pins import HintedBy, hint_id
from pagefold.request import FinishReason, Request, RequestStatus

if TYPE_CHECKING:
    from pagefold.beams import BeamGroup
    from pagefold.kv import KVCore, SequenceCache
    from pagefold.kv.block import Node
    from pagefold.request import WarmUp
    from pagefold.scheduler.growth import AdmissionRule
    from pagefold.scheduler.policy import SchedulingPolicy
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.sessions import Sessions
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.scheduler.streamer import Streamer

__all__ = ["Leaving"]


class Leaving:
    """Lets requests go, and what they have.

    Args:
        core: has their blocks.
        queues: where those go that wait again.
        streamer: keeps what a request that streams has.
        rule: expects no growth any more of who goes.
        sessions: are told who leaves.
        policy: is told who has left, and who has ended.
        emit: where events go.

    Attributes:
        num_finished: how many requests have left for good, with each of their samples.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it holds together
        self,
        core: KVCore,
        queues: Queues,
        streamer: Streamer,
        rule: AdmissionRule,
        sessions: Sessions,
        policy: SchedulingPolicy,
        emit: Emit,
    ) -> None:
        self._core = core
        self._queues = queues
        self._streamer = streamer
        self._rule = rule
        self._sessions = sessions
        self._policy = policy
        self._emit = emit
        self.num_finished = 0

    def wait_again(self, request: Request, *, is_preempted: bool = False) -> None:
        """Let a request that ran wait: preempted, or taken back with the step that admitted it.

        It stands in no queue. One that holds a beam takes the others with it, wherever these stand, and they begin
        again as one request.
        """
        if request.beams is not None and request.beams.has_begun:
            request = self._gather(request.beams)
        if is_preempted:
            request.num_preemptions += 1
            request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
        request.drafts = ()
        self._sessions.preempted(request)
        progress = request.num_computed_tokens / request.stop.max_total_tokens
        self.let_go(request, min(progress, 1.0))
        self._leave(request)
        request.num_computed_tokens = 0
        request.to(RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING)
        self._queues.wait(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Let a request end, and those that were to fork from it."""
        for sample in (request, *request.forks):
            sample.finish_reason = reason
        if request.hint_pins:  # before its session is told, which may be over
            self._pin_hints(request)
        for sample in (request, *request.forks):
            self._sessions.finished(sample)
        if request.cache is not None:
            if request.warm_up is not None and request.warm_up.pin and request.has_answer:
                self._pin(request, request.warm_up, request.cache)
            self._core.moves.write_through(request.cache)
            if request.returns_in_s is not None:
                self._core.uses.hint(request.cache, repeat(True))  # noqa: FBT003 - of every block
            self.let_go(request)
        self._queues.forget(request)
        self._leave(request)
        self.num_finished += request.num_seqs
        for sample in (request, *request.forks):
            sample.to(RequestStatus.FINISHED)
            self._policy.ended(sample)
            self._rule.ended(sample)
            self._emit(
                RequestFinished(
                    sample.request_id, reason, sample.num_prompt_tokens, sample.num_output_tokens, sample.sample_index
                )
            )

    def drop_ended(self, behind: StepInFlight | None = None) -> None:
        """Let every running request go that has a finish reason.

        One that is part of ``behind``, the step that is in flight still, stays until that ends, and gets nothing of it.
        """
        busy = set(behind.requests) if behind is not None else ()
        still: list[Request] = []
        for request in self._queues.running:
            if request.finish_reason is None:
                still.append(request)
            elif request in busy:
                request.is_aborted = True
                still.append(request)
            else:
                self.finish(request, request.finish_reason)
        self._queues.running = still

    def trim(self, requests: list[Request]) -> None:
        """Give back what those have left behind that a step has got on; they run."""
        for request in requests:
            if request.cache is not None:
                self._core.trim(request.cache, request.num_computed_tokens)

    def let_go(self, request: Request, progress: float = 1.0) -> None:
        """Give back a request's blocks, and tell the policy whose they were, and what share of it was computed."""
        cache, use = request.cache, request.prompt_use
        assert cache is not None
        self._rule.forget(request)
        self._streamer.keep(request)
        request.kept_share = self._core.packing.kept_share(cache)
        cache.facts = RequestFacts(progress, request.priority, is_repeat=use.is_told)
        use.is_told = use.is_told or cache.has_path
        self._core.release(cache)
        request.cache = None

    def _leave(self, request: Request) -> None:
        """Let a request and those that were to fork from it have no place any more."""
        for sample in (request, *request.forks):
            self._policy.left(sample)

    def _gather(self, group: BeamGroup[Request]) -> Request:
        """Let all beams but the first go, and that one be the request again that it was before it forked."""
        leader, *others = group.seats
        tables = (table for seat in group.seats if seat.cache is not None for table in seat.cache.tables)
        group.num_held = len({block_id for table in tables for block_id in table.all_ids()})
        for seat in group.seats:
            self._queues.take_out(seat)
        for seat in others:
            self.let_go(seat)
            self._queues.forget(seat)
            seat.num_computed_tokens = 0
            seat.to(RequestStatus.PREEMPTED)
        leader.forks = others
        group.begin_again()
        return leader

    def _pin(self, request: Request, warm_up: WarmUp, cache: SequenceCache) -> None:
        """Pin what a warm-up has computed, under its own id; ``core.pins.dropped`` says why if it cannot be."""
        self._core.pins.add(
            request.request_id,
            cache.tail,
            self._core.now_s,
            ttl_s=warm_up.ttl_s,
            priority=warm_up.retention_priority,
        )

    def _pin_hints(self, request: Request) -> None:
        """Pin the beginnings of a prompt that its client has named, as far as they were computed and there is room."""
        has_failed = request.finish_reason == "error" and not request.has_whole_output
        cache = None if has_failed else request.cache
        by = HintedBy(request.tenant, self._sessions.owner_of(request))
        for hint in request.hint_pins:
            num_blocks = hint.num_tokens // self._core.block_size
            tail = None if cache is None or not cache.has_path else _node_at(cache.tail, num_blocks)
            pin_id = hint_id(request.request_id, hint.num_tokens)
            self._core.pins.hint(pin_id, tail, self._core.now_s, ttl_s=hint.ttl_s, by=by)


def _node_at(tail: Node | None, num_blocks: int) -> Node | None:
    """Return the node of the path up to ``tail`` with which its first blocks end; None if it has not so many."""
    node = tail
    while node is not None and node.depth >= num_blocks:
        node = node.parent
    if node is None or node.parent is None or node.depth + 1 < num_blocks:
        return None
    return node
