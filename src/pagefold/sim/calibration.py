"""Calibration: a few loads through a real runner, each step timed, and the cost that fits them."""

from __future__ import annotations

from random import Random
from time import perf_counter
from typing import TYPE_CHECKING

from pagefold.request import Request, StopRule
from pagefold.sim.step_cost import LinearStepCost, MeasuredStep, fit_step_cost
from pagefold.sim.traces.request import GREEDY_TO_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.scheduler import Scheduler
    from pagefold.steps import Runner, StepPlan, StepResult

__all__ = ["TimedRunner", "calibrate"]

_LOADS = ((1, 32), (1, 400), (4, 100), (16, 32), (16, 200), (32, 64), (8, 700))
"""Requests at once, and tokens of their prompts."""

_NUM_OUTPUT = 12


class TimedRunner:
    """A runner that notes what each step computed and read, and how long it took.

    Args:
        runner: does the work.
        clock: seconds.

    Attributes:
        steps: what was measured.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = perf_counter) -> None:
        self._runner = runner
        self._clock = clock
        self.steps: list[MeasuredStep] = []

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out ``plan``."""
        began = self._clock()
        result = self._runner.run(plan)
        seconds = self._clock() - began
        num_computed = len(plan.token_ids)
        self.steps.append(MeasuredStep(num_computed, sum(plan.starts) + num_computed, seconds))
        return result


def calibrate(scheduler: Scheduler, runner: Runner, *, vocab_size: int, seconds: float = 30.0) -> LinearStepCost:
    """Return what a step costs: prompts of several lengths, alone and together, each with some output.

    Args:
        scheduler: idle; it has seen nothing.
        runner: of a real model.
        vocab_size: tokens are below it.
        seconds: no load is begun later.

    Raises:
        ConfigError: not one load fits.
    """
    timed = TimedRunner(runner)
    rng = Random(0)  # noqa: S311 - tokens that nobody reads
    began = perf_counter()
    capacity = scheduler.core.pool.num_blocks * scheduler.core.block_size
    for number, (num_requests, num_prompt) in enumerate(_LOADS):
        wanted = num_requests * (num_prompt + _NUM_OUTPUT + scheduler.core.block_size)
        if perf_counter() - began > seconds or num_requests > scheduler.limits.max_num_seqs or wanted > capacity:
            continue
        for index in range(num_requests):
            prompt = [rng.randrange(vocab_size) for _ in range(num_prompt)]
            stop = StopRule(frozenset(), num_prompt + _NUM_OUTPUT)
            scheduler.add(Request(f"calibration-{number}-{index}", prompt, GREEDY_TO_LENGTH, stop=stop))
        while scheduler.has_work:
            scheduler.apply(timed.run(scheduler.schedule(0.0)))
    return fit_step_cost(timed.steps)
