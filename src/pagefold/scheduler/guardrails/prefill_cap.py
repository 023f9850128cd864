"""PrefillCap: how many prompt tokens a step may compute, so that those that decode do not wait too long.

Chunked prefill (Sarathi-Serve, arXiv 2403.02310, section 4.3) bounds what a prompt adds to the gap between two tokens
of others by a fixed budget. Here the budget follows what is measured: it shrinks by a share and grows by a step, as a
sender's window does (AIMD: Chiu and Jain, 1989).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pagefold.scheduler.guardrails.gap_window import GapWindow

if TYPE_CHECKING:
    from pagefold.scheduler.guardrails.landed_step import LandedStep
    from pagefold.scheduler.guardrails.step_time_fit import StepTimeFit

__all__ = ["CapLimits", "PrefillCap"]

_LOW = 0.8
"""Share of the target under which the cap grows; between it and the target it stays."""
_AIM = 0.9
"""Share of the target that a step is meant to take."""
_SHRINK, _MOST_SHRINK = 0.75, 0.25
"""What is left of the cap when it shrinks; and at least, where the fitted times ask for less."""
_PATIENCE, _MOST_PATIENCE = 16, 256
"""So many gaps must have been measured under a cap before it grows. It doubles each time that the cap had to shrink
behind a growth, and halves with each growth that was right, so that a cap does not swing about its target."""
_GROWTHS = 16
"""So often it grows from nothing to all of a step."""


@dataclass(frozen=True, slots=True)
class CapLimits:
    """What a cap is held to.

    Attributes:
        target_s: of the gap between two tokens, its 95th percentile.
        floor: the least cap: a block of tokens.
        ceiling: the most: all tokens of a step.
    """

    target_s: float
    floor: int
    ceiling: int

    @property
    def growth(self) -> int:
        """By how many tokens a cap grows at once."""
        return max(self.floor, self.ceiling // _GROWTHS)


@dataclass(frozen=True, slots=True)
class PrefillCap:
    """The cap of prompt tokens a step, and what was measured since it last changed.

    Only gaps of steps that computed prompt tokens count, since quiet ones would hide them; and only of steps that were
    planned under this cap.

    Attributes:
        num_tokens: the cap.
        window: the last gaps.
        num_gaps: how many there were.
        most_tokens: the most prompt tokens that one of those steps computed.
        patience: how many gaps it takes before the cap grows.
        has_grown: whether its last change was a growth.
    """

    num_tokens: int
    window: GapWindow = field(default_factory=GapWindow)
    num_gaps: int = 0
    most_tokens: int = 0
    patience: int = _PATIENCE
    has_grown: bool = False

    def is_over(self, limits: CapLimits) -> bool:
        """Whether those that decode wait longer than the target allows."""
        p95_s = self.window.p95_s
        return p95_s is not None and p95_s > limits.target_s

    def measured(self, step: LandedStep) -> PrefillCap:
        """Return the state with what was measured of a step; the cap stays."""
        if step.gap_s is None or not step.num_prompt_tokens or step.cap_tokens != self.num_tokens:
            return self
        most = max(self.most_tokens, step.num_prompt_tokens)
        return replace(self, window=self.window.with_gap(step.gap_s), num_gaps=self.num_gaps + 1, most_tokens=most)

    def begun_again(self) -> PrefillCap:
        """Return the state with the same cap, of which nothing is measured yet."""
        return replace(self, window=GapWindow(), num_gaps=0, most_tokens=0)

    def decided(self, limits: CapLimits, fit: StepTimeFit) -> PrefillCap:
        """Return the state with a cap that has shrunk or grown, if it must or may; else itself.

        It grows only where it was used: what a larger one would do is not known from steps that computed little.
        """
        p95_s = self.window.p95_s
        if p95_s is None:
            return self
        used = min(self.num_tokens, self.most_tokens)
        aim = self._aim(limits, fit, p95_s, used)
        if p95_s > limits.target_s:
            wanted = int(_SHRINK * used)
            if aim is not None:
                wanted = max(int(_MOST_SHRINK * used), min(wanted, aim))
            patience = min(2 * self.patience, _MOST_PATIENCE) if self.has_grown else self.patience
            return PrefillCap(min(self.num_tokens, max(limits.floor, wanted)), patience=patience)
        is_calm = p95_s < _LOW * limits.target_s and self.num_gaps >= self.patience
        if not is_calm or self.num_tokens >= limits.ceiling or used < _SHRINK * self.num_tokens:
            return self
        wanted = self.num_tokens + limits.growth
        if aim is not None:
            wanted = min(wanted, max(self.num_tokens, aim))
        wanted = min(wanted, limits.ceiling)
        if wanted == self.num_tokens:
            return self
        patience = max(_PATIENCE, self.patience // 2) if self.has_grown else self.patience
        return PrefillCap(wanted, patience=patience, has_grown=True)

    @staticmethod
    def _aim(limits: CapLimits, fit: StepTimeFit, p95_s: float, used: int) -> int | None:
        """Return how many tokens keep nearly all steps a little under the target, by what steps took; None if unknown.

        Times are fitted to means: what the 95th percentile is more than the mean it will be under another cap too.
        """
        mean_s = fit.seconds_of(used)
        if mean_s is None or mean_s <= 0:
            return None
        return fit.tokens_within(_AIM * limits.target_s / max(1.0, p95_s / mean_s))
