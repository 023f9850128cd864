"""WaitCorrection: by what factor requests wait longer, or less long, than was computed from rates."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WaitCorrection"]

_KEPT = 0.95
"""Share of its weight that a request keeps when the next one is let in: some 20 count."""
_LEAST, _MOST = 0.25, 4.0
_PRIOR = 0.25
"""In targets: so much wait has been predicted and waited before anybody came, and so short waits teach little."""
_LONGEST = 8.0
"""In targets too: a longer wait counts as that."""


@dataclass(frozen=True, slots=True)
class WaitCorrection:
    """Waits that were computed, and what was really waited: prefixes that are found make it less, preemptions more.

    Attributes:
        target_s: of the time to the first token.
        computed_s, waited_s: sums, in which a request weighs the less the longer ago it was let in.
    """

    target_s: float
    computed_s: float = 0.0
    waited_s: float = 0.0

    @property
    def factor(self) -> float:
        """What computed waits are multiplied with; 1/4 to 4."""
        prior_s = _PRIOR * self.target_s
        return min(max((self.waited_s + prior_s) / (self.computed_s + prior_s), _LEAST), _MOST)

    def after(self, computed_s: float, waited_s: float) -> WaitCorrection:
        """Return the state with one request more that was let in."""
        most_s = _LONGEST * self.target_s
        return WaitCorrection(
            self.target_s,
            _KEPT * self.computed_s + min(computed_s, most_s),
            _KEPT * self.waited_s + min(max(0.0, waited_s), most_s),
        )
