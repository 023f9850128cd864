"""SchedulerLimits: how much one step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from pagefold.scheduler.prefill_limits import NO_PREFILL_LIMITS, PrefillLimits

__all__ = ["SchedulerLimits"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much one step may hold.

    Attributes:
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed in one step; not less than ``max_num_seqs``, so that every running
            sequence gets its token in every step.
        prefills: how many prompts may be partly computed, and how much of one a step computes.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefills: PrefillLimits = NO_PREFILL_LIMITS
