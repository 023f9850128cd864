"""StepTimeFit: what a step takes by its prompt tokens, ``a + b * tokens``, fitted to the last steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["StepTimeFit"]

_KEPT = 0.97
"""Share of its weight that a step keeps when the next one is measured: some 33 steps count."""
_LEAST_WEIGHT = 8.0
_LEAST_SPREAD = 4.0
"""Standard deviation of the tokens of steps, below which no slope is told: all had as many."""


class _Line(NamedTuple):
    """Seconds of a step without prompt tokens, and what each of them adds."""

    base_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """Sums of least squares, each step weighted the less the longer ago it was. Steps that decode only count too.

    Attributes:
        weight, tokens, seconds, squares, products: sums of 1, x, y, x * x and x * y, of x tokens that took y seconds.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def with_step(self, num_tokens: int, seconds: float) -> StepTimeFit:
        """Return the fit with one step more."""
        return StepTimeFit(
            _KEPT * self.weight + 1,
            _KEPT * self.tokens + num_tokens,
            _KEPT * self.seconds + seconds,
            _KEPT * self.squares + num_tokens * num_tokens,
            _KEPT * self.products + num_tokens * seconds,
        )

    def seconds_of(self, num_tokens: int) -> float | None:
        """Return what a step with so many prompt tokens takes; None where that is not known."""
        line = self._line()
        return None if line is None else line.base_s + line.token_s * num_tokens

    def tokens_within(self, seconds: float) -> int | None:
        """Return how many prompt tokens a step computes in that time, 0 at least; None where that is not known."""
        line = self._line()
        return None if line is None else max(0, int((seconds - line.base_s) / line.token_s))

    def _line(self) -> _Line | None:
        if self.weight < _LEAST_WEIGHT:
            return None
        mean_tokens, mean_s = self.tokens / self.weight, self.seconds / self.weight
        variance = self.squares / self.weight - mean_tokens * mean_tokens
        if variance < _LEAST_SPREAD**2:
            return None
        token_s = (self.products / self.weight - mean_tokens * mean_s) / variance
        return _Line(mean_s - token_s * mean_tokens, token_s) if token_s > 0 else None
