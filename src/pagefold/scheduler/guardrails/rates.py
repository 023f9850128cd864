"""Rates: how fast this server computes prompts, and how fast its requests leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.scheduler.guardrails.landed_step import LandedStep

__all__ = ["Rates"]

_KEPT = 0.9
"""Share of its weight that a measurement keeps when the next one comes: some 10 count."""
_LONGEST = 16.0
"""A step counts as so many times the usual at most: one that hung, or a clock that jumped, says nothing of the next."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured while there was more to do than could be done: else a rate only says how little came.

    Attributes:
        usual_s: what a step takes; 0 before one was measured.
        prompt_tokens, prompt_s: of steps that had to leave a part of a prompt to the next one.
        num_finished, contended_s: requests that left while others waited for a seat or memory, and in what time.
        open_s: such time since the last of them left.
    """

    usual_s: float = 0.0
    prompt_tokens: float = 0.0
    prompt_s: float = 0.0
    num_finished: float = 0.0
    contended_s: float = 0.0
    open_s: float = 0.0

    @classmethod
    def measured_at_start(cls, prompt_tokens: int, seconds: float) -> Rates:
        """Return what is known where so many prompt tokens were computed for a trial."""
        return cls(prompt_tokens=prompt_tokens, prompt_s=seconds)

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """Prompt tokens computed a second; None before that was measured."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s > 0 else None

    @property
    def finished_per_s(self) -> float | None:
        """Requests that leave a second, the drain rate; None before that was measured.

        As long as others wait and nobody has left, it is thought that one is about to: so it sinks from step to step.
        """
        seconds = self.contended_s + self.open_s
        return max(self.num_finished, 1.0) / seconds if seconds > 0 else None

    def after(self, step: LandedStep) -> Rates:
        """Return the rates with what was measured of a step."""
        took_s = min(step.took_s, _LONGEST * self.usual_s) if self.usual_s else step.took_s
        tokens, prompt_s = self.prompt_tokens, self.prompt_s
        if step.leaves_prompts and step.num_prompt_tokens and took_s > 0:
            tokens, prompt_s = _KEPT * tokens + step.num_prompt_tokens, _KEPT * prompt_s + took_s
        num_finished, contended_s = self.num_finished, self.contended_s
        open_s = self.open_s + took_s if step.is_contended else 0.0
        if step.is_contended and step.num_finished:
            num_finished, contended_s = _KEPT * num_finished + step.num_finished, _KEPT * contended_s + open_s
            open_s = 0.0
        usual_s = _KEPT * self.usual_s + (1 - _KEPT) * took_s if self.usual_s else took_s
        return Rates(usual_s, tokens, prompt_s, num_finished, contended_s, open_s)
