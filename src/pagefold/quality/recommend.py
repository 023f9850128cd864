"""Recommend: the smallest setting whose cost is within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.quality.result import Evaluation, SettingResult

__all__ = ["recommend"]


def recommend(
    evaluation: Evaluation, max_perplexity_change: float, floor_of: Callable[[SettingResult], float]
) -> SettingResult | None:
    """Return the setting of the fewest KV bytes that is within the bound and not under its floor; None if none is.

    Args:
        evaluation: what was found.
        max_perplexity_change: relative; less perplexity than the exact cache's is always within it.
        floor_of: the least top-1 agreement of a setting.
    """
    within = [
        setting
        for setting in evaluation.settings
        if setting.perplexity_change.value <= max_perplexity_change
        and setting.top1_agreement.value >= floor_of(setting)
        and setting.bytes_per_token < evaluation.exact_bytes_per_token
    ]
    return min(within, key=lambda setting: (setting.bytes_per_token, setting.kl.value), default=None)
