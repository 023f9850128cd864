"""PrefillLimits: how many prompts may be partly computed at once, and how much of one a step computes.

A long prompt is computed in chunks. Without limits the first that waits gets all that a step has left, and those
behind it wait until it is computed. With a threshold, no step computes more than that of any prompt, so that those that
decode beside it are not held up, and others begin beside it; and with places for long prompts fewer than for all, short
ones go past a long one that has no place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.request import Request

__all__ = ["NO_PREFILL_LIMITS", "PrefillLimits"]


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """How much may be computed of prompts.

    Attributes:
        max_num_partial: prompts that are partly computed between two steps; None for any number.
        max_long_partial: long ones among them; None for any number.
        long_threshold: tokens to compute that make a prompt long, and the most that a step computes of any; 0 for no
            prompt is long.
    """

    max_num_partial: int | None = None
    max_long_partial: int | None = None
    long_threshold: int = 0

    @property
    def is_on(self) -> bool:
        """Whether there are any."""
        return bool(self.long_threshold) or self.max_num_partial is not None

    def is_long(self, num_to_compute: int) -> bool:
        """Whether a prompt of which so many tokens are to be computed is long."""
        return 0 < self.long_threshold < num_to_compute

    def lets_begin(self, num_to_compute: int, budget: int, partial: Iterable[Request]) -> bool:
        """Whether a prompt may begin beside those that are partly computed behind the step being planned.

        Args:
            num_to_compute: tokens that the cache has not.
            budget: tokens that the step has left.
            partial: requests, as they are before the step.
        """
        if self.lacks_long_place(num_to_compute, partial):
            return False
        is_whole = num_to_compute <= min(budget, self.long_threshold or budget)
        return is_whole or self.max_num_partial is None or sum(1 for _ in partial) < self.max_num_partial

    def lacks_long_place(self, num_to_compute: int, partial: Iterable[Request]) -> bool:
        """Whether a prompt waits for a place among long ones; arguments are those of :meth:`lets_begin`."""
        if self.max_long_partial is None or not self.is_long(num_to_compute):
            return False
        num_long = sum(self.is_long(one.num_tokens - one.num_computed_tokens) for one in partial)
        return num_long >= self.max_long_partial


NO_PREFILL_LIMITS = PrefillLimits()
