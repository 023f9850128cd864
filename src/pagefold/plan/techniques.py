"""Techniques: what each would give for this model, device and workload, what it costs, and how to switch it on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.kv.codec import plain_codec
from pagefold.masks.packed import PACKED
from pagefold.masks.rule import CHUNK
from pagefold.plan.concurrency import Rounding
from pagefold.plan.floors import prefill_operations, ttft_bound
from pagefold.plan.memory import Memory, plan_memory
from pagefold.plan.money import monthly_cost, saving
from pagefold.plan.timing import request_rate
from pagefold.plan.weights import find_weight_dtype

if TYPE_CHECKING:
    from pagefold.kv import CacheGroup, CacheLayout
    from pagefold.plan.load import WorkloadPlan
    from pagefold.plan.question import Question
    from pagefold.plan.settings import PlanSettings
    from pagefold.plan.timing import Timing
    from pagefold.plan.workload import Lengths

__all__ = ["KEPT_SHARE", "NVME_BANDWIDTH", "RAM_BANDWIDTH_SHARE", "Technique", "rank_techniques"]

NVME_BANDWIDTH = 7e9
"""Bytes a second of an NVMe disk of the fourth generation, read in sequence."""

RAM_BANDWIDTH_SHARE = 0.8
"""Share of a host link's peak that copies reach: 50 GB/s of 63 on PCIe 5."""

KEPT_SHARE = 0.2
"""Share of its tokens that a sequence keeps under token eviction: 400 of 2,000, as in the H2O family's reports."""

