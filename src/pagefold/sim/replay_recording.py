"""Replaying a recording: the same scheduler and cache, given what the server was given, must do what it did.

What timing and the model decided comes from the recording: when requests came, before which step they were cancelled,
what was sampled, which steps failed. What each request found and which blocks were evicted is decided anew, and
compared.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pagefold.events import BlockEvicted, PrefixLookup, RequestPreempted
from pagefold.kv import (
    NO_HOST,
    NO_QUOTAS,
    NO_RESIDUALS,
    HostTier,
    KVCore,
    PinLimits,
    Quotas,
    Residuals,
    audit,
    blocks_per_place,
    make_policy,
)
from pagefold.kv.pins import hint_id
from pagefold.request import Request, StopRule, WarmUp
from pagefold.sampling import SamplingParams
from pagefold.scheduler import SCHEDULING_POLICIES, Guardrails, PrefillLimits, Scheduler, SchedulerLimits
from pagefold.scheduler.guardrails import GivenCap
from pagefold.sim.traces.recording import (
    RecordedAdd,
    RecordedCut,
    RecordedReset,
    RecordedSessionEnd,
    RecordedStep,
    RecordedUnpin,
    Recording,
)
from pagefold.steps import StepResult, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.events import Event
    from pagefold.request import FinishReason
    from pagefold.steps import StepPlan

__all__ = ["RecordingReport", "replay_recording"]

_ENDS_BY_A_TOKEN = ("stop", "error")
_END = -1
"""No hash is negative. The last token of an output may be any: its KV is not computed, so no block holds it. Numbers
below it are tokens that nobody knows, since the server was killed before their request ended; no two are equal."""
_ENDS = frozenset({_END})
_ANY_TEXT = ("a text",)
_WRONG = -(2**31)
"""A draft that nothing samples."""
_NO_LOGPROB = TokenLogprobs(0.0, 1, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingReport:
    """How a replay went.

    Attributes:
        num_requests: how many requests came.
        num_steps: that were replayed; empty ones count.
        num_failed_steps, num_cancelled, num_preemptions: steps that failed, requests cancelled, preemptions.
        num_asked_tokens, num_hit_tokens: of first admissions.
        num_evictions: cached blocks that went.
        num_equal_steps: steps that found and evicted just what the server's did.
        first_difference: what was other than in the recording; empty where nothing was. Nothing after it is replayed.
    """

    num_requests: int
    num_steps: int
    num_failed_steps: int
    num_cancelled: int
    num_preemptions: int
    num_asked_tokens: int
    num_hit_tokens: int
    num_evictions: int
    num_equal_steps: int
    first_difference: str

    @property
    def token_hit_ratio(self) -> float:
        """Share of prompt tokens that were found, 0 to 1."""
        return self.num_hit_tokens / self.num_asked_tokens if self.num_asked_tokens else 0.0

    def figures(self) -> dict[str, object]:
        """Return all figures by name, for JSON."""
        told: dict[str, object] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return told | {"token_hit_ratio": self.token_hit_ratio}


def replay_recording(recording: Recording, *, progress: Callable[[int], None] | None = None) -> RecordingReport:
    """Replay a recording on the real scheduler and cache, step by step, and compare each with what was recorded.

    Args:
        recording: of a server.
        progress: told how many of ``recording.happened`` are done.
    """
    return _Replayer(recording).replay(progress)


class _Replayer:
    def __init__(self, recording: Recording) -> None:
        settings = recording.settings
        self._recording = recording
        self._cut = {each.number for each in recording.happened if isinstance(each, RecordedCut)}
        self._hits: list[tuple[int, int]] = []
        self._evicted: list[int] = []
        self._unknown: dict[tuple[int, int], int] = {}
        self._num_preemptions = self._num_asked = self._num_hit = self._num_evictions = 0
        num_places = settings.num_blocks // blocks_per_place(settings.rules)
        make = partial(make_policy, settings.eviction_policy, num_places)
        quotas = Quotas() if settings.has_quotas else NO_QUOTAS
        self._core = KVCore(
            settings.num_blocks,
            block_size=settings.block_size,
            rules=settings.rules,
            policy=quotas.policy(make(), make),
            enable_prefix_caching=settings.enable_prefix_caching,
            pin_limits=PinLimits(settings.max_pinned_share, settings.pin_half_life_s),
            host=HostTier(settings.num_host_blocks) if settings.num_host_blocks else NO_HOST,
            allow_streaming=settings.allow_streaming,
            residuals=Residuals(settings.max_num_seqs, settings.block_size) if settings.seals_blocks else NO_RESIDUALS,
            quotas=quotas,
            emit=self._note,
        )
        self._pacing = GivenCap()
        self._scheduler = Scheduler(
            self._core,
            SchedulerLimits(
                settings.max_num_seqs,
                settings.max_num_batched_tokens,
                PrefillLimits(
                    settings.max_num_partial_prefills,
                    settings.max_long_partial_prefills,
                    settings.long_prefill_token_threshold,
                ),
            ),
            policy=SCHEDULING_POLICIES[settings.scheduling_policy](settings.priority_aging_s),
            admission=settings.admission,
            guardrails=Guardrails(self._pacing),
            emit=self._note,
        )

    def replay(self, progress: Callable[[int], None] | None) -> RecordingReport:
        happened = self._recording.happened
        in_step: list[RecordedCut] = []
        steps = [each for each in happened if isinstance(each, RecordedStep)]
        num_equal = num_steps = num_requests = 0
        difference = ""
        for index, each in enumerate(happened):
            match each:
                case RecordedAdd(has_beams=True):
                    difference = f"request {each.number} searches beams, and which there were is not recorded"
                    break
                case RecordedAdd():
                    num_requests += 1
                    self._scheduler.add(self._request(each))
                case RecordedCut():
                    in_step.append(each) if each.is_in_step else self._finish(each)
                case RecordedUnpin() | RecordedSessionEnd() | RecordedReset():
                    self._release(each)
                case RecordedStep():
                    num_steps += 1
                    difference = self._step(each, in_step)
                    in_step = []
                    if difference:
                        break
                    num_equal += 1
            if progress is not None:
                progress(index + 1)
        audit(self._core)
        return RecordingReport(
            num_requests=num_requests,
            num_steps=num_steps,
            num_failed_steps=sum(step.has_failed for step in steps[:num_steps]),
            num_cancelled=len(self._cut),
            num_preemptions=self._num_preemptions,
            num_asked_tokens=self._num_asked,
            num_hit_tokens=self._num_hit,
            num_evictions=self._num_evictions,
            num_equal_steps=num_equal,
            first_difference=difference,
        )

    def _release(self, recorded: RecordedUnpin | RecordedSessionEnd | RecordedReset) -> None:
        """Let what was cached lose what kept it, as somebody asked."""
        match recorded:
            case RecordedUnpin():
                name = _name(recorded.number)
                self._core.pins.remove(hint_id(name, recorded.num_tokens) if recorded.num_tokens else name)
            case RecordedSessionEnd():
                self._scheduler.end_session(recorded.session)
            case RecordedReset():
                self._core.forgetting.reset()

    def _step(self, recorded: RecordedStep, in_step: list[RecordedCut]) -> str:
        """Run a step; return what was other than recorded, if anything."""
        self._give_drafts(recorded)
        self._pacing.prefill_cap_tokens = recorded.prefill_cap_tokens
        plan = self._scheduler.schedule(recorded.now_s)
        where = f"step {recorded.step_id}"
        if plan.num_rows != recorded.num_rows or len(plan.token_ids) != recorded.num_computed:
            if plan.num_rows:
                self._scheduler.abandon("the replay ends here")
            was = f"{recorded.num_rows} sequences and {recorded.num_computed} tokens"
            return f"{where} had {was}; the replay has {plan.num_rows} and {len(plan.token_ids)}"
        for cut in in_step:
            self._finish(cut)
        if not plan.num_rows:
            pass
        elif not frozenset(recorded.damaged) <= plan.host_ops.ids_read:
            self._scheduler.abandon("the replay ends here")
            return f"{where} failed of host blocks {recorded.damaged}; the replay does not load them"
        elif recorded.has_failed:
            self._scheduler.abandon("as recorded", frozenset(recorded.damaged))
        else:
            corrupted = {_name(number) for number in recorded.corrupted}
            corrupted.update(_name(number) for number, _, num_right in recorded.drafts if num_right < 0)
            rows = [row for row, one in enumerate(self._scheduler.in_step) if one.request_id in corrupted]
            self._scheduler.apply(replace(self._result(plan), corrupted=rows))
        hits, self._hits = tuple(self._hits), []
        evicted, self._evicted = tuple(self._evicted), []
        if hits != recorded.hits:
            return f"{where} found {recorded.hits} (request, tokens); the replay found {hits}"
        if evicted != recorded.evicted:
            return f"{where} evicted blocks {recorded.evicted}; the replay evicted {evicted}"
        return ""

    def _give_drafts(self, recorded: RecordedStep) -> None:
        """Give requests as many drafts as they had, of which as many are right."""
        for request in self._scheduler.running:
            request.drafts = ()
        for number, num_drafts, num_right in recorded.drafts:
            drafted = self._scheduler.get(_name(number))
            if drafted is not None:
                begin = drafted.num_tokens
                drafts = self._recording.tokens[number][begin : begin + max(0, num_right)]
                if number in self._cut or not self._recording.ended.get(number):  # its last tokens were not written
                    places = range(begin + len(drafts), begin + num_right)
                    drafts.extend(self._unknown_at(number, place) for place in places)
                drafted.drafts = drafts + array("i", [_WRONG]) * (num_drafts - len(drafts))

    def _note(self, event: Event) -> None:
        match event:
            case PrefixLookup():
                self._hits.append((int(event.request_id[1:]), event.num_hit_tokens))
                if not event.after_preemption:
                    self._num_asked += event.num_tokens
                    self._num_hit += event.num_hit_tokens
            case BlockEvicted():
                self._evicted.append(event.block_id)
                self._num_evictions += 1
            case RequestPreempted():
                self._num_preemptions += 1
            case _:
                pass

    def _finish(self, cut: RecordedCut) -> None:
        """End a request as the server did: by its client, or by its text, which may have ended before its tokens."""
        request = self._scheduler.get(_name(cut.number))
        reason: FinishReason = "abort"
        if request is not None and self._recording.ended.get(cut.number) == "stop":
            request.cut(len(self._recording.tokens[cut.number]) - request.num_prompt_tokens)
            reason = "stop"
        self._scheduler.finish(_name(cut.number), reason)

    def _request(self, add: RecordedAdd) -> Request:
        """Return a request that will sample what was recorded."""
        prompt = self._recording.tokens[add.number][: add.num_prompt_tokens]
        sampling = SamplingParams(
            max_tokens=None,
            ignore_eos=True,
            prompt_logprobs=0 if add.has_prompt_logprobs else None,
            stop=_ANY_TEXT if add.has_stop_strings else (),
        )
        pin = None if add.pin is None else WarmUp(pin=True, ttl_s=add.pin[0], retention_priority=add.pin[1])
        samples = [
            Request(
                _name(number),
                prompt,
                sampling,
                stop=StopRule(_ENDS, add.most_tokens),
                namespace=str(add.namespace).encode(),
                tenant=str(add.tenant),
                weight=add.weight,
                quota=add.quota,
                seed=number,
                arrival_s=add.arrival_s,
                deadline_s=add.deadline_s,
                priority=add.priority,
                parent_id=_name(add.number),
                sample_index=number - add.number,
                warm_up=pin,
                returns_in_s=add.returns_in_s,
                session=add.session,
                hint_pins=() if number > add.number else add.hint_pins,
                message_ends=add.message_ends,
            )
            for number in range(add.number, add.number + add.num_samples)
        ]
        first, *first.forks = samples
        return first

    def _unknown_at(self, number: int, place: int) -> int:
        """Return the token at one place of a sample, which nobody knows: no other has the same."""
        return self._unknown.setdefault((number, place), _END - 1 - len(self._unknown))

    def _ends_by_a_token(self, number: int) -> bool:
        return number not in self._cut and self._recording.ended.get(number) in _ENDS_BY_A_TOKEN

    def _result(self, plan: StepPlan) -> StepResult:
        """Return what the server sampled; seeds are numbers of samples."""
        sampled = []
        for place, seed, draw in zip(plan.sampled_positions(), plan.seeds, plan.draws, strict=True):
            tokens = self._recording.tokens[seed]
            assert draw <= place
            is_last = place == len(tokens) - 1 and self._ends_by_a_token(seed)
            if is_last:
                sampled.append(_END)
            elif place < len(tokens):
                sampled.append(tokens[place])
            else:
                sampled.append(self._unknown_at(seed, place))
        parts = [[_NO_LOGPROB] * len(part.token_ids) for part in plan.prompt_parts]
        return StepResult(sampled, logprobs=[_NO_LOGPROB] * len(plan.logprob_rows), prompt_logprobs=parts)


def _name(number: int) -> str:
    return f"r{number}"
