"""Techniques: what each would give for this model, device and workload, what it costs, and how to switch it on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.plan.concurrency import Rounding
from pagefold.plan.floors import prefill_operations, ttft_bound
from pagefold.plan.memory import Memory, plan_memory
from pagefold.plan.money import monthly_cost, saving
from pagefold.plan.weights import find_weight_dtype

if TYPE_CHECKING:
    from pagefold.plan.plan import Question, WorkloadPlan
    from pagefold.plan.settings import PlanSettings
    from pagefold.plan.timing import Timing
    from pagefold.plan.workload import Workload

__all__ = ["NVME_BANDWIDTH", "RAM_BANDWIDTH_SHARE", "Technique", "rank_techniques"]

NVME_BANDWIDTH = 7e9
"""Bytes a second of an NVMe disk of the fourth generation, read in sequence."""

RAM_BANDWIDTH_SHARE = 0.8
"""Share of a host link's peak that copies reach: 50 GB/s of 63 on PCIe 5."""

_KEPT_SHARE = 0.2
"""Share of its tokens that a sequence keeps under token eviction: 400 of 2,000, as in the H2O family's reports."""

_CACHE_DTYPES = (
    ("fp8", "next to none on most tasks, with calibrated scales", "none; faster reads"),
    ("int8_per_token_head", "next to none on most tasks", "a little arithmetic a token"),
    ("int4_per_token_head", "small, and measurable in recall and mathematics", "a little arithmetic a token"),
)
_WEIGHT_DTYPES = (
    ("fp8", "next to none on most tasks", "none; faster reads"),
    ("int4-g128", "small, and measurable", "none; decode reads a quarter of the weights"),
)


_WORTH_AT_A_COST = (("next to none", 0.9), ("small", 0.5), ("depends", 0.25))


@dataclass(frozen=True, slots=True)
class Technique:
    """One thing to do.

    Attributes:
        name: what it is.
        gain: how many times as many requests of the workload fit on a replica; 1 where it gives time instead.
        gain_per_device: the same for each device, where it takes more of them.
        ttft_gain: at most so many times sooner comes the first token of a request that it helps; 1 where it does not.
        quality_cost, latency_cost: what it costs, in words.
        flags: that switch it on, in vLLM's spelling.
        note: what else to know.
        monthly_saving: what it is worth; None without a price.
    """

    name: str
    gain: float
    gain_per_device: float
    ttft_gain: float
    quality_cost: str
    latency_cost: str
    flags: str
    note: str = ""
    monthly_saving: float | None = None

    @property
    def worth(self) -> float:
        """What it is ranked by: requests for each device, or time to the first token where that is what it gives.

        Less where it costs quality: what may be lost is not bought by memory alone.
        """
        share = next((share for words, share in _WORTH_AT_A_COST if self.quality_cost.startswith(words)), 1.0)
        return share * (max(self.gain_per_device, self.ttft_gain) - 1)


def rank_techniques(
    question: Question, memory: Memory, load: WorkloadPlan, timing: Timing, break_even: float | None
) -> tuple[Technique, ...]:
    """Return what would help, the best first; what gives nothing here is left out."""
    settings = question.settings
    found = [
        *_smaller_cache(question, memory, load),
        *_smaller_weights(question, memory, load),
        *_sharing(question, load),
        *_tiers(question, memory, load, timing, break_even),
        *_token_eviction(load),
        *_more_devices(question, load),
        *_other_blocks(question, load),
    ]
    if not question.device.is_cpu and settings.gpu_memory_utilization < 0.95:  # noqa: PLR2004 - of memory
        gain = _gain(question, load, gpu_memory_utilization=0.95)
        note = "what an engine keeps for itself beside activations must fit in the rest"
        found += _technique("more of the memory", gain, flags="--gpu-memory-utilization 0.95", note=note)
    ranked = sorted(found, key=lambda technique: -technique.worth)
    if question.price_per_hour is None:
        return tuple(ranked)
    cost = monthly_cost(question.price_per_hour, settings.num_devices)
    return tuple(
        replace(each, monthly_saving=saving(cost, each.gain_per_device)) if each.gain_per_device > 1 else each
        for each in ranked
    )


def _technique(  # noqa: PLR0913 - a row of a table
    name: str,
    gain: float | None,
    *,
    flags: str,
    devices: float = 1.0,
    ttft_gain: float = 1.0,
    quality: str = "none",
    latency: str = "none",
    note: str = "",
) -> list[Technique]:
    if gain is None or (gain < 1.005 and ttft_gain < 1.005):  # noqa: PLR2004 - half a percent
        return []
    return [Technique(name, gain, gain / devices, ttft_gain, quality, latency, flags, note)]


def _requests(question: Question, workload: Workload, settings: PlanSettings) -> float | None:
    """Return how many requests of the workload fit at their full lengths; None where nothing fits."""
    try:
        memory = plan_memory(question.shape, question.device, settings)
    except ConfigError:
        return None
    device = memory.tightest
    if workload.longest > memory.max_model_len:
        return None
    rounding = Rounding(device.shard.layout, workload)
    return max(0.0, device.capacity.num_blocks - rounding.shared_blocks) / rounding.full_own_blocks


def _gain(question: Question, load: WorkloadPlan, **changes: object) -> float | None:
    settings: PlanSettings = replace(question.settings, **changes)  # type: ignore[arg-type]
    requests = _requests(question, load.workload, settings)
    return None if requests is None or not load.full_shared else requests / load.full_shared