_KEPT_SHARES = (
    (0.5, "small, and measurable: pagefold eval --kv-keep 0.5"),
    (0.25, "depends on the model and the task: pagefold eval --kv-keep 0.25"),
)
"""Shares of older tokens that ``kv_keep`` keeps, and what that costs: less than 1 % of perplexity the first, of
SmolLM2-135M and 2k tokens (``benchmarks/masks.py``)."""
_CACHE_DTYPES = (
    ("fp8", "next to none on most tasks, with calibrated scales", "none; faster reads"),
    ("int8_per_token_head", "next to none on most tasks", "a little arithmetic a token"),
    ("k8v4", "small: V alone has 4 bit", "a little arithmetic a token"),
    ("int4_per_token_head", "small, and measurable in recall and mathematics", "a little arithmetic a token"),
    ("kivi2", "depends on the model: large on small ones", "a little arithmetic a token"),
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
        throughput_gain: how many times as many requests a second the floors then allow each device; None where its
            peaks are not known. That is what saves money: more requests at once are not more requests a second where
            something else than memory binds.
        ttft_gain: at most so many times sooner comes the first token of a request that it helps; 1 where it does not.
        quality_cost, latency_cost: what it costs, in words.
        flags: that switch it on, in vLLM's spelling.
        note: what else to know.
        monthly_saving: what it is worth, by its throughput, or by requests at once where the device's peaks are not
            known; None without a price.
    """

    name: str
    gain: float
    gain_per_device: float
    throughput_gain: float | None
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

    def saves(self, cost: float) -> float | None:
        """Return what it saves of ``cost``; None where it lets a device carry no more."""
        gain = self.gain_per_device if self.throughput_gain is None else self.throughput_gain
        return saving(cost, gain) if gain > 1 else None


@dataclass(frozen=True, slots=True)
class _Gain:
    """What a change of settings gives: times as many requests at once, and requests a second, of a replica."""

    requests: float = 1.0
    throughput: float | None = None


def rank_techniques(
    question: Question, memory: Memory, load: WorkloadPlan, timing: Timing, break_even: float | None
) -> tuple[Technique, ...]:
    """Return what would help, the best first; what gives nothing here is left out."""
    settings, now = question.settings, _Now(question, memory, load, timing)
    found = [
        *_smaller_cache(now),
        *_smaller_weights(now),
        *_sharing(now),
        *_tiers(question, memory, load, timing, break_even),
        *_kept_shares(now),
        *_token_eviction(now),
        *_more_devices(now),
        *_other_blocks(now),
    ]
    if not question.device.is_cpu and memory.utilization < 0.95:  # noqa: PLR2004 - of memory
        gain = now.with_settings(gpu_memory_utilization=0.95)
        note = "what an engine keeps for itself beside activations must fit in the rest"
        found += _technique("more of the memory", gain, flags="--gpu-memory-utilization 0.95", note=note)
    ranked = sorted(found, key=lambda technique: -technique.worth)
    if question.price_per_hour is None:
        return tuple(ranked)
    cost = monthly_cost(question.price_per_hour, settings.num_devices)
    return tuple(replace(each, monthly_saving=each.saves(cost)) for each in ranked)


def _technique(  # noqa: PLR0913 - a row of a table
    name: str,
    gain: _Gain | None,
    *,
    flags: str,
    devices: float = 1.0,
    ttft_gain: float = 1.0,
    quality: str = "none",
    latency: str = "none",
    note: str = "",
) -> list[Technique]:
    if gain is None or (gain.requests < 1.005 and ttft_gain < 1.005):  # noqa: PLR2004 - half a percent
        return []
    throughput = None if gain.throughput is None else gain.throughput / devices
    requests = gain.requests
    return [Technique(name, requests, requests / devices, throughput, ttft_gain, quality, latency, flags, note)]


@dataclass(frozen=True, slots=True)
class _Now:
    """The plan as it is, which every technique is compared with."""

    question: Question
    memory: Memory
    load: WorkloadPlan
    timing: Timing

    def with_settings(self, **changes: object) -> _Gain | None:
        """Return what other settings give; None where they hold no request of the workload, or do not go together."""
        workload = self.load.workload
        try:
            settings: PlanSettings = replace(self.question.settings, **changes)  # type: ignore[arg-type]
            memory = plan_memory(self.question.shape, self.question.device, settings)
        except ConfigError:
            return None
        if workload.longest > memory.max_model_len or not self.load.full_shared:
            return None
        device = memory.tightest
        rounding = Rounding(device.shard.layout, workload, memory.num_new)
        held = max(0.0, device.capacity.num_blocks - rounding.shared_blocks) / rounding.full_own_blocks
        requests = held / self.load.full_shared
        return _Gain(requests, self.throughput_of(memory, requests))

    def throughput_of(self, memory: Memory, requests: float) -> float | None:
        """Return how many times as many requests a second the floors allow with that memory."""
        if self.timing.requests_per_s is None:
            return None
        concurrency = self.timing.concurrency
        if self.load.fills_memory:  # else something else ends it, and more room does not raise it
            concurrency *= requests
        concurrency = max(1.0, min(concurrency, self.question.settings.max_num_seqs or concurrency))
        rate = request_rate(
            self.question.shape,
            self.question.device,
            memory,
            self.load.workload,
            concurrency=concurrency,
            hit_share=self.load.hit_share,
        )
        return None if rate is None else rate / self.timing.requests_per_s

    def without_sharing(self) -> float | None:
        """Return the requests a second that the floors allow when no prefix is shared."""
        concurrency = max(1.0, self.load.reached.mean)
        question, workload = self.question, self.load.workload
        return request_rate(
            question.shape, question.device, self.memory, workload, concurrency=concurrency, hit_share=0
        )


def _smaller_cache(now: _Now) -> list[Technique]:
    found = []
    settings, memory, shape = now.question.settings, now.memory, now.question.shape
    for name, quality, latency in _CACHE_DTYPES:
        gain = now.with_settings(kv_cache_dtype=name)
        if memory.codec.name != name and gain is not None:
            flags = f"--kv-cache-dtype {name}"
            bits = replace(settings, kv_cache_dtype=name).codec(memory.dtype).bits_per_element(shape.head_dim)
            bits_now = 8 * memory.layout.bytes_per_token / _elements(memory)
            note = f"{bits:.3g} bit an element with its scales, of {bits_now:.3g}"
            found += _technique(f"KV in {name}", gain, quality=quality, latency=latency, flags=flags, note=note)
    return found


def _elements(memory: Memory) -> int:
    return sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in memory.layout.layers)


def _smaller_weights(now: _Now) -> list[Technique]:
    found = []
    for name, quality, latency in _WEIGHT_DTYPES:
        if find_weight_dtype(name).bits < now.memory.weight_dtype.bits:
            gain = now.with_settings(weight_dtype=name)
            flags = f"serve a checkpoint in {name} (--quantization)"
            found += _technique(f"weights in {name}", gain, quality=quality, latency=latency, flags=flags)
    return found


def _sharing(now: _Now) -> list[Technique]:
    question, load = now.question, now.load
    workload = load.workload
    if not workload.prefix_len:
        return []
    saved = load.hit_share
    prompt = round(workload.mean_prompt)
    whole = prefill_operations(question.shape, prompt)
    spared = 1 - prefill_operations(question.shape, prompt, round(saved * prompt)) / whole
    note = (
        f"part of this plan: {saved:.0%} of prompt tokens are found, and {spared:.0%} of the prefill's work is spared"
    )
    without, rate = now.without_sharing(), now.timing.requests_per_s
    gain = _Gain(load.full_shared / load.full, rate / without if without and rate else None)
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
    # Each device loads its own part over its own link (and from its own disk), as the break-even has it.
    loaded = memory.tightest.shard.layout.num_bytes_for(said)
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
        latency = f"{loaded / bandwidth * 1e3:,.0f} ms to load a conversation"
        found += _technique(name, _Gain(), flags=flags, ttft_gain=bound, latency=latency, note=f"{verdict}; {size}")
    return found


def _kept_shares(now: _Now) -> list[Technique]:
    """A share of older tokens is kept, of the layers that attend to all, and what is kept is shared as ever."""
    if not _packs(now):
        return []
    workload, load, device = now.load.workload, now.load, now.memory.tightest
    found = []
    for share, quality in _KEPT_SHARES:
        packed = partial(_packed_blocks, device.shard.layout, now.memory.num_new, share)
        shared = [packed(lengths, workload.prefix_len) for lengths in workload.lengths] if workload.prefix_len else [0]
        own = max(1.0, workload.mean(packed) - workload.prefix_share * sum(shared) / len(shared))
        held = max(0, device.capacity.num_blocks - max(shared)) / own
        requests = held / load.full_shared if load.full_shared else 1.0
        gain = _Gain(requests, now.throughput_of(now.memory, requests))
        name, flags = f"{share:.0%} of older tokens", f"--kv-keep {share}"
        note = f"of what is older than {CHUNK} to {2 * CHUNK} tokens, by layer and KV head; prefixes are shared"
        found += _technique(name, gain, quality=quality, flags=flags, note=note)
    return found


def _packs(now: _Now) -> bool:
    """Whether our own server takes ``kv_keep`` there, as far as a config tells."""
    memory, layers = now.memory, now.memory.layout.layers
    full = [group for group in memory.layout.groups if group.keeps.window is None]
    is_plain = memory.weight_dtype.bits >= 16 and not memory.codec.channel_tokens  # noqa: PLR2004 - not quantized
    is_alone = len(memory.layout.groups) == 1 or memory.codec == plain_codec(memory.codec.key_bytes(1))
    return (
        now.question.device.is_cpu
        and is_plain
        and is_alone
        and len(full) == 1
        and CHUNK % full[0].block_size == 0
        and all(layer.value_dim for layer in layers)
    )


def _packed_blocks(
    layout: CacheLayout, num_new: int | None, share: float, lengths: Lengths, num_first: int | None = None
) -> int:
    """Return the blocks of a request of which a share of older tokens is kept, where layers attend to all of them.

    Args:
        layout: of the KV.
        num_new: how many tokens a step writes; None for one.
        share: that is kept.
        lengths: of the request.
        num_first: count only what so many first tokens take of layers that attend to all, when it is at its end.
    """
    num_tokens, num_blocks = sum(lengths), layout.num_state_blocks if num_first is None else 0
    for group in layout.groups:
        if group.keeps.window is not None:
            num_blocks += group.num_blocks_for(num_tokens, num_new) if num_first is None else 0
        elif num_first is None:
            whole = group.num_blocks_for(num_tokens, num_new)
            num_blocks += min(whole, PACKED.num_blocks_for(num_tokens, num_new or 1, group.block_size, share))
        else:
            first = min(num_first, lengths.prompt - 1) // group.block_size
            packed = min(first * group.block_size // CHUNK, PACKED.num_packed(num_tokens)) * CHUNK // group.block_size
            num_blocks += first - packed + math.ceil(share * packed)
    return num_blocks


def _token_eviction(now: _Now) -> list[Technique]:
    """Fewer tokens of each request are kept; windows and states stay as they are, and nothing is shared."""
    load, device = now.load, now.memory.tightest
    workload, layout = load.workload, device.shard.layout
    if workload.mean_prompt + workload.mean_output < 1000:  # noqa: PLR2004 - short sequences have nothing to drop
        return []
    note = f"keeping {KEPT_SHARE:.0%} of the tokens; evicted requests share no prefix"
    quality = "depends on the task: what is dropped cannot be recalled"
    flags = "none in vLLM; SnapKV, H2O, StreamingLLM in research engines"
    num_new = now.memory.num_new
    kept = layout.num_state_blocks + workload.mean(
        lambda each: sum(_kept_blocks(group, sum(each), num_new) for group in layout.groups)
    )
    requests = device.capacity.num_blocks / kept / load.full_shared if load.full_shared else 1.0
    gain = _Gain(requests, now.throughput_of(now.memory, requests))
    return _technique("token eviction", gain, quality=quality, flags=flags, note=note)


def _kept_blocks(group: CacheGroup, num_tokens: int, num_new: int | None) -> int:
    """Return the blocks that a sequence keeps of a group; a window that is no longer than what is kept stays whole."""
    kept = max(1, round(KEPT_SHARE * num_tokens))
    if group.keeps.window is not None and group.keeps.window <= kept:
        return group.num_blocks_for(num_tokens, num_new)
    return group.num_blocks_for(kept)


def _more_devices(now: _Now) -> list[Technique]:
    question = now.question
    size = 2 * question.settings.tensor_parallel_size
    if question.device.is_cpu:
        return []
    gain = now.with_settings(tensor_parallel_size=size)
    note = "weights are held once for all of them"
    if size > question.shape.num_kv_heads or any(layer.value_dim == 0 for layer in question.shape.kv_layers):
        note += "; KV heads are repeated, so blocks do not shrink"
    flags = f"--tensor-parallel-size {size}"
    latency = "less: each reads its share of the weights; an exchange a layer is added"
    return _technique(f"{size} devices for each layer", gain, devices=2, latency=latency, flags=flags, note=note)


def _other_blocks(now: _Now) -> list[Technique]:
    found = []
    for size in (8, 32):
        if size < now.question.settings.block_size:
            gain = now.with_settings(block_size=size)
            latency = "longer tables"
            found += _technique(f"blocks of {size} tokens", gain, latency=latency, flags=f"--block-size {size}")
    return found
