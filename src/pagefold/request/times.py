"""RequestTimes: when things happened to a request."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestTimes"]


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of the engine's clock; None for what has not happened.

    Attributes:
        arrival_s: when the request came.
        scheduled_s: a step was first planned with it. What comes after, a preemption or a failed step, changes nothing.
        first_token_s, last_token_s: it got its first token, and the last one so far.
        num_ahead: how many requests waited already when it came.
        computed_wait_s: how long it was to wait until it is let in, by what was measured when it came; None where
            nobody asks, or it has been let in.
    """

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_ahead: int = 0
    computed_wait_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """Seconds that it waited until it was first scheduled."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds until its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        """Seconds from its first schedule to its first token."""
        if self.first_token_s is None or self.scheduled_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """Seconds from its first token to the last one so far."""
        if self.last_token_s is None or self.first_token_s is None:
            return None
        return self.last_token_s - self.first_token_s
