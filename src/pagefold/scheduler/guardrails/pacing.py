"""Pacing: keeps the gap between two tokens under its target: without drafts first, and then with smaller prefills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagefold.scheduler.guardrails.draft_switch import DraftSwitch
from pagefold.scheduler.guardrails.landed_step import NO_CAP
from pagefold.scheduler.guardrails.prefill_cap import CapLimits, PrefillCap
from pagefold.scheduler.guardrails.step_time_fit import StepTimeFit

if TYPE_CHECKING:
    from pagefold.scheduler.guardrails.landed_step import LandedStep

__all__ = ["NO_PACING", "GivenCap", "ItlPacing", "Pacing", "PacingState", "PacingStatus"]

_LONGEST = 4.0
"""A gap counts as so many targets at most in the fit: one step that hung says nothing of the others."""


class PacingStatus(NamedTuple):
    """What pacing does at a moment.

    Attributes:
        prefill_cap_tokens: how many prompt tokens a step may compute.
        allows_drafts: whether requests may get drafts.
    """

    prefill_cap_tokens: int
    allows_drafts: bool


@dataclass(frozen=True, slots=True)
class PacingState:
    """All that pacing knows. A step in, a new state out: no clock, and nothing else that changes."""

    cap: PrefillCap
    drafts: DraftSwitch = field(default_factory=DraftSwitch)
    fit: StepTimeFit = field(default_factory=StepTimeFit)

    def after(self, step: LandedStep, limits: CapLimits) -> PacingState:
        """Return the state behind a step."""
        if step.gap_s is None:
            return self
        fit = self.fit.with_step(step.num_prompt_tokens, min(step.gap_s, _LONGEST * limits.target_s))
        cap = self.cap.measured(step)
        drafts = self.drafts.measured(step, limits.target_s)
        if drafts.is_in_use and (cap.is_over(limits) or drafts.is_over(limits.target_s)):
            # What prefills do without drafts is measured before these are cut.
            return PacingState(cap.begun_again(), drafts.off(), fit)
        return PacingState(cap.decided(limits, fit), drafts, fit)


class Pacing(Protocol):
    """What the scheduler asks once a step."""

    @property
    def prefill_cap_tokens(self) -> int:
        """How many prompt tokens a step may compute; :data:`NO_CAP` for any number."""

    @property
    def allows_drafts(self) -> bool:
        """Whether requests may get drafts."""

    def landed(self, step: LandedStep) -> None:
        """Learn from a step that ran."""

    def status(self) -> PacingStatus | None:
        """Return what it does now; None where there is no target. Plain reads, so any thread may ask."""


class ItlPacing:
    """Pacing by a target of the inter-token latency.

    Args:
        limits: the target, and what the cap is held to.

    Attributes:
        state: what it knows now.
    """

    def __init__(self, limits: CapLimits) -> None:
        self.limits = limits
        self.state = PacingState(PrefillCap(limits.ceiling))

    @property
    def prefill_cap_tokens(self) -> int:
        """See :class:`Pacing`."""
        return self.state.cap.num_tokens

    @property
    def allows_drafts(self) -> bool:
        """See :class:`Pacing`."""
        return self.state.drafts.is_allowed

    def landed(self, step: LandedStep) -> None:
        """See :class:`Pacing`."""
        self.state = self.state.after(step, self.limits)

    def status(self) -> PacingStatus:
        """See :class:`Pacing`."""
        return PacingStatus(self.prefill_cap_tokens, self.allows_drafts)


class GivenCap:
    """Pacing that was decided before: of a recording, which says with each step what its cap was."""

    allows_drafts = True

    def __init__(self, prefill_cap_tokens: int = NO_CAP) -> None:
        self.prefill_cap_tokens = prefill_cap_tokens

    def landed(self, step: LandedStep) -> None:
        """See :class:`Pacing`."""

    def status(self) -> None:
        """See :class:`Pacing`."""


NO_PACING: Pacing = GivenCap()
"""No pacing; nobody changes it, so all schedulers without a target share it."""
