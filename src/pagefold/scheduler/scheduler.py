"""Scheduler: continuous batching with chunked prefill under a token budget, in the order of a policy.

A step is one sentence::

    plan = scheduler.schedule(now)
    result = runner.run(plan)
    scheduler.apply(result)          or, when the runner raised: scheduler.abandon(error)

Memory comes from free and cached blocks first, then from pins, and only then from running requests.

Always: ``waiting`` is in the policy's order, and so is ``running`` when a step begins; those that the step admits come
behind. Preemption takes from the end of ``running``, so the first in that order always gets on, and a victim is never
part of the plan that is being made. First come first served, all in ``running`` came before all in ``waiting``, but
for those that were tried apart.

When a step has failed, ``suspicion.py`` says who alone is planned until it is known whose fault that was. Who runs and
is not chosen keeps its blocks, unless somebody more urgent needs them.

Where the device computes beside the host, one more step may be planned behind the one in flight (``schedule_ahead``):
it is applied after it, or taken back with it.

A request of several samples is one here until its prompt is computed: it takes a seat for each, and its row is sampled
once for each. When that step is applied the others fork from it, with their first tokens, and each goes its own way.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING

from pagefold.events import (
    Emit,
    RequestCut,
    RequestFinished,
    RequestPreempted,
    RequestStreamed,
    StepAbandoned,
    StepApplied,
    StepPlanned,
    ignore,
)
from pagefold.kv.eviction import RequestFacts
from pagefold.request import FinishReason, Request, RequestStatus
from pagefold.scheduler.corrupted import end_corrupted
from pagefold.scheduler.deadlines import Deadlines
from pagefold.scheduler.ending import is_over, take_token
from pagefold.scheduler.extras import apply_extras, plan_extras
from pagefold.scheduler.policy import FirstComeFirstServed
from pagefold.scheduler.publishing import commit, publish_late
from pagefold.scheduler.room import Room
from pagefold.scheduler.step_in_flight import StepInFlight
from pagefold.scheduler.streaming import Streamer
from pagefold.scheduler.suspicion import Suspicion
from pagefold.scheduler.telling import tell_added, tell_lookups
from pagefold.steps import StepPlan, StepResult

if TYPE_CHECKING:
    from pagefold.kv import BlockTable, KVCore
    from pagefold.request import WarmUp
    from pagefold.scheduler.policy import SchedulingPolicy

__all__ = ["Scheduler", "SchedulerLimits"]

_ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much one step may hold.

    Attributes:
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed in one step; not less than ``max_num_seqs``, so that every running
            sequence gets its token in every step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """Decides each step; owns the queues and, through the core, the blocks of running requests.

    Args:
        core: the KV core.
        limits: what one step may hold.
        policy: the order of requests; first come first served if not given.
        emit: where events go.

    Attributes:
        waiting, running: requests, in order.
        fetching: those that wait for blocks, by id.
        timed_out: those that the last call of :meth:`schedule` ended.
        corrupted: those that the last call of :meth:`apply` ended, since their logits are no numbers.
        distrusted: digests of the paths that were dropped with them, for slower tiers to forget.
        suspicion: who may be planned after a step has failed.
    """

    def __init__(
        self,
        core: KVCore,
        limits: SchedulerLimits,
        *,
        policy: SchedulingPolicy | None = None,
        emit: Emit = ignore,
    ) -> None:
        assert limits.max_num_batched_tokens >= limits.max_num_seqs, "every running sequence needs a token a step"
        self.core = core
        self.limits = limits
        self.policy = policy or FirstComeFirstServed()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.fetching: dict[str, Request] = {}
        self.timed_out: list[Request] = []
        self.corrupted: list[Request] = []
        self.distrusted: set[bytes] = set()
        self.suspicion = Suspicion()
        self._held_back: list[Request] = []  # of those that run, who is not chosen; while a step is planned
        self._by_id: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._emit = emit
        self._step: StepInFlight | None = None
        self._ahead: StepInFlight | None = None  # planned behind it
        self._num_steps = 0
        self._num_arrived = 0
        self._streamer = Streamer(core)
        self._room = Room(core, self._streamer)

    # Requests come and go.

    @property
    def has_work(self) -> bool:
        """Whether any request runs or could be admitted: whether a step would do anything."""
        return bool(self.running or self.waiting)

    @property
    def has_requests(self) -> bool:
        """Whether any request is here, those included that wait for blocks."""
        return bool(self._by_id)

    @property
    def next_deadline_s(self) -> float:
        """When the next request's time may be up; inf for never."""
        return self._deadlines.next_s

    def add(self, request: Request) -> None:
        """Queue a request, with those that will fork from it.

        The caller has checked that it can ever fit: at most ``max_model_len`` tokens and ``max_num_seqs`` samples.
        """
        assert request.num_seqs <= self.limits.max_num_seqs, "more samples than seats"
        for sample in (request, *request.forks):
            sample.index = self._num_arrived
            self._num_arrived += 1
            sample.order = self.policy.key(sample)
        self._enter(request)
        self._queue(request)
        tell_added(self._emit, request)

    def hold(self, request: Request) -> None:
        """Let a request that waits not be admitted before :meth:`ready`: blocks are brought for it."""
        self.waiting.remove(request)
        request.to(RequestStatus.FETCHING)
        self.fetching[request.request_id] = request

    def ready(self, request: Request) -> None:
        """Let a held request be admitted, in its place among those that wait."""
        del self.fetching[request.request_id]
        request.to(RequestStatus.WAITING)
        self._queue(request)

    def get(self, request_id: str) -> Request | None:
        """Return the request of that id, if it has not finished."""
        return self._by_id.get(request_id)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request from outside: cancelled, or its text met a stop string. At any moment, also during a step.

        Returns the request, or None when it is not here (any more) or ends already. During a step its blocks are
        released when the last step ends that it is part of, since the runner still writes them. Those that were to fork
        from it end with it.
        """
        request = self._by_id.get(request_id)
        if request is None or request.finish_reason is not None:
            return None
        is_in_step = request.status is RequestStatus.RUNNING and self._is_in_step(request)
        self._emit(RequestCut(request_id, reason, is_in_step))
        if is_in_step:
            for sample in (request, *request.forks):
                sample.is_aborted = True
                sample.finish_reason = reason
            return request
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.FETCHING:
            del self.fetching[request_id]
        else:
            self.waiting.remove(request)
        self._finish(request, reason)
        return request

    # The step.

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. An empty plan (no rows) means that there is nothing to run.

        Requests whose deadline has come end first, with ``timeout``: see ``timed_out``.

        Running requests come first, each leaving one token of the budget for everyone behind it, so that a long prompt
        never stops those that decode. What is left admits waiting requests, in order.
        """
        assert self._step is None, "one step at a time: apply or abandon the last one first"
        self.core.now_s = now
        self.core.pins.expire(now)
        self.timed_out = self._end_late(now)
        step = StepInFlight(StepPlan(self._num_steps), now)
        self._plan(step)
        if step.requests:
            self._step = step
        return self._planned(step)

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """Plan the step behind the one in flight, whose tokens are not known yet. None where that one must land first.

        That is so where its tokens decide what comes next, where a request's time is up, where somebody would have to
        be preempted, and while a culprit is looked for. Who may end with the token that is being sampled has a row too
        many, which is dropped.
        """
        before = self._step
        assert self._ahead is None, "two steps at a time: apply or abandon the first one first"
        if before is None or before.hides_too_much or self.next_deadline_s <= now or self.suspicion.is_on:
            return None
        if self.core.streaming.is_on:  # it looks at one step at a time
            return None
        self.core.now_s = now
        self.core.pins.expire(now)
        step = StepInFlight(StepPlan(self._num_steps), now, before.places())
        all_running = self.running
        with before.foreseen():
            self.running = [request for request in all_running if not is_over(request)]
            num_running = len(self.running)
            step.num_leaving = len(all_running) - num_running
            self._plan(step)
        admitted = self.running[num_running:]
        self.running = all_running
        if len(step.requests) < num_running + len(admitted) or not step.requests:
            assert not admitted, "admitted, and somebody who runs has no row"
            for promise in reversed(step.promises):
                self.core.publishing.abandon(promise)
            return None
        self.running += admitted
        step.note_late()
        self._ahead = step
        return self._planned(step)

    def apply(self, result: StepResult) -> list[Request]:
        """The step ran: commit its blocks, append what it sampled, end what is complete.

        Returns the requests that got a token, or asked for none and are computed, in the plan's order; those that ended
        have a ``finish_reason``.
        """
        step = self._take_step()
        plan = step.plan
        core = self.core
        commit(core, step.promises, self._step)
        if plan.copies:
            core.moves.copies_done(plan.copies)
        core.moves.host_done(plan.host_ops)
        requests = step.requests
        self.suspicion.ran(requests)
        tell_lookups(self._emit, step, has_tiers=self.core.host.is_on)
        any_ended = False
        for request, num_tokens in zip(requests, plan.num_tokens, strict=True):
            request.num_computed_tokens += num_tokens
            if request.is_aborted:
                any_ended = True
        if step.filling or step.joins:
            publish_late(core, step, self._step)
        self.corrupted, self.distrusted = [], set()
        if result.corrupted:
            rows = [requests[row] for row in result.corrupted]
            self.corrupted, self.distrusted = end_corrupted(core, rows, self._emit)
            any_ended = True
        apply_extras(plan, result, requests, step.samples)
        self._fork(step)
        sampled: list[Request] = []
        for request, token_id in zip(step.samples, result.token_ids, strict=True):
            if request.is_aborted:
                continue
            sampled.append(request)
            request.finish_reason = reason = take_token(request, token_id)
            if reason is not None:
                any_ended = True
        num_output_tokens = len(sampled)
        if any_ended:
            num_output_tokens -= sum(request.has_no_output for request in sampled)  # they have all ended
            self._drop_ended()
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
        step = self._take_step()
        behind, self._step = self._step, None
        if behind is not None:
            self._take_back(behind)
            self._note_overwritten(behind)
        self._take_back(step, damaged_ids)
        for request in [one for one in self.running if not self._streamer.is_intact(one)]:
            self.running.remove(request)
            self._back_to_waiting(request, is_preempted=True)
        self._begin_lost_blocks_again()
        if is_blamed and not damaged_ids:
            self._blame(step)
        else:
            self.suspicion.spoiled()
        took_part = [*step.requests, *(behind.requests if behind is not None else ())]
        here = [*self.running, *self.waiting]
        ended = [request for request in dict.fromkeys([*took_part, *here]) if request.finish_reason is not None]
        self._drop_ended()
        for request in ended:
            if request.status is not RequestStatus.FINISHED:
                self.waiting.remove(request)
                self._finish(request, request.finish_reason or "error")
        self._emit(StepAbandoned(step.plan.step_id, len(step.requests), error))
        if behind is not None:
            self._emit(StepAbandoned(behind.plan.step_id, len(behind.requests), "the step before it failed"))
        return [sample for request in ended for sample in (request, *request.forks)]

    # What there is.

    @property
    def num_wasted_slots(self) -> int:
        """Token positions in blocks of running requests that hold no token: what rounding to blocks costs.

        What a step in flight writes counts as held. Any thread may ask; while a step is planned or applied the answer
        may be off by what that step changes.
        """
        step = self._ahead or self._step
        if step is None:
            ends = [(request, request.num_computed_tokens) for request in self.running]
        else:
            rows = zip(step.requests, step.plan.starts, step.plan.num_tokens, strict=False)
            ends = [(request, start + num_tokens) for request, start, num_tokens in rows]
            if not step.is_ahead and len(ends) < len(self.running):  # some are held back
                planned = {request for request, _ in ends}
                ends += [(one, one.num_computed_tokens) for one in list(self.running) if one not in planned]
        tables = [(request.table, end) for request, end in ends]
        return sum(table.capacity - end for table, end in tables if table is not None)

    @property
    def in_step(self) -> list[Request]:
        """Who has each row of the step in flight that was planned last."""
        step = self._ahead or self._step
        return [] if step is None else step.requests

    # Inside.

    def _plan(self, step: StepInFlight) -> None:
        """Plan rows: those of running requests, then those of requests that are admitted."""
        self.running.sort(key=_ORDER)  # in order but for those that the last step admitted: next to nothing
        while self.suspicion.is_on and not step.requests:
            chosen = self.suspicion.choose(self.running, self.waiting)
            if chosen is not None:
                self._plan_chosen(step, chosen)
        if not step.requests:
            self._plan_all(step)

    def _plan_chosen(self, step: StepInFlight, chosen: set[Request]) -> None:
        """Plan rows of nobody but ``chosen``, while a culprit is looked for. Perhaps there is room for none of them."""
        self._held_back = [request for request in self.running if request not in chosen]
        self.running = [request for request in self.running if request in chosen]
        budget = self._schedule_running(step, self.limits.max_num_batched_tokens)
        others = [request for request in self.waiting if request not in chosen]
        self.waiting = deque(request for request in self.waiting if request in chosen)
        self._admit_waiting(step, budget)
        self.running = sorted([*self.running, *self._held_back], key=_ORDER)
        self.waiting = deque(sorted([*self.waiting, *others], key=_ORDER))
        self._held_back = []

    def _plan_all(self, step: StepInFlight) -> None:
        num_running = len(self.running)
        budget = self._schedule_running(step, self.limits.max_num_batched_tokens)
        if step.is_ahead and len(step.requests) < num_running:
            return
        if self.waiting:
            self._admit_waiting(step, budget)

    def _planned(self, step: StepInFlight) -> StepPlan:
        """Hand over a plan that stands, with what must be moved for it."""
        self._num_steps += 1
        plan = step.plan
        if step.requests:
            plan.copies = self.core.moves.take_copies()
            plan.host_ops = self.core.moves.take_host_ops()
            plan.residual_ids = self.core.residuals.ids_of(request.table for request in step.requests)
            plan.residual_copies = self.core.residuals.take_copies()
        else:
            assert not self.core.moves.pending_copies, "nobody runs, so nobody waits for a copy"
        num_tokens = len(plan.token_ids)
        self._emit(StepPlanned(plan.step_id, step.now, plan.num_rows, num_tokens, sum(plan.starts) + num_tokens))
        return plan

    def _take_back(self, step: StepInFlight, damaged_ids: frozenset[int] = frozenset()) -> None:
        """Take back what a step had promised, and let those that it admitted wait again. The newest step first."""
        self.core.moves.copies_failed(step.plan.copies)
        self.core.moves.host_failed(step.plan.host_ops, damaged_ids)
        self.core.residuals.failed(step.plan.residual_copies)
        for promise in reversed(step.promises):
            self.core.publishing.abandon(promise)
        for promise in step.joins:  # what the step before wrote stays, and nobody reads these tables any more
            self.core.publishing.join(promise)
        for request in reversed(step.admitted):
            self.running.remove(request)
            self._back_to_waiting(request)

    def _note_overwritten(self, behind: StepInFlight) -> None:
        """Note in whose residual the step behind a failed one may have begun a block."""
        for request, start in zip(behind.requests, behind.plan.starts, strict=True):
            if request.table is not None and start % self.core.block_size == 0:
                self.core.residuals.overwritten(request.table)

    def _begin_lost_blocks_again(self) -> None:
        """Let those whose residual is lost compute their last block from its beginning."""
        residuals, size = self.core.residuals, self.core.block_size
        for request in self.running:
            if request.table is not None and residuals.take_lost(request.table):
                request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
                request.num_computed_tokens -= request.num_computed_tokens % size

    def _end_late(self, now: float) -> list[Request]:
        late: list[Request] = []
        for request_id, index in self._deadlines.take(now):
            request = self._by_id.get(request_id)
            if request is not None and request.index == index:  # and not a later one of the same name
                self.finish(request_id, "timeout")
                late += (request, *request.forks)
        return late

    def _schedule_running(self, step: StepInFlight, budget: int) -> int:
        """Plan a row for every running request, preempting from the end where memory is short; return what is left."""
        plan = step.plan
        running = self.running
        block_size = self.core.block_size
        add_request, add_token = step.requests.append, plan.token_ids.append
        add_start, add_num, add_table = plan.starts.append, plan.num_tokens.append, plan.block_ids.append
        add_row, add_sampling, add_sample = plan.sampling_rows.append, plan.sampling.append, step.samples.append
        add_seed, add_draw = plan.seeds.append, plan.draws.append
        row = 0
        while row < len(running):
            request = running[row]
            token_ids = request.token_ids
            start = request.num_computed_tokens
            num_tokens = len(token_ids) - start
            allowed = budget - (len(running) - row - 1)
            num_tokens = min(num_tokens, allowed)
            table = request.table
            assert table is not None
            if num_tokens > 1:
                num_tokens = self._limit(request, start, num_tokens)
            end = start + num_tokens
            if (end > table.capacity or table.may_share_tail) and not self._make_room(step, request, start, end):
                break  # it was the last and went itself, or nobody may go
            budget -= num_tokens
            add_request(request)
            if num_tokens == 1:
                add_token(token_ids[start])
            else:
                plan.token_ids.extend(token_ids[start:end])
            add_start(start)
            add_num(num_tokens)
            add_table(table.block_ids)
            if end == len(token_ids):
                add_row(row)
                add_sampling(request.sampling)
                add_seed(request.seed)
                add_draw(end - request.num_prompt_tokens)
                add_sample(request)
                if request.forks:
                    self._plan_forks(step, request)
            if not request.is_plain:
                plan_extras(plan, request)
            if start < request.num_prompt_tokens or num_tokens > 1 or start < request.max_computed_tokens:
                step.num_prefill_tokens += num_tokens
                step.num_recomputed_tokens += max(0, min(end, request.max_computed_tokens) - start)
            if end // block_size > table.num_published and table.tail is not None:
                self._promise(step, request, end)
            row += 1
        return budget

    def _promise(self, step: StepInFlight, request: Request, end: int) -> None:
        """Promise the blocks of ``request`` up to position ``end``, or note that they are filled with a late token."""
        if request in step.late:
            step.filling.append(request)
            return
        assert request.table is not None
        promise = self.core.publishing.promise(request.table, request.packed(), end)
        if promise is not None:
            step.promises.append(promise)

    def _admit_waiting(self, step: StepInFlight, budget: int) -> None:
        """Admit from the head of the queue while budget, seats and memory last."""
        core = self.core
        num_seats = self.limits.max_num_seqs - len(self.running) - len(self._held_back)
        if num_seats:
            num_seats -= sum(len(request.forks) for request in (*self.running, *self._held_back))
        if self.core.residuals.is_on:  # those who leave have theirs until the step in flight has ended
            num_seats -= step.num_leaving
        while self.waiting and budget > 0 and self.waiting[0].num_seqs <= num_seats:
            request = self.waiting[0]
            packed = request.packed()
            streams = self._streamer.streams(request)
            if streams and not self._room.to_stream(request, self._all_running, step.now):
                break
            found = core.match(request.namespace, packed, request.max_hit_tokens)
            hit = found if streams else self._room.for_all(request, found, self._all_running, step.now)
            if hit is None:
                break  # in order: nobody overtakes the head of the queue
            table, start = core.begin_streaming(hit) if streams else core.acquire(core.worth(hit))
            num_tokens = min(request.num_tokens - start, budget)
            request.table = table
            num_tokens = self._limit(request, start, num_tokens)
            if not core.extend(table, start, start + num_tokens):
                request.table = None
                core.release(table)
                break
            self.waiting.popleft()
            if streams:
                self._emit(RequestStreamed(request.request_id, request.num_tokens, len(table.cold)))
            self._start(request, start, step.now)
            self.running.append(request)
            self._plan_admitted(step, request, num_tokens, packed)
            budget -= num_tokens
            num_seats -= request.num_seqs

    def _limit(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` from ``start`` on ``request`` may compute in one step."""
        assert request.table is not None
        if request.table.streams:
            return self._streamer.limit(num_tokens)
        return self.core.residuals.limit(start, num_tokens, request.num_tokens, self.core.block_size)

    def _start(self, request: Request, num_hit_tokens: int, now: float) -> None:
        if request.status is not RequestStatus.PREEMPTED:
            request.num_cached_tokens = num_hit_tokens
            assert request.table is not None
            request.num_loaded_tokens = request.table.num_loaded_tokens
        request.to(RequestStatus.RUNNING)
        request.num_computed_tokens = num_hit_tokens
        if request.times.scheduled_s is None:
            request.times.scheduled_s = now

    def _plan_admitted(self, step: StepInFlight, request: Request, num_tokens: int, packed: bytes) -> None:
        plan = step.plan
        table = request.table
        assert table is not None
        start = request.num_computed_tokens
        end = start + num_tokens
        if end == request.num_tokens:
            plan.sampling_rows.append(plan.num_rows)
            plan.sampling.append(request.sampling)
            plan.seeds.append(request.seed)
            plan.draws.append(request.num_output_tokens)
            step.samples.append(request)
            self._plan_forks(step, request)
        step.requests.append(request)
        step.num_admitted += 1
        step.num_prefill_tokens += num_tokens
        step.num_recomputed_tokens += max(0, min(end, request.max_computed_tokens) - start)
        plan.token_ids.extend(request.token_ids[start:end])
        plan.starts.append(start)
        plan.num_tokens.append(num_tokens)
        plan.block_ids.append(table.block_ids)
        if not request.is_plain:
            plan_extras(plan, request)
        promise = self.core.publishing.promise(table, packed, end)
        if promise is not None:
            step.promises.append(promise)

    def _plan_forks(self, step: StepInFlight, request: Request) -> None:
        """Sample the row of ``request``, which was planned last, once for each that will fork from it."""
        plan = step.plan
        for fork in request.forks:
            plan.sampling_rows.append(plan.sampling_rows[-1])
            plan.sampling.append(fork.sampling)
            plan.seeds.append(fork.seed)
            plan.draws.append(0)
            step.samples.append(fork)
        if request.forks:
            step.forking.append(request)

    def _fork(self, step: StepInFlight) -> None:
        """Let the other samples of each prompt that the step has completed run on its blocks."""
        for request in step.forking:
            if request.is_aborted:
                continue
            assert request.table is not None
            for fork in request.forks:
                fork.to(RequestStatus.RUNNING)
                fork.table = self.core.fork(request.table)
                fork.num_computed_tokens = request.num_computed_tokens
                fork.num_cached_tokens = request.num_cached_tokens
                fork.num_loaded_tokens = request.num_loaded_tokens
                fork.prompt_use = request.prompt_use
                fork.prompt_logprobs = request.prompt_logprobs
                fork.times.scheduled_s = request.times.scheduled_s
                self._enter(fork)
            at = self.running.index(request) + 1
            self.running[at:at] = request.forks
            request.forks = []

    def _make_room(self, step: StepInFlight, request: Request, start: int, end: int) -> bool:
        """Extend the table of ``request``, giving up pins and then preempting from the end.

        False when ``request`` itself had to go; or somebody, while a step is in flight that reads what they have.
        """
        assert request.table is not None
        if request.table.streams:
            self._streamer.make_room(request, end)
        while not self.core.extend(request.table, start, end):
            if self._streamer.cool(self._all_running) or self.core.pins.give_up(self.core.now_s):
                continue
            if self._streamer.take_back(request, end):
                continue
            if step.is_ahead:
                return False
            victim = self._take_last()
            self._preempt(victim, request)
            if victim is request:
                return False
        return True

    def _take_last(self) -> Request:
        """Take the last, in order, of those that run and have no row yet."""
        held_back = self._held_back
        is_held_back = held_back and held_back[-1].order > self.running[-1].order
        return held_back.pop() if is_held_back else self.running.pop()

    def _preempt(self, victim: Request, beneficiary: Request) -> None:
        """Take a running request's blocks; what is published stays cached and spares work if it is still there."""
        usage = self.core.usage
        num_computed = victim.num_computed_tokens
        self._back_to_waiting(victim, is_preempted=True)
        self._emit(
            RequestPreempted(
                victim.request_id, num_computed, usage, self.core.usage, cause_request_id=beneficiary.request_id
            )
        )

    def _back_to_waiting(self, request: Request, *, is_preempted: bool = False) -> None:
        assert request.table is not None
        if is_preempted:
            request.num_preemptions += 1
            request.max_computed_tokens = max(request.max_computed_tokens, request.num_computed_tokens)
        progress = request.num_computed_tokens / request.stop.max_total_tokens
        self._release(request, min(progress, 1.0))
        request.num_computed_tokens = 0
        request.to(RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        """Put a request in its place among those that wait: nearly always one of the ends."""
        waiting = self.waiting
        if not waiting or waiting[-1].order < request.order:
            waiting.append(request)
        elif request.order < waiting[0].order:
            waiting.appendleft(request)
        else:
            waiting.insert(bisect(waiting, request.order, key=_ORDER), request)

    def _drop_ended(self) -> None:
        """Take every running request that has a finish reason out of ``running``.

        One that is part of a step in flight stays until that ends, and gets nothing of it.
        """
        busy = set(self._step.requests) if self._step is not None else ()
        still: list[Request] = []
        for request in self.running:
            if request.finish_reason is None:
                still.append(request)
            elif request in busy:
                request.is_aborted = True
                still.append(request)
            else:
                self._finish(request, request.finish_reason)
        self.running = still

    def _enter(self, request: Request) -> None:
        """From now on ``request`` is found by its id and ends when its time is up."""
        assert request.request_id not in self._by_id, f"request id {request.request_id!r} is in use"
        self._by_id[request.request_id] = request
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, request.index, request.request_id, self._by_id)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.table is not None:
            if request.warm_up is not None and request.warm_up.pin and reason in ("stop", "length"):
                self._pin(request, request.warm_up, request.table)
            self.core.moves.write_through(request.table)
            if request.returns_in_s is not None:
                self.core.hint(request.table, repeat(True))  # noqa: FBT003 - of every block
            self._release(request, 1.0)
        del self._by_id[request.request_id]
        for sample in (request, *request.forks):
            sample.finish_reason = reason
            sample.to(RequestStatus.FINISHED)
            self._emit(
                RequestFinished(
                    sample.request_id, reason, sample.num_prompt_tokens, sample.num_output_tokens, sample.sample_index
                )
            )

    def _release(self, request: Request, progress: float) -> None:
        """Give back a request's blocks, and tell the policy whose they were."""
        table, use = request.table, request.prompt_use
        assert table is not None
        self._streamer.keep(request)
        table.facts = RequestFacts(progress, request.priority, is_repeat=use.is_told)
        use.is_told = use.is_told or table.has_path
        self.core.release(table)
        request.table = None

    def _pin(self, request: Request, warm_up: WarmUp, table: BlockTable) -> None:
        """Pin what a warm-up has computed, under its own id; ``core.pins.dropped`` says why if it cannot be."""
        self.core.pins.add(
            request.request_id,
            table.tail,
            self.core.now_s,
            ttl_s=warm_up.ttl_s,
            priority=warm_up.retention_priority,
        )

    @property
    def _all_running(self) -> list[Request]:
        return [*self.running, *self._held_back] if self._held_back else self.running

    def _is_in_step(self, request: Request) -> bool:
        return any(step is not None and request in step.requests for step in (self._step, self._ahead))

    def _blame(self, step: StepInFlight) -> None:
        """Let those end who are found to have made steps fail."""
        for request, why in self.suspicion.failed(step.requests, step.admitted).items():
            if request.status is not RequestStatus.FINISHED and not request.is_aborted:
                request.finish_reason, request.error = "error", why

    def _take_step(self) -> StepInFlight:
        """Take the step that was planned first; the one planned behind it is the next."""
        step = self._step
        assert step is not None, "no step is in flight"
        self._step, self._ahead = self._ahead, None
        return step
