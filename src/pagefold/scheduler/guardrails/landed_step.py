"""LandedStep: what was measured of a step that ran, as the guardrails are told of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_CAP", "LandedStep"]

NO_CAP = 2**62
"""The cap of prompt tokens where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedStep:
    """A step that ran. One that failed is none: nothing is told of it.

    Attributes:
        took_s: seconds that it took: since it was planned, or since the one before had landed.
        gap_s: seconds since the step before landed, which those that decode waited for their token; None where nobody
            decoded in it, or where the step before failed.
        num_prompt_tokens: that it computed of prompts.
        cap_tokens: how many of these it was allowed to compute when it was planned.
        has_drafts: whether it computed drafts.
        leaves_prompts: whether it had to leave a part of a prompt that was let in to the next step: then it computed
            prompt tokens as fast as this server does.
        is_contended: whether somebody was not let in for want of a seat or of memory.
        num_finished: how many requests have left since the step before.
    """

    took_s: float
    gap_s: float | None = None
    num_prompt_tokens: int = 0
    cap_tokens: int = NO_CAP
    has_drafts: bool = False
    leaves_prompts: bool = False
    is_contended: bool = False
    num_finished: int = 0
