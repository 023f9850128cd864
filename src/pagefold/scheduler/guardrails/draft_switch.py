"""DraftSwitch: whether requests get drafts: they are the first that goes when tokens come too slowly."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pagefold.scheduler.guardrails.gap_window import GapWindow

if TYPE_CHECKING:
    from pagefold.scheduler.guardrails.landed_step import LandedStep

__all__ = ["DraftSwitch"]

_LOW = 0.7
"""Share of the target under which drafts may come back."""
_PATIENCE, _MOST_PATIENCE = 32, 4096
"""So many steps must be calm before they do. It doubles each time that they had to go again soon, and so two switches
come ever later where drafts are the very reason."""
_SOON = 2048
"""Soon is within so many steps."""
_RECENT = 32
"""Drafts are in use if one of so many last steps had some."""


@dataclass(frozen=True, slots=True)
class DraftSwitch:
    """Whether drafts are allowed, and what was measured since that changed.

    Attributes:
        is_allowed: whether they are.
        window: gaps of all steps in which somebody decoded.
        num_steps: measured since it changed.
        num_calm: how many of the last of them, one after another, were calm.
        patience: how many calm ones it takes before drafts are allowed again.
        last_draft: which of the steps was the last with drafts; 0 if none was.
    """

    is_allowed: bool = True
    window: GapWindow = field(default_factory=GapWindow)
    num_steps: int = 0
    num_calm: int = 0
    patience: int = _PATIENCE
    last_draft: int = 0

    @property
    def is_in_use(self) -> bool:
        """Whether steps have drafts, so that it is of use to do without."""
        return self.is_allowed and self.last_draft > max(0, self.num_steps - _RECENT)

    def is_over(self, target_s: float) -> bool:
        """Whether those that decode wait longer than the target allows, whatever beside them is computed."""
        p95_s = self.window.p95_s
        return p95_s is not None and p95_s > target_s

    def measured(self, step: LandedStep, target_s: float) -> DraftSwitch:
        """Return the state with what was measured of a step. Drafts come back when all has been calm long enough."""
        if step.gap_s is None:
            return self
        window, num_steps = self.window.with_gap(step.gap_s), self.num_steps + 1
        p95_s = window.p95_s
        num_calm = self.num_calm + 1 if p95_s is not None and p95_s < _LOW * target_s else 0
        if not self.is_allowed and num_calm >= self.patience:
            return DraftSwitch(is_allowed=True, patience=self.patience)
        last_draft = num_steps if step.has_drafts else self.last_draft
        return replace(self, window=window, num_steps=num_steps, num_calm=num_calm, last_draft=last_draft)

    def off(self) -> DraftSwitch:
        """Return the state without drafts."""
        is_soon = self.num_steps <= _SOON
        patience = min(2 * self.patience, _MOST_PATIENCE) if is_soon else _PATIENCE
        return DraftSwitch(is_allowed=False, patience=patience)
