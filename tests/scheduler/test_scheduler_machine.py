"""Scheduler and core under random operations, beside a slab that can be read and a slow look at every plan.

Held after every operation, for every policy, with tiny pools, small chunks and few seats:

* ``audit`` passes; ``waiting`` is in the policy's order; first come first served, ``running`` came before ``waiting``,
  but for those that were preempted;
* a plan's columns are consistent: the budget is kept, every running request has a row of at least one token or was
  preempted, no position is computed twice or skipped, seeds and draws are those of the row's request;
* each row finds in its blocks exactly its own history, and what it writes is still there when all rows have written.
  Blocks are poisoned when they become free, and the positions that a row will write before it writes them;
* every output is what its request generates alone, that of each sample of a prompt included; a prompt of several
  samples is sampled once for each when it is computed, and then they are requests like all others;
* what pins keep is read back; nobody is preempted while pins alone keep a block, a pin is given up only for somebody
  who then gets on, and nobody waits for memory that pins keep;
* who is preempted has no row, comes behind its beneficiary, and is whom a slow twin of ``victims.py`` would choose; the
  oldest request never is; who comes back has room for a while; admission waits only for budget, seats or memory; while
  there is work each step computes tokens; every request ends within as many steps as there are tokens;
* where growth is expected, a slow twin agrees that there is no room beside it, and that what is promised is what all
  lack of their ends; where prompts have places, none begins beside too many, and no row has more of one than it may.

* where blocks are sealed, each row finds in its residual what its sequence has of its last block, and begins a block or
  ends in the one that it begins in; who loses a residual by a failed step begins the block again;
* nobody ends by ``error`` but for a cause: so many steps that failed with it alone, or in company, or in a row; where
  steps fail of culprits alone, several at a time, or two of a kind that fail only together, nobody else ends;
* whose logits are no numbers ends, gets no token, and nothing is found that begins as it does; others go on;
* who has drafts, right ones, wrong ones, or right ones and then wrong ones, generates what it does without, has just
  what was accepted behind each step, and publishes no more than that; drafts that are not finite end nobody;
* where tenants have quotas, counted anew: no block goes below another tenant's floor, nobody has more than its cap, and
  who waits for its cap is passed by all other tenants;
* with guardrails, whatever their clock says, prompts get no more of a step than the cap and a token each, and every
  step gets on all the same; whoever is refused leaves nothing behind;
* a step that is planned behind one in flight leaves every request as it was, has the positions that follow, and says
  of each token that is not known yet whose it is; when it is not planned, there is a reason.

Steps are planned, one behind another too, applied or abandoned; requests are added and finished, pins taken away, and
the cache is reset, at any point of that. Some requests are warm-ups that pin their prompts.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from slow_growth import KeptEnds, has_room
from until_seen import IN_FULL, until_seen

from pagefold.events import (
    BlockEvicted,
    DraftsVerified,
    Event,
    PinDropped,
    PrefixLookup,
    RequestPreempted,
    StepApplied,
    StepPlanned,
)
from pagefold.kv import (
    KEEP_ALL,
    NO_HOST,
    NO_MASK,
    NO_QUOTAS,
    NO_RESIDUALS,
    BlockState,
    BlockTable,
    HostTier,
    KeepRule,
    KVCore,
    KVQuota,
    Namespace,
    PinLimits,
    Quotas,
    Residuals,
    audit,
    make_policy,
)
from pagefold.request import HintPin, Request, RequestStatus, SessionRef, StopRule, WarmUp, hints_within, session_ref
from pagefold.sampling import SamplingParams
from pagefold.scheduler import SCHEDULING_POLICIES, Guardrails, PrefillLimits, Scheduler, SchedulerLimits, Targets
from pagefold.scheduler.making_way import MOST_WAYS_MADE
from pagefold.scheduler.needs import Needs
from pagefold.scheduler.prefill_limits import NO_PREFILL_LIMITS
from pagefold.scheduler.suspicion import MAX_FAILED_IN_A_ROW
from pagefold.sim.shadow_runner import VOCAB_SIZE, ShadowRunner, alone, cells_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import SequenceCache
    from pagefold.kv.block import Node
    from pagefold.steps import StepPlan

BLOCK_SIZE = 4
MAX_WAITING = 6
NAMESPACES = tuple(Namespace(model="m", tenant=tenant).key() for tenant in ("", "a"))
TENANTS, WEIGHTS = "aaaaabbc", {"a": 0.5, "b": 4.0, "c": 1.0, "d": 1.0}
TENANTS_WITH_QUOTAS = "aaaabbccdd"
"""One sends most. Who asks is apart from what is shared, so that tenants find each other's blocks here."""
STREAMS = tuple(tuple(Random(seed).choices(range(VOCAB_SIZE), k=60)) for seed in range(40))
"""What prompts begin with, so that prefixes, partial matches and duplicates are frequent: the first two are popular, of
the others a few requests come one after another."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=None)


PACKING = (
    (KEEP_ALL, KeepRule(8, is_chunked=True, num_before=1, packs=True)),
    (KeepRule(4, is_chunked=True, packs=True), KEEP_ALL),
    (KEEP_ALL, KeepRule(4, is_chunked=True, num_before=1, packs=True), KeepRule(6)),
)
"""Groups of which one packs chunks."""

GROUPS = (
    (KEEP_ALL, KEEP_ALL),
    (KEEP_ALL, KeepRule(9)),
    (KEEP_ALL, KeepRule(2), KeepRule(13)),
    (KEEP_ALL, KeepRule(8, is_chunked=True)),
    (KeepRule(6), KEEP_ALL),
    (KeepRule(5), KEEP_ALL, KeepRule(12)),
    (KeepRule(9), KEEP_ALL),
    (KeepRule(13), KeepRule(2), KEEP_ALL, KeepRule(5)),
)


EXPECTING = ("predicted", "max_tokens")
"""Rules of admission that expect growth."""

PREFILLS = (NO_PREFILL_LIMITS, PrefillLimits(max_num_partial=1), PrefillLimits(2, 1, 5))


@dataclass(frozen=True)
class Setup:
    """A pool and the limits of a step."""

    num_blocks: int = 14
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    policy: str = "lru"
    enable_prefix_caching: bool = True
    scheduling: str = "fcfs"
    pinned_share: float = 0.6
    long_outputs: bool = False
    """Short prompts and long outputs: all are let in, and then there is no room to grow."""
    seals: bool = False
    """Blocks are sealed when they are full."""
    rules: tuple[KeepRule, ...] = (KEEP_ALL,)
    """Of the cache groups."""
    num_host_blocks: int = 0
    sessions: bool = False
    """Requests are of sessions: they go on, edit, call others and end; and no output is another for it."""
    """Of the host tier; 0 for none."""
    drafts: bool = False
    """Some of those that run have drafts, right and wrong ones."""
    has_culprits: bool = False
    """Steps fail because of who is in them, and never otherwise."""
    admission: str = "prompt"
    prefills: PrefillLimits = NO_PREFILL_LIMITS
    guarded: bool = False
    """There are targets, and steps take any time."""
    quotas: bool = False
    """Tenants have quotas, and no tenant finds another's blocks."""


@dataclass
class Flight:
    """A step in flight.

    Attributes:
        plan: of it.
        launched: the same with the tables as they were then, as a card gets them.
        requests: who has each row.
        samples: who gets each token.
        admitted: in this step.
        lookups: what it will tell, if it runs.
    """

    plan: StepPlan
    launched: StepPlan
    requests: list[Request]
    samples: list[Request]
    admitted: list[Request]
    lookups: list[PrefixLookup]

    def drafts_of(self, request: Request) -> list[int]:
        """Return what a request's row has behind its own tokens."""
        for row, _, first, num_drafts in self.plan.drafted:
            if self.requests[row] is request:
                return self.plan.token_ids[first : first + num_drafts].tolist()
        return []


def _copied(tables: Sequence[BlockTable]) -> list[BlockTable]:
    return [BlockTable(table.block_ids, table.num_trimmed) for table in tables]


def _num_common_blocks(request: Request, other: Request) -> int:
    """Return how many whole blocks two requests begin with alike."""
    if request.namespace != other.namespace:
        return 0
    pairs = enumerate(zip(request.token_ids, other.token_ids, strict=False))
    shorter = min(request.num_tokens, other.num_tokens)
    return next((at for at, (own, its) in pairs if own != its), shorter) // BLOCK_SIZE


