"""Flight: the steps that were planned and have not been applied or abandoned: one, and perhaps one behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.request import Request
    from pagefold.scheduler.step_in_flight import StepInFlight

__all__ = ["Flight"]


class Flight:
    """The steps in flight, in the order in which they run.

    Attributes:
        first: the step that is applied or abandoned next; None if there is none.
        behind: the step that was planned behind it; None if there is none.
    """

    def __init__(self) -> None:
        self.first: StepInFlight | None = None
        self.behind: StepInFlight | None = None

    @property
    def newest(self) -> StepInFlight | None:
        """The step that was planned last."""
        return self.behind or self.first

    def take(self) -> StepInFlight:
        """Take the step that was planned first; the one behind it is the first then."""
        step = self.first
        assert step is not None, "no step is in flight"
        self.first, self.behind = self.behind, None
        return step

    def has(self, request: Request) -> bool:
        """Whether a step in flight has a row of ``request``."""
        return any(step is not None and request in step.requests for step in (self.first, self.behind))

    def ends(self, running: Iterable[Request]) -> list[tuple[Request, int]]:
        """Return of each of those that run up to which position its tokens are stored when the newest step has run."""
        step = self.newest
        if step is None:
            return [(request, request.num_computed_tokens) for request in running]
        rows = zip(step.requests, step.plan.starts, step.plan.num_tokens, strict=False)
        ends = {request: start + num_tokens for request, start, num_tokens in rows}
        if not step.is_ahead:  # some may be set aside
            for request in list(running):
                ends.setdefault(request, request.num_computed_tokens)
        return list(ends.items())