def _smaller_cache(question: Question, memory: Memory, load: WorkloadPlan) -> list[Technique]:
    found = []
    now = memory.layout.bytes_per_token
    for name, quality, latency in _CACHE_DTYPES:
        gain = _gain(question, load, kv_cache_dtype=name)
        if memory.codec.name != name and gain is not None:
            flags = f"--kv-cache-dtype {name}"
            ratio = replace(question.settings, kv_cache_dtype=name).codec(memory.dtype)
            bits = ratio.bits_per_element(question.shape.head_dim)
            note = f"{bits:.3g} bit an element with its scales, of {8 * now / _elements(memory):.3g}"
            found += _technique(f"KV in {name}", gain, quality=quality, latency=latency, flags=flags, note=note)
    return found


def _elements(memory: Memory) -> int:
    return sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in memory.layout.layers)


def _smaller_weights(question: Question, memory: Memory, load: WorkloadPlan) -> list[Technique]:
    found = []
    for name, quality, latency in _WEIGHT_DTYPES:
        if find_weight_dtype(name).bits < memory.weight_dtype.bits:
            gain = _gain(question, load, weight_dtype=name)
            flags = f"serve a checkpoint in {name} (--quantization)"
            found += _technique(f"weights in {name}", gain, quality=quality, latency=latency, flags=flags)
    return found


def _sharing(question: Question, load: WorkloadPlan) -> list[Technique]:
    workload = load.workload
    if not workload.prefix_len:
        return []
    saved = workload.mean(workload.shared_tokens) / workload.mean_prompt
    prompt = round(workload.mean_prompt)
    whole = prefill_operations(question.shape, prompt)
    spared = 1 - prefill_operations(question.shape, prompt, round(saved * prompt)) / whole
    note = (
        f"part of this plan: {saved:.0%} of prompt tokens are found, and {spared:.0%} of the prefill's work is spared"
    )
    gain = load.full_shared / load.full
    flags = "--enable-prefix-caching (the default)"
    return _technique("sharing of prefixes", gain, flags=flags, ttft_gain=ttft_bound(spared), note=note)


def _tiers(
    question: Question, memory: Memory, load: WorkloadPlan, timing: Timing, break_even: float | None
) -> list[Technique]:
    """Keeping conversations between their turns: what it spares is the part of each prompt that was said before."""
    workload = load.workload
    if workload.turns < 2 or timing.requests_per_s is None or break_even is None:  # noqa: PLR2004 - it comes back
        return []
    prompt, said = round(workload.mean_prompt), round(workload.mean_prompt * (1 - 1 / workload.turns))
    spared = 1 - prefill_operations(question.shape, prompt, said) / prefill_operations(question.shape, prompt)
    paused = timing.requests_per_s * workload.pause_s * (1 - 1 / workload.turns)
    needed = paused * memory.layout.num_bytes_for(round(workload.mean_prompt + workload.mean_output))
    size = f"{needed / 2**30:,.0f} GiB keep {paused:,.0f} conversations over pauses of {workload.pause_s:g} s"
    found = []
    host = question.device.host_link
    ram = RAM_BANDWIDTH_SHARE * host if host else None
    for name, bandwidth, flags in (
        ("KV of idle conversations in RAM", ram, f"--kv-offloading-size {max(1, round(needed / 2**30))}"),
        ("KV of idle conversations on NVMe", NVME_BANDWIDTH, "--kv-transfer-config with a file tier"),
    ):
        if bandwidth is None:
            continue
        times = bandwidth / break_even
        bound = min(ttft_bound(spared), 1 / (1 - spared + spared / times)) if times > 0 else 1.0
        verdict = f"loads {times:.1f} x as fast as computing" if times > 1 else "loads slower than computing: do not"
        latency = f"{said * memory.layout.bytes_per_token / bandwidth * 1e3:,.0f} ms to load a conversation"
        found += _technique(name, 1.0, flags=flags, ttft_gain=bound, latency=latency, note=f"{verdict}; {size}")
    return found


def _token_eviction(load: WorkloadPlan) -> list[Technique]:
    workload = load.workload
    if workload.mean_prompt + workload.mean_output < 1000:  # noqa: PLR2004 - short sequences have nothing to drop
        return []
    note = f"keeping {_KEPT_SHARE:.0%} of the tokens; evicted requests share no prefix"
    quality = "depends on the task: what is dropped cannot be recalled"
    flags = "none in vLLM; SnapKV, H2O, StreamingLLM in research engines"
    return _technique("token eviction", 1 / _KEPT_SHARE, quality=quality, flags=flags, note=note)


def _more_devices(question: Question, load: WorkloadPlan) -> list[Technique]:
    size = 2 * question.settings.tensor_parallel_size
    if question.device.is_cpu:
        return []
    gain = _gain(question, load, tensor_parallel_size=size)
    note = "weights are held once for all of them"
    if size > question.shape.num_kv_heads or any(layer.value_dim == 0 for layer in question.shape.kv_layers):
        note += "; KV heads are repeated, so blocks do not shrink"
    flags = f"--tensor-parallel-size {size}"
    latency = "less: each reads its share of the weights; an exchange a layer is added"
    return _technique(f"{size} devices for each layer", gain, devices=2, latency=latency, flags=flags, note=note)


def _other_blocks(question: Question, load: WorkloadPlan) -> list[Technique]:
    found = []
    for size in (8, 32):
        if size < question.settings.block_size:
            gain = _gain(question, load, block_size=size)
            latency = "longer tables"
            found += _technique(f"blocks of {size} tokens", gain, latency=latency, flags=f"--block-size {size}")
    return found
