"""Thinking: how thinking stands when one answer begins, and what follows for its grammar, its text and its usage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefold.server.reasoning.counter import NOTHING_COUNTED, ReasoningCounter
from pagefold.server.reasoning.formats import ReasoningFormat
from pagefold.server.reasoning.reader import Beginning, ReasoningReader
from pagefold.structured.free_beginning import FreeBeginning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.sampling import SamplingParams
    from pagefold.server.reasoning.counter import TokenCounter
    from pagefold.server.structured_fields import Structured
    from pagefold.tokenizer import Tokenizer

__all__ = ["NO_THINKING", "Thinking", "thinking_of"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thinking of answers to one prompt, which all begin alike.

    Attributes:
        form: how the model marks it.
        beginning: how answers begin.
        token_ids: of marks that are tokens of their own.
    """

    form: ReasoningFormat
    beginning: Beginning
    token_ids: tuple[tuple[str, int], ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether thinking is told from answers at all."""
        return bool(self.form.ends)

    def reader(self, structured: Structured | None = None) -> ReasoningReader:
        """Return who reads one output, whose answer looks like ``structured``."""
        keeps_space = structured is not None and not structured.allows_space
        return ReasoningReader(self.form, self.beginning, keeps_space=keeps_space)

    def before(self, structured: Structured | None) -> Structured | None:
        """Return what an output must look like whose answer, behind its thinking, looks like ``structured``."""
        if structured is None or self.beginning is Beginning.ANSWER:
            return structured
        free = FreeBeginning(
            self.form.starts,
            self.form.ends,
            self.token_ids,
            is_open=self.beginning is Beginning.THINKING,
            allows_space=structured.allows_space,
        )
        return structured._replace(params=replace(structured.params, beginning=free))

    def sampling(self, how: SamplingParams, structured: Structured | None) -> SamplingParams:
        """Return how to sample an output with its thinking: its marks are told, whatever tokens write them."""
        marks = tuple(mark for mark, _ in self.token_ids)
        params = None if structured is None else structured.params
        return replace(how, structured_outputs=params, shown_special_tokens=marks)

    def counter(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> TokenCounter:
        """Return who counts the tokens of one output's thinking."""
        if self.beginning is Beginning.ANSWER or tokenizer is None:
            return NOTHING_COUNTED
        marks = tuple(mark for mark, _ in self.token_ids)
        return ReasoningCounter(tokenizer.detokenizer(prompt_token_ids, shown=marks), self.reader())


NO_THINKING = Thinking(ReasoningFormat("none", (), ()), Beginning.ANSWER)
"""The thinking of models whose thinking, if any, nobody tells from their answers."""


def thinking_of(form: ReasoningFormat, prompt: str, continued: str, tokenizer: Tokenizer) -> Thinking:
    """Return how thinking stands behind a prompt.

    Args:
        form: the model's marks.
        prompt: the text of the chat. Its template may end with a mark: then thinking has begun, or is over.
        continued: what the assistant has said of the message that is being continued; empty for a new one.
        tokenizer: the model's.
    """
    token_ids = tuple(
        (mark, token_id) for mark in (*form.starts, *form.ends) if (token_id := tokenizer.token_id(mark)) is not None
    )
    return Thinking(form, _beginning(form, prompt.rstrip(), continued), token_ids)


def _beginning(form: ReasoningFormat, prompt: str, continued: str) -> Beginning:
    if continued.strip():
        is_open = _last(form.starts, continued) > _last(form.ends, continued)
        return Beginning.THINKING if is_open else Beginning.ANSWER
    if prompt.endswith(form.ends):
        return Beginning.ANSWER
    return Beginning.THINKING if form.is_assumed or prompt.endswith(form.starts) else Beginning.MARKED


def _last(marks: tuple[str, ...], text: str) -> int:
    return max(text.rfind(mark) for mark in marks)
