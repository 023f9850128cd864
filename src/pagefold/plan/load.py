"""Load: what a workload comes to on a device: how many of its requests run at once there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefold.kv import KEEP_ALL
from pagefold.plan.concurrency import Pool, Reached, Rounding, reach
from pagefold.plan.question import DEFAULT_WORKLOAD
from pagefold.plan.workload import Lengths, Workload

if TYPE_CHECKING:
    from pagefold.kv import CacheLayout
    from pagefold.plan.memory import Memory
    from pagefold.plan.question import Question

__all__ = ["WorkloadPlan", "plan_load"]

_FILLED = 0.9
"""Fewer requests at once than this share of what memory holds at full length, and something else is the reason."""


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """What a workload comes to.

    Attributes:
        workload: without requests that are too long.
        num_too_long: requests that were left out for their length.
        rounding: blocks of its requests.
        full: requests at once, each counted at its full length: so many never preempt each other.
        full_shared: the same when the prefix is held once.
        reached: requests that a server runs at once when others always wait, without sharing.
        reached_shared: the same with sharing.
        waste: share of the memory of running requests that holds no token.
        is_likened: whether ``reached`` was simulated in a likeness: one group that keeps all.
    """

    workload: Workload
    num_too_long: int
    rounding: Rounding
    full: float
    full_shared: float
    reached: Reached
    reached_shared: Reached
    waste: float
    is_likened: bool

    @property
    def fills_memory(self) -> bool:
        """Whether it is the memory that ends how many requests run at once."""
        return self.reached_shared.mean >= _FILLED * self.full_shared

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens that are found when prefixes are shared."""
        return self.workload.mean(self.workload.shared_tokens) / self.workload.mean_prompt


def plan_load(question: Question, memory: Memory) -> WorkloadPlan:
    """Return what the workload of ``question`` comes to beside what ``memory`` says."""
    asked = question.workload
    if asked is DEFAULT_WORKLOAD and asked.longest > memory.max_model_len:
        half = memory.max_model_len // 2
        asked = Workload(
            name=f"{half} tokens in, {half} out (the default where so few fit)", lengths=(Lengths(half, half),)
        )
    workload = asked.up_to(memory.max_model_len)
    device = memory.tightest
    layout, capacity = device.shard.layout, device.capacity
    rounding = Rounding(layout, workload, memory.num_new)
    rules, num_blocks, simulated = tuple(group.keeps for group in layout.groups), capacity.num_blocks, rounding
    if not _is_simulated_whole(layout):
        # One group that keeps all, in which as many requests fit: likened by the blocks that a request takes.
        group = replace(layout.groups[0], block_size=layout.block_size, keeps=KEEP_ALL)
        simulated = Rounding(replace(layout, groups=(group,), layers=layout.layers[:1], state_bytes=0), workload)
        rules = (KEEP_ALL,)
        num_blocks = max(1, round(num_blocks * simulated.mean_blocks / rounding.mean_blocks))
    pool = Pool(
        num_blocks,
        layout.block_size,
        memory.max_num_seqs or capacity.num_residuals or None,
        memory.max_num_batched_tokens,
        rules,
        "predicted" if question.settings.engine_on(question.device).is_ours else "prompt",
    )
    reached = reach(pool, workload, footprint=simulated.mean_blocks, with_sharing=False)
    shared = reached
    if workload.prefix_len:
        shared = reach(pool, workload, footprint=simulated.mean_own_blocks, with_sharing=True)
    return WorkloadPlan(
        workload=workload,
        num_too_long=len(asked.lengths) - len(workload.lengths),
        rounding=rounding,
        full=capacity.num_blocks / rounding.full_blocks,
        full_shared=max(0.0, capacity.num_blocks - rounding.shared_blocks) / rounding.full_own_blocks,
        reached=reached,
        reached_shared=shared,
        waste=rounding.waste(layout),
        is_likened=not _is_simulated_whole(layout),
    )


def _is_simulated_whole(layout: CacheLayout) -> bool:
    """Whether the cache that is simulated has the groups of ``layout``: all have blocks of one size, and no state."""
    return not layout.state_bytes and all(group.block_size == layout.block_size for group in layout.groups)
