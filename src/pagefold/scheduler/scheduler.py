"""Scheduler: continuous batching with chunked prefill under a token budget, in the order of a policy.

A step is one sentence::

    plan = scheduler.schedule(now)
    result = runner.run(plan)
    scheduler.apply(result)          or, when the runner raised: scheduler.abandon(error)

Running requests get their rows first (``rows.py``), and what is left of the budget admits waiting ones
(``admission.py``). Memory is found as ``relief.py`` says. Preemption takes from those behind who needs a block
(``victims.py``), so the first in order always gets on, and a victim is never part of the plan that is being made. First
come first served, all in ``running`` came before all in ``waiting``, but for those that were preempted or tried apart.

When a step has failed, ``suspicion.py`` says who alone is planned until it is known whose fault that was. Who runs and
is not chosen keeps its blocks, unless somebody more urgent needs them.

Where the device computes beside the host, one more step may be planned behind the one in flight (``look_ahead.py``):
it is applied after it, or taken back with it. What a failed step takes back is in ``failed_steps.py``.

A request of several samples is one here until its prompt is computed: it takes a seat for each, and its row is sampled
once for each. When that step is applied the others fork from it, with their first tokens, and each goes its own way.
Beams begin so too, and then stay together: ``beams.py`` says after each step which of them there are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pagefold.events import (
    Emit,
    RequestCut,
    RequestRefused,
    StepApplied,
    StepPlanned,
    ignore,
)
from pagefold.request import FinishReason, OrderKey, Request, RequestStatus
from pagefold.scheduler.admission import Admission
from pagefold.scheduler.beams import Beams, leaders
from pagefold.scheduler.committing import commit, commit_packed, join, publish_late
from pagefold.scheduler.corrupted import end_corrupted
from pagefold.scheduler.ending import take_tokens
from pagefold.scheduler.expected_growth import ADMISSION_RULES
from pagefold.scheduler.extras import apply_extras
from pagefold.scheduler.failed_steps import FailedSteps
from pagefold.scheduler.flight import Flight
from pagefold.scheduler.guardrails import NO_CAP, NO_GUARDRAILS, Guardrails, Refusal
from pagefold.scheduler.leaving import Leaving
from pagefold.scheduler.look_ahead import LookAhead
from pagefold.scheduler.making_way import NO_MAKING_WAY, MakingWay
from pagefold.scheduler.needs import Needs
from pagefold.scheduler.policy import FirstComeFirstServed
from pagefold.scheduler.queue_ahead import QueueAhead
from pagefold.scheduler.queues import Queues
from pagefold.scheduler.relief import Relief
from pagefold.scheduler.reservation import Reservation
from pagefold.scheduler.rows import RowPlanner
from pagefold.scheduler.samples import fork_samples
from pagefold.scheduler.sessions import MAX_SESSIONS_PER_TENANT, Sessions
from pagefold.scheduler.step_in_flight import StepInFlight
from pagefold.scheduler.streamer import Streamer
from pagefold.scheduler.suspicion import Suspicion
from pagefold.scheduler.telling import tell_added, tell_lookups
from pagefold.scheduler.verifying import settle, verify
from pagefold.scheduler.victims import Victims
from pagefold.steps import StepPlan, StepResult

if TYPE_CHECKING:
    from collections import deque

    from pagefold.kv import KVCore
    from pagefold.request import EndedSession, SessionRef
    from pagefold.scheduler.limits import SchedulerLimits
    from pagefold.scheduler.making_way import AnyMakingWay
    from pagefold.scheduler.policy import SchedulingPolicy

__all__ = ["Scheduler"]

_NOBODY: frozenset[str] = frozenset()


class Scheduler:
    """Decides each step. Its parts have what is theirs: queues, admission, relief, rows, flight, leaving, failed steps.

    Args:
        core: the KV core.
        limits: what one step may hold.
        policy: the order of requests; first come first served if not given.
        admission: who may be let in beside what growth of those that run: a name of ``ADMISSION_RULES``.
        guardrails: keep steps and waits within targets, by what was measured.
        max_sessions_per_tenant: how many sessions of a tenant are remembered.
        emit: where events go.

    Attributes:
        rule: the rule of that name.
        timed_out: those that the last call of :meth:`schedule` ended.
        corrupted: those that the last call of :meth:`apply` ended, since the model computed no numbers for them.
        distrusted: digests of the paths that were dropped with them, for slower tiers to forget.
        suspicion: who may be planned after a step has failed.
        sessions: of agents.
    """

    def __init__(  # noqa: PLR0913 - the parts that it holds together
        self,
        core: KVCore,
        limits: SchedulerLimits,
        *,
        policy: SchedulingPolicy | None = None,
        admission: str = "prompt",
        guardrails: Guardrails = NO_GUARDRAILS,
        max_sessions_per_tenant: int = MAX_SESSIONS_PER_TENANT,
        emit: Emit = ignore,
    ) -> None:
        assert limits.max_num_batched_tokens >= limits.max_num_seqs, "every running sequence needs a token a step"
        self.core = core
        self.limits = limits
        self.policy = policy or FirstComeFirstServed()
        self.guardrails = guardrails
        self.timed_out: list[Request] = []
        self.corrupted: list[Request] = []
        self.distrusted: set[bytes] = set()
        self.suspicion = Suspicion()
        self._emit = emit
        self._flight = Flight()
        self._num_steps = 0
        self._num_arrived = 0
        self._queues = queues = Queues()
        needs = Needs(core, limits.max_num_batched_tokens)
        self.rule = rule = ADMISSION_RULES[admission](core, needs, emit)
        streamer = Streamer(core, needs)
        self.sessions = Sessions(core, emit, max_sessions_per_tenant)
        self._leaving = Leaving(core, queues, streamer, rule, self.sessions, self.policy, emit)
        victims, reservation = Victims(core, queues, self.policy), Reservation(queues, core.block_size)
        relief = Relief(core, queues, needs, streamer, self._leaving, victims, reservation, rule, emit)
        admits = Admission(core, queues, streamer, relief, self.sessions, rule, self.policy, limits, emit)
        self._making_way: AnyMakingWay = NO_MAKING_WAY
        if self.policy.shares is not None:
            self._making_way = MakingWay(core, queues, self.policy.shares, relief, limits)
        self._rows = RowPlanner(core, queues, relief, admits, limits, guardrails)
        self._look_ahead = LookAhead(core, queues, self._rows, self._making_way)
        self._queue_ahead = QueueAhead(queues, core, limits.max_num_seqs)
        self._beams = Beams(core, queues, self._leaving, rule)
        self._failed_steps = FailedSteps(core, queues, self._leaving, self.suspicion, emit)

    # Requests come and go.

    @property
    def waiting(self) -> deque[Request]:
        """Requests that could be admitted, in order."""
        return self._queues.waiting

    @property
    def running(self) -> list[Request]:
        """Requests that have blocks, in order."""
        return self._queues.running

    @property
    def with_blocks(self) -> list[Request]:
        """Those that have blocks: they run, or are set aside for the moment."""
        return self._queues.with_blocks

    @property
    def fetching(self) -> dict[str, Request]:
        """Requests that wait for blocks of slow tiers, by id."""
        return self._queues.fetching

    @property
    def has_work(self) -> bool:
        """Whether any request runs or could be admitted: whether a step would do anything."""
        return bool(self._queues.running or self._queues.waiting)

    @property
    def has_requests(self) -> bool:
        """Whether any request is here, those included that wait for blocks."""
        return bool(self._queues)

    @property
    def next_deadline_s(self) -> float:
        """When the next request's time may be up; inf for never."""
        return self._queues.deadlines.next_s

    def add(self, request: Request) -> None:
        """Queue a request, with those that will fork from it.

        The caller has checked that it can ever fit: at most ``max_model_len`` tokens and ``max_num_seqs`` samples.
        """
        assert request.num_seqs <= self.limits.max_num_seqs, "more samples than seats"
        num_ahead = len(self._queues.waiting) + len(self._queues.fetching)
        for sample in (request, *request.forks):
            sample.times.num_ahead = num_ahead
            sample.index = self._num_arrived
            self._num_arrived += 1
        tag = self.policy.key(request).tag
        for sample in (request, *request.forks):
            sample.order = OrderKey.of(tag, sample.index)
        self.policy.arrived(request)
        self.core.quotas.arrived(request.tenant, request.quota)
        self._queues.enter(request)
        self._queues.wait(request)
        self.sessions.arrived(request)
        tell_added(self._emit, request)

    def judge(self, request: Request) -> Refusal | None:
        """Return why a request that is about to be added should not be, or None: it would wait longer than it may.

        What counts is what would be computed before it in the policy's order. Whoever adds it all the same may do so;
        nothing is queued here.
        """
        request.index = self._num_arrived
        request.order = self.policy.key(request)
        ahead = partial(self._queue_ahead.of, request.order, request.num_prompt_tokens, request.num_seqs)
        request.times.computed_wait_s, refusal = self.guardrails.shedder.judge(request.num_prompt_tokens, ahead)
        if refusal is not None:
            self._emit(RequestRefused(request.request_id, "ttft_target", refusal.expected_s, refusal.threshold_s))
        return refusal

    def hold(self, request: Request) -> None:
        """Let a request that waits not be admitted before :meth:`ready`: blocks are brought for it."""
        self._queues.hold(request)

    def ready(self, request: Request) -> None:
        """Let a held request be admitted, in its place among those that wait."""
        self._queues.ready(request)

    def get(self, request_id: str) -> Request | None:
        """Return the request of that id, if it has not finished."""
        return self._queues.get(request_id)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request from outside: cancelled, or its text met a stop string. At any moment, also during a step.

        Returns the request, or None when it is not here (any more) or ends already. During a step its blocks are
        released when the last step ends that it is part of, since the runner still writes them. Those that were to fork
        from it end with it.
        """
        request = self._queues.get(request_id)
        if request is None or request.finish_reason is not None:
            return None
        is_in_step = request.status is RequestStatus.RUNNING and self._flight.has(request)
        self._emit(RequestCut(request_id, reason, is_in_step))
        if is_in_step:
            for sample in (request, *request.forks):
                sample.is_aborted = True
                sample.finish_reason = reason
            return request
        self._queues.remove(request)
        self._leaving.finish(request, reason)
        return request

    def end_session(self, session: SessionRef) -> EndedSession | None:
        """End a session, with its sub-agents; None if there is none. At any moment, also during a step.

        Its requests go on, and their blocks go first when they end.
        """
        return self.sessions.end(session)

    # The step.

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. An empty plan (no rows) means that there is nothing to run.

        Requests whose deadline has come end first, with ``timeout``: see ``timed_out``.

        Running requests come first, each leaving one token of the budget for everyone behind it, so that a long prompt
        never stops those that decode. What is left admits waiting requests, in order.
        """
        assert self._flight.first is None, "one step at a time: apply or abandon the last one first"
        self.core.now_s = now
        self.core.pins.expire(now)
        self.timed_out = self._end_late(now)
        step = StepInFlight(StepPlan(self._num_steps), now)
        self._plan(step)
        if step.requests:
            self._flight.first = step
        return self._planned(step)

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """Plan the step behind the one in flight, whose tokens are not known yet. None where that one must land first.

        That is so where its tokens decide what comes next, where a request's time is up, where somebody would have to
        be preempted, and while a culprit is looked for. Who may end with the token that is being sampled has a row too
        many, which is dropped.
        """
        before = self._flight.first
        assert self._flight.behind is None, "two steps at a time: apply or abandon the first one first"
        if before is None or self.suspicion.is_on or not self._look_ahead.may_follow(before, now):
            return None
        self.core.now_s = now
        self.core.pins.expire(now)
        step = self._look_ahead.plan(before, StepPlan(self._num_steps), now)
        if step is None:
            return None
        self._flight.behind = step
        return self._planned(step)

    def apply(self, result: StepResult, now: float | None = None) -> list[Request]:
        """The step ran: commit its blocks, append what it sampled, end what is complete.

        Args:
            result: of the step.
            now: when its tokens were there, for the guardrails; without it they learn nothing of the step.

        Returns the requests that got tokens, or asked for none and are computed, in the plan's order, and behind them
        those whose beams did; those that ended have a ``finish_reason``. A request gets one token, and one more for
        each draft that was right; what beams got is known when they end.
        """
        step = self._flight.take()
        behind = self._flight.first
        plan = step.plan
        core = self.core
        joins = not result.corrupted
        tell_lookups(self._emit, step, has_tiers=self.core.host.is_on)
        late = commit(core, step.promises, behind, joins=joins)
        core.moves.copies_done(plan.copies)
        core.moves.host_done(plan.host_ops)
        requests = step.requests
        self.suspicion.ran(leaders(requests) if self.suspicion.is_on else requests)
        num_uncounted, dropped, spoiled = verify(step, result)
        for row, (request, num_tokens) in enumerate(zip(requests, plan.num_tokens, strict=True)):
            request.num_computed_tokens += num_tokens - num_uncounted.get(row, 0)
        any_ended = any(request.is_aborted for request in requests)
        if step.filling or step.joins:
            late += publish_late(core, step, behind, joins=joins)
        if core.packing.is_on:
            commit_packed(core, step, result, behind, self._emit)
        if core.trims:
            self._leaving.trim(requests)
        self.corrupted, self.distrusted = [], set()
        if result.corrupted:
            rows = [requests[row] for row in result.corrupted if row not in spoiled]
            self.corrupted, self.distrusted = end_corrupted(core, rows, self._queues.with_blocks, self._emit)
            join(core, late, behind)
            any_ended = True
        apply_extras(plan, result, step, dropped)
        fork_samples(step, core, self._queues, self.rule)
        sampled = take_tokens(step, result, dropped)
        if plan.logprob_rows and any(request.beams is not None for request in requests):
            sampled += self._beams.advance(step, result)
        num_output_tokens = len(sampled)
        if plan.drafted:
            settle(core, step, spoiled, self._emit)
            sampled = list(dict.fromkeys(sampled))
        if any_ended or any(request.finish_reason is not None for request in sampled):
            num_output_tokens -= sum(request.has_no_output for request in sampled)  # they have all ended
            self._leaving.drop_ended(behind)
        self._emit(
            StepApplied(
                plan.step_id,
                len(self.running),
                len(self.waiting),
                step.num_prefill_tokens,
                num_output_tokens,
                step.num_recomputed_tokens,
                len(plan.token_ids),
            )
        )
        if now is not None:
            self.guardrails.landed(step, now, self._leaving.num_finished, self._queue_ahead)
        return sampled

    def abandon(
        self, error: str, damaged_ids: frozenset[int] = frozenset(), *, is_blamed: bool = True
    ) -> list[Request]:
        """The step failed: take back all that it had promised, and let those that it admitted wait again.

        A step planned behind it is taken back first, and is nobody's failure.

        Args:
            error: what it failed of.
            damaged_ids: what of the host arena it could not load; then no request is at fault.
            is_blamed: whether one of its requests may be at fault.

        Returns the requests that are gone with it: those that were cancelled meanwhile or had ended before, and those
        against whom too much counts now, which have an ``error``.
        """
        step = self._flight.take()
        behind, self._flight.first = self._flight.first, None
        self.guardrails.failed()
        ended = self._failed_steps.abandon(step, behind, error, damaged_ids, is_blamed=is_blamed)
        return [sample for request in ended for sample in (request, *request.forks)]

    # What there is.

    @property
    def num_wasted_slots(self) -> int:
        """Slots in blocks of running requests, of all groups, that hold no token: what rounding to blocks costs.

        What a step in flight writes counts as held. Any thread may ask; while a step is planned or applied the answer
        may be off by what that step changes.
        """
        caches = [(request.cache, end) for request, end in self._flight.ends(self.running)]
        num_wasted = sum(cache.capacity - end for cache, end in caches if cache is not None)
        return num_wasted * self.core.num_groups  # all tables of a cache end with the same position

    @property
    def in_step(self) -> list[Request]:
        """Who has each row of the step in flight that was planned last."""
        step = self._flight.newest
        return [] if step is None else step.requests

    # Inside.

    def _plan(self, step: StepInFlight) -> None:
        """Plan rows; while a culprit is looked for, for nobody but those that may be planned together."""
        queues = self._queues
        queues.sort()
        while self.suspicion.is_on and not step.requests:
            chosen = self.suspicion.choose(leaders(queues.running), queues.waiting)
            if chosen is not None:  # perhaps there is room for none of them
                chosen.update(request for request in queues.running if request.leader in chosen)
                others = queues.choose(chosen)
                self._rows.plan(step)
                queues.unchoose(others)
        if not step.requests:
            if not self.suspicion.is_on:
                self._making_way.make(step)
            self._rows.plan(step)

    def _planned(self, step: StepInFlight) -> StepPlan:
        """Hand over a plan that stands, with what must be moved for it."""
        self._num_steps += 1
        plan = step.plan
        if step.requests:
            plan.copies = self.core.moves.take_copies()
            plan.host_ops = self.core.moves.take_host_ops()
            plan.residual_ids = self.core.residuals.ids_of(request.cache for request in step.requests)
            plan.residual_copies = self.core.residuals.take_copies()
            if self.core.packing.is_on:
                self._plan_packing(step)
        else:
            assert not self.core.moves.pending_copies, "nobody runs, so nobody waits for a copy"
        num_tokens = len(plan.token_ids)
        drafts = tuple((step.requests[one.row].request_id, one.num_drafts) for one in plan.drafted)
        num_read = sum(plan.starts) + num_tokens
        waits_for = "apart" if self.suspicion.is_on and self.waiting else step.waits_for
        cap = None if step.prefill_cap_tokens == NO_CAP else step.prefill_cap_tokens
        capped = frozenset(step.capped) if step.capped else _NOBODY
        self._emit(
            StepPlanned(plan.step_id, step.now, plan.num_rows, num_tokens, num_read, drafts, waits_for, cap, capped)
        )
        return plan

    @staticmethod
    def _plan_packing(step: StepInFlight) -> None:
        """Say what rows have of packed chunks, and into which blocks they pack the next ones."""
        plan = step.plan
        for row, request in enumerate(step.requests):
            assert request.cache is not None
            plan.chunks.append(request.cache.chunks)
            plan.mask_of.append(request.mask)
            if request.cache.granted:
                plan.packing_rows.append(row)
                plan.granted.append(request.cache.granted)

    def _end_late(self, now: float) -> list[Request]:
        late: list[Request] = []
        for request in self._queues.take_late(now):
            self.finish(request.request_id, "timeout")
            late += (request, *request.forks)
        return late
