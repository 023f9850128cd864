"""VirtualClock: time that passes when somebody says so."""

from __future__ import annotations

__all__ = ["VirtualClock"]


class VirtualClock:
    """Seconds since the start of a simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass; never backwards."""
        assert seconds >= 0, "time does not go back"
        self.now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Jump to ``now_s`` if that is later."""
        self.now_s = max(self.now_s, now_s)
