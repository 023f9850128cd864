"""Shedding: refusing requests that would wait longer for their first token than the target allows.

Whoever would come too late anyway is told so at once, and those that are here get on in time. Refusing begins a little
under the target and ends clearly under it, so that it does not begin and end with each request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagefold.scheduler.guardrails.rates import Rates
from pagefold.scheduler.guardrails.wait_correction import WaitCorrection

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.scheduler.guardrails.landed_step import LandedStep
    from pagefold.scheduler.queue_ahead import Ahead

__all__ = ["NO_SHEDDER", "Refusal", "Shedder", "Shedding", "SheddingStatus", "TtftShedder"]

_HIGH, _LOW = 0.9, 0.8
"""Shares of the target: who would take longer than the first is refused; and than the second while others are."""
_MOST_RETRY_S = 600
_LOOK_EVERY = 16
"""In so many steps it is looked once whether shedding has ended, if nobody comes."""


class Refusal(NamedTuple):
    """Why a request is not taken.

    Attributes:
        expected_s: seconds that it would be expected to wait: for its first token; of a prompt that alone takes longer
            than the target, until it is let in.
        threshold_s: that this must not pass.
        target_s: of the time to the first token.
        retry_after_s: whole seconds until the queue is short enough again, by the measured rates; at least 1.
        goes_on: whether it is refused only since others were: the queue has not become clearly shorter yet.
    """

    expected_s: float
    threshold_s: float
    target_s: float
    retry_after_s: int
    goes_on: bool


class Judged(NamedTuple):
    """A request that came: what follows from it.

    Attributes:
        shedding: the new state.
        computed_wait_s: the wait before it is let in, by rates alone.
        refusal: why it is not taken; None if it is.
    """

    shedding: Shedding
    computed_wait_s: float
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Shedding:
    """All that shedding knows. A measurement in, a new state out.

    Attributes:
        correction: of computed waits.
        rates: how fast prompts are computed and requests leave.
        is_on: whether requests are being refused.
        expected_s: what a request behind all others was last expected to wait before it is let in.
    """

    correction: WaitCorrection
    rates: Rates = field(default_factory=Rates)
    is_on: bool = False
    expected_s: float = 0.0

    @property
    def target_s(self) -> float:
        """The target of the time to the first token."""
        return self.correction.target_s

    def computed_wait_s(self, ahead: Ahead) -> float:
        """Return the wait behind ``ahead`` by rates alone; 0 where nothing was measured yet.

        Prompts are computed while others leave, so the slower of both counts.
        """
        tokens_per_s, finished_per_s = self.rates.prompt_tokens_per_s, self.rates.finished_per_s
        of_tokens = 0.0 if tokens_per_s is None else ahead.num_tokens / tokens_per_s
        of_seats = 0.0 if finished_per_s is None else ahead.num_to_leave / finished_per_s
        return max(of_tokens, of_seats)

    def judged(self, num_prompt_tokens: int, ahead: Ahead) -> Judged:
        """Return whether a request is taken. One that comes to an idle server always is."""
        computed_s = self.computed_wait_s(ahead)
        if ahead.is_idle:
            return Judged(replace(self, is_on=False, expected_s=0.0), computed_s, None)
        tokens_per_s = self.rates.prompt_tokens_per_s
        own_s = 0.0 if tokens_per_s is None else num_prompt_tokens / tokens_per_s
        own_s += self.rates.usual_s  # its token comes when a whole step has ended
        if own_s > _HIGH * self.target_s:  # it is late even alone: refused for ever if its own time counted
            own_s = 0.0
        expected_s = self.correction.factor * computed_s + own_s
        threshold_s = (_LOW if self.is_on else _HIGH) * self.target_s
        if expected_s <= threshold_s:
            return Judged(self, computed_s, None)
        seconds = math.ceil(min(expected_s - _LOW * self.target_s, _MOST_RETRY_S))
        goes_on = expected_s <= _HIGH * self.target_s
        refusal = Refusal(expected_s, threshold_s, self.target_s, max(1, seconds), goes_on)
        return Judged(replace(self, is_on=True), computed_s, refusal)

    def looked(self, ahead: Ahead) -> Shedding:
        """Return the state with what a request behind all others would wait now: shedding ends when that is little."""
        expected_s = 0.0 if ahead.is_idle else self.correction.factor * self.computed_wait_s(ahead)
        return replace(self, is_on=self.is_on and expected_s >= _LOW * self.target_s, expected_s=expected_s)


class SheddingStatus(NamedTuple):
    """What shedding does at a moment.

    Attributes:
        is_on: whether requests are being refused.
        expected_s: what a request behind all others was last expected to wait before it is let in.
    """

    is_on: bool
    expected_s: float


class Shedder(Protocol):
    """Whom the scheduler asks when a request comes."""

    is_on: bool

    def judge(self, num_prompt_tokens: int, ahead: Callable[[], Ahead]) -> tuple[float | None, Refusal | None]:
        """Return the wait that is computed for a request, None where nobody computes it; and why it is not taken."""

    def landed(self, step: LandedStep, ahead: Callable[[], Ahead]) -> None:
        """Learn from a step that ran; ``ahead`` says what is before a request behind all others."""

    def let_in(self, computed_s: float, waited_s: float) -> None:
        """Learn from a request that was let in."""

    def status(self) -> SheddingStatus | None:
        """Return what it does now; None where there is no target. Plain reads, so any thread may ask."""


class TtftShedder:
    """A shedder by a target of the time to the first token.

    Args:
        target_s: that.
        rates: what was measured before the first step.

    Attributes:
        state: what it knows now.
    """

    is_on = True

    def __init__(self, target_s: float, rates: Rates | None = None) -> None:
        self.state = Shedding(WaitCorrection(target_s), rates or Rates())
        self._num_until_look = 0

    def judge(self, num_prompt_tokens: int, ahead: Callable[[], Ahead]) -> tuple[float | None, Refusal | None]:
        """See :class:`Shedder`."""
        judged = self.state.judged(num_prompt_tokens, ahead())
        self.state = judged.shedding
        return judged.computed_wait_s, judged.refusal

    def landed(self, step: LandedStep, ahead: Callable[[], Ahead]) -> None:
        """See :class:`Shedder`."""
        self.state = replace(self.state, rates=self.state.rates.after(step))
        self._num_until_look -= 1
        if self._num_until_look <= 0 or step.num_finished:
            self._num_until_look = _LOOK_EVERY
            self.state = self.state.looked(ahead())

    def let_in(self, computed_s: float, waited_s: float) -> None:
        """See :class:`Shedder`."""
        self.state = replace(self.state, correction=self.state.correction.after(computed_s, waited_s))

    def status(self) -> SheddingStatus:
        """See :class:`Shedder`."""
        return SheddingStatus(self.state.is_on, self.state.expected_s)


class _NoShedder:
    is_on = False

    def judge(self, num_prompt_tokens: int, ahead: Callable[[], Ahead]) -> tuple[float | None, Refusal | None]:  # noqa: ARG002 - the protocol's form
        return None, None

    def landed(self, step: LandedStep, ahead: Callable[[], Ahead]) -> None:
        pass

    def let_in(self, computed_s: float, waited_s: float) -> None:
        pass

    def status(self) -> None:
        pass


NO_SHEDDER: Shedder = _NoShedder()
"""Nobody is refused."""
