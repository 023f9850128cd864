"""OpenOutputs: the outputs of requests that have not ended, and the deltas that tell of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

from pagefold.engine.logprobs import Logprob, PromptLogprobs, named_logprobs
from pagefold.engine.output_rules import matcher_error, output_text
from pagefold.engine.outputs import OutputDelta, OutputText
from pagefold.events import Emit, PromptFinished
from pagefold.scheduler.times import tell_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.request import FinishReason, Request
    from pagefold.scheduler import Scheduler
    from pagefold.tokenizer import Tokenizer

__all__ = ["OpenOutputs"]


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
    """What a delta tells of logprobs."""

    cumulative_logprob: float
    logprobs: tuple[dict[int, Logprob], ...]
    prompt_logprobs: PromptLogprobs


class OpenOutputs:
    """Turns tokens into deltas, from a request's arrival until the last of its samples has ended.

    Args:
        scheduler: is told when a text met a stop string, or its reader has gone.
        tokenizer: for text; None tells tokens only.
        emit: where events go.

    Attributes:
        texts: the text of every sample that has not ended, by its id.
        requests: the requests of those samples, by id.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None, emit: Emit) -> None:
        self.texts: dict[str, OutputText] = {}
        self.requests: dict[str, _Open] = {}
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._emit = emit

    def begin(self, samples: Sequence[Request], prompt_token_ids: Sequence[int]) -> None:
        """Begin the outputs of one request, all of whose samples these are."""
        first = samples[0]
        for sample in samples:
            self.texts[sample.request_id] = output_text(first.sampling, prompt_token_ids, self._tokenizer)
        sample_ids = [sample.request_id for sample in samples]
        self.requests[first.parent_id] = _Open(sample_ids, first.sampling.n if first.warm_up is None else 0)

    def abort(self, request_id: str, now: float) -> bool:
        """End a request whose caller has gone, with all its samples. False when it has ended already."""
        opened = self.requests.pop(request_id, None)
        if opened is None:
            return False
        for sample_id in opened.sample_ids:
            del self.texts[sample_id]
            request = self._scheduler.finish(sample_id, "abort")
            if request is not None:
                for sample in (request, *request.forks):
                    tell_end(self._emit, sample, "abort", now)
                    opened.count_end(sample)
        self._tell_prompt_end(request_id, opened)
        return True

    def deltas(self, request: Request, reason: FinishReason | None, now: float) -> list[OutputDelta]:
        """Turn the tokens that ``request`` just got into text, and end it if that completes a stop string.

        Tokens behind a stop string, of the same step, are nobody's: the request has none behind it.

        Args:
            request: has got at least one token, if it gets any at all.
            reason: why it ended with the last of them, if it did.
            now: the time.

        Returns one for each token, or one without a token. Of a beam none: which tokens it has is known when it ends.
        """
        if request.beams is not None and reason is None:
            return []
        if request.has_no_output:
            return [self._delta(request, (), reason, now)]
        text = self.texts[request.request_id]
        deltas: list[OutputDelta] = []
        new = request.token_ids[request.num_prompt_tokens + text.num_told :]
        for num_behind, token_id in zip(reversed(range(len(new))), new, strict=True):
            text.num_told += 1
            deltas.append(self._delta(request, (token_id,), None if num_behind else reason, now))
            if deltas[-1].finish_reason is not None:
                break
        return deltas

    def _delta(
        self, request: Request, token_ids: tuple[int, ...], reason: FinishReason | None, now: float
    ) -> OutputDelta:
        text = self.texts[request.request_id]
        text_offset = text.num_characters
        piece = ""
        for token_id in token_ids:
            is_stop_token = reason == "stop" and token_id in request.stop.token_ids
            if not is_stop_token or request.sampling.include_stop_str_in_output:
                piece = text.push(token_id)
        if text.stopped and reason != "stop":
            request.cut(text.num_told)
            if request.finish_reason is None:
                self._scheduler.finish(request.request_id, "stop")
            reason = "stop"
        elif reason is not None:
            piece += text.flush()
            if text.stopped:
                reason = "stop"
        is_last = False
        if reason is not None:
            is_last = self._end(request)
            tell_end(self._emit, request, reason, now)
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
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
            kept_share=request.kept_share if reason is not None else None,
        )
        if reason == "error":
            assert request.matcher is not None  # in a step that ran, only it can have failed
            delta = replace(delta, error=matcher_error(request, request.matcher), param=request.matcher.field)
        if request.is_plain:
            return delta
        return replace(delta, text_offset=text_offset, **self._logprobs(request, text.num_told))

    def cut_off(self, request: Request, error: str, now: float) -> OutputDelta:
        """Return the last delta of a request that ended between tokens."""
        text = self.texts[request.request_id].flush()
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
            is_last=self._end(request),
            times=request.times,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
        )

    def _end(self, request: Request) -> bool:
        """Forget a sample that has ended; return whether it was the last of its request."""
        del self.texts[request.request_id]
        opened = self.requests[request.parent_id]
        opened.sample_ids.remove(request.request_id)
        opened.count_end(request)
        if opened.sample_ids:
            return False
        del self.requests[request.parent_id]
        self._tell_prompt_end(request.parent_id, opened)
        return True

    def _tell_prompt_end(self, request_id: str, opened: _Open) -> None:
        """Tell that all samples of a request have ended."""
        if opened.num_choices:
            self._emit(PromptFinished(request_id, opened.num_choices, opened.num_longest_tokens))

    def _logprobs(self, request: Request, num_told: int) -> _Logprobs:
        """Return what a delta tells of logprobs: of the last told token; with the first one, of the prompt."""
        told: _Logprobs = {}
        sampling = request.sampling
        if sampling.logprobs is not None:
            last = request.logprobs[max(0, num_told - 1) : num_told]  # none where nothing is sampled
            token_ids = (request.token_ids[request.num_prompt_tokens + num_told - 1],) if last else ()
            told["logprobs"] = tuple(named_logprobs(self._tokenizer, token_ids, last))
        if num_told and request.logprobs:
            told["cumulative_logprob"] = request.logprob_sums[num_told - 1]
        if sampling.prompt_logprobs is not None and num_told <= 1 and request.sample_index == 0:
            rest = request.token_ids[1 : request.num_prompt_tokens]
            told["prompt_logprobs"] = PromptLogprobs(self._tokenizer, rest, request.prompt_logprobs)
        return told
