"""Engine: the loop around scheduler and runner. One thread calls it; nothing in it waits.

::

    plan = scheduler.schedule(now)
    result = runner.run(plan)
    scheduler.apply(result)            or scheduler.abandon(error)

Before that, ``drafting`` may give requests drafts of what they will sample.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pagefold.beams import BeamGroup, BeamSearch
from pagefold.engine.adapters import NO_ADAPTERS
from pagefold.engine.drafting import NO_DRAFTING
from pagefold.engine.foresight import foresee
from pagefold.engine.intake import NO_INTAKE
from pagefold.engine.load_shed import load_shed
from pagefold.engine.open_outputs import OpenOutputs
from pagefold.engine.output_rules import matchers
from pagefold.engine.pins import PinReport, report_pins
from pagefold.engine.quota_report import QuotaStatus, report_quotas
from pagefold.engine.request_checks import RequestChecks
from pagefold.engine.tenant_limits import TenantLimits
from pagefold.errors import InvalidRequestError
from pagefold.events import Emit, RefusalReason, RequestRefused, ignore
from pagefold.memory.cache_size import CacheSize
from pagefold.request import ANYBODY, Caller, Request, StopRule, hints_within
from pagefold.scheduler import MAX_EXPECTED_BYTES, NO_TIERING
from pagefold.scheduler.times import tell_tokens
from pagefold.steps import DamagedBlocksError
from pagefold.structured.params import FIELD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pagefold.adapters import LoadedAdapter
    from pagefold.engine.adapters import EngineAdapters
    from pagefold.engine.drafting import Drafting
    from pagefold.engine.foresight import Foreseen
    from pagefold.engine.intake import Intake
    from pagefold.engine.limits import ModelLimits
    from pagefold.engine.outputs import OutputDelta
    from pagefold.engine.together import Together
    from pagefold.kv.transfers import TierUse
    from pagefold.memory.capacity import Capacity
    from pagefold.request import EndedSession, RequestTimes, SessionRef
    from pagefold.sampling import SamplingParams
    from pagefold.scheduler import Scheduler, Tiering
    from pagefold.steps import Runner, StepPlan
    from pagefold.structured.compiler import GrammarCompiler
    from pagefold.structured.grammar import Grammar
    from pagefold.structured.params import StructuredOutputsParams
    from pagefold.tokenizer import Tokenizer

__all__ = ["Engine"]

_log = logging.getLogger(__name__)

_MOST_NAMED = 16
"""So many requests one line of the log names at most."""


class Engine:
    """Requests in, deltas out, one step at a time.

    Args:
        scheduler: with its core.
        runner: carries out plans.
        tokenizer: for text and stop strings; None works in tokens only.
        limits: of the model.
        capacity: what fits.
        tenants: what of that tenants may have; all of it if not given.
        tiering: of slow tiers.
        intake: takes blocks into them that somebody else computed.
        drafting: gives requests drafts.
        adapters: those that requests may have.
        compiler: of grammars; None for free output only.
        seed: of requests that bring none; the n-th such request draws the same in every run.
        request_timeout_s: seconds after which a request that has not finished is ended; None for never.
        emit: where events go.
        clock: seconds, monotonic.
    """

    def __init__(  # noqa: PLR0913 - the parts that it holds together
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        capacity: Capacity,
        tenants: TenantLimits | None = None,
        tiering: Tiering = NO_TIERING,
        intake: Intake = NO_INTAKE,
        drafting: Drafting = NO_DRAFTING,
        adapters: EngineAdapters = NO_ADAPTERS,
        compiler: GrammarCompiler | None = None,
        seed: int = 0,
        request_timeout_s: float | None = None,
        emit: Emit = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.limits = limits
        self.capacity = capacity
        self.tenants = tenants or TenantLimits((), capacity)
        self.tiering = tiering
        self.intake = intake
        self.drafting = drafting
        self.adapters = adapters
        self._compiler = compiler
        self._seed = seed
        self._request_timeout_s = request_timeout_s
        self._emit = emit
        self._clock = clock
        self._checks = RequestChecks(scheduler, limits, capacity, self.tenants, has_tokenizer=tokenizer is not None)
        self._outputs = OpenOutputs(scheduler, tokenizer, emit)
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def has_requests(self) -> bool:
        """Whether any request is here: also if all of them wait for blocks."""
        return self.scheduler.has_requests

    def cache_sizes(self) -> list[CacheSize]:
        """Return what is kept beside blocks. Plain reads, so any thread may ask."""
        sizes = [] if self._compiler is None else self._compiler.sizes()
        if self.tokenizer is not None:
            sizes.append(self.tokenizer.cache_size())
        tiering = self.tiering  # which the engine's thread lets go of when it closes
        if tiering.is_on:
            sizes.append(CacheSize("expected_conversations", tiering.expected_bytes, MAX_EXPECTED_BYTES))
        return sizes + self.drafting.cache_sizes()

    def tier_uses(self) -> Mapping[str, TierUse]:
        """Return what slow tiers have, by name, of those that know it at once. Plain reads, so any thread may ask."""
        return self.tiering.uses()

    def decide_in_order(self) -> None:
        """From now on plan each step when the last one's tokens are known: so a recording can be replayed.

        This engine always does.
        """

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, caller: Caller = ANYBODY) -> None:
        """Refuse what can never be served. Reads nothing that changes, so any thread may call it.

        Raises:
            InvalidRequestError: with the field at fault.
            AdapterNotFoundError: it names an adapter that is not loaded.
        """
        self.adapters.find(caller.adapter)
        self._checks.check(prompt_token_ids, sampling, caller)
        self.drafting.wanted(caller.speculation)

    def compile_grammar(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of what an output must look like. Blocks; any thread may call it.

        Raises:
            InvalidRequestError: it does not compile, or takes too much, or there is no tokenizer.
        """
        if self._compiler is None:
            msg = "Structured output needs a tokenizer, and this engine works in tokens only."
            raise InvalidRequestError(msg, param=FIELD, remedy="Leave it out.")
        return self._compiler.compile(params)

    def add(  # noqa: PLR0913 - a request, by name
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        caller: Caller = ANYBODY,
        grammar: Grammar | None = None,
        *,
        together: Together | None = None,
    ) -> RequestTimes:
        """Queue a request, with all its samples; return its times, which are written as it goes on.

        Args:
            request_id: the caller's name for it.
            prompt_token_ids: at least one.
            sampling: how to choose tokens, and when to stop.
            caller: who asks.
            grammar: of ``sampling.structured_outputs``, from :meth:`compile_grammar`; None if that is None.
            together: with whom it comes, and may be refused if it would wait too long; None takes it at any rate.

        Raises:
            InvalidRequestError: see :meth:`check`; or the id is in use.
            LoadShedError: it would wait longer than the target allows.
            PinQuotaError: it asks for a pin that is more than the quota leaves.
        """
        self.check(prompt_token_ids, sampling, caller)
        assert (grammar is None) == (sampling.structured_outputs is None), "a grammar is compiled before it is added"
        sample_ids = [request_id, *(f"{request_id}/{index}" for index in range(1, sampling.num_samples))]
        self._check_names(sample_ids)
        kind = self.limits.kind_of(caller)
        adapter = self.adapters.find(caller.adapter)
        namespace = kind.namespace_of(caller, adapter.fingerprint).key()
        max_total = self.tenants.most_tokens(caller.tenant)
        if sampling.max_tokens is not None:
            max_total = min(max_total, len(prompt_token_ids) + sampling.max_tokens)
        priority = caller.priority + (caller.tier_offset if self.scheduler.policy.heeds_priority else 0)
        seed = sampling.seed if sampling.seed is not None else hash((self._seed, self._num_requests))
        self._num_requests += 1
        now = self._clock()
        stop = StopRule(self._checks.stop_ids(sampling), max_total)
        ends = self.limits.message_ends(prompt_token_ids) if self.scheduler.core.trims else ()
        speculation = self.drafting.wanted(caller.speculation)
        if speculation is not None and (speculation.is_off or sampling.use_beam_search):
            speculation = None
        to_match = matchers(sampling, grammar, self.limits.vocab_size, self.tokenizer)
        session = caller.session
        hints = hints_within(caller.hint_pins, len(prompt_token_ids))
        samples = [
            Request(
                sample_id,
                prompt_token_ids,
                sampling,
                stop=stop,
                matcher=matcher,
                namespace=namespace,
                tenant=caller.tenant,
                weight=caller.weight,
                quota=self.tenants.quota_of(caller.tenant),
                seed=seed + index,
                arrival_s=now,
                deadline_s=None if self._request_timeout_s is None else now + self._request_timeout_s,
                priority=priority,
                parent_id=request_id,
                sample_index=index,
                warm_up=caller.warm_up,
                returns_in_s=caller.returns_in_s,
                session=session,
                hint_pins=() if index else hints,
                message_ends=ends,
                speculation=speculation,
                predicted=caller.predicted[: max_total - len(prompt_token_ids)],  # more of it cannot come
                mask=kind.mask,
                adapter=adapter.slot,
            )
            for index, (sample_id, matcher) in enumerate(zip(sample_ids, to_match, strict=True))
        ]
        if caller.warm_up is not None and caller.warm_up.pin:
            self._checks.check_pin_quota(samples[0])
        if sampling.use_beam_search:
            _search_beams(samples)
        first, *first.forks = samples
        if together is not None:
            together.judge(lambda: load_shed(self.scheduler.judge(first)))
        self.adapters.note(adapter, namespace, self.scheduler)
        self._outputs.begin(samples, prompt_token_ids)
        self.scheduler.add(first)
        self.tiering.begin(first, now)
        return first.times

    def foresee(self, prompt_token_ids: Sequence[int], caller: Caller = ANYBODY) -> Foreseen:
        """Return what a prompt would find in the cache.

        Raises:
            InvalidRequestError: the engine does not offer the kind of blocks that the caller asks for.
            AdapterNotFoundError: it names an adapter that is not loaded.
        """
        kind = self.limits.kind_of(caller)
        namespace = kind.namespace_of(caller, self.adapters.find(caller.adapter).fingerprint).key()
        return foresee(self.scheduler.core, namespace, prompt_token_ids, kind.mask, self._clock())

    def abort(self, request_id: str) -> bool:
        """End a request whose caller has gone, with all its samples. False when it has ended already."""
        return self._outputs.abort(request_id, self._clock())

    def tell_refused(self, request_id: str, reason: RefusalReason) -> None:
        """Tell that a request was refused before it was added."""
        self._emit(RequestRefused(request_id, reason))

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix, between steps; running requests go on. Return how many blocks became free.

        Raises:
            TierError: a slow tier could not forget.
        """
        num_freed, finish = self.begin_reset()
        finish()
        return num_freed

    def begin_reset(self) -> tuple[int, Callable[[], None]]:
        """Forget every cached prefix on device and host. Return how many blocks became free, and what is left to do.

        That may take long, and any thread may call it.
        """
        num_freed = self.scheduler.core.forgetting.reset()
        self.drafting.reset()
        self.tiering.begin_reset()
        return num_freed, self.tiering.finish_reset

    def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> LoadedAdapter:
        """Read an adapter, and let requests name it from now on.

        Raises:
            AdapterError: see :meth:`EngineAdapters.read`.
        """
        return self.adapters.install(self.adapters.read(name, path, in_place=in_place))

    def begin_unload(self, name: str) -> LoadedAdapter:
        """Take an adapter's name away. Requests that have it go on; behind the last of them nothing is left of it.

        Raises:
            AdapterNotFoundError: nobody has that name.
        """
        found = self.adapters.begin_unload(name)
        self.adapters.settle(self.scheduler, self.tiering)
        return found

    def pins(self) -> PinReport:
        """Return what is pinned now."""
        return report_pins(self.scheduler.core, self._clock())

    def quotas(self) -> tuple[QuotaStatus, ...]:
        """Return what tenants with a quota have now."""
        return report_quotas(self.scheduler.core, self.tenants)

    def unpin(self, pin_id: str) -> bool:
        """Take a pin away; its blocks stay cached. False if there is no such pin."""
        return self.scheduler.core.pins.remove(pin_id) is not None

    def end_session(self, session: SessionRef) -> EndedSession | None:
        """End a session, with its sub-agents: its requests go on, its blocks go first. None if there is none."""
        return self.scheduler.end_session(session)

    def idle(self) -> float:
        """Nothing runs: do what is due. Return the seconds until something will be; or inf.

        Nobody need call :meth:`step` before that, unless ``tiering`` wakes it.
        """
        now = self._clock()
        if self.adapters.is_leaving:
            self.adapters.settle(self.scheduler, self.tiering)
        pins = self.scheduler.core.pins
        pins.expire(now)
        self.drafting.forget_ended()
        self.tiering.store_pending()
        self.tiering.poll(now)
        due_s = min(pins.next_expiry_s, self.scheduler.next_deadline_s, self.tiering.next_due_s())
        return 0.0 if self.scheduler.has_work else max(0.0, due_s - now)

    def wait(self) -> None:
        """All requests wait for blocks: return when something has come, or is due."""
        due_s = self.idle()
        if due_s:
            self.tiering.wait(due_s)

    def close(self, left_s: Callable[[], float] = lambda: 0.0) -> None:
        """Let go of slow tiers, and before that write to them what is cached, as long as ``left_s()`` is positive."""
        self.tiering.close(left_s)
        self.tiering = NO_TIERING

    def step(self) -> list[OutputDelta]:
        """Run one step and return what it added, request by request.

        A step that fails is taken back, and its requests run again: apart, until it is known whose fault it was. Who
        made it fail ends with ``error``.
        """
        now = self._clock()
        if self.adapters.is_leaving:
            self.adapters.settle(self.scheduler, self.tiering)
        self.tiering.poll(now)
        if self.drafting.is_on:
            self.drafting.prepare()
            now = self._clock()  # a draft model takes its time
        plan = self.scheduler.schedule(now)
        deltas = [self._timed_out(request, now) for request in self.scheduler.timed_out]
        if not plan.num_rows:
            return deltas
        try:
            result = self.runner.run(plan)
        except Exception as error:  # noqa: BLE001 - whatever a step dies of, its requests must not be lost
            return deltas + self._abandon(plan, error)
        except BaseException as interrupt:  # not the step's fault: whoever catches it finds no step in flight
            self.scheduler.abandon(type(interrupt).__name__, is_blamed=False)
            raise
        began, now = now, self._clock()
        self.tiering.computed(len(plan.token_ids), plan.num_rows, now - began)
        requests = self.scheduler.apply(result, now)
        tell_tokens(self._emit, requests, now, self.scheduler.core.block_size)
        for request in requests:
            told = self._outputs.deltas(request, request.finish_reason, now)
            deltas += told
            if told and told[-1].finish_reason in {"stop", "length"}:
                self.tiering.expect(request, now)
        return deltas + self._all_failed(self._corrupted(), None)

    def _abandon(self, plan: StepPlan, error: Exception) -> list[OutputDelta]:
        """Take back a step that failed; return the last deltas of requests that ended by it."""
        if isinstance(error, DamagedBlocksError):
            _log.warning("step %d found %s; they are dropped, and what they held is computed", plan.step_id, error)
            return self._all_failed(self.scheduler.abandon(str(error), error.host_ids), error)
        _log.error("step %d failed with %d requests", plan.step_id, plan.num_rows, exc_info=error)
        ended = self.scheduler.abandon(f"{type(error).__name__}: {error}")
        if ended:
            _log.error("%d requests end since their steps failed", len(ended), extra=_named(ended))
        return self._all_failed(ended, error)

    def _check_names(self, sample_ids: list[str]) -> None:
        """Refuse the names of a request's samples, the first of which is its own, where somebody has one of them."""
        request_id = sample_ids[0]
        is_pin = self.scheduler.core.pins.get(request_id) is not None
        if is_pin or any(name in self._outputs.texts or self.scheduler.get(name) is not None for name in sample_ids):
            msg = f"Request id {request_id!r} is in use."
            raise InvalidRequestError(msg, param="request_id", remedy="Use another id.")

    def _corrupted(self) -> list[Request]:
        """Return those who end by the step that was just applied, since the model computed no numbers for them."""
        ended = self.scheduler.corrupted
        if ended:
            _log.error(
                "what the model computes for %d requests is NaN or infinite; what they had is dropped",
                len(ended),
                extra=_named(ended),
            )
        if self.scheduler.distrusted:
            self.tiering.distrust(self.scheduler.distrusted)
        return [sample for request in ended for sample in (request, *request.forks)]

    def _all_failed(self, ended: list[Request], error: Exception | None) -> list[OutputDelta]:
        """Return the last deltas of requests that ended by a step, with its error; who cancelled is told nothing."""
        now = self._clock()
        why = "." if error is None else f": {type(error).__name__}: {error}"
        return [
            self._outputs.cut_off(request, f"{request.error or 'The step failed'}{why}", now)
            for request in ended
            if request.request_id in self._outputs.texts
        ]

    def _timed_out(self, request: Request, now: float) -> OutputDelta:
        where = f"after {request.num_output_tokens} tokens" if request.num_cached_tokens >= 0 else "while it waited"
        told = f"The request was ended {where}: its {self._request_timeout_s:g} s are up."
        return self._outputs.cut_off(request, told, now)


def _search_beams(samples: list[Request]) -> None:
    """Let ``samples`` of one prompt be the beams of a search."""
    first = samples[0]
    sampling, stop = first.sampling, first.stop
    search = BeamSearch(
        len(samples),
        stop.token_ids,
        stop.max_total_tokens - first.num_prompt_tokens,
        min_tokens=sampling.min_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
    )
    group = BeamGroup(samples, search, sampling.logprobs or 0)
    for sample in samples:
        sample.beams = group


def _named(requests: list[Request]) -> dict[str, str]:
    """Return the field of a line of the log that says which requests it is about: the first of them, by their ids."""
    return {"request_ids": ",".join(request.request_id for request in requests[:_MOST_NAMED])}
