"""Guardrails: what keeps a server within its targets when more comes than it can do.

``pacing`` keeps the gap between two tokens under one target, ``shedder`` the time to the first token under the other.
Both decide from what was measured of steps that ran; time comes in with those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.scheduler.guardrails.landed_step import LandedStep
from pagefold.scheduler.guardrails.pacing import NO_PACING, ItlPacing, Pacing, PacingStatus
from pagefold.scheduler.guardrails.prefill_cap import CapLimits
from pagefold.scheduler.guardrails.shedding import NO_SHEDDER, Shedder, SheddingStatus, TtftShedder

if TYPE_CHECKING:
    from pagefold.scheduler.guardrails.rates import Rates
    from pagefold.scheduler.queue_ahead import QueueAhead
    from pagefold.scheduler.step_in_flight import StepInFlight

__all__ = ["NO_GUARDRAILS", "GuardrailStatus", "Guardrails", "Targets"]


_CONTENDED = frozenset({"seats", "memory", "growth"})
"""What ends when somebody leaves."""


class Targets(NamedTuple):
    """What a server is to keep, in seconds; None where it does not matter.

    Attributes:
        ttft_s: the time to the first token of each request that is taken.
        itl_s: the gap between two tokens of a request, its 95th percentile.
    """

    ttft_s: float | None = None
    itl_s: float | None = None


class GuardrailStatus(NamedTuple):
    """What guardrails do at a moment; None for what has no target."""

    pacing: PacingStatus | None = None
    shedding: SheddingStatus | None = None


class Guardrails:
    """The guardrails of one scheduler.

    Args:
        pacing: of steps.
        shedder: of requests.
    """

    def __init__(self, pacing: Pacing = NO_PACING, shedder: Shedder = NO_SHEDDER) -> None:
        self.pacing = pacing
        self.shedder = shedder
        self._landed_s: float | None = None  # when the last step did, if it ran
        self._num_finished = 0

    @classmethod
    def of(
        cls, targets: Targets, *, max_num_batched_tokens: int, block_size: int, rates: Rates | None = None
    ) -> Guardrails:
        """Return the guardrails of these targets.

        Args:
            targets: in seconds.
            max_num_batched_tokens: of a step: the most that a cap allows.
            block_size: the least.
            rates: what was measured before the first step.
        """
        pacing, shedder = NO_PACING, NO_SHEDDER
        if targets.itl_s is not None:
            floor = min(block_size, max_num_batched_tokens)
            pacing = ItlPacing(CapLimits(targets.itl_s, floor, max_num_batched_tokens))
        if targets.ttft_s is not None:
            shedder = TtftShedder(targets.ttft_s, rates)
        is_off = pacing is NO_PACING and shedder is NO_SHEDDER
        return NO_GUARDRAILS if is_off else cls(pacing, shedder)

    def landed(self, step: StepInFlight, now: float, num_finished: int, queue: QueueAhead) -> None:
        """Learn from a step that ran. What was measured is booked to it, though others may have been planned since.

        Args:
            step: that.
            now: when its tokens were there.
            num_finished: how many requests have left, ever.
            queue: who runs and waits behind it.
        """
        before_s, self._landed_s = self._landed_s, now
        has_decodes = len(step.requests) > step.num_prefill_rows
        gap_s = None if before_s is None or not has_decodes or now < before_s else now - before_s
        landed = LandedStep(
            took_s=max(0.0, now - max(step.now, step.now if before_s is None else before_s)),
            gap_s=gap_s,
            num_prompt_tokens=step.num_prefill_tokens,
            cap_tokens=step.prefill_cap_tokens,
            has_drafts=bool(step.plan.drafted),
            leaves_prompts=bool(step.partial),
            is_contended=step.waits_for in _CONTENDED,
            num_finished=num_finished - self._num_finished,
        )
        self._num_finished = num_finished
        queue.is_contended = landed.is_contended
        self.pacing.landed(landed)
        for request in step.admitted if self.shedder.is_on else ():
            computed_s, waited_s = request.times.computed_wait_s, request.times.queue_s
            if computed_s is not None and waited_s is not None:
                self.shedder.let_in(computed_s, waited_s)
                request.times.computed_wait_s = None  # it may be preempted and let in again
        self.shedder.landed(landed, queue.of)

    def failed(self) -> None:
        """A step failed: what it took, and what those waited that decode, is nobody's measure."""
        self._landed_s = None

    def status(self, *, is_idle: bool = False) -> GuardrailStatus:
        """Return what they do now, where nobody is here perhaps. Plain reads, so any thread may ask."""
        shedding = self.shedder.status()
        if is_idle and shedding is not None:  # the last may have been cancelled, and no step told so
            shedding = SheddingStatus(is_on=False, expected_s=0.0)
        return GuardrailStatus(self.pacing.status(), shedding)


class _NoGuardrails(Guardrails):
    def landed(self, step: StepInFlight, now: float, num_finished: int, queue: QueueAhead) -> None:
        pass

    def failed(self) -> None:
        pass


NO_GUARDRAILS: Guardrails = _NoGuardrails()
"""No targets: nothing is capped, nobody is refused, nothing is measured. All schedulers without targets share it."""
