"""What comes out: deltas for streams, results for batches, and the text of an output with its stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.engine.logprobs import Logprob, PromptLogprobs
    from pagefold.request import FinishReason, RequestTimes
    from pagefold.sampling import SamplingParams
    from pagefold.tokenizer import Detokenizer

__all__ = ["CompletionOutput", "OutputDelta", "OutputText", "RequestOutput", "best"]


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to one sample of a request.

    Attributes:
        request_id: whose sample it is.
        text: text that is certain now: it ends at a character, and no stop string can still begin in it.
        token_ids: tokens sampled in the step.
        num_cached_tokens: how much of the prompt was a prefix hit.
        num_loaded_tokens: how much of that came from tiers behind the device, by tier.
        finish_reason: why it ended, in the sample's last delta.
        stop_reason: with ``finish_reason`` ``stop``, the stop string that ended it, if one did.
        error: what went wrong, when ``finish_reason`` is ``error`` or ``timeout``.
        param: the request's field at fault, when it was the request that went wrong.
        logprobs: for each of ``token_ids``, those of it and of the most likely tokens by token id, if asked for.
        prompt_logprobs: of the prompt's tokens, in the first delta of the first sample, if asked for.
        cumulative_logprob: the sum of the logprobs of all the sample's tokens so far, where they are known.
        text_offset: how many characters of the output's text come before that of ``token_ids``.
        times: of the request; the engine goes on writing it.
        index: which of the request's samples it is.
        is_last: whether all samples of the request have ended with it.
        num_draft_tokens: how many drafts of the sample were computed so far.
        num_accepted_tokens: how many of those became tokens of it.
        kept_share: in its last delta, what share of the memory of its older tokens was kept; None where all is, and
            where none is old enough.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    cumulative_logprob: float | None = None
    text_offset: int = 0
    times: RequestTimes | None = None
    param: str | None = None
    index: int = 0
    is_last: bool = False
    num_loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    stop_reason: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    kept_share: float | None = None

    @property
    def can_merge(self) -> bool:
        """Whether it may be told together with others that may: its tokens need no place of their own, nor its end."""
        return self.logprobs is None and self.prompt_logprobs is None and self.finish_reason is None

    @staticmethod
    def merged(deltas: Sequence[OutputDelta]) -> OutputDelta:
        """Return one delta for several of one output in order; all of them ``can_merge``, or there is one."""
        if len(deltas) == 1:
            return deltas[0]
        text = "".join(delta.text for delta in deltas)
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        return replace(deltas[-1], text=text, token_ids=token_ids, text_offset=deltas[0].text_offset)


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request; vLLM's names.

    Attributes:
        index: which of the request's outputs.
        text: its text, without stop string unless ``include_stop_str_in_output``.
        token_ids: its tokens, those of a stop string and a stop token included.
        finish_reason: ``stop``, ``length``, ``abort``, ``error`` or ``timeout``; None while it runs.
        logprobs: for each token, those of it and of the most likely tokens by token id, if asked for.
        cumulative_logprob: the sum of its tokens' logprobs, if they are asked for, or told which outputs are the best.
        kept_share: with ``kv_keep``, once it has ended, what share of the memory of its older tokens was kept; None
            where none is old enough.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    kept_share: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt; vLLM's names.

    Attributes:
        request_id: made by the engine.
        prompt: its text, when text was given.
        prompt_token_ids: its tokens.
        outputs: the ``n`` that were asked for; with ``best_of``, the best first.
        num_cached_tokens: how much of the prompt was a prefix hit.
        num_loaded_tokens: how much of that came from tiers behind the device: by ``host``, ``disk``, ``remote``.
        error: what went wrong, when an output's ``finish_reason`` is ``error``.
        prompt_logprobs: for each token of the prompt, those of it and of the most likely tokens by token id, if asked
            for; None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def add(self, delta: OutputDelta) -> None:
        """Append what a step added."""
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        output.finish_reason = delta.finish_reason
        output.kept_share = delta.kept_share
        if delta.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs.extend(delta.logprobs)
        if delta.cumulative_logprob is not None:
            output.cumulative_logprob = delta.cumulative_logprob
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs.named()
        self.num_cached_tokens = delta.num_cached_tokens
        self.num_loaded_tokens = delta.num_loaded_tokens
        self.error = self.error or delta.error

    def keep_best(self, sampling: SamplingParams) -> None:
        """Drop all but the ``n`` best outputs, and number those, the best first."""
        scores = [(output.cumulative_logprob, len(output.token_ids)) for output in self.outputs]
        self.outputs = [replace(self.outputs[at], index=index) for index, at in enumerate(best(sampling, scores))]


def best(sampling: SamplingParams, scores: Sequence[tuple[float | None, int]]) -> list[int]:
    """Return the places of the ``n`` outputs that were asked for, the best first.

    Of samples these are those with the highest logprob per token, OpenAI's measure of what is best. Of equals the first
    sampled wins; what was cut off before its first token loses. What beams found is in order already.

    Args:
        sampling: says how many, and of what.
        scores: the cumulative logprob and the number of tokens of each.
    """
    if sampling.use_beam_search:
        return list(range(sampling.n))
    means = [float("-inf") if total is None or not num_tokens else total / num_tokens for total, num_tokens in scores]
    return sorted(range(len(means)), key=means.__getitem__, reverse=True)[: sampling.n]


class OutputText:
    """The text of one output, token by token, until a stop string.

    Text that could be the beginning of a stop string is held back until it is certain.

    Args:
        detokenizer: for this output; None when text is not wanted.
        stop: the stop strings.
        min_tokens: a stop string that is complete within so many tokens does not count.
        keeps_stop: whether the stop string is part of the text.

    Attributes:
        stop_reason: the stop string that is complete, if one is.
        num_characters: of the text so far, what is held back included.
        num_told: how many of the output's tokens have been told of; whoever tells counts.
    """

    def __init__(
        self, detokenizer: Detokenizer | None, stop: tuple[str, ...], min_tokens: int = 0, *, keeps_stop: bool = False
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._keeps_stop = keeps_stop
        self._num_tokens = 0
        self._num_passed = 0  # characters of ``_held`` within which a complete stop string does not count
        self.num_characters = 0
        self.num_told = 0
        self._num_held_back = max((len(text) for text in stop), default=1) - 1
        self._held = ""
        self.stop_reason: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.stop_reason is not None

    def push(self, token_id: int) -> str:
        """Take a token; return the text that is certain now. Sets ``stop_reason`` when a stop string is complete."""
        if self._detokenizer is None or self.stopped:
            return ""
        self._num_tokens += 1
        return self._take(self._detokenizer.push(token_id), self._num_held_back)

    def flush(self) -> str:
        """The output ended: return what was held back, up to a stop string if that completes one."""
        if self._detokenizer is None or self.stopped:
            return ""
        return self._take(self._detokenizer.flush(), 0)

    def _take(self, piece: str, num_held_back: int) -> str:
        self.num_characters += len(piece)
        self._held += piece
        if self._min_tokens and self._num_tokens <= self._min_tokens:
            self._num_passed = len(self._held)
        firsts = [(text, max(0, self._num_passed + 1 - len(text))) for text in self._stop]
        found = [(at + len(text), at) for text, first in firsts if (at := self._held.find(text, first)) >= 0]
        if found:  # the one that is complete first, whether or not the piece holds more; of those, the longest
            end, begin = min(found)
            self.stop_reason = self._held[begin:end]
            certain, self._held = self._held[: end if self._keeps_stop else begin], ""
            return certain
        cut = len(self._held) - num_held_back
        if cut <= 0:
            return ""
        certain, self._held = self._held[:cut], self._held[cut:]
        self._num_passed = max(0, self._num_passed - cut)
        return certain
