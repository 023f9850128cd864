"""Time of a workload on a device: floors of prefill and decode, what binds, and the throughput that they bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pagefold.plan.floors import Floor, decode_operations, prefill_operations, share_of_touched_experts
from pagefold.plan.weights import AS_IN_FILE

if TYPE_CHECKING:
    from pagefold.plan.memory import Memory
    from pagefold.plan.shape import ModelShape
    from pagefold.plan.tables import Device
    from pagefold.plan.workload import Workload

__all__ = ["Timing", "peaks", "read_weight_bytes", "request_rate", "time_workload"]

_NUDGE = 1.1
_ANY_NUMBER = 1000
_MEMORY_BINDS = 1.5


@dataclass(frozen=True, slots=True)
class Timing:
    """Floors of one replica. None where the device's peaks are not known.

    Attributes:
        prefill: of a prompt of mean length, on all devices of the replica together.
        decode: of one step with ``concurrency`` sequences of mean length.
        decode_alone: of one step with a single such sequence.
        requests_per_s: at most, with ``concurrency`` requests at once.
        output_tokens_per_s: output tokens a second.
        binds: what to have more of. ``memory`` where half as many requests a second again would be possible with any
            number of them at once; else what a tenth more of would help the most.
        concurrency: sequences at once.
    """

    prefill: Floor
    decode: Floor
    decode_alone: Floor
    requests_per_s: float | None
    output_tokens_per_s: float | None
    binds: Literal["memory", "compute", "bandwidth"] | None
    concurrency: float


def read_weight_bytes(shape: ModelShape, memory: Memory, num_tokens: float) -> float:
    """Return the bytes of weights that a step of so many tokens reads from one device of each stage.

    The embedding table is not read, but for a few rows, and of experts only those in use.
    """
    total = sum(device.shard.weight_bytes for device in memory.devices)
    stored = memory.weight_dtype
    num_kept = 0 if memory.keeps_all_alike else shape.embedding_parameters
    unread = 0.0
    if shape.head_parameters:
        unread = float(stored.num_bytes(shape.embedding_parameters, num_kept=num_kept))
    for layer in shape.layers:
        if layer.active_share < 1:
            idle = 1 - share_of_touched_experts(layer.active_share, num_tokens)
            size = memory.tensor_parallel_size
            unread += idle * memory.forms.expert_bytes(layer, shape.hidden_size, size) * size
    return max(0.0, total - unread / memory.tensor_parallel_size)


def time_workload(  # noqa: PLR0913 - what time depends on
    shape: ModelShape, device: Device, memory: Memory, workload: Workload, *, concurrency: float, hit_share: float = 0.0
) -> Timing:
    """Return the floors of a workload.

    Args:
        shape: of the model.
        device: the device that the model runs on.
        memory: how it lies there.
        workload: what is asked of it.
        concurrency: requests at once.
        hit_share: share of a prompt's tokens that are found in the cache.
    """

    def rate_on(device: Device, concurrency: float) -> float | None:
        return request_rate(shape, device, memory, workload, concurrency=concurrency, hit_share=hit_share)

    rate = rate_on(device, concurrency)
    context = workload.mean_prompt + workload.mean_output / 2
    prompt, cached = round(workload.mean_prompt), round(hit_share * workload.mean_prompt)
    binds: Literal["memory", "compute", "bandwidth"] | None = None
    if rate is not None:
        unbounded = rate_on(device, _ANY_NUMBER * concurrency)
        more: dict[Literal["memory", "compute", "bandwidth"], float | None] = {
            "compute": rate_on(_with(device, flops=_NUDGE), concurrency),
            "bandwidth": rate_on(_with(device, bandwidth=_NUDGE), concurrency),
        }
        _, binds = max((rate or 0.0, what) for what, rate in more.items())
        if unbounded is not None and unbounded > _MEMORY_BINDS * rate:
            binds = "memory"
    return Timing(
        prefill=_prefill(shape, device, memory, prompt, cached),
        decode=_decode(shape, device, memory, context, concurrency),
        decode_alone=_decode(shape, device, memory, context, 1),
        requests_per_s=rate,
        output_tokens_per_s=None if rate is None else rate * workload.mean_output,
        binds=binds,
        concurrency=concurrency,
    )


def _with(device: Device, *, flops: float = 1.0, bandwidth: float = 1.0) -> Device:
    return replace(
        device,
        flops_16=device.flops_16 and device.flops_16 * flops,
        flops_8=device.flops_8 and device.flops_8 * flops,
        flops_32=device.flops_32 and device.flops_32 * flops,
        bandwidth=device.bandwidth and device.bandwidth * bandwidth,
    )


def peaks(device: Device, memory: Memory) -> tuple[float | None, float | None]:
    """Return (operations, bytes) a second of one device."""
    name = memory.weight_dtype.name
    widens = device.is_cpu and name == "int8"  # our own decoder multiplies such weights as float32
    flops = device.flops_16
    if name in {"fp8", "int8", "w8a8_int8", AS_IN_FILE} and not widens:
        flops = device.flops_8 or flops
    elif memory.dtype in {"float32", "float64"} or widens:
        flops = device.flops_32 or flops
    return flops, device.bandwidth


def _prefill(shape: ModelShape, device: Device, memory: Memory, num_tokens: int, num_cached: int) -> Floor:
    """The stages of a pipeline work on a prompt one after another, the devices of a stage together."""
    flops, bandwidth = peaks(device, memory)
    size = memory.tensor_parallel_size
    operations = prefill_operations(shape, num_tokens, num_cached) / size
    read = read_weight_bytes(shape, memory, num_tokens) + memory.layout.num_bytes_for(num_tokens) / size
    return Floor.of(operations, read, flops=flops, bandwidth=bandwidth)


def _decode(shape: ModelShape, device: Device, memory: Memory, context: float, num_sequences: float) -> Floor:
    flops, bandwidth = peaks(device, memory)
    size = memory.tensor_parallel_size
    kv_bytes = sum(device.shard.layout.num_bytes_for(round(context)) for device in memory.devices)
    read = read_weight_bytes(shape, memory, num_sequences) + num_sequences * kv_bytes
    operations = num_sequences * decode_operations(shape, context) / size
    return Floor.of(operations, read, flops=flops, bandwidth=bandwidth)


def request_rate(  # noqa: PLR0913 - what time depends on
    shape: ModelShape, device: Device, memory: Memory, workload: Workload, *, concurrency: float, hit_share: float
) -> float | None:
    """Return requests a second, at most; None where the device's peaks are not known. Two things bound them.

    The device: operations of some requests hide behind the memory traffic of others, so it is the longer of the two; a
    step reads the weights once for all that it computes, prompts and outputs together (no more tokens than
    ``max_num_batched_tokens``, and of each request no more than one of output); the stages of a pipeline work at the
    same time, on different requests. And each request itself: its prefill and its decode steps come one after another,
    none faster than alone.
    """
    flops, bandwidth = peaks(device, memory)
    if flops is None or bandwidth is None:
        return None
    prompt = round(workload.mean_prompt)
    computed = max(1, prompt - round(hit_share * prompt))
    decoded = workload.mean_output - 1  # prefill brings the first
    context = workload.mean_prompt + workload.mean_output / 2
    kv_bytes = sum(device.shard.layout.num_bytes_for(round(context)) for device in memory.devices)

    num_steps = max(decoded / concurrency, (computed + decoded) / memory.max_num_batched_tokens)
    read = num_steps * read_weight_bytes(shape, memory, (computed + decoded) / num_steps) + decoded * kv_bytes
    operations = prefill_operations(shape, prompt, prompt - computed) + decoded * decode_operations(shape, context)
    busy = max(operations / memory.tensor_parallel_size / flops, read / bandwidth) / len(memory.devices)

    prefill = _prefill(shape, device, memory, prompt, prompt - computed).seconds
    step = _decode(shape, device, memory, context, 1).seconds
    assert prefill is not None
    assert step is not None
    return 1 / max(busy, (prefill + decoded * step) / concurrency)
