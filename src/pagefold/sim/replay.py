"""Replay: requests with arrival times through the real scheduler and cache, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import BudgetTooSmallError
from pagefold.kv import KEEP_ALL, KeepRule, KVCore, make_policy
from pagefold.scheduler import SCHEDULING_POLICIES, Scheduler, SchedulerLimits, Tiering
from pagefold.scheduler.times import tell_tokens
from pagefold.sim.arrivals import AnyRequest, Arrivals
from pagefold.sim.clock import VirtualClock
from pagefold.sim.null_runner import NullRunner
from pagefold.sim.report import Report, Tally
from pagefold.sim.step_cost import LinearStepCost
from pagefold.sim.tiers import SimArena, SimTransfers, TierModel
from pagefold.steps import StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagefold.events import Emit
    from pagefold.steps import Runner

__all__ = ["SimConfig", "check_fit", "replay", "scheduler_of", "simulate"]

_PROBE_TOKENS = 256
"""What prefilling takes is asked with so many tokens, as a server measures it."""

_AGING_S = 60.0
"""Seconds of waiting that policies look at: what ``--priority-aging-s`` is where a server is told nothing."""


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
        tiers: what is behind the pool.
        rules: what each cache group keeps; each has blocks of its own of a sequence.
        admission: when a request that waits is let in.
        scheduling_policy: who goes first.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    eviction_policy: str = "default"
    tiers: TierModel = field(default_factory=TierModel)
    rules: tuple[KeepRule, ...] = (KEEP_ALL,)
    admission: str = "predicted"
    scheduling_policy: str = "fcfs"


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
        ConfigError: a tier is smaller than a block.
    """
    tally = Tally(progress)
    cost = step_cost or LinearStepCost()
    tiers, rules = config.tiers, config.rules
    host = tiers.host(config.block_size, len(rules))
    core = KVCore(
        config.num_blocks,
        block_size=config.block_size,
        rules=rules,
        policy=make_policy(config.eviction_policy, config.num_blocks, tally),
        enable_prefix_caching=config.enable_prefix_caching,
        host=host,
        slow=tiers.slow(host, config.block_size, _compute_s(cost), rules),
        emit=tally,
    )
    scheduler = scheduler_of(core, config, tally)
    clock = VirtualClock()

    def whole_cost(plan: StepPlan) -> float:
        return cost(plan) + tiers.step_s(plan.host_ops, config.block_size, len(rules))

    disk = None
    if core.slow.is_on:
        transfers = SimTransfers(tiers, config.block_size, clock, len(rules))
        tiering = Tiering(scheduler, core.slow, transfers, SimArena(), lambda _: None, emit=tally, clock=clock)
        disk = _Disk(tiering, transfers)
    return replay(requests, scheduler, runner or NullRunner(), clock, whole_cost, tally=tally, disk=disk)


class _Disk(NamedTuple):
    """A slow tier: who decides, and who moves."""

    tiering: Tiering
    transfers: SimTransfers

    def next_s(self) -> float:
        """Return when something will have come, or somebody waits no longer; inf for never."""
        return min(self.transfers.next_due_s, self.tiering.next_due_s())


def replay(  # noqa: PLR0913 - what goes in, the parts of a machine, and who watches
    requests: Iterable[AnyRequest],
    scheduler: Scheduler,
    runner: Runner,
    clock: VirtualClock,
    step_cost: Callable[[StepPlan], float],
    *,
    tally: Tally,
    disk: _Disk | None = None,
) -> Report:
    """Run ``requests`` to their ends: each is added when its time has come, and steps follow each other at their cost.

    An agent's session is ended with its last turn.

    Args:
        requests: with their arrival times, in any order.
        scheduler: with its core; both emit to ``tally``.
        runner: carries out plans.
        clock: moved on by each step, and to the next arrival when there is nothing to do.
        step_cost: virtual seconds that a plan takes.
        tally: counts what happens.
        disk: a slow tier behind the core's host tier.

    Raises:
        BudgetTooSmallError: a request can never fit.
    """
    coming = Arrivals(requests)
    check_fit(coming.most_tokens, scheduler)
    while coming or scheduler.has_requests:
        if not scheduler.has_work:
            next_s = coming.next_s
            if disk is not None:
                disk.tiering.store_pending()
                next_s = min(next_s, disk.next_s())
            clock.advance_to(next_s)
        for request in coming.take(clock()):
            scheduler.add(request)
            if disk is not None:
                disk.tiering.begin(request, clock())
        if disk is not None:
            disk.tiering.poll(clock())
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule(clock())
        assert plan.num_rows, "the oldest request always gets on"
        result = runner.run(plan)
        took_s = step_cost(plan)
        clock.advance(took_s)
        if disk is not None:
            disk.tiering.computed(len(plan.token_ids), plan.num_rows, took_s)
        got_tokens = scheduler.apply(result, clock())
        tell_tokens(tally, got_tokens, clock(), scheduler.core.block_size)
        for over in coming.ended((one.request_id for one in got_tokens if one.finish_reason is not None), clock()):
            scheduler.end_session(over)
        tally.look(scheduler, clock())
    return tally.report()


def _compute_s(cost: Callable[[StepPlan], float]) -> float:
    """Return the seconds that prefilling takes a token."""
    plan = StepPlan(0)
    plan.token_ids.extend([0] * _PROBE_TOKENS)
    plan.starts, plan.num_tokens = [0], [_PROBE_TOKENS]
    return cost(plan) / _PROBE_TOKENS


def scheduler_of(core: KVCore, config: SimConfig, emit: Emit) -> Scheduler:
    """Return the scheduler of a core, as a config has it."""
    limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens)
    policy = SCHEDULING_POLICIES[config.scheduling_policy](_AGING_S)
    return Scheduler(core, limits, policy=policy, admission=config.admission, emit=emit)


def check_fit(longest: int, scheduler: Scheduler) -> None:
    """Check that a request of ``longest`` tokens fits into the pool.

    Raises:
        BudgetTooSmallError: it never will.
    """
    core = scheduler.core
    num_blocks_needed = core.num_blocks_for(longest, scheduler.limits.max_num_batched_tokens)
    if num_blocks_needed > core.pool.num_blocks:
        msg = (
            f"The pool has {core.pool.num_blocks} blocks of {core.block_size} tokens; the longest request of the "
            f"workload, {longest} tokens, needs {num_blocks_needed}."
        )
        raise BudgetTooSmallError(msg, remedy=f"Give at least {num_blocks_needed} blocks.")
