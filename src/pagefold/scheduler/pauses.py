"""Pauses: how long sessions were away, by tenant and by session; and what is expected of the next one from that.

From times alone: what an agent will do next stands in its output, which a recording does not keep. Tools of one kind
take about as long, and an agent uses one kind for a while. So its own last pauses count most, and what its tenant's
other sessions did fills the gaps.
"""

from __future__ import annotations

from pagefold.kv.pause_forecast import NUM_RANGES, PauseForecast, range_of

__all__ = ["Pauses", "forecast_of"]

_BLUR = ((-2, 0.04), (-1, 0.16), (0, 0.6), (1, 0.16), (2, 0.04))
"""How much of one pause counts for the ranges around it."""

_LEAST_WEIGHT = 1e-3
_OF_TENANT = 0.35
"""What all others' pauses weigh, beside 1 for the last one of the session itself."""

_UNKNOWN = dict.fromkeys(range(4, 44, 2), 1.0)
"""What is expected where nobody has paused yet: half a second to six minutes."""


class Pauses:
    """Pauses that were seen, by ranges; older ones count less.

    Args:
        fade: what is left of the weight of a pause when the next one is seen, 0 to 1.
    """

    __slots__ = ("_fade", "weights")

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self.weights: dict[int, float] = {}

    def see(self, pause_s: float) -> None:
        """Note a pause of so many seconds."""
        weights = {at: left for at, weight in self.weights.items() if (left := weight * self._fade) > _LEAST_WEIGHT}
        center = range_of(pause_s)
        for offset, share in _BLUR:
            at = min(NUM_RANGES - 1, max(0, center + offset))
            weights[at] = weights.get(at, 0.0) + share
        self.weights = weights


def forecast_of(own: Pauses, others: Pauses) -> PauseForecast:
    """Return what is expected of the next pause of a session.

    Args:
        own: its pauses.
        others: those of all sessions of its tenant.
    """
    base = others.weights or _UNKNOWN
    scale = _OF_TENANT / sum(base.values())
    weights = dict(own.weights)
    for at, weight in base.items():
        weights[at] = weights.get(at, 0.0) + weight * scale
    return PauseForecast(weights)
