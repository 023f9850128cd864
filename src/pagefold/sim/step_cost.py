"""What a step would take: virtual seconds for a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.steps import StepPlan

__all__ = ["LinearStepCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepCost:
    """A step reads the weights once, computes its tokens, and reads the KV of its sequences.

    Attributes:
        step_s: seconds that every step takes: weights are read, kernels started.
        token_s: seconds for each token that is computed.
        context_token_s: seconds for each token of KV that is read.
    """

    step_s: float = 8e-3
    token_s: float = 20e-6
    context_token_s: float = 20e-9

    def __call__(self, plan: StepPlan) -> float:
        """Return the seconds that ``plan`` takes."""
        num_computed = len(plan.token_ids)
        num_read = sum(plan.starts) + num_computed
        return self.step_s + num_computed * self.token_s + num_read * self.context_token_s