class Machine:
    """Operations, each legal at any time; one that makes no sense at the moment does nothing."""

    def __init__(self, setup: Setup) -> None:  # noqa: PLR0915 - all that is held of it
        self.setup = setup
        num_blocks = setup.num_blocks
        self.quotas: dict[str, KVQuota] = {}
        quotas = NO_QUOTAS
        if setup.quotas:
            self.quotas = {
                "a": KVQuota(0, max(3, num_blocks // 2)),
                "b": KVQuota(num_blocks // 4),
                "c": KVQuota(num_blocks // 5, num_blocks // 5 + max(3, num_blocks // 3)),
            }
            quotas = Quotas()
        make = partial(make_policy, setup.policy)
        self.core = KVCore(
            setup.num_blocks,
            block_size=BLOCK_SIZE,
            rules=setup.rules,
            host=HostTier(setup.num_host_blocks) if setup.num_host_blocks else NO_HOST,
            policy=quotas.policy(make(), make),
            quotas=quotas,
            enable_prefix_caching=setup.enable_prefix_caching,
            pin_limits=PinLimits(setup.pinned_share, 8.0),
            residuals=Residuals(setup.max_num_seqs, BLOCK_SIZE) if setup.seals else NO_RESIDUALS,
            emit=self._on_event,
        )
        limits = SchedulerLimits(setup.max_num_seqs, setup.max_num_batched_tokens, setup.prefills)
        scheduling = SCHEDULING_POLICIES[setup.scheduling](2.5)
        targets = Targets(ttft_s=3.0, itl_s=0.5) if setup.guarded else Targets()
        self.guardrails = Guardrails.of(
            targets, max_num_batched_tokens=setup.max_num_batched_tokens, block_size=BLOCK_SIZE
        )
        self.scheduler = Scheduler(
            self.core,
            limits,
            policy=scheduling,
            admission=setup.admission,
            guardrails=self.guardrails,
            emit=self._on_event,
        )
        if setup.admission != "prompt":
            self.kept_ends = KeptEnds(self.scheduler)
        self.landed_s = 0.0
        self.runner = ShadowRunner(self.scheduler)
        self.whole = self.runner.whole_group
        num_new = setup.max_num_batched_tokens
        self.max_total_tokens = next(
            num_tokens
            for num_tokens in range(min(60, setup.num_blocks // len(setup.rules) * BLOCK_SIZE), 0, -1)
            if self.core.rules.packing is None or self.core.num_blocks_for(num_tokens, num_new) <= setup.num_blocks
        )
        if self.quotas:
            floors = sum(quota.floor_blocks for quota in self.quotas.values())
            caps = [quota.cap_blocks for quota in self.quotas.values() if quota.cap_blocks is not None]
            self.max_total_tokens = min(60, BLOCK_SIZE * min(setup.num_blocks - floors, *caps))
        self.flights: list[Flight] = []  # two at most, in order
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}  # of running requests: tokens whose KV they have
        self.ever_computed: dict[str, int] = {}  # of preempted requests: the most that they ever had
        self.failed_alone: Counter[str] = Counter()  # steps since it ran
        self.failed_in_company: Counter[str] = Counter()  # steps since it ran in company
        self.num_failed_in_a_row = 0
        self.has_failed = False  # a step, ever
        self.is_out_of_order = False  # some were tried apart
        self.corrupt = 0  # bits of rows
        self.rng = Random(0)  # of drafts
        self.drafts: dict[str, list[int]] = {}  # given for the next step
        self.culprits: set[str] = set()  # steps with one of them fail
        self.odd: set[str] = set()  # steps with two of them fail
        self.looked_up: set[str] = set()
        self.extended: set[str] = set()  # have been given blocks for a step that did not come to pass
        self.num_added = 0
        self.last_of: dict[int, Request] = {}  # of each session
        self.events: list[Event] = []
        self.now = 0.0
        self.computed_at_failure: dict[str, int] = {}  # tokens of who ran when the last step failed
        self.num_made_way: Counter[str] = Counter()
        self.chosen: list[tuple[Request, Request]] = []  # of this schedule(): who was preempted, and for whom
        self.scheduler._rows._relief._victims.choose = self._choose
        self.failed_extends: list[int] = []  # of this schedule(): how many blocks pins alone kept each time
        self.core.extend = self._extend
        self.seen: Counter[str] = Counter()

    # Operations.

    def add(self, which: int, length: int, own: int, num_new: int) -> None:
        """A request comes: some of a stream, a few tokens of its own, some to generate, in one sample or several."""
        if len(self.scheduler.waiting) >= MAX_WAITING:
            return
        stream = STREAMS[which % 2 if which % 3 else self.num_added // 4 % len(STREAMS)]
        namespace, mask = NAMESPACES[which // 6 % 8 == 0], 0
        if self.core.packing.is_on:  # those of one namespace keep all
            namespace = NAMESPACES[which // 6 % 3 == 0]
            mask = NO_MASK if namespace == NAMESPACES[1] else 0
        tokens = list(stream[: length % (5 if self.setup.long_outputs else self.max_total_tokens - 4)])
        tokens += [own >> bit & 1 for bit in range(own % 3 if tokens else 1)]
        stops = frozenset({own % VOCAB_SIZE}) if own % 4 == 0 else frozenset()
        max_total = min(self.max_total_tokens, len(tokens) + 1 + num_new % (50 if self.setup.long_outputs else 20))
        warm_up = None
        if which % 5 == 0:
            warm_up = WarmUp(pin=True, ttl_s=1.0 + num_new % 30 if num_new % 3 else None, retention_priority=own % 7)
            max_total = min(max_total, len(tokens) + 1)
        session, returns_in_s = None, None
        if self.setup.sessions and warm_up is None and own // 64 % 4:
            tokens, session, returns_in_s = self._of_session(tokens, own // 256, num_new)
            max_total = max(max_total, len(tokens) + 1)
        request_id = f"r{self.num_added}"
        self.num_added += 1
        num_samples = 1 + num_new // 50 % min(4, self.setup.max_num_seqs) if own // 16 % 3 == 0 else 1
        num_samples = num_samples if warm_up is None else 1
        max_total = len(tokens) if num_new % 13 == 0 else max_total
        tenant = TENANTS[(own + which) % len(TENANTS)]
        if self.quotas:
            tenant = TENANTS_WITH_QUOTAS[(own + which) % len(TENANTS_WITH_QUOTAS)]
            namespace = Namespace(model="m", tenant=tenant).key()
        num_hinted = (1 + which % 11, 1 + own % 23) if warm_up is None and which % 3 == 1 else ()
        hints = hints_within((HintPin(each, 1.0 + num_new % 30) for each in num_hinted), len(tokens))
        samples = [
            Request(
                request_id if not index else f"{request_id}/{index}",
                tokens,
                SAMPLING,
                stop=StopRule(stops, max_total),
                namespace=namespace,
                seed=own // 8 % 2 + index,
                arrival_s=float(self.num_added),
                priority=own % 5 - 2,
                parent_id=request_id,
                sample_index=index,
                warm_up=warm_up,
                hint_pins=() if index else hints,
                message_ends=tuple(range(1 + own % 7, len(tokens), 7)),
                mask=mask,
                tenant=tenant,
                weight=WEIGHTS[tenant],
                quota=self.quotas.get(tenant),
                session=session,
                returns_in_s=returns_in_s,
            )
            for index in range(num_samples)
        ]
        request, *request.forks = samples
        if self.setup.guarded and self.scheduler.judge(request) is not None:
            self._saw("refused")
            assert self.scheduler.has_requests, "a server with nothing to do refuses nobody"
            assert self.scheduler.get(request_id) is None
            return
        if self.setup.has_culprits and 0 < own % 9 < 7:
            (self.culprits if own % 9 < 3 else self.odd).add(samples[num_new % num_samples].request_id)
        for sample in samples:
            self.requests[sample.request_id] = sample
            self.expected[sample.request_id] = alone(sample)
        if session is not None:
            self.last_of[own // 256 % 6] = request
        self.scheduler.add(request)
        self._saw("added during a step", bool(self.flights))

    def _of_session(self, tokens: list[int], which: int, how: int) -> tuple[list[int], SessionRef, float | None]:
        """Return the prompt of a request of one of six sessions; three are of agents that the others have called."""
        number = which % 6
        before = self.last_of.get(number if how % 5 else number - 3)
        if before is not None and how % 3:
            self._saw("a session goes on")
            num_kept = len(before.token_ids) if how % 4 else which // 6 % (len(before.token_ids) + 1)  # or it is edited
            said = before.token_ids[:num_kept].tolist() + tokens[: 1 + how % 3]
            tokens = said[: self.max_total_tokens - 2] or tokens
        ref = session_ref("", f"s{number}", f"s{number - 3}" if number >= 3 else "")
        return tokens, ref, (None, 0.0, 3.0)[how % 3]

    def end_session(self, which: int) -> None:
        """A client ends a session; some were never begun."""
        ref = session_ref("", f"s{which % 7}")
        ended = self.scheduler.end_session(ref)
        self._saw("a session ended", ended is not None)
        self._saw("a session ended while a request of it runs", ended is not None and ended.num_running > 0)
        assert self.scheduler.end_session(ref) is None, "ended twice"

    def schedule(self) -> None:
        """Plan a step, and look at all of it."""
        if self.flights:
            return
        before = sorted(self.scheduler.running, key=lambda request: request.order)
        waited = list(self.scheduler.waiting)
        self.chosen.clear()
        self.events.clear()
        self.failed_extends.clear()
        self._give_drafts()
        plan = self.scheduler.schedule(self.now)
        assert all(pin.expires_at_s > self.now for pin in self.core.pins)
        assert bool(plan.num_rows) == bool(before or waited), "nothing to run though there is work"
        assert not plan.late
        self._check_preempted(before)
        flight = self._flight(plan, [request for request in waited + before if self._is_new(request)])
        self._check_given_up(flight)
        self._check_admission(plan)
        assert flight.requests == self.scheduler.in_step
        is_searching = self.scheduler.suspicion.is_on
        assert is_searching or flight.requests == self.scheduler.running
        self._saw("somebody is held back", len(flight.requests) < len(self.scheduler.running))
        self._saw("somebody new waits for a search", is_searching and bool(self.scheduler.waiting))
        self._check_plan(flight)
        if plan.num_rows:
            self.flights.append(flight)
            self._poison_what_is_written(plan)

    def look_ahead(self) -> None:
        """Plan a step behind the one in flight, and look at all of it."""
        if len(self.flights) != 1:
            return
        (first,) = self.flights
        before = [(request, list(request.token_ids), request.num_computed_tokens) for request in self.requests.values()]
        running, waited = list(self.scheduler.running), list(self.scheduler.waiting)
        self.events.clear()
        self.failed_extends.clear()
        plan = self.scheduler.schedule_ahead(self.now)
        assert not [event for event in self.events if isinstance(event, RequestPreempted)], "preempted during a step"
        admitted = [request for request in waited if self._is_new(request)]
        for request, token_ids, num_computed_tokens in before:
            assert list(request.token_ids) == token_ids, "a placeholder was left behind"
            assert request.num_computed_tokens == num_computed_tokens or request in admitted
        assert [request for request in self.scheduler.running if request not in admitted] == running
        goes_on = [request for request in running if not self._is_over(request, first)]
        if plan is None:
            self.extended.update(request.request_id for request in goes_on)
            assert not admitted
            is_forking = any(request.forks for request in first.samples)
            is_in_the_way = self.scheduler.suspicion.is_on or is_forking or self.failed_extends or self._joins()
            is_due = self.scheduler._making_way.is_due()
            self._saw("not ahead: somebody is to make way", is_due)
            is_in_the_way = is_in_the_way or is_due or bool(first.plan.drafted or first.plan.packing_rows)
            self._saw("not ahead: chunks are packed", bool(first.plan.packing_rows))
            self._saw("not ahead: drafts", bool(first.plan.drafted))
            assert is_in_the_way or not goes_on, "nothing was in the way"
            self._saw("not ahead: a fork", is_forking)
            self._saw("not ahead: memory", bool(self.failed_extends))
            self._saw("not ahead: a join", self._joins())
            return
        flight = self._flight(plan, admitted)
        assert {*flight.requests} == {*goes_on, *admitted}
        self._check_plan(flight, first)
        self.flights.append(flight)
        self._poison_what_is_written(plan)
        self._saw("ahead")
        self._saw("ahead: admitted", bool(admitted))
        self._saw("ahead: no output", any(request.has_no_output for request in flight.requests))
        self._saw(
            "ahead: a chunk behind a chunk",
            any(plan.starts[row] for row in range(plan.num_rows) if row not in plan.sampling_rows),
        )

    def apply(self) -> None:
        """The step runs."""
        if not self.flights:
            return
        if self._is_poisonous(self.flights[0]):
            self._fail(self.flights[0].plan.step_id)
        else:
            self._apply(self.flights.pop(0))

    def _apply(self, flight: Flight) -> None:  # noqa: PLR0915 - all that must come of a step  # noqa: C901 - every kind of step
        plan, requests = flight.plan, flight.requests
        aborted = {request.request_id for request in flight.samples if request.is_aborted}
        result = self.runner.run(flight.launched)
        corrupted = self._take_corrupted(flight)
        result = replace(result, corrupted=[requests.index(request) for request in corrupted])
        spoiled = [request for request in corrupted if flight.drafts_of(request)]
        self._saw("corrupted drafts", bool(spoiled))
        corrupted = [request for request in corrupted if request not in spoiled]
        aborted.update(sample.request_id for request in corrupted for sample in (request, *request.forks))
        num_taken = {request: self._num_taken(request, flight) for request in requests}
        num_taken |= dict.fromkeys(spoiled, 0)
        for row, (request, start, num_tokens) in enumerate(zip(requests, plan.starts, plan.num_tokens, strict=True)):
            if drafts := flight.drafts_of(request):
                cells = cells_of(request.namespace, [*request.token_ids[: start + 1], *drafts])
                assert self.runner.read_row(plan, row) == cells, f"{request} reads what is not its own"
                continue
            if start + num_tokens > request.num_tokens:
                assert request.is_aborted, "computed what it does not have"
                self._saw("a row too many of one that was cut off")
                continue
            cells = cells_of(request.namespace, request.token_ids[: start + num_tokens])
            assert self.runner.read_row(plan, row) == cells, f"{request} reads what is not its own"
        for request, start, num_tokens in zip(requests, plan.starts, plan.num_tokens, strict=True):
            num_computed = num_taken[request] if flight.drafts_of(request) else num_tokens
            self.computed[request.request_id] = start + num_computed
            self.failed_alone[request.request_id] = 0
            if len(requests) > 1:
                self.failed_in_company[request.request_id] = 0
        self.num_failed_in_a_row = 0
        self._saw("a row too many of one that ended", any(request.finish_reason == "stop" for request in requests))
        caches = [list(block_ids) for block_ids in self._whole_of(plan)]
        num_recomputed = self._num_recomputed(plan, requests)
        self.events.clear()
        got = self.scheduler.apply(result, self._landed(plan))
        self._saw("joined at commit", any(a != b for a, b in zip(caches, self._whole_of(plan), strict=True) if b))
        got_any = [one for one in flight.samples if one.request_id not in aborted and one not in spoiled]
        assert got == list(dict.fromkeys(got_any))
        self._check_distrusted(flight, corrupted)
        for request in requests:
            if request.status is RequestStatus.FINISHED:
                self.computed.pop(request.request_id)
        for request in self.scheduler.running:
            if request.request_id not in self.computed:
                assert request.sample_index, "runs, and was not admitted"
                self.computed[request.request_id] = request.num_prompt_tokens
                self._saw("forked")
                self._saw("forked inside a block", request.num_prompt_tokens % BLOCK_SIZE > 0)
        assert [event for event in self.events if isinstance(event, PrefixLookup)] == flight.lookups
        first = [lookup.request_id for lookup in flight.lookups if not lookup.after_preemption]
        assert not self.looked_up.intersection(first), "a first lookup comes once"
        self.looked_up.update(first)
        (applied,) = [event for event in self.events if isinstance(event, StepApplied)]
        assert applied.num_tokens == len(plan.token_ids)
        assert applied.num_recomputed_tokens == num_recomputed
        num_of_drafts = sum(num_taken[request] - 1 for request in got if flight.drafts_of(request))
        assert applied.num_output_tokens == sum(not request.has_no_output for request in got) + num_of_drafts
        self._check_counts(flight, got, num_taken)
        self._forget_ended()

    def _give_drafts(self) -> None:
        """Give some of those that run drafts: as many right ones as may be, and wrong ones behind them."""
        self.drafts.clear()
        if not self.setup.drafts:
            return
        for request in self.requests.values():
            request.drafts = ()
        for request in self.scheduler.running:
            if self.rng.random() < 0.3:
                continue
            num_right, num_wrong = self.rng.randrange(8), self.rng.randrange(4)
            begin = request.num_output_tokens
            drafts = self.expected[request.request_id][begin : begin + num_right]
            drafts += [self.rng.randrange(VOCAB_SIZE) for _ in range(num_wrong)]
            request.drafts = array("i", drafts)
            self.drafts[request.request_id] = drafts

    def _num_taken(self, request: Request, flight: Flight) -> int:
        """Return how many tokens a row with drafts brings: those that it generates alone, as far as drafts are so."""
        if request.is_aborted:
            return 1
        coming = self.expected[request.request_id][request.num_output_tokens :]
        num_right = 0
        for draft, token_id in zip(flight.drafts_of(request), coming, strict=False):
            if draft != token_id:
                break
            num_right += 1
        return min(num_right + 1, len(coming))

    def _check_counts(self, flight: Flight, got: list[Request], num_taken: dict[Request, int]) -> None:
        """What is told of drafts is what was seen of them."""
        told = [event for event in self.events if isinstance(event, DraftsVerified)]
        drafted = [request for request in flight.requests if flight.drafts_of(request)]
        assert len(told) == bool(drafted)
        for one in told:
            for request, (name, num_drafts, num_accepted) in zip(drafted, one.counts, strict=True):
                assert (name, num_drafts) == (request.request_id, len(flight.drafts_of(request)))
                if num_accepted is None:
                    assert not request.may_draft
                    continue
                assert num_accepted == (num_taken[request] - 1 if request in got else 0)
                self._saw("all drafts accepted", num_accepted == num_drafts)
                self._saw("some drafts accepted", 0 < num_accepted < num_drafts)
                self._saw("no draft accepted", not num_accepted)
                self._saw("ended among drafts", request.finish_reason == "stop" and num_accepted > 0)

    def _take_corrupted(self, flight: Flight) -> list[Request]:
        """Return whose logits will be said to be no numbers, in the order of rows."""
        which, self.corrupt = self.corrupt, 0
        return [request for row, request in enumerate(flight.requests) if which >> row % 16 & 1]

    def _check_distrusted(self, flight: Flight, corrupted: list[Request]) -> None:
        """Those who are corrupted end, unless they did before, and nothing is found that begins as they do.

        But for what rows with drafts have computed in the same step, which is published behind that; and what rows have
        that computed all of it themselves in that step, of which their own blocks stay.
        """
        plan = flight.plan
        drafting = [one for one in flight.requests if flight.drafts_of(one) and one not in corrupted]
        alone = [
            (one, num_tokens // BLOCK_SIZE)
            for one, start, num_tokens in zip(flight.requests, plan.starts, plan.num_tokens, strict=True)
            if not start and one not in corrupted
        ]
        for request in corrupted:
            assert request.is_aborted
            assert request.finish_reason is not None
            namespace, mask = request.namespace, request.mask
            hit = self.core.match(namespace, request.packed(), request.num_tokens, mask=mask)
            common = [_num_common_blocks(request, one) for one in drafting]
            common += [min(_num_common_blocks(request, one), num_own) for one, num_own in alone]
            assert len(hit.nodes) <= max(common, default=0)
            assert not hit.held
            assert request.cache is None or request.cache.tail is None
            self._saw("corrupted", request in self.scheduler.corrupted)
            self._saw("corrupted, with a row in the step behind", request.cache is not None)
            self._saw("corrupted, with samples", bool(request.forks))
        for other in self.scheduler.running:
            self._saw("shares with one who is corrupted", bool(corrupted) and other.cache.tail is None)

    def corrupt_next(self, which: int) -> None:
        """The next step that runs will have logits that are no numbers."""
        self.corrupt = which

    def advance(self) -> None:
        """Whatever of these two comes next."""
        if not self.flights:
            self.schedule()
        else:
            self.apply()

    def fail(self, how_far: int) -> None:
        """The step dies of nobody, unless there are culprits for that."""
        if self.flights and not self.setup.has_culprits:
            self._fail(how_far)

    def _fail(self, how_far: int) -> None:
        """The step dies: before its copies, after them, or while its rows are written."""
        flight, *behind = self.flights
        plan = flight.plan
        how_far %= plan.num_rows + 2
        if how_far:
            self.runner.move(plan)
            self.runner.copy(plan)
            self.runner.spoil(plan, how_far - 1)
            for other in behind:  # it ran on what the first one left
                self.runner.move(other.plan)
                self.runner.copy(other.plan)
                self.runner.spoil(other.plan, other.plan.num_rows)
        self._saw("failed step with copies", bool(plan.copies))
        self._saw("failed step with one behind it", bool(behind))
        self._saw("failed step with one behind it that has admitted", any(other.admitted for other in behind))
        self._saw("failed step with forks", any(request.forks for request in flight.samples))
        is_alone = len(flight.requests) == 1
        for request in flight.requests:
            (self.failed_alone if is_alone else self.failed_in_company)[request.request_id] += 1
        self.num_failed_in_a_row += 1
        self.has_failed = True
        left = [request for request in flight.requests if request.is_aborted]
        left += [request for other in behind for request in other.admitted if request.is_aborted]
        admitted = [request for one in self.flights for request in one.admitted]
        self.extended.update(request.request_id for other in behind for request in other.requests)
        self.flights = []
        ended = self.scheduler.abandon("it died")
        self.computed_at_failure = {one.request_id: one.num_computed_tokens for one in self.scheduler.running}
        assert {*ended}.issuperset(sample for request in left for sample in (request, *request.forks))
        for request in ended:
            if request not in left and request.parent_id not in {one.request_id for one in left if one.forks}:
                self._check_blamed(request)
        for request in self.scheduler.running:
            self._note_lost(request)
        for request in admitted:
            self.computed.pop(request.request_id, None)
        if self.setup.drafts:  # of the next step drafts of others may leave it less than it has blocks for
            self.extended.update(request.request_id for request in flight.requests)
        self._saw("failed step with drafts", bool(plan.drafted))
        self._forget_ended()

    def die(self) -> None:
        """The device dies, which nobody outlives who runs."""
        if self.setup.has_culprits:
            return
        was_alive = not self.num_failed_in_a_row
        for how_far in range(MAX_FAILED_IN_A_ROW):
            self.schedule()
            self.check()
            self.fail(how_far)
            self.check()
        assert not was_alive or not self.num_failed_in_a_row or not self.scheduler.running

    def _is_poisonous(self, flight: Flight) -> bool:
        names = {request.request_id for request in flight.requests}
        self._saw("two culprits in a step", len(names & self.culprits) > 1)
        forking = {request.request_id for request in flight.requests if request.forks}
        self._saw("a culprit of several samples", bool(forking & self.culprits))
        return bool(names & self.culprits) or len(names & self.odd) > 1

    def _check_blamed(self, request: Request) -> None:
        """Whoever ends by failed steps ends for a cause, which it tells."""
        assert request.finish_reason == "error"
        name = request.parent_id if request.num_output_tokens == 0 else request.request_id
        counts = self.failed_alone[name], self.failed_in_company[name], self.num_failed_in_a_row
        assert any(n >= most for n, most in zip(counts, (3, 3, 16), strict=True)), f"{request} is blamed for nothing"
        if self.setup.has_culprits:
            assert name in self.culprits | self.odd, f"{request} ends, and has done nothing: {request.error}"
        self._saw(f"blamed: {request.error.partition(' ')[2]}", request.sample_index == 0)

    def finish(self, which: int) -> None:
        """A client goes away, or a stop string is met."""
        present = [*self.scheduler.running, *self.scheduler.waiting]
        if not present:
            return
        if which % 8:
            present = self._forking() or present  # a short moment, and one worth hitting
        request = present[which % len(present)]
        was_running = request.status is RequestStatus.RUNNING
        self._saw("cancelled during a step", bool(self.flights) and was_running)
        self._saw("cancelled during two steps", len(self.flights) == 2 and was_running)
        has_ended = request.finish_reason is not None
        if request.forks:
            self._saw("samples cancelled while they wait", not was_running)
            self._saw("samples cancelled while their prompt is computed", was_running)
            self._saw("samples cancelled in the step that forks", request in self._forking())
        self._saw("a sample cancelled", request.parent_id != request.request_id)
        found = self.scheduler.finish(request.request_id, "abort" if which % 3 else "stop")
        assert found is (None if has_ended else request)
        self._forget_ended()

    def reset(self) -> None:
        """All prefixes are forgotten."""
        self._saw("reset during a step", bool(self.flights))
        self._saw("reset during two steps", len(self.flights) == 2)
        self.core.forgetting.reset()

    def unpin(self, which: int) -> None:
        """Somebody takes a pin away."""
        pins = [pin.pin_id for pin in self.core.pins]
        if pins:
            assert self.core.pins.remove(pins[which % len(pins)]) is not None

    def pass_time(self, seconds: int) -> None:
        """Time goes on."""
        self.now += seconds % 5

    def drain(self) -> None:
        """Run everything to its end: no step fails now, so there is a bound on how long it takes."""
        num_steps_left = sum(
            request.num_seqs * (request.stop.max_total_tokens + 2)
            for request in (*self.scheduler.running, *self.scheduler.waiting)
        )
        num_steps_left += 40 * len(self.requests) * (self.setup.has_culprits or self.scheduler.suspicion.is_on)
        while self.flights or self.scheduler.has_work:
            self.schedule()
            self.check()
            if num_steps_left % 3:
                self.look_ahead()
                self.check()
            self.apply()
            self.check()
            num_steps_left -= 1
            assert num_steps_left >= -1, "somebody starves"
        assert all(request.status is RequestStatus.FINISHED for request in self.requests.values())
        assert self.core.num_active == 0
        self.core.forgetting.reset()
        assert self.core.pool.num_free == self.core.pool.num_blocks

    # Checks.

    def check(self) -> None:  # noqa: C901, PLR0912 - a list of what holds
        """Check all that holds between operations."""
        scheduler, core = self.scheduler, self.core
        audit(core)
        waiting = [request.order for request in scheduler.waiting]
        assert waiting == sorted(waiting), "not in the policy's order"
        if self.setup.scheduling == "lpm" or self.setup.prefills.max_long_partial is not None:
            self._saw(
                "overtakes", any(one.index > other.index for one in scheduler.running for other in scheduler.waiting)
            )
        elif self.setup.scheduling == "fcfs":
            everybody = [one.index for one in (*scheduler.running, *scheduler.waiting) if not one.num_preemptions]
            is_in_order = everybody == sorted(everybody)
            is_allowed = self.is_out_of_order or scheduler.suspicion.is_on or bool(self.quotas)
            self.is_out_of_order = not is_in_order and is_allowed
            assert is_in_order or self.is_out_of_order, "not in order of arrival"
        elif self.setup.scheduling == "fair":
            self._check_shares()
        else:
            known = [(request.priority * 2.5 + request.arrival_s, request.index) for request in scheduler.waiting]
            assert known == [(order.tag, order.arrival) for order in waiting]
            self._saw("overtakes", any(a.index > b.index for a, b in pairwise(scheduler.waiting)))
        for flight in self.flights:
            running = [request for request in flight.requests if request in scheduler.running]
            assert sum(1 + len(request.forks) for request in running) <= self.setup.max_num_seqs
        assert core.caches == {request.cache for request in scheduler.running}
        for request in scheduler.running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens == self.computed[request.request_id]
            assert request.num_computed_tokens < request.num_tokens or request.is_aborted
            assert scheduler.get(request.request_id) is request
            self._check_growth(request)
        for request in scheduler.waiting:
            assert request.cache is None
            assert request.finish_reason is None
            assert (request.status is RequestStatus.PREEMPTED) == (request.num_preemptions > 0)
        for request in (*scheduler.running, *scheduler.waiting):
            assert not (request.forks and request.num_output_tokens), "it has a token, and its samples have not begun"
            for fork in request.forks:
                assert (fork.status, fork.cache) == (RequestStatus.WAITING, None)
                assert scheduler.get(fork.request_id) is None
        if not self.flights:
            assert not core.moves.copies_in_flight
            waits_for = {copy.dst: copy.src for copy in core.moves.pending_copies}
            assert not waits_for or self.has_failed
            self._saw("a copy waits for another step", bool(waits_for))
            for request in scheduler.running:
                self._check_published(request)
                self._check_cells(request, waits_for)
        self._check_pins()
        self._check_promised()
        for block_id in self._meaningless(core.pool.free_ids):
            self.runner.poison(block_id)
        for host_id in core.host.blocks.free_ids():
            self.runner.poison_host(host_id)

    def _check_growth(self, request: Request) -> None:
        """Where all groups keep all, what a running request takes yet is what their rules say of its tables."""
        if self.core.trims:
            return
        needs = Needs(self.core, self.setup.max_num_batched_tokens)
        for num_steps in (0, 9):
            num_tokens = max(request.num_tokens, min(request.num_tokens + num_steps, request.stop.max_total_tokens))
            twin = self.core.num_blocks_for(num_tokens, self.setup.max_num_batched_tokens, request.cache)
            assert needs.growth(request, num_steps) == twin

    def _check_cells(self, request: Request, waits_for: dict[int, int]) -> None:
        """Between steps a running request has what it has computed; copies may be still to be made."""
        block_ids = [waits_for.get(block_id, block_id) for block_id in self._blocks_of(request)]
        cells = self._cells(request, block_ids)
        assert cells == cells_of(request.namespace, request.token_ids[: request.num_computed_tokens])

    def _cells(self, request: Request, block_ids: list[int]) -> list[int]:
        """Return what a running request has, between steps."""
        if not self.setup.seals:
            return self.runner.read(block_ids, request.num_computed_tokens)
        waits_for = {copy.dst: copy.src for copy in self.core.residuals.pending_copies}
        residual_id = waits_for.get(request.cache.residual_id, request.cache.residual_id)
        return self.runner.read_sealed(block_ids, request.num_computed_tokens, residual_id)

    def _check_published(self, request: Request) -> None:
        """All whole blocks are published, but for one whose twin was evicted and written anew while ours was written.

        It joins that twin when it grows; until then what forks from it shares it, off the tree. If the step fails that
        writes the twin, there is none any more, and it is published when it grows. Where a window was gone, a step may
        have computed several blocks of a path that was known, and was forgotten since: then it is all of these.
        """
        cache = request.cache
        num_whole = request.num_computed_tokens // BLOCK_SIZE
        if cache.tail is None or cache.num_published == num_whole:  # None: caching is off, or the cache was reset
            return
        key = request.token_ids[cache.num_published * BLOCK_SIZE :][:BLOCK_SIZE].tobytes()
        num_tables = self.core.pool.blocks[self._blocks_of(request)[cache.num_published]].num_table_refs
        assert cache.num_published == num_whole - 1 or self.core.trims
        has_lost_it = self.computed_at_failure.get(request.request_id) == request.num_computed_tokens
        assert key in cache.tail.children or num_tables > 1 or has_lost_it, f"{request} has not published a block"
        self._saw("publishes later")

    def _check_preempted(self, before: list[Request]) -> None:
        after = {request.request_id for request in self.scheduler.running}
        preempted = [event.request_id for event in self.events if isinstance(event, RequestPreempted)]
        assert len(set(preempted)) == len(preempted)
        made_way = self._made_way()
        assert preempted[len(made_way) :] == [victim.request_id for victim, _ in self.chosen]
        for victim, beneficiary in self.chosen:
            assert victim is beneficiary or victim.order > beneficiary.order, "for somebody behind it"
            self._saw("not the last was preempted", victim.index < max(one.index for one in before))
            self._saw("went itself", victim is beneficiary)
        for request in before:
            request_id = request.request_id
            if request_id in preempted:
                computed = self.computed.pop(request_id)
                self.ever_computed[request_id] = max(self.ever_computed.get(request_id, 0), computed)
                self._saw("readmitted in the step that preempted it", request_id in after)
                if request_id in made_way and request_id in after:
                    head = next(each.cause_request_id for each in self.events if _is_about(each, request_id))
                    assert head in after, "made way, and took it back"
            else:
                assert request_id in after, "gone without an event"
        assert not before or before[0].request_id not in preempted, "the oldest was preempted"
        self.seen["preempted"] += len(preempted)

    def _made_way(self) -> list[str]:
        """Return who was preempted for another tenant's share: before all others; and check for whom."""
        made_way = [each for each in self.events if isinstance(each, RequestPreempted) and each.cause == "share"]
        assert self.setup.scheduling == "fair" or not made_way
        for event in made_way:
            request, head = self.requests[event.request_id], self.requests[event.cause_request_id]
            assert request.tenant != head.tenant
            assert request.order > head.order, "it would be let in again before"
            assert any(one.tenant == request.tenant for one in self.scheduler.running), "a tenant's last one went"
            self.num_made_way[event.request_id] += 1
            assert self.num_made_way[event.request_id] <= MOST_WAYS_MADE
            is_let_in = head in self.scheduler.running
            self._saw("made way, and no tokens are left", not is_let_in)
            assert is_let_in or self._waits_for() == "tokens", "somebody made way in vain"
        self._saw("made way", bool(made_way))
        self._saw("several made way", len(made_way) > 1)
        return [event.request_id for event in made_way]

    def _waits_for(self) -> str | None:
        """Return why nobody more was let in."""
        (planned,) = [event for event in self.events if isinstance(event, StepPlanned)]
        return planned.waits_for

    def _note_lost(self, request: Request) -> None:
        """Where blocks are sealed, a step that failed may have cost somebody the block that was not yet."""
        computed = self.computed[request.request_id]
        if self.setup.seals and request.num_computed_tokens < computed:
            assert request.num_computed_tokens == computed // BLOCK_SIZE * BLOCK_SIZE
            self.ever_computed[request.request_id] = max(self.ever_computed.get(request.request_id, 0), computed)
            self.computed[request.request_id] = request.num_computed_tokens
            self._saw("lost what was not sealed")

    def _check_admission(self, plan: StepPlan) -> None:  # noqa: PLR0911 - one for each thing to wait for
        """Nobody waits who could run: admission ends for want of budget, seats or memory."""
        scheduler = self.scheduler
        if scheduler.suspicion.is_on:
            return
        (planned,) = [event for event in self.events if isinstance(event, StepPlanned)]
        self._saw(f"waits for {planned.waits_for}", bool(scheduler.waiting))
        num_seats = self.setup.max_num_seqs - sum(request.num_seqs for request in scheduler.running)
        first = {one.tenant: one for one in reversed(scheduler.waiting)}
        assert planned.capped <= self.quotas.keys()
        if not plan.copies and self.setup.scheduling != "lpm":
            went = [one for one in self.events if isinstance(one, RequestPreempted) and one.cause == "share"]
            gave = {self.requests[one.request_id].tenant for one in went}  # what they gave is the head's
            capped = [first[tenant] for tenant in planned.capped - gave if tenant in first]
            assert all(map(self._is_capped, capped)), "may have more"
        waiting = [one for one in scheduler.waiting if one.tenant not in planned.capped]
        self._saw("passes one at its cap", bool(planned.capped and scheduler.waiting and plan.num_rows))
        if planned.waits_for == "kv_cap":
            assert not waiting, "somebody waits for another tenant's cap"
            return
        candidates = waiting if self.setup.scheduling == "lpm" else waiting[:1]
        if any(request.num_seqs > num_seats for request in candidates) or not candidates:
            return
        if planned.waits_for == "prefills":
            self._check_prefills(plan)
            return
        if len(plan.token_ids) == self.setup.max_num_batched_tokens or plan.copies:
            return
        if self._num_prompt_tokens(plan) >= self.guardrails.pacing.prefill_cap_tokens:
            self._saw("waits for the cap")
            return
        if planned.waits_for == "growth":
            could_run = [has_room(self.kept_ends, request, plan.step_id) for request in candidates]
            assert not all(could_run) or not self._is_exact(), "there is room beside all growth"
            return
        assert not all(self._could_run(request) for request in candidates), f"{candidates} could run"

    # Quotas, counted anew.

    def _count(self, tenant: str) -> tuple[int, int, int]:
        """Return how many blocks a tenant has, how many of them nobody holds, and how many of those pins keep."""
        blocks = [block for block in self.core.pool.blocks if block.state != BlockState.FREE]
        names = {one.name: one for one in self.core.quotas}
        mine = [block for block in blocks if block.tenant is names.get(tenant if tenant in self.quotas else "")]
        cached = [block for block in mine if block.state == BlockState.CACHED]
        return len(mine), len(cached), sum(block.num_pin_refs > 0 for block in cached)

    def _room(self, tenant: str) -> float:
        """Return how many blocks a tenant may get yet below its cap, with cached ones that no pin keeps."""
        num_blocks, num_cached, num_pinned = self._count(tenant)
        cap = self.quotas.get(tenant, KVQuota()).cap_blocks
        return float("inf") if cap is None else cap - num_blocks + num_cached - num_pinned

    def _may_give(self, giver: str, tenant: str, num_new: int) -> bool:
        """Whether one tenant may be given what another lets go of."""
        if giver == tenant or (giver not in self.quotas and tenant not in self.quotas):
            return True
        floor = self.quotas.get(giver, KVQuota()).floor_blocks
        return self._room(tenant) >= num_new and self._count(giver)[0] > floor

    def _num_available(self, tenant: str) -> int:
        """Return how many blocks a tenant could get, had all pins been given up, and had it no cap."""
        num_available = self.core.pool.num_free
        for other in {*self.quotas, "d"}:
            num_blocks, num_cached, _ = self._count(other)
            floor = self.quotas.get(other, KVQuota()).floor_blocks
            num_available += num_cached if other == tenant else min(num_cached, max(0, num_blocks - floor))
        return num_available

    def _is_capped(self, head: Request) -> bool:
        """Whether one that waits would pass its tenant's cap with that one's others, had all its pins been given up."""
        num_steps = self._num_reserved(head)
        cap = self.quotas.get(head.tenant, KVQuota()).cap_blocks
        if cap is None or num_steps is None:
            return cap is not None
        running = [one for one in self.scheduler.running if one.tenant == head.tenant]
        needed = self._num_needed(head, running, num_steps) - (0 if running else len(head.forks))
        num_blocks, num_cached, _ = self._count(head.tenant)
        return needed > cap - num_blocks + num_cached

    def _check_prefills(self, plan: StepPlan) -> None:
        """There are as many partly computed prompts as may be."""
        limits = self.setup.prefills
        rows = zip(self.scheduler.in_step, plan.starts, plan.num_tokens, strict=True)
        left = [one.num_tokens - start for one, start, num_tokens in rows if start + num_tokens < one.num_tokens]
        num_long = sum(0 < limits.long_threshold < num_tokens for num_tokens in left)
        is_full = limits.max_num_partial is not None and len(left) >= limits.max_num_partial
        assert is_full or (limits.max_long_partial is not None and num_long >= limits.max_long_partial)

    def _is_exact(self) -> bool:
        """Whether what requests take can be told from their tokens: who has drafts, or gives blocks back, may vary."""
        return not self.setup.drafts and not self.core.trims

    def _check_promised(self) -> None:
        """What is promised is what those that run lack of their ends."""
        rule = self.scheduler.rule
        if rule.name == "prompt":
            return
        assert rule._running.keys() == set(self.scheduler.running)
        assert {number: (lot.num_seqs, lot.num_blocks) for number, lot in rule._lots.items()} == self.kept_ends.by_lot()
        if self._is_exact():
            assert rule.num_promised == self.kept_ends.all_at_their_ends()
        for request, forecast in rule._forecasts.items():
            assert request.request_id in self.requests
            assert request.num_prompt_tokens + forecast.most_tokens <= request.stop.max_total_tokens

    def _could_run(self, head: Request) -> bool:
        """Whether all tokens of one that waits fit beside those of all that run."""
        scheduler, core = self.scheduler, self.core
        num_steps = self._num_reserved(head)
        if num_steps is None:
            self._saw("comes back when it is first")
            return False
        if self.quotas:
            if self._is_capped(head):
                return False
            needed = int(self.setup.num_blocks * 0.01) + self._num_needed(head, scheduler.running, num_steps)
            return needed <= self._num_available(head.tenant)
        needed = int(self.setup.num_blocks * 0.01) + self._num_needed(head, scheduler.running, num_steps)
        return needed <= core.num_available + core.pool.num_pinned

    def _num_needed(self, head: Request, running: list[Request], num_steps: int) -> int:
        """Return how many blocks one that waits needs for so many steps, with what those lack that run."""
        core, num_groups, num_new = self.core, len(self.setup.rules), self.setup.max_num_batched_tokens
        num_tokens = min(head.num_tokens + num_steps, max(head.num_tokens, head.stop.max_total_tokens)) + 1
        needed = core.num_blocks_for(num_tokens, num_new, is_expected=True) + len(head.forks) * num_groups
        for request in running:
            num_tokens = max(request.num_tokens, min(request.num_tokens + num_steps, request.stop.max_total_tokens))
            needed += core.num_blocks_for(num_tokens, num_new, request.cache, is_expected=True)
            needed += len(request.forks) * num_groups
        return needed

    def _num_reserved(self, head: Request) -> int | None:
        """Return for how many steps there must be room beside what waits first; None where it waits for all of them."""
        if not head.num_preemptions or all(head.order < one.order for one in self.scheduler.running):
            return 0
        self._saw("reserves")
        return None if head.num_preemptions > 2 else head.num_preemptions * max(head.num_output_tokens, BLOCK_SIZE)

    def _choose(self, beneficiary: Request, num_planned: int, num_new: int) -> Request:
        """Choose a victim, as the scheduler does, beside a slow twin."""
        choose, queues = type(self.scheduler._rows._relief._victims).choose, self.scheduler._queues
        victim = choose(self.scheduler._rows._relief._victims, beneficiary, num_planned, num_new)
        having = [*queues.running[num_planned:], *queues.set_aside]
        if self.quotas:
            having = [one for one in having if self._may_give(one.tenant, beneficiary.tenant, num_new)]
        behind = sorted((one for one in having if one.order > beneficiary.order), key=lambda one: one.order)
        urgency = (lambda one: one.priority) if self.setup.scheduling == "priority" else (lambda one: 0)
        least = [one for one in behind if urgency(one) == max(map(urgency, behind))]
        fewest = [one for one in least if one.num_preemptions == min(each.num_preemptions for each in least)]
        expected = beneficiary
        if fewest:
            is_spared = fewest[0].num_preemptions >= 2 > beneficiary.num_preemptions
            if not (is_spared and num_planned and urgency(fewest[0]) <= urgency(beneficiary)):
                losses = [(loss_of(self.core, one), -place) for place, one in enumerate(fewest)]
                expected = fewest[-min(losses)[1]]
                self._saw("loses least", expected is not fewest[-1])
            else:
                self._saw("spared")
        assert victim is expected, f"{victim} is preempted, not {expected}"
        self.chosen.append((victim, beneficiary))
        return victim

    def _landed(self, plan: StepPlan) -> float | None:
        """Return when a step has run, for guardrails: mostly as slow as its tokens are many; and clocks jump."""
        if not self.setup.guarded:
            return None
        self.landed_s += self.rng.choice((*[0.2 * len(plan.token_ids)] * 6, 0.0, 0.4, 1e9, -2.0))
        return self.landed_s

    def _num_prompt_tokens(self, plan: StepPlan) -> int:
        """Return how many tokens of prompts a plan computes, or more."""
        in_step = self.scheduler.in_step
        return sum(
            num_tokens
            for request, start, num_tokens in zip(in_step, plan.starts, plan.num_tokens, strict=False)
            if num_tokens > 1 or start < max(request.num_prompt_tokens, request.max_computed_tokens)
        )

    def _check_given_up(self, flight: Flight) -> None:
        """Pins went for the sake of somebody who runs now, before anybody was preempted."""
        num_given_up = sum(isinstance(event, PinDropped) and event.cause == "memory" for event in self.events)
        assert not num_given_up or self.failed_extends or flight.admitted, "a pin was given up for nothing"
        self._saw("pin given up for one that waits", bool(num_given_up and not self.failed_extends))
        self._saw("pin given up for one that runs", bool(num_given_up and self.failed_extends))

    def _extend(self, cache: SequenceCache, start: int, end: int) -> bool:
        done = KVCore.extend(self.core, cache, start, end)
        if not done:
            self.failed_extends.append(self.core.pool.num_pinned)
        return done

    def _check_shares(self) -> None:
        """What is counted of each tenant is what it has."""
        scheduler = self.scheduler
        shares = scheduler.policy.shares
        assert shares is not None
        new = [request for request in scheduler.waiting if request.num_cached_tokens < 0]
        for name, tenant in shares.tenants.items():
            running = [request for request in scheduler.running if request.tenant == name]
            assert tenant.num_seats == sum(request.num_seqs for request in running)
            assert tenant.num_waiting == sum(request.num_seqs for request in new if request.tenant == name)
            held = sum(shares.held(sample) for request in running for sample in (request, *request.forks))
            assert tenant.num_tokens == pytest.approx(held)
            own = [request for request in self.requests.values() if request.tenant == name]
            if self.quotas:  # who makes way goes behind a head that may have passed its tenant's next at its cap
                own = [request for request in own if not shares.num_made_way(request.leader)]
            orders = [request.order for request in own]
            assert orders == sorted(orders), "a tenant's requests are in order of arrival"

    def _check_pins(self) -> None:
        for pin in self.core.pins:
            path = list(pin.path())[::-1]
            blocks = [node.blocks[self.whole] for node in path]
            assert set(pin.blocks) >= set(blocks)
            tokens = array("i", b"".join(node.key for node in path))
            block_ids = [block.block_id for block in blocks]
            assert self.runner.read(block_ids, len(tokens)) == cells_of(pin.namespace, tokens), "a pin lost its bytes"

    def _check_pinned(self, request: Request) -> None:
        """A warm-up has ended: its prompt is pinned as far as it fills blocks, or there is a reason."""
        pin = self.core.pins.get(request.request_id)
        self._saw("pinned", pin is not None)
        causes = [event.cause for event in self.events if isinstance(event, PinDropped)]
        if pin is None:
            self._saw("beyond the quota", "quota" in causes)
            assert causes, "no pin, and nobody says why"
        else:
            num_blocks = pin.tail.depth + 1
            if num_blocks < request.num_prompt_tokens // BLOCK_SIZE:  # as far as nobody else is writing the same
                following = request.token_ids[num_blocks * BLOCK_SIZE : (num_blocks + 1) * BLOCK_SIZE]
                assert not pin.tail.children[following.tobytes()].committed
                self._saw("pinned up to what another writes")
            prompt = request.token_ids[: num_blocks * BLOCK_SIZE].tobytes()
            assert b"".join([node.key for node in pin.path()][::-1]) == prompt

    def _check_plan(self, flight: Flight, before: Flight | None = None) -> None:  # noqa: PLR0915 - column by column
        """Look at a plan; ``before`` is the step in flight that it was planned behind."""
        plan = flight.plan
        block_size = BLOCK_SIZE
        assert plan.num_rows == len(flight.requests) == len(plan.num_tokens) == len(plan.tables)
        assert sum(plan.num_tokens) == len(plan.token_ids) <= self.setup.max_num_batched_tokens
        cap = self.guardrails.pacing.prefill_cap_tokens
        assert max(plan.num_tokens, default=0) <= max(1, cap) or plan.drafted
        self._saw("a cap below a step", cap < self.setup.max_num_batched_tokens)
        late: list[tuple[int, int]] = []
        sampling: list[tuple[int, int, int]] = []
        written: set[tuple[int, int]] = set()
        at = 0
        for row, request in enumerate(flight.requests):
            start, num_tokens, block_ids = plan.starts[row], plan.num_tokens[row], self._whole_of(plan)[row]
            num_known = request.num_tokens
            drafts: list[int] = []
            num_computed = self.computed[request.request_id]
            if before is not None and request in before.requests:
                num_computed += before.plan.num_tokens[before.requests.index(request)]
            if before is not None and request in before.samples:
                assert (start, num_tokens) == (num_known, 1)
                late.append((at, before.samples.index(request)))
                num_known += 1
            else:
                drafts = flight.drafts_of(request)
                self._check_drafts(request, drafts)
                own = array("i", [*request.token_ids[start : start + num_tokens - len(drafts)], *drafts])
                assert plan.token_ids[at : at + num_tokens] == own
                num_known += len(drafts)
            assert start == num_computed, "computed twice, or skipped"
            assert 1 <= num_tokens <= num_known - start
            num_needed = -(-(start + num_tokens) // block_size)
            assert len(block_ids) >= num_needed
            assert len(block_ids) == num_needed or request.request_id in self.extended, "more blocks than it needs"
            positions = range(start, start + num_tokens)
            cells = {(block_ids[position // block_size], position % block_size) for position in positions}
            assert not cells & written, "two rows write one position"
            written |= cells
            at += num_tokens
            if start + num_tokens == num_known:
                num_outputs = num_known - request.num_prompt_tokens
                sampling += [(row, request.seed, num_outputs - back) for back in range(len(drafts), 0, -1)]
                sampling += [(row, sample.seed, num_outputs) for sample in (request, *request.forks)]
            self._saw("chunk", start + num_tokens < num_known)
            assert num_tokens <= (self.setup.prefills.long_threshold or num_tokens) or drafts
        ends = [start + num_tokens for start, num_tokens in zip(plan.starts, plan.num_tokens, strict=True)]
        num_slots = [len(block_ids) * block_size for block_ids in self._whole_of(plan)]
        wasted = sum(slots - end for slots, end in zip(num_slots, ends, strict=True))
        set_aside = [] if before else [one for one in self.scheduler.running if one not in flight.requests]
        wasted += sum(request.cache.capacity - request.num_computed_tokens for request in set_aside)
        assert self.scheduler.num_wasted_slots == wasted * len(self.setup.rules)
        assert list(zip(plan.late, plan.late_from, strict=True)) == late
        assert list(zip(plan.sampling_rows, plan.seeds, plan.draws, strict=True)) == sampling
        assert len(plan.sampling) == len(sampling)
        self._saw("copy-on-write", bool(plan.copies))
        self._saw("packed", bool(plan.packing_rows))
        self._saw("packed ahead", before is not None and bool(plan.packing_rows))
        self._saw("several copies of a block", len({copy.src for copy in plan.copies}) < len(plan.copies))
        self._saw_leaning(flight)

    def _check_drafts(self, request: Request, drafts: list[int]) -> None:
        """Drafts are the first of those that were given, no more than the request may sample, and stay in a block."""
        given = self.drafts.get(request.request_id, [])
        assert drafts == given[: len(drafts)]
        if not drafts:
            return
        assert request.num_computed_tokens == request.num_tokens - 1
        assert request.num_tokens + len(drafts) < request.stop.max_total_tokens
        assert not request.forks
        in_block = BLOCK_SIZE - request.num_computed_tokens % BLOCK_SIZE - 1
        assert not self.setup.seals or len(drafts) <= in_block
        self._saw("drafts that fill a block", len(drafts) >= in_block)

    def _flight(self, plan: StepPlan, admitted: list[Request]) -> Flight:
        """Note who has which row of a plan that was just made, and who was admitted."""
        assert not [event for event in self.events if isinstance(event, PrefixLookup)], "told before it ran"
        rows = {id(self._blocks_of(request)): request for request in self.scheduler.running}
        requests = [rows[id(block_ids)] for block_ids in self._whole_of(plan)]
        admitted.sort(key=requests.index)
        lookups = [self._lookup_of(request) for request in admitted]
        self.computed |= {lookup.request_id: lookup.num_hit_tokens for lookup in lookups}
        rows_then = zip(plan.starts, plan.tables, strict=True)  # of a row that begins, the runner asks whose it is
        launched = replace(plan, tables=[_copied(tables) if start else tables for start, tables in rows_then])
        launched.chunks = [list(chunks) for chunks in plan.chunks]
        return Flight(plan, launched, requests, samples_of(plan, requests), admitted, lookups)

    def _blocks_of(self, request: Request) -> list[int]:
        """Return what a request holds of the first group that keeps all."""
        return request.cache.tables[self.whole].block_ids

    def _whole_of(self, plan: StepPlan) -> list[list[int]]:
        """Return the same of each row."""
        return [tables[self.whole].block_ids for tables in plan.tables]

    def _is_new(self, request: Request) -> bool:
        return request.status is RequestStatus.RUNNING and request.request_id not in self.computed

    def _is_over(self, request: Request, flight: Flight) -> bool:
        """Whether a running request surely has nothing to do behind ``flight``."""
        num_tokens = request.num_tokens + (request in flight.samples)
        return request.is_aborted or num_tokens == request.stop.max_total_tokens + request.has_no_output

    def _joins(self) -> bool:
        """Whether a running table is not published as far as it is written: others hold the same."""
        for request in self.scheduler.running:
            num_whole = request.num_computed_tokens // BLOCK_SIZE
            if request.cache.tail is not None and request.cache.num_published < num_whole:
                return True
        return False

    def _saw_leaning(self, flight: Flight) -> None:
        for request, start in zip(flight.requests, flight.plan.starts, strict=True):
            node: Node | None = request.cache.tail
            while node is not None and (node.depth + 1) * BLOCK_SIZE > start:
                node = node.parent
            self._saw("lean on a promise", node is not None and any(node.blocks) and not node.committed)

    def _lookup_of(self, request: Request) -> PrefixLookup:
        num_hit_tokens = request.num_computed_tokens
        after_preemption = request.num_preemptions > 0
        assert num_hit_tokens < request.num_tokens
        if not after_preemption:
            assert request.num_cached_tokens == num_hit_tokens
        self._saw("prefix hit", num_hit_tokens > 0)
        num_loaded = sum(request.num_loaded_tokens.values())  # when it was admitted first
        self._saw("host hit", bool(request.cache.num_loaded_tokens))
        self._saw("begins packed", bool(request.cache.chunks))
        if request.mask == NO_MASK:
            rule, start = self.core.rules.packing, request.num_computed_tokens
            self._saw("begins with what others would pack", rule.num_packed(start) > 0)
        self._saw("what a preemption kept", after_preemption and num_hit_tokens > 0)
        has_tiers = self.core.host.is_on
        num_lost = request.num_lost_tokens
        assert num_lost % BLOCK_SIZE == 0
        self._saw("a window was gone", num_lost > 0)
        num_declined = request.num_declined_tokens
        return PrefixLookup(
            request.request_id,
            request.num_tokens,
            num_hit_tokens,
            after_preemption,
            num_loaded,
            has_tiers,
            num_lost,
            num_declined,
            self.now,
            loaded_by_tier=dict(request.num_loaded_tokens),
        )

    def _forking(self) -> list[Request]:
        """Return those whose samples will begin when the steps in flight are applied."""
        return [request for flight in self.flights for request in flight.samples if request.forks]

    def _poison_what_is_written(self, plan: StepPlan) -> None:
        for tables, start in zip(plan.tables, plan.starts, strict=True):
            for table in tables:
                for index in range(start // BLOCK_SIZE, table.end):
                    block_ids = self._meaningless([table.block_ids[index - table.num_trimmed]])
                    for block_id in block_ids:
                        self.runner.poison(block_id, start % BLOCK_SIZE if index == start // BLOCK_SIZE else 0)
        for block_id in self._meaningless([copy.dst for copy in plan.copies]):
            self.runner.poison(block_id)

    def _meaningless(self, block_ids: list[int]) -> list[int]:
        """Return which of these blocks no step will store: what they hold is of no use to anybody."""
        ops = [self.core.host.pending, *(flight.plan.host_ops for flight in self.flights)]
        stored = {store.block_id for one in ops for store in one.stores}
        return [block_id for block_id in block_ids if block_id not in stored]

    def _num_recomputed(self, plan: StepPlan, requests: list[Request]) -> int:
        return sum(
            len(range(start, min(start + num_tokens, self.ever_computed.get(request.request_id, 0))))
            for request, start, num_tokens in zip(requests, plan.starts, plan.num_tokens, strict=True)
        )

    def _forget_ended(self) -> None:
        for request_id, request in list(self.requests.items()):
            expected = self.expected[request_id]
            output = request.output_token_ids
            assert output == expected[: len(output)], f"{request} generates what it does not generate alone"
            if request.status is not RequestStatus.FINISHED:
                continue
            self._saw(f"ended by {request.finish_reason}")
            assert request.cache is None
            assert self.scheduler.get(request_id) is None
            self._saw("a sample ended by itself", request.sample_index > 0 and request.finish_reason == "stop")
            if request.finish_reason == "length":
                assert output == expected
            if request.warm_up is not None and output:
                self._check_pinned(request)
            self.computed.pop(request_id, None)
            self.ever_computed.pop(request_id, None)
            del self.requests[request_id], self.expected[request_id]

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, BlockEvicted) and event.cause == "allocation" and self.quotas:
            tenant, asked = Namespace.from_key(event.node.root.key).tenant, self.requests[event.asked_by].tenant
            is_kept = self._count(tenant)[0] < self.quotas.get(tenant, KVQuota()).floor_blocks
            assert tenant == asked or not is_kept, f"{asked} has evicted a block below the floor of {tenant}"
            self._saw("evicted for another", tenant != asked)
        if isinstance(event, BlockEvicted) and event.cause == "allocation":
            self._saw("something superseded is evicted", event.rule == "superseded")
            spared = None if event.rule == "superseded" else self.core.blocks.expectations.superseded()
            if spared is not None and self.quotas:  # who was at its cap could have its own alone
                owner, asked = Namespace.from_key(spared.node.root.key).tenant, self.requests[event.asked_by].tenant
                cap = self.quotas.get(asked, KVQuota()).cap_blocks
                spared = None if owner != asked and cap is not None and self._count(asked)[0] + 1 >= cap else spared
            assert spared is None, "evicted, while something superseded could go"
        if isinstance(event, RequestPreempted) and event.cause == "memory":
            assert self.quotas or not self.failed_extends[-1], "preempted, while pins alone keep a block"

    def _saw(self, what: str, holds: bool = True) -> None:
        if holds:
            self.seen[what] += 1


def _is_about(event: Event, request_id: str) -> bool:
    """Whether ``event`` is the preemption of a request."""
    return isinstance(event, RequestPreempted) and event.request_id == request_id


def loss_of(core: KVCore, request: Request) -> float:
    """Return the blocks that a request would compute again for each block that it alone has, block by block."""
    cache, num_computed = request.cache, request.num_computed_tokens
    own = [
        block_id
        for block_id in cache.all_block_ids()
        if core.pool.blocks[block_id].num_table_refs == 1 and not core.pool.blocks[block_id].num_pin_refs
    ]
    num_kept = min(
        (
            next((place for place, block_id in enumerate(table.block_ids) if block_id in own), len(table.block_ids))
            for table in cache.tables
            if not table.num_trimmed
        ),
        default=0,
    )
    num_published = cache.num_published * BLOCK_SIZE if cache.has_path else 0
    lost = range(min(num_kept * BLOCK_SIZE, num_published, num_computed), num_computed)
    num_restored = sum(core.host.is_on and position < num_published for position in lost)
    num_lost = len(lost) - num_restored + num_restored * 0.01
    return round(num_lost / BLOCK_SIZE / len(own)) if own else float("inf")


def samples_of(plan: StepPlan, requests: list[Request]) -> list[Request]:
    """Return who gets the token of each sampling row, given who has each row."""
    num_drafts = {one.row: one.num_drafts for one in plan.drafted}
    samples: list[Request] = []
    for row in dict.fromkeys(plan.sampling_rows):
        samples += (requests[row],) * num_drafts.get(row, 0) + (requests[row], *requests[row].forks)
    return samples


# Drivers.

MAX_INT = 2**16

OPERATIONS: tuple[tuple[str, int, float], ...] = (
    ("add", 4, 16),
    ("advance", 0, 76),
    ("look_ahead", 0, 40),
    ("fail", 1, 3),
    ("die", 0, 0.3),
    ("finish", 1, 3),
    ("reset", 0, 1),
    ("corrupt_next", 1, 1),
    ("unpin", 1, 1),
    ("pass_time", 1, 3),
    ("end_session", 1, 2),
)
"""Name, number of arguments, how often."""


def random_setup(rng: Random, policy: str) -> Setup:
    """Return a pool and limits: tight ones mostly."""
    max_num_seqs = rng.choice((1, 2, 3, 5, 8))
    return Setup(
        num_blocks=rng.choice((3, 6, 9, 14, 20, 40, 130)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, rng.choice((1, 3, 8, 9, 17, 64, 512))),
        policy=policy,
        enable_prefix_caching=rng.random() < 0.9,
        scheduling=rng.choice(("fcfs", "priority")),
        pinned_share=rng.choice((0.3, 0.6, 1.0)),
        long_outputs=rng.random() < 0.5,
        seals=rng.random() < 0.3,
        has_culprits=rng.random() < 0.4,
        drafts=rng.random() < 0.5,
        sessions=rng.random() < 0.5,
    )


def random_operations(
    seed: int,
    num_operations: int,
    policy: str,
    rules: tuple[KeepRule, ...] = (KEEP_ALL,),
    *,
    has_host: bool = False,
    is_fair: bool = False,
    **changes: object,
) -> Counter[str]:
    """Do ``num_operations`` random operations with everything checked after each. Return how often what happened.

    The same seed does the same operations; a failure names the seed, the setup and the last operations.
    """
    rng = Random(seed)
    setup = random_setup(rng, policy)
    if is_fair:
        num_seqs = max(3, setup.max_num_seqs)
        budget = max(num_seqs, setup.max_num_batched_tokens)
        setup = replace(setup, scheduling="fair", max_num_seqs=num_seqs, max_num_batched_tokens=budget)
        setup = replace(setup, has_culprits=setup.has_culprits and seed % 2 > 0)
    setup = replace(setup, **changes)
    if len(rules) > 1:
        setup = replace(setup, rules=rules, num_blocks=setup.num_blocks * len(rules))
    if has_host:  # and a device that is too small, so that blocks go there
        num_blocks, num_host_blocks = rng.choice((6, 9, 14)), rng.choice((5, 30, 200))
        setup = replace(setup, num_blocks=num_blocks * len(rules), num_host_blocks=num_host_blocks * len(rules))
    machine = Machine(setup)
    operations = rng.choices(OPERATIONS, weights=[weight for _, _, weight in OPERATIONS], k=num_operations)
    log: list[str] = []
    try:
        for name, num_arguments, _ in operations:
            arguments = [rng.randrange(MAX_INT) for _ in range(num_arguments)]
            log.append(f"{name}{tuple(arguments)}")
            getattr(machine, name)(*arguments)
            machine.check()
        machine.drain()
    except BaseException as error:
        error.add_note(
            f"random_operations({seed}, {num_operations}, {policy!r}), operation {len(log)}: {machine.setup}"
        )
        error.add_note("last operations: " + " ".join(log[-12:]))
        raise
    return machine.seen


ints = st.integers(0, MAX_INT - 1)


class SchedulerMachine(RuleBasedStateMachine):
    """The same machine, driven by hypothesis, which shrinks what it finds."""

    @initialize(
        num_blocks=st.sampled_from((6, 9, 14, 3)),
        limits=st.sampled_from([(seqs, budget) for seqs in (4, 2, 1) for budget in (64, 9, 4)]),
        policy=st.sampled_from(("lru", "lfu", "fifo")),
        scheduling=st.sampled_from(("fcfs", "priority", "lpm", "fair")),
        load=st.sampled_from([(admission, limits) for limits in PREFILLS for admission in ("prompt", *EXPECTING)]),
        kind=st.sampled_from([{}, {"long_outputs": True}, {"seals": True}, {"long_outputs": True, "seals": True}]),
        has_culprits=st.booleans(),
        drafts=st.booleans(),
        sessions=st.booleans(),
    )
    def start(  # noqa: PLR0917 - what is drawn
        self,
        num_blocks: int,
        limits: tuple[int, int],
        policy: str,
        scheduling: str,
        load: tuple[str, PrefillLimits],
        kind: dict[str, bool],
        *,
        has_culprits: bool,
        drafts: bool,
        sessions: bool,
    ) -> None:
        """Begin with an empty pool."""
        setup = Setup(
            num_blocks,
            *limits,
            policy,
            scheduling=scheduling,
            has_culprits=has_culprits,
            drafts=drafts,
            sessions=sessions,
            **kind,
        )
        setup = replace(setup, admission=load[0], prefills=load[1])
        self.machine = Machine(setup)

    @rule(which=ints, length=ints, own=ints, num_new=ints)
    def add(self, which: int, length: int, own: int, num_new: int) -> None:
        """See Machine."""
        self.machine.add(which, length, own, num_new)

    @rule()
    def schedule(self) -> None:
        """See Machine."""
        self.machine.schedule()

    @rule()
    def apply(self) -> None:
        """See Machine."""
        self.machine.apply()

    @rule()
    def step(self) -> None:
        """A step in one go, so that hypothesis gets further."""
        self.machine.schedule()
        self.machine.check()
        self.machine.apply()

    @rule()
    def look_ahead(self) -> None:
        """See Machine."""
        self.machine.look_ahead()

    @rule(how_far=ints)
    def fail(self, how_far: int) -> None:
        """See Machine."""
        self.machine.fail(how_far)

    @rule()
    def die(self) -> None:
        """See Machine."""
        self.machine.die()

    @rule(which=ints)
    def finish(self, which: int) -> None:
        """See Machine."""
        self.machine.finish(which)

    @rule(which=ints)
    def corrupt_next(self, which: int) -> None:
        """See Machine."""
        self.machine.corrupt_next(which)

    @rule(which=ints)
    def unpin(self, which: int) -> None:
        """See Machine."""
        self.machine.unpin(which)

    @rule(which=ints)
    def end_session(self, which: int) -> None:
        """See Machine."""
        self.machine.end_session(which)

    @rule(seconds=ints)
    def pass_time(self, seconds: int) -> None:
        """See Machine."""
        self.machine.pass_time(seconds)

    @rule()
    def reset(self) -> None:
        """See Machine."""
        self.machine.reset()

    @invariant()
    def everything_holds(self) -> None:
        """See Machine.check."""
        if hasattr(self, "machine"):
            self.machine.check()

    def teardown(self) -> None:
        """Run everything to its end, and look for what is left behind."""
        if hasattr(self, "machine"):
            self.machine.drain()


def test_hypothesis_finds_nothing() -> None:
    """About 2 * 10^3 operations, found and shrunk by hypothesis."""
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=50, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@IN_FULL
def test_random_operations(policy: str, in_full: bool) -> None:
    """In full some 10^4 operations over all policies, in 8 setups each."""
    for seed in range(8 if in_full else 3):
        random_operations(seed, 400, policy)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("scheduling", ["fcfs", "lpm"])
@pytest.mark.parametrize("prefills", PREFILLS, ids=str)
@pytest.mark.parametrize("admission", EXPECTING)
@IN_FULL
def test_random_operations_under_load(admission: str, prefills: PrefillLimits, scheduling: str, in_full: bool) -> None:
    """The same where growth is expected, where prompts have places, and where some overtake."""
    for seed in range(200, 206 if in_full else 202):
        changes = {"drafts": False} if seed % 2 else {}
        random_operations(seed, 300, "lru", admission=admission, prefills=prefills, scheduling=scheduling, **changes)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("rules", [GROUPS[3], GROUPS[5], PACKING[0]], ids=str)
def test_random_operations_under_load_with_several_groups(rules: tuple[KeepRule, ...]) -> None:
    for seed in range(210, 212):
        random_operations(seed, 300, "lru", rules, seals=False, admission="predicted", prefills=PREFILLS[2])


@IN_FULL
def test_what_happens_under_load(in_full: bool) -> None:
    """A control: requests wait for growth and for places, and overtake."""
    seen: Counter[str] = Counter()
    asked = "waits for growth", "waits for prefills", "waits for memory", "overtakes", "preempted", "ahead"
    for seed in until_seen(range(220, 232), seen, asked, in_full=in_full):
        setup = {"admission": "predicted", "prefills": PREFILLS[2], "has_culprits": False}
        seen += random_operations(seed, 300, "lru", **setup, scheduling=("fcfs", "lpm")[seed % 2])
    assert min(seen[what] for what in asked) > 0, seen


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(
    ("rules", "seals"),
    [
        pytest.param(
            rules,
            seals,
            id=f"{rules}-sealed" if seals else str(rules),
            marks=[] if place % 2 == seals else [pytest.mark.long],
        )
        for place, rules in enumerate(GROUPS)
        for seals in (False, True)
    ],
)
def test_random_operations_with_several_groups(rules: tuple[KeepRule, ...], seals: bool) -> None:
    """The same where groups keep windows, and give blocks back while requests run; also where blocks are sealed."""
    random_operations(0, 200, "lru", rules, seals=seals)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("rules", [(KEEP_ALL,), GROUPS[1]], ids=str)
@IN_FULL
def test_random_operations_with_guardrails(rules: tuple[KeepRule, ...], in_full: bool) -> None:
    """The same with targets, and a clock that jumps: every step gets on, and every request ends as it does alone."""
    seen: Counter[str] = Counter()
    asked = ("refused", "a cap below a step", "ahead")
    for seed in until_seen(range(24, 32), seen, asked, in_full=in_full):
        seen += random_operations(seed, 300, "lru", rules, guarded=True)
    assert min(seen[what] for what in asked) > 0


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("rules", PACKING, ids=str)
@IN_FULL
def test_random_operations_where_chunks_are_packed(rules: tuple[KeepRule, ...], in_full: bool) -> None:
    """The same where what was kept of older chunks is packed."""
    seen: Counter[str] = Counter()
    asked = "packed", "ahead", "not ahead: chunks are packed", "begins packed", "begins with what others would pack"
    for seed in until_seen(range(80, 84), seen, asked, in_full=in_full):
        seen += random_operations(seed, 400, "lru", rules, seals=False)
    assert min(seen[what] for what in asked) > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rules", PACKING, ids=str)
def test_very_many_random_operations_where_chunks_are_packed(rules: tuple[KeepRule, ...]) -> None:
    for seed in range(6):
        random_operations(600 + seed, 1500, "lru", rules, seals=False)


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("rules", GROUPS[1:], ids=str)
@IN_FULL
def test_who_loses_a_block_that_was_not_sealed_finds_its_windows(rules: tuple[KeepRule, ...], in_full: bool) -> None:
    """With nothing published, so that it is for their sake alone that the windows are there."""
    seen: Counter[str] = Counter()
    for seed in until_seen(range(4), seen, ["lost what was not sealed"], in_full=in_full):
        seen += random_operations(seed, 400, "lru", rules, seals=True, enable_prefix_caching=False)
    assert seen["lost what was not sealed"] > 0


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("rules", [(KEEP_ALL,), *GROUPS, *PACKING], ids=str)
@IN_FULL
def test_random_operations_with_a_host_tier(rules: tuple[KeepRule, ...], in_full: bool) -> None:
    """What is evicted comes back from the host, in a step that may be planned behind another, and may fail."""
    seen: Counter[str] = Counter()
    for seed in until_seen(range(50, 54), seen, ["host hit"], in_full=in_full):
        changes = {"seals": False} if rules in PACKING else {}
        seen += random_operations(seed, 400, "lru", rules, has_host=True, **changes)
    assert seen["host hit"], "nothing ever came back"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rules", [(KEEP_ALL,), *GROUPS], ids=str)
def test_very_many_random_operations_with_groups_and_a_host_tier(rules: tuple[KeepRule, ...]) -> None:
    for seed in range(6):
        random_operations(500 + seed, 2000, "lru", rules, has_host=seed % 3 > 0)


@pytest.mark.long
def test_what_is_worth_testing_happens() -> None:
    """A control: the driver reaches the corners that it exists for."""
    seen: Counter[str] = Counter()
    for seed in range(100, 124):
        seen += random_operations(seed, 300, "lru")
    for what in (
        "all drafts accepted",
        "corrupted drafts",
        "drafts that fill a block",
        "ended among drafts",
        "failed step with drafts",
        "no draft accepted",
        "not ahead: drafts",
        "some drafts accepted",
        "a copy waits for another step",
        "a sample cancelled",
        "a session ended",
        "a session ended while a request of it runs",
        "a session goes on",
        "something superseded is evicted",
        "a sample ended by itself",
        "added during a step",
        "ahead",
        "ahead: a chunk behind a chunk",
        "ahead: admitted",
        "ahead: no output",
        "a row too many of one that ended",
        "a row too many of one that was cut off",
        "a culprit of several samples",
        "beyond the quota",
        "blamed: steps failed with this request alone in them",
        "blamed: steps failed with this request and others, and none without either",
        "blamed: steps in a row failed, whoever was in them",
        "cancelled during a step",
        "cancelled during two steps",
        "chunk",
        "copy-on-write",
        "corrupted",
        "corrupted, with a row in the step behind",
        "ended by abort",
        "ended by error",
        "ended by length",
        "ended by stop",
        "failed step with copies",
        "failed step with forks",
        "failed step with one behind it",
        "failed step with one behind it that has admitted",
        "forked",
        "forked inside a block",
        "joined at commit",
        "lean on a promise",
        "lost what was not sealed",
        "not ahead: a fork",
        "not ahead: a join",
        "not ahead: memory",
        "not the last was preempted",
        "overtakes",
        "pin given up for one that runs",
        "pin given up for one that waits",
        "pinned",
        "preempted",
        "prefix hit",
        "reserves",
        "reset during a step",
        "reset during two steps",
        "samples cancelled in the step that forks",
        "samples cancelled while their prompt is computed",
        "samples cancelled while they wait",
        "several copies of a block",
        "somebody is held back",
        "somebody new waits for a search",
        "two culprits in a step",
        "waits for memory",
        "went itself",
        "what a preemption kept",
    ):
        assert seen[what] > 0, f"{what} never happened: {seen}"


def test_what_is_given_for_a_share_is_not_taken_by_the_tenant_that_gave_it() -> None:
    """One of a tenant waits for its cap before the head, and another of that tenant makes way: there is room then."""
    random_operations(9012, 300, "lru", num_blocks=9, scheduling="fair", quotas=True, admission="prompt")


def test_what_is_given_for_a_share_is_not_taken_by_drafts() -> None:
    """One makes way, and another's drafts would fill the blocks that it left."""
    random_operations(100039, 300, "lru", scheduling="fair", quotas=True)


def test_nobody_makes_way_for_what_samples_copy() -> None:
    """One of three samples makes way, and the others would copy what they shared with it."""
    random_operations(300033, 300, "lru", GROUPS[2], is_fair=True, admission="prompt")


def test_nobody_makes_way_for_blocks_that_the_head_begins_with() -> None:
    """Who would go holds what the head finds in the cache."""
    random_operations(4064, 400, "lru", is_fair=True)


def test_who_ends_among_drafts_has_nothing_cut_behind_its_windows() -> None:
    """Without a tree windows are trimmed as far as drafts were right, and it ends by an earlier one."""
    random_operations(300431, 300, "lru", GROUPS[2], is_fair=True)


def test_what_samples_of_a_corrupted_prompt_share_is_not_published() -> None:
    """One fills the block with the same token in the same step, and began with a copy of what the other has."""
    random_operations(300441, 300, "lru", scheduling="fair", quotas=True, num_blocks=12, has_host=True)


@pytest.mark.parametrize("scheduling", ["fcfs", "fair", "lpm", "priority"])
@IN_FULL
def test_random_operations_of_tenants_with_quotas(scheduling: str, in_full: bool) -> None:
    """The same where tenants have floors and caps, which are counted anew."""
    seen: Counter[str] = Counter()
    asked = ("evicted for another", "passes one at its cap", "waits for kv_cap", "preempted", "ahead", "forked")
    for seed in until_seen(range(740, 752), seen, asked, in_full=in_full):
        changes = {"num_blocks": (9, 14, 20, 40)[seed % 4], "scheduling": scheduling, "quotas": True}
        changes["admission"] = ("prompt", "predicted")[seed % 3 > 1]
        seen += random_operations(seed, 300, "lru", **changes)
    assert min(seen[what] for what in asked) > 0, seen


@IN_FULL
def test_random_operations_of_tenants_with_shares(in_full: bool) -> None:
    """The same where requests make way for other tenants' shares."""
    seen: Counter[str] = Counter()
    asked = ("made way", "not ahead: somebody is to make way", "preempted", "ahead", "ahead: admitted", "forked")
    asked += ("cancelled during a step", "failed step with one behind it", "somebody is held back", "several made way")
    for seed in until_seen((711, 707, 704, 710, 701, 712, 706, 4037), seen, asked, in_full=in_full):
        seen += random_operations(seed, 400, "lru", is_fair=True)
    assert min(seen[what] for what in asked) > 0, seen


@IN_FULL
def test_random_operations_of_tenants_with_shares_and_groups(in_full: bool) -> None:
    """The same where groups keep windows or pack, and there is a host tier."""
    seen: Counter[str] = Counter()
    for seed in until_seen(range(720, 730), seen, ["made way"], in_full=in_full):
        rules = (GROUPS[2], PACKING[0], (KEEP_ALL,))[seed % 3]
        changes = {"seals": False} if rules in PACKING else {}
        seen += random_operations(seed, 300, "lru", rules, has_host=seed % 2 > 0, is_fair=True, **changes)
    assert seen["made way"]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_very_many_random_operations(policy: str) -> None:
    """300,000 operations over the three policies, in 50 setups each."""
    for seed in range(50):
        random_operations(1000 + seed, 2000, policy)
