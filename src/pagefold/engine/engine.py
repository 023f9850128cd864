"""Engine: the loop around scheduler and runner. One thread calls it; nothing in it waits.

::

    plan = scheduler.schedule(now)
    result = runner.run(plan)
    scheduler.apply(result)            or scheduler.abandon(error)
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from pagefold.engine.logprobs import Logprob, PromptLogprobs, named_logprobs
from pagefold.engine.output_rules import matcher_error, matchers, output_text, refuse_without_tokenizer
from pagefold.engine.outputs import OutputDelta, OutputText
from pagefold.engine.pins import PinReport, report_pins
from pagefold.errors import InvalidRequestError, PinQuotaError
from pagefold.events import Emit, PromptFinished, ignore
from pagefold.kv import Namespace
from pagefold.memory.cache_size import CacheSize
from pagefold.request import ANYBODY, Caller, Request, StopRule
from pagefold.scheduler import MAX_EXPECTED_BYTES
from pagefold.scheduler.times import tell_end, tell_tokens
from pagefold.steps import DamagedBlocksError
from pagefold.structured.params import FIELD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pagefold.memory.capacity import Capacity
    from pagefold.request import FinishReason, WarmUp
    from pagefold.sampling import SamplingParams
    from pagefold.scheduler import Scheduler, Tiering
    from pagefold.steps import Runner, StepPlan
    from pagefold.structured.compiler import GrammarCompiler
    from pagefold.structured.grammar import Grammar
    from pagefold.structured.params import StructuredOutputsParams
    from pagefold.tokenizer import Tokenizer

__all__ = ["Engine", "ModelLimits"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the engine must know of the model to judge a request.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: each of them ends a sequence, unless ``ignore_eos``.
        namespace: model, layout and dtype of its blocks; tenant and salt are the request's.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    namespace: Namespace


@dataclass(slots=True)
class _Open:
    """A request some of whose samples have not ended.

    Attributes:
        sample_ids: the ids of those samples.
        num_choices: that were asked for; 0 for a warm-up.
        num_longest_tokens: output tokens of the longest of the others.
    """

    sample_ids: list[str]
    num_choices: int
    num_longest_tokens: int = 0

    def count_end(self, sample: Request) -> None:
        """Count the output of a sample that has ended."""
        self.num_longest_tokens = max(self.num_longest_tokens, sample.num_output_tokens)


class _Logprobs(TypedDict, total=False):
    cumulative_logprob: float
    logprobs: tuple[dict[int, Logprob], ...]
    prompt_logprobs: PromptLogprobs


class Engine:
    """Requests in, deltas out, one step at a time.

    Args:
        scheduler: with its core.
        runner: carries out plans.
        tokenizer: for text and stop strings; None works in tokens only.
        limits: of the model.
        capacity: what fits.
        tiering: of slow tiers; None without any.
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
        tiering: Tiering | None = None,
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
        self.tiering = tiering
        self._compiler = compiler
        self._seed = seed
        self._request_timeout_s = request_timeout_s
        self._emit = emit
        self._clock = clock
        self._texts: dict[str, OutputText] = {}  # of every sample that has not ended
        self._open: dict[str, _Open] = {}  # the requests of those samples
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
        if tiering is not None:
            sizes.append(CacheSize("expected_conversations", tiering.expected_bytes, MAX_EXPECTED_BYTES))
        return sizes

    def decide_in_order(self) -> None:
        """From now on plan each step when the last one's tokens are known: so a recording can be replayed.

        This engine always does.
        """

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, caller: Caller = ANYBODY) -> None:
        """Refuse what can never be served. Reads nothing that changes, so any thread may call it.

        Raises:
            InvalidRequestError: with the field at fault.
        """
        num_tokens = len(prompt_token_ids)
        max_len = self.capacity.max_model_len
        if not num_tokens:
            msg = "The prompt is empty."
            raise InvalidRequestError(msg, param="prompt", remedy="Send at least one token.")
        if num_tokens >= max_len:
            msg = f"The prompt has {num_tokens} tokens; max_model_len is {max_len}, and one must be left to generate."
            raise InvalidRequestError(msg, param="prompt", remedy=f"Send at most {max_len - 1} tokens.")
        self._check_ids(prompt_token_ids, "prompt")
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(sampling.logit_bias or (), "logit_bias")
        self._check_ids(sampling.allowed_token_ids or (), "allowed_token_ids")
        max_tokens = max_len - num_tokens if sampling.max_tokens is None else sampling.max_tokens
        if sampling.min_tokens > max_tokens:
            msg = f"min_tokens is {sampling.min_tokens}, and the output has at most {max_tokens} tokens."
            raise InvalidRequestError(msg, param="min_tokens", remedy=f"Ask for at most {max_tokens}.")
        if sampling.min_tokens:
            self._check_that_some_go_on(sampling)
        if self.tokenizer is None:
            refuse_without_tokenizer(sampling)
        max_samples = self.scheduler.limits.max_num_seqs
        if sampling.num_samples > max_samples:
            param = "n" if sampling.n > max_samples else "best_of"
            msg = f"{param} is {getattr(sampling, param)}, but at most {max_samples} sequences run at once."
            remedy = f"Ask for at most {max_samples}, or start with a larger max_num_seqs."
            raise InvalidRequestError(msg, param=param, remedy=remedy)
        max_in_blocks = self.capacity.num_blocks * self.capacity.block_size
        if sampling.num_samples > 1 and num_tokens >= max_in_blocks:
            msg = (
                f"The prompt has {num_tokens} tokens; of more than the KV budget's {max_in_blocks} one sample is made."
            )
            raise InvalidRequestError(msg, param="n", remedy="Ask for one sample a request.")
        if caller.priority and self.scheduler.policy.name == "fcfs":
            msg = f"priority is {caller.priority}, but requests are served first come first served."
            raise InvalidRequestError(
                msg, param="priority", remedy="Leave it out, or start with scheduling_policy=priority."
            )
        if caller.warm_up is not None:
            self._check_warm_up(num_tokens, caller.warm_up)

    def compile_grammar(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of what an output must look like. Blocks; any thread may call it.

        Raises:
            InvalidRequestError: it does not compile, or takes too much, or there is no tokenizer.
        """
        if self._compiler is None:
            msg = "Structured output needs a tokenizer, and this engine works in tokens only."
            raise InvalidRequestError(msg, param=FIELD, remedy="Leave it out.")
        return self._compiler.compile(params)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        caller: Caller = ANYBODY,
        grammar: Grammar | None = None,
    ) -> None:
        """Queue a request, with all its samples.

        Args:
            request_id: the caller's name for it.
            prompt_token_ids: at least one.
            sampling: how to choose tokens, and when to stop.
            caller: who asks.
            grammar: of ``sampling.structured_outputs``, from :meth:`compile_grammar`; None if that is None.

        Raises:
            InvalidRequestError: see :meth:`check`; or the id is in use.
            PinQuotaError: it asks for a pin that is more than the quota leaves.
        """
        self.check(prompt_token_ids, sampling, caller)
        assert (grammar is None) == (sampling.structured_outputs is None), "a grammar is compiled before it is added"
        sample_ids = [request_id, *(f"{request_id}/{index}" for index in range(1, sampling.num_samples))]
        self._check_names(sample_ids)
        base = self.limits.namespace
        namespace = Namespace(base.model, base.layout, base.dtype, base.adapter, caller.tenant, caller.cache_salt)
        max_total = self.capacity.max_model_len
        if sampling.max_tokens is not None:
            max_total = min(max_total, len(prompt_token_ids) + sampling.max_tokens)
        priority = caller.priority + (0 if self.scheduler.policy.name == "fcfs" else caller.tier_offset)
        seed = sampling.seed if sampling.seed is not None else hash((self._seed, self._num_requests))
        self._num_requests += 1
        now = self._clock()
        stop = StopRule(self._stop_ids(sampling), max_total)
        to_match = matchers(sampling, grammar, self.limits.vocab_size, self.tokenizer)
        samples = [
            Request(
                sample_id,
                prompt_token_ids,
                sampling,
                stop=stop,
                matcher=matcher,
                namespace=namespace.key(),
                seed=seed + index,
                arrival_s=now,
                deadline_s=None if self._request_timeout_s is None else now + self._request_timeout_s,
                priority=priority,
                parent_id=request_id,
                sample_index=index,
                warm_up=caller.warm_up,
                returns_in_s=caller.returns_in_s,
            )
            for index, (sample_id, matcher) in enumerate(zip(sample_ids, to_match, strict=True))
        ]
        if caller.warm_up is not None and caller.warm_up.pin:
            self._check_pin_quota(samples[0])
        for sample_id in sample_ids:
            self._texts[sample_id] = output_text(sampling, prompt_token_ids, self.tokenizer)
        self._open[request_id] = _Open(sample_ids, sampling.n if caller.warm_up is None else 0)
        first, *first.forks = samples
        self.scheduler.add(first)
        if self.tiering is not None:
            self.tiering.begin(first, now)

    def abort(self, request_id: str) -> bool:
        """End a request whose caller has gone, with all its samples. False when it has ended already."""
        if request_id not in self._open:
            return False
        opened = self._open.pop(request_id)
        for sample_id in opened.sample_ids:
            del self._texts[sample_id]
            request = self.scheduler.finish(sample_id, "abort")
            if request is not None:
                for sample in (request, *request.forks):
                    tell_end(self._emit, sample, "abort", self._clock())
                    opened.count_end(sample)
        self._tell_prompt_end(request_id, opened)
        return True

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
        num_freed = self.scheduler.core.reset()
        if self.tiering is None:
            return num_freed, lambda: None
        self.tiering.begin_reset()
        return num_freed, self.tiering.finish_reset

    def pins(self) -> PinReport:
        """Return what is pinned now."""
        return report_pins(self.scheduler.core, self._clock())

    def unpin(self, pin_id: str) -> bool:
        """Take a pin away; its blocks stay cached. False if there is no such pin."""
        return self.scheduler.core.pins.remove(pin_id) is not None

    def idle(self) -> float:
        """Nothing runs: do what is due. Return the seconds until something will be; or inf.

        Nobody need call :meth:`step` before that, unless something is told to ``tiering.transfer.notify``.
        """
        now = self._clock()
        pins = self.scheduler.core.pins
        pins.expire(now)
        due_s = min(pins.next_expiry_s, self.scheduler.next_deadline_s)
        if self.tiering is not None:
            self.tiering.store_pending()
            self.tiering.poll(now)
            due_s = min(due_s, self.tiering.next_due_s())
        return 0.0 if self.scheduler.has_work else max(0.0, due_s - now)

    def wait(self) -> None:
        """All requests wait for blocks: return when something has come, or is due."""
        due_s = self.idle()
        if self.tiering is not None and due_s:
            self.tiering.wait(due_s)

    def close(self, left_s: Callable[[], float] = lambda: 0.0) -> None:
        """Let go of slow tiers, and before that write to them what is cached, as long as ``left_s()`` is positive."""
        if self.tiering is not None:
            self.tiering.close(left_s)
            self.tiering = None

    def step(self) -> list[OutputDelta]:
        """Run one step and return what it added, request by request.

        A step that fails is taken back, and its requests run again: apart, until it is known whose fault it was. Who
        made it fail ends with ``error``.
        """
        now = self._clock()
        if self.tiering is not None:
            self.tiering.poll(now)
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
        if self.tiering is not None:
            self.tiering.computed(len(plan.token_ids), plan.num_rows, now - began)
        requests = self.scheduler.apply(result)
        tell_tokens(self._emit, requests, now, self.scheduler.core.block_size)
        deltas += [self._delta(request, request.finish_reason, now) for request in requests]
        return deltas + self._all_failed(self._corrupted(), None)

    def _abandon(self, plan: StepPlan, error: Exception) -> list[OutputDelta]:
        """Take back a step that failed; return the last deltas of requests that ended by it."""
        if isinstance(error, DamagedBlocksError):
            _log.warning("step %d found %s; they are dropped, and what they held is computed", plan.step_id, error)
            return self._all_failed(self.scheduler.abandon(str(error), error.host_ids), error)
        _log.error("step %d failed with %d requests", plan.step_id, plan.num_rows, exc_info=error)
        return self._all_failed(self.scheduler.abandon(f"{type(error).__name__}: {error}"), error)

    def _check_names(self, sample_ids: list[str]) -> None:
        """Refuse the names of a request's samples, the first of which is its own, where somebody has one of them."""
        request_id = sample_ids[0]
        is_pin = self.scheduler.core.pins.get(request_id) is not None
        if is_pin or any(name in self._texts or self.scheduler.get(name) is not None for name in sample_ids):
            msg = f"Request id {request_id!r} is in use."
            raise InvalidRequestError(msg, param="request_id", remedy="Use another id.")

    def _check_warm_up(self, num_tokens: int, warm_up: WarmUp) -> None:
        core = self.scheduler.core
        if not core.publishes:
            msg = "Prefix caching is off, so there is nothing to warm."
            raise InvalidRequestError(msg, param="prompt", remedy="Start with enable_prefix_caching.")
        num_blocks = num_tokens // core.block_size
        if not num_blocks:
            msg = f"The prompt has {num_tokens} tokens to keep, which do not fill a block of {core.block_size}."
            raise InvalidRequestError(msg, param="prompt", remedy="There is nothing to gain from warming it.")
        if warm_up.pin and num_blocks > core.pins.max_blocks:
            msg = f"The prompt fills {num_blocks} blocks, and at most {core.pins.max_blocks} may be pinned."
            raise PinQuotaError(msg, remedy="Warm it without a pin, or start with a larger max_pinned_share.")

    def _check_pin_quota(self, request: Request) -> None:
        """Refuse before it is computed what could not be pinned now. Others may be faster: then pinning fails."""
        core = self.scheduler.core
        core.pins.expire(request.arrival_s)
        num_blocks = request.num_prompt_tokens // core.block_size
        known = core.match(request.namespace, request.packed(), request.num_prompt_tokens).nodes
        num_new = core.pins.num_new_blocks(known, num_blocks)
        if core.pins.num_blocks + num_new > core.pins.max_blocks:
            msg = (
                f"{core.pins.num_blocks} of at most {core.pins.max_blocks} blocks are pinned, and this prompt would "
                f"pin {num_new} more."
            )
            raise PinQuotaError(
                msg, remedy="Take pins away, warm it without a pin, or start with a larger max_pinned_share."
            )

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self.limits.vocab_size:
            bad = lowest if lowest < 0 else highest
            msg = f"Token id {bad} is not in the model's vocabulary."
            raise InvalidRequestError(msg, param=param, remedy=f"Ids go from 0 to {self.limits.vocab_size - 1}.")

    def _check_that_some_go_on(self, sampling: SamplingParams) -> None:
        stop_ids = self._stop_ids(sampling)
        if len(stop_ids) >= self.limits.vocab_size:
            msg = "Every token is a stop token, so none can come before min_tokens."
            raise InvalidRequestError(msg, param="stop_token_ids", remedy="Leave some out.")
        allowed = sampling.allowed_token_ids
        if allowed is not None and sampling.structured_outputs is None and stop_ids.issuperset(allowed):
            msg = "Every allowed token ends the output, so none can come before min_tokens."
            raise InvalidRequestError(msg, param="allowed_token_ids", remedy="Allow more, or leave min_tokens out.")

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Return what ends the output. A grammar lets the end of sequence come only where an output may end."""
        stop_ids = frozenset(sampling.stop_token_ids)
        if sampling.ignore_eos and sampling.structured_outputs is None:
            return stop_ids
        return stop_ids.union(self.limits.eos_token_ids)

    def _delta(self, request: Request, reason: FinishReason | None, now: float) -> OutputDelta:
        """Turn the token that ``request`` just got into text, and end the request if that completes a stop string.

        ``reason`` is why it ended with that token, if it did.
        """
        text = self._texts[request.request_id]
        text_offset = text.num_characters
        token_ids = () if request.has_no_output else (request.token_ids[-1],)
        piece = ""
        for token_id in token_ids:
            is_stop_token = reason == "stop" and token_id in request.stop.token_ids
            if not is_stop_token or request.sampling.include_stop_str_in_output:
                piece = text.push(token_id)
        if text.stopped and reason != "stop":
            if reason is None:
                self.scheduler.finish(request.request_id, "stop")
            reason = "stop"
        elif reason is not None:
            piece += text.flush()
            if text.stopped:
                reason = "stop"
        is_last = False
        if reason is not None:
            is_last = self._close(request)
            tell_end(self._emit, request, reason, now)
            if self.tiering is not None and reason in ("stop", "length"):
                self.tiering.expect(request, now)
        delta = OutputDelta(
            request.parent_id,
            piece,
            token_ids,
            request.num_cached_tokens,
            reason,
            index=request.sample_index,
            is_last=is_last,
            times=request.times,
            num_loaded_tokens=request.num_loaded_tokens,
            stop_reason=text.stop_reason if reason == "stop" else None,
        )
        if reason == "error":
            assert request.matcher is not None  # in a step that ran, only it can have failed
            delta = replace(delta, error=matcher_error(request, request.matcher), param=request.matcher.field)
        return delta if request.is_plain else replace(delta, text_offset=text_offset, **self._logprobs(request))

    def _close(self, request: Request) -> bool:
        """Forget a sample that has ended; return whether it was the last of its request."""
        del self._texts[request.request_id]
        opened = self._open[request.parent_id]
        opened.sample_ids.remove(request.request_id)
        opened.count_end(request)
        if opened.sample_ids:
            return False
        del self._open[request.parent_id]
        self._tell_prompt_end(request.parent_id, opened)
        return True

    def _tell_prompt_end(self, request_id: str, opened: _Open) -> None:
        if opened.num_choices:
            self._emit(PromptFinished(request_id, opened.num_choices, opened.num_longest_tokens))

    def _logprobs(self, request: Request) -> _Logprobs:
        """Return what a delta tells of logprobs: of the last token; with the first one, of the prompt."""
        told: _Logprobs = {}
        sampling = request.sampling
        if sampling.logprobs is not None:
            last = request.logprobs[-1:]  # none where nothing is sampled
            told["logprobs"] = tuple(named_logprobs(self.tokenizer, request.token_ids[-1:] if last else (), last))
        if request.logprobs:
            told["cumulative_logprob"] = request.cumulative_logprob
        if sampling.prompt_logprobs is not None and request.num_output_tokens <= 1 and request.sample_index == 0:
            rest = request.token_ids[1 : request.num_prompt_tokens]
            told["prompt_logprobs"] = PromptLogprobs(self.tokenizer, rest, request.prompt_logprobs)
        return told

    def _corrupted(self) -> list[Request]:
        """Return those who end by the step that was just applied, since their logits are no numbers."""
        ended = self.scheduler.corrupted
        if ended:
            _log.error("logits of %d requests are NaN or infinite; what they had is dropped", len(ended))
        if self.tiering is not None and self.scheduler.distrusted:
            self.tiering.distrust(self.scheduler.distrusted)
        return [sample for request in ended for sample in (request, *request.forks)]

    def _all_failed(self, ended: list[Request], error: Exception | None) -> list[OutputDelta]:
        """Return the last deltas of requests that ended by a step, with its error; who cancelled is told nothing."""
        now = self._clock()
        why = "." if error is None else f": {type(error).__name__}: {error}"
        return [
            self._cut_off(request, f"{request.error or 'The step failed'}{why}", now)
            for request in ended
            if request.request_id in self._texts
        ]

    def _timed_out(self, request: Request, now: float) -> OutputDelta:
        where = f"after {request.num_output_tokens} tokens" if request.num_cached_tokens >= 0 else "while it waited"
        told = f"The request was ended {where}: its {self._request_timeout_s:g} s are up."
        return self._cut_off(request, told, now)

    def _cut_off(self, request: Request, error: str, now: float) -> OutputDelta:
        """Return the last delta of a request that ended between tokens."""
        text = self._texts[request.request_id].flush()
        reason = request.finish_reason
        assert reason is not None
        tell_end(self._emit, request, reason, now)
        return OutputDelta(
            request.parent_id,
            text,
            (),
            max(0, request.num_cached_tokens),
            reason,
            error,
            index=request.sample_index,
            is_last=self._close(request),
            times=request.times,
        )
