"""Money: what devices cost a month, and what a saving is worth."""

from __future__ import annotations

__all__ = ["HOURS_A_MONTH", "monthly_cost", "saving", "throughput_gain_of_less", "token_cost"]

HOURS_A_MONTH = 24 * 30
"""A month is 30 days."""


def monthly_cost(price_per_hour: float, num_devices: int = 1) -> float:
    """Return what devices cost in a month."""
    return price_per_hour * num_devices * HOURS_A_MONTH


def throughput_gain_of_less(share_saved: float) -> float:
    """Return how many times more fits when each takes less by ``share_saved``: 10 % less is 11.1 % more."""
    return 1 / (1 - share_saved)


def saving(cost: float, gain: float) -> float:
    """Return what is saved of ``cost`` when the same devices carry ``gain`` times as much."""
    return cost * (1 - 1 / gain)


def token_cost(price_per_hour: float, num_devices: int, tokens_per_s: float) -> float:
    """Return the price of a million tokens."""
    return price_per_hour * num_devices / 3600 / tokens_per_s * 1e6
