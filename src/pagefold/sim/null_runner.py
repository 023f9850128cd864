"""NullRunner: carries out a plan without computing anything, and checks that the plan could be carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.steps import StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NullRunner", "hashed_token"]


def hashed_token(seed: int, draw: int) -> int:
    """Return a token that depends on the request's seed and position only: outputs that never repeat by accident."""
    return (seed * 0x9E3779B1 + draw * 0x85EBCA77 + 0x165667B1) & 0x3FFFFFFF


class NullRunner:
    """A :class:`~pagefold.steps.Runner` whose tokens come from a function of (seed, draw).

    Args:
        token: the sampling function.
    """

    def __init__(self, token: Callable[[int, int], int] = hashed_token) -> None:
        self._token = token

    def run(self, plan: StepPlan) -> StepResult:
        """Sample a token for every row that asks for one."""
        token = self._token
        return StepResult([token(seed, draw) for seed, draw in zip(plan.seeds, plan.draws, strict=True)])
