"""The plan: what fits on a device, what it costs, and what to switch on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.plan.floors import break_even_bandwidth
from pagefold.plan.load import plan_load
from pagefold.plan.memory import Memory, plan_memory
from pagefold.plan.money import monthly_cost, token_cost
from pagefold.plan.techniques import Technique, rank_techniques
from pagefold.plan.timing import Timing, time_workload

if TYPE_CHECKING:
    from pagefold.plan.load import WorkloadPlan
    from pagefold.plan.question import Question

__all__ = ["Cost", "Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What devices cost, in the currency of their price.

    Attributes:
        monthly: of one replica.
        per_million_output_tokens: at the throughput that the floors allow; None where they are not known.
    """

    monthly: float
    per_million_output_tokens: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a question comes to.

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
    load = plan_load(question, memory)
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
