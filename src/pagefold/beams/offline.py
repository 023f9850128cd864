"""What :meth:`pagefold.LLM.beam_search` takes and returns; vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagefold.beams.search import EarlyStopping  # noqa: TC001 - of a dataclass
from pagefold.sampling import MAX_LOGPROBS, SamplingParams, out_of_range
from pagefold.typecheck import wrong_type

if TYPE_CHECKING:
    from pagefold.engine.logprobs import Logprob
    from pagefold.engine.outputs import RequestOutput
    from pagefold.request import FinishReason

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search.

    Attributes:
        beam_width: beams at once, and outputs of a prompt.
        max_tokens: that an output has at most.
        ignore_eos: go on after the model's end-of-sequence token.
        temperature: 0; beams are not sampled.
        length_penalty: an output is ranked by its logprob over its length to the power of this.
        early_stopping: whether a search is over when ``beam_width`` outputs are finished (True), when no better one is
            likely (False), or when none is possible (``never``). As in transformers; vLLM has ``never``.
        include_stop_str_in_output: keep the text of the token that ended an output.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        wrong = wrong_type(self)
        if wrong is not None:
            raise out_of_range(wrong.field, repr(wrong.value), wrong.allowed)
        if not 1 <= self.beam_width <= MAX_LOGPROBS:
            raise out_of_range("beam_width", self.beam_width, f"between 1 and {MAX_LOGPROBS}")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """Return the same as sampling parameters.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            use_beam_search=True,
            logprobs=0,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One output of a search.

    Attributes:
        tokens: prompt and output.
        text: of prompt and output, as in vLLM; of the output alone where the prompt was given as tokens.
        cum_logprob: the sum of the output's logprobs; -inf where it was cut off.
        finish_reason: ``stop`` or ``length``; ``error`` or ``timeout`` where it was cut off.
        logprobs: of each token of the output, by token id.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: FinishReason | None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)


@dataclass(slots=True)
class BeamSearchOutput:
    """The result of one prompt.

    Attributes:
        sequences: its outputs, the best first.
        error: why there are none, where it was cut off.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None

    @classmethod
    def of(cls, result: RequestOutput) -> BeamSearchOutput:
        """Return the result of a search that ran as a request."""
        sequences = [
            BeamSearchSequence(
                tokens=result.prompt_token_ids + output.token_ids,
                text=(result.prompt or "") + output.text,
                cum_logprob=-math.inf if output.cumulative_logprob is None else output.cumulative_logprob,
                finish_reason=output.finish_reason,
                logprobs=output.logprobs or [],
            )
            for output in result.outputs
        ]
        return cls(sequences, result.error)
