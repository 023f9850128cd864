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

from pagefold.engine.logprobs import named_logprobs
from pagefold.engine.outputs import Logprob, OutputDelta, OutputText
from pagefold.engine.times import tell_end, tell_tokens
from pagefold.errors import InvalidRequestError
from pagefold.events import Emit, ignore
from pagefold.kv import Namespace
from pagefold.request import ANYBODY, Caller, Request, SamplingParams, StopRule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pagefold.capacity import Capacity
    from pagefold.request import FinishReason
    from pagefold.scheduler import Scheduler
    from pagefold.steps import Runner
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


class _Logprobs(TypedDict, total=False):
    logprobs: tuple[dict[int, Logprob], ...]
    prompt_logprobs: list[dict[int, Logprob] | None]


class Engine:
    """Requests in, deltas out, one step at a time.

    Args:
        scheduler: with its core.
        runner: carries out plans.
        tokenizer: for text and stop strings; None works in tokens only.
        limits: of the model.
        capacity: what fits.
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
        self._seed = seed
        self._request_timeout_s = request_timeout_s
        self._emit = emit
        self._clock = clock
        self._texts: dict[str, OutputText] = {}
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

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
        max_tokens = max_len - num_tokens if sampling.max_tokens is None else sampling.max_tokens
        if sampling.min_tokens > max_tokens:
            msg = f"min_tokens is {sampling.min_tokens}, and the output has at most {max_tokens} tokens."
            raise InvalidRequestError(msg, param="min_tokens", remedy=f"Ask for at most {max_tokens}.")
        if sampling.min_tokens and len(self._stop_ids(sampling)) >= self.limits.vocab_size:
            msg = "Every token is a stop token, so none can come before min_tokens."
            raise InvalidRequestError(msg, param="stop_token_ids", remedy="Leave some out.")
        if sampling.stop and self.tokenizer is None:
            msg = "Stop strings need a tokenizer, and this engine works in tokens only."
            raise InvalidRequestError(msg, param="stop", remedy="Use stop_token_ids.")
        if caller.priority and self.scheduler.policy.name == "fcfs":
            msg = f"priority is {caller.priority}, but requests are served first come first served."
            raise InvalidRequestError(
                msg, param="priority", remedy="Leave it out, or start with scheduling_policy=priority."
            )

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        caller: Caller = ANYBODY,
    ) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: see :meth:`check`; or the id is in use.
        """
        self.check(prompt_token_ids, sampling, caller)
        if self.scheduler.get(request_id) is not None:
            msg = f"Request id {request_id!r} is in use."
            raise InvalidRequestError(msg, param="request_id", remedy="Use another id.")
        base = self.limits.namespace
        namespace = Namespace(base.model, base.layout, base.dtype, base.adapter, caller.tenant, caller.cache_salt)
        max_total = self.capacity.max_model_len
        if sampling.max_tokens is not None:
            max_total = min(max_total, len(prompt_token_ids) + sampling.max_tokens)
        seed = sampling.seed if sampling.seed is not None else hash((self._seed, self._num_requests))
        self._num_requests += 1
        now = self._clock()
        request = Request(
            request_id,
            prompt_token_ids,
            sampling,
            stop=StopRule(self._stop_ids(sampling), max_total),
            namespace=namespace.key(),
            seed=seed,
            arrival_s=now,
            deadline_s=None if self._request_timeout_s is None else now + self._request_timeout_s,
            priority=caller.priority,
        )
        detokenizer = None if self.tokenizer is None else self.tokenizer.detokenizer(prompt_token_ids)
        self._texts[request_id] = OutputText(detokenizer, sampling.stop, sampling.min_tokens)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request whose caller has gone. False when it has ended already."""
        self._texts.pop(request_id, None)
        request = self.scheduler.finish(request_id, "abort")
        if request is None:
            return False
        tell_end(self._emit, request, "abort", self._clock())
        return True

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix, between steps; running requests go on. Return how many blocks became free."""
        return self.scheduler.core.reset()

    def step(self) -> list[OutputDelta]:
        """Run one step and return what it added, request by request.

        A step that fails is taken back, and its requests run again; one that keeps failing ends with ``error``.
        """
        now = self._clock()
        plan = self.scheduler.schedule(now)
        deltas = [self._timed_out(request, now) for request in self.scheduler.timed_out]
        if not plan.num_rows:
            return deltas
        try:
            result = self.runner.run(plan)
        except Exception as error:  # noqa: BLE001 - whatever a step dies of, its requests must not be lost
            _log.exception("step %d failed with %d requests", plan.step_id, plan.num_rows)
            ended = self.scheduler.abandon(f"{type(error).__name__}: {error}")
            now = self._clock()
            deltas += [self._failed(request, error, now) for request in ended if request.request_id in self._texts]
            return deltas
        except BaseException as interrupt:  # not the step's fault: whoever catches it finds no step in flight
            self.scheduler.abandon(type(interrupt).__name__)
            raise
        now = self._clock()
        requests = self.scheduler.apply(result)
        tell_tokens(self._emit, requests, now, self.scheduler.core.block_size)
        deltas += [self._delta(request, now) for request in requests]
        return deltas

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self.limits.vocab_size:
            bad = lowest if lowest < 0 else highest
            msg = f"Token id {bad} is not in the model's vocabulary."
            raise InvalidRequestError(msg, param=param, remedy=f"Ids go from 0 to {self.limits.vocab_size - 1}.")

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(sampling.stop_token_ids)
        return stop_ids if sampling.ignore_eos else stop_ids.union(self.limits.eos_token_ids)

    def _delta(self, request: Request, now: float) -> OutputDelta:
        """Turn the token that ``request`` just got into text, and end the request if that completes a stop string."""
        token_id = request.token_ids[-1]
        text = self._texts[request.request_id]
        reason: FinishReason | None = request.finish_reason
        text_offset = text.num_characters
        is_stop_token = reason == "stop"
        piece = "" if is_stop_token else text.push(token_id)
        if text.stopped and reason != "stop":
            if reason is None:
                self.scheduler.finish(request.request_id, "stop")
            reason = "stop"
        elif reason is not None:
            piece += text.flush()
            if text.stopped:
                reason = "stop"
        if reason is not None:
            del self._texts[request.request_id]
            tell_end(self._emit, request, reason, now)
        delta = OutputDelta(
            request.request_id, piece, (token_id,), request.num_cached_tokens, reason, times=request.times
        )
        return delta if request.is_plain else replace(delta, text_offset=text_offset, **self._logprobs(request))

    def _logprobs(self, request: Request) -> _Logprobs:
        """Return what a delta tells of logprobs: of the last token; with the first one, of the prompt."""
        told: _Logprobs = {}
        sampling = request.sampling
        if sampling.logprobs is not None:
            last = named_logprobs(self.tokenizer, request.token_ids[-1:], request.logprobs[-1:])
            told["logprobs"] = tuple(last)
        if sampling.prompt_logprobs is not None and request.num_output_tokens == 1:
            rest = request.token_ids[1 : request.num_prompt_tokens]
            told["prompt_logprobs"] = [None, *named_logprobs(self.tokenizer, rest, request.prompt_logprobs)]
        return told

    def _failed(self, request: Request, error: Exception, now: float) -> OutputDelta:
        told = f"The step failed {request.num_failed_steps} times: {type(error).__name__}: {error}"
        return self._cut_off(request, told, now)

    def _timed_out(self, request: Request, now: float) -> OutputDelta:
        where = f"after {request.num_output_tokens} tokens" if request.num_cached_tokens >= 0 else "while it waited"
        told = f"The request was ended {where}: its {self._request_timeout_s:g} s are up."
        return self._cut_off(request, told, now)

    def _cut_off(self, request: Request, error: str, now: float) -> OutputDelta:
        """Return the last delta of a request that ended between tokens."""
        text = self._texts.pop(request.request_id).flush()
        reason = request.finish_reason
        assert reason is not None
        tell_end(self._emit, request, reason, now)
        num_cached_tokens = max(0, request.num_cached_tokens)
        return OutputDelta(request.request_id, text, (), num_cached_tokens, reason, error, times=request.times)
