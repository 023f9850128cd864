"""GapWindow: the last gaps between tokens, and their 95th percentile."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GapWindow"]

_SIZE = 32
_FEWEST = 8
"""Of fewer gaps nothing is said."""


@dataclass(frozen=True, slots=True)
class GapWindow:
    """The last gaps that were measured, in seconds; at most 32."""

    gaps_s: tuple[float, ...] = ()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.gaps_s)

    def with_gap(self, gap_s: float) -> GapWindow:
        """Return the window with one gap more; the oldest goes where it is full."""
        return GapWindow((*self.gaps_s[1 - _SIZE :], gap_s))

    @property
    def p95_s(self) -> float | None:
        """The 95th percentile; None of fewer than 8 gaps. Rounded down: one gap alone, however long, is not it."""
        num = len(self.gaps_s)
        return None if num < _FEWEST else sorted(self.gaps_s)[int(0.95 * (num - 1))]
