"""Replay: requests with arrival times through the real scheduler and cache, on a virtual clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import BudgetTooSmallError
from pagefold.kv import KVCore, make_policy
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim.arrivals import AnyRequest, Arrival, arrivals
from pagefold.sim.clock import VirtualClock
from pagefold.sim.null_runner import NullRunner
from pagefold.sim.report import Report, Tally
from pagefold.sim.step_cost import LinearStepCost
from pagefold.times import tell_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagefold.steps import Runner, StepPlan

__all__ = ["SimConfig", "replay", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The memory and the limits that a workload is replayed with; names as in ``EngineConfig``.

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens a block.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed in one step.
        enable_prefix_caching: whether blocks are shared between requests that begin alike.
        eviction_policy: which cached blocks go first.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    eviction_policy: str = "default"


def simulate(
    requests: Iterable[AnyRequest],
    config: SimConfig,
    *,
    step_cost: Callable[[StepPlan], float] | None = None,
    runner: Runner | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Replay ``requests`` with a fresh cache and a runner that computes nothing.

    Args:
        requests: with their arrival times: of a trace, of a generator, or requests with tokens, which are used up.
        config: memory and limits.
        step_cost: virtual seconds that a plan takes; :class:`LinearStepCost` by default.
        runner: samples; :class:`~pagefold.sim.NullRunner` by default.
        progress: told how many requests have ended, when some have.

    Raises:
        BudgetTooSmallError: a request can never fit.
    """
    tally = Tally(progress)
    core = KVCore(
        config.num_blocks,
        block_size=config.block_size,
        policy=make_policy(config.eviction_policy),
        enable_prefix_caching=config.enable_prefix_caching,
        emit=tally,
    )
    limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens)
    scheduler = Scheduler(core, limits, emit=tally)
    cost = step_cost or LinearStepCost()
    return replay(requests, scheduler, runner or NullRunner(), VirtualClock(), cost, tally=tally)


def replay(  # noqa: PLR0913 - what goes in, the four parts of a machine, and who watches
    requests: Iterable[AnyRequest],
    scheduler: Scheduler,
    runner: Runner,
    clock: VirtualClock,
    step_cost: Callable[[StepPlan], float],
    *,
    tally: Tally,
) -> Report:
    """Run ``requests`` to their ends: each is added when its time has come, and steps follow each other at their cost.

    Args:
        requests: with their arrival times, in any order.
        scheduler: with its core; both emit to ``tally``.
        runner: carries out plans.
        clock: moved on by each step, and to the next arrival when there is nothing to do.
        step_cost: virtual seconds that a plan takes.
        tally: counts what happens.

    Raises:
        BudgetTooSmallError: a request can never fit.
    """
    coming = deque(arrivals(requests))
    _check_fit(coming, scheduler.core)
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            clock.advance_to(coming[0].arrival_s)
        while coming and coming[0].arrival_s <= clock():
            scheduler.add(coming.popleft().make())
        plan = scheduler.schedule(clock())
        assert plan.num_rows, "the oldest request always gets on"
        result = runner.run(plan)
        clock.advance(step_cost(plan))
        tell_tokens(tally, scheduler.apply(result), clock(), scheduler.core.block_size)
        tally.look(scheduler, clock())
    return tally.report()


def _check_fit(coming: Iterable[Arrival], core: KVCore) -> None:
    longest = max((arrival.num_tokens for arrival in coming), default=0)
    num_blocks_needed = -(-longest // core.block_size)
    if num_blocks_needed > core.pool.num_blocks:
        msg = (
            f"The pool has {core.pool.num_blocks} blocks of {core.block_size} tokens; the longest request of the "
            f"workload, {longest} tokens, needs {num_blocks_needed}."
        )
        raise BudgetTooSmallError(msg, remedy=f"Give at least {num_blocks_needed} blocks.")
