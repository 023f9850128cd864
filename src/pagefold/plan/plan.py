"""The plan: what fits on a device, what it costs, and what to switch on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefold.plan.concurrency import Pool, Reached, Rounding, reach
from pagefold.plan.floors import break_even_bandwidth
from pagefold.plan.memory import Memory, plan_memory
from pagefold.plan.money import monthly_cost, token_cost
from pagefold.plan.techniques import Technique, rank_techniques
from pagefold.plan.timing import Timing, time_workload
from pagefold.plan.workload import Lengths, Workload

if TYPE_CHECKING:
    from pagefold.plan.settings import PlanSettings
    from pagefold.plan.shape import ModelShape
    from pagefold.plan.tables import Device

__all__ = ["DEFAULT_WORKLOAD", "Cost", "Plan", "Question", "WorkloadPlan", "make_plan"]

DEFAULT_WORKLOAD = Workload(name="1,024 tokens in, 128 out (the default)", lengths=(Lengths(1024, 128),))
"""vLLM's random benchmark."""

_FILLED = 0.9
"""Fewer requests at once than this share of what memory holds at full length, and something else is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that a plan is asked.

    Attributes:
        shape: the model.
        device: that it is to run on.
        settings: that it is to run with.
        workload: that is to run on it.
        price_per_hour: of one device; None where nobody said.
    """

    shape: ModelShape
    device: Device
    settings: PlanSettings
    workload: Workload = DEFAULT_WORKLOAD
    price_per_hour: float | None = None


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
    """

    workload: Workload
    num_too_long: int
    rounding: Rounding
    full: float
    full_shared: float
    reached: Reached
    reached_shared: Reached
    waste: float

    @property
    def fills_memory(self) -> bool:
        """Whether it is the memory that ends how many requests run at once."""
        return self.reached_shared.mean >= _FILLED * self.full_shared

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens that are found when prefixes are shared."""
        return self.workload.mean(self.workload.shared_tokens) / self.workload.mean_prompt


@dataclass(frozen=True, slots=True)
class Cost:
    """Money. In the currency of the price.

    Attributes:
        monthly: of one replica.
        per_million_output_tokens: at the throughput that the floors allow; None where they are not known.
    """

    monthly: float
    per_million_output_tokens: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Attributes:
        question: what was asked.
        memory: what fits.
        load: what the workload comes to.
        timing: floors.
        break_even: bytes a second at which loading a prompt's KV takes as long as computing it; None where the device's
            peaks are not known.
        techniques: what more could be had, the best first.
        cost: money; None without a price.
    """

    question: Question
    memory: Memory
    load: WorkloadPlan
    timing: Timing
    break_even: float | None
    techniques: tuple[Technique, ...]
    cost: Cost | None


def make_plan(question: Question) -> Plan:
    """Answer a question.

    Raises:
        ConfigError: what is asked cannot be.
        DoesNotFitError: it does not fit; ``nearest_settings`` finds what does.
    """
    memory = plan_memory(question.shape, question.device, question.settings)
    load = _load(question, memory)
    workload = load.workload
    concurrency, hit_share = load.reached_shared.mean, load.hit_share
    timing = time_workload(
        question.shape, question.device, memory, workload, concurrency=concurrency, hit_share=hit_share
    )
    alone = time_workload(question.shape, question.device, memory, workload, concurrency=1)
    break_even = None
    if alone.prefill.seconds:
        kv_bytes = memory.tightest.shard.layout.num_bytes_for(round(workload.mean_prompt))
        break_even = break_even_bandwidth(kv_bytes, alone.prefill.seconds)
    cost = None
    if question.price_per_hour is not None:
        num_devices, rate = question.settings.num_devices, timing.output_tokens_per_s
        price = None if rate is None else token_cost(question.price_per_hour, num_devices, rate)
        cost = Cost(monthly_cost(question.price_per_hour, num_devices), price)
    techniques = rank_techniques(question, memory, load, timing, break_even)
    return Plan(question, memory, load, timing, break_even, techniques, cost)


def _load(question: Question, memory: Memory) -> WorkloadPlan:
    asked = question.workload
    if asked is DEFAULT_WORKLOAD and asked.longest > memory.max_model_len:
        half = memory.max_model_len // 2
        asked = Workload(
            name=f"{half} tokens in, {half} out (the default where so few fit)", lengths=(Lengths(half, half),)
        )
    workload = asked.up_to(memory.max_model_len)
    device = memory.tightest
    layout, capacity = device.shard.layout, device.capacity
    rounding = Rounding(layout, workload)
    # The simulated pool has one group without a window; any layout is likened to it by the blocks that a request takes.
    group = replace(layout.groups[0], block_size=layout.block_size, window=None, is_chunked=False)
    plain = Rounding(replace(layout, groups=(group,), layers=layout.layers[:1], state_bytes=0), workload)
    ratio = plain.mean_blocks / rounding.mean_blocks
    pool = Pool(
        max(1, round(capacity.num_blocks * ratio)),
        layout.block_size,
        question.settings.max_num_seqs or capacity.num_residuals or None,
        memory.max_num_batched_tokens,
    )
    reached = reach(pool, workload, footprint=plain.mean_blocks, with_sharing=False)
    shared = reached
    if workload.prefix_len:
        shared = reach(pool, workload, footprint=plain.mean_own_blocks, with_sharing=True)
    return WorkloadPlan(
        workload=workload,
        num_too_long=len(asked.lengths) - len(workload.lengths),
        rounding=rounding,
        full=capacity.num_blocks / rounding.full_blocks,
        full_shared=max(0.0, capacity.num_blocks - rounding.shared_blocks) / rounding.full_own_blocks,
        reached=reached,
        reached_shared=shared,
        waste=rounding.waste(layout),
    )
