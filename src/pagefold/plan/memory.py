"""Memory of a device: weights, what activations need, and what is left for blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError, DoesNotFitError
from pagefold.kv import CODECS
from pagefold.memory.capacity import Capacity, plan_capacity
from pagefold.memory.limit import MAX_ROPE_POSITIONS, Limit
from pagefold.plan.parallel import Shard, check_parallel, shards_of
from pagefold.plan.settings import DTYPES
from pagefold.plan.weights import WeightDtype, find_weight_dtype, stored_dtype

if TYPE_CHECKING:
    from pagefold.kv import CacheLayout, Codec
    from pagefold.plan.settings import PlanSettings
    from pagefold.plan.shape import ModelShape
    from pagefold.plan.tables import Device

__all__ = ["DeviceMemory", "Memory", "activation_bytes", "plan_memory"]

_CPU_BATCHED_TOKENS = 512
_FUSED_SLOTS = 4
"""What our own server's fused decoder takes the slots of a block in."""
_FUSED_DTYPES = "float32", "bfloat16"
"""What it computes in."""
_ROPE_BYTES = 2 * 4
"""Of each element of a head and position: a cosine and a sine, in float32."""
_GPU_BATCHED_TOKENS = 8192
_DEFAULT_NUM_SEQS = 256
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the memory of one device goes to.

    Attributes:
        shard: what it holds of the model. Our own server's tables of ropes are in ``capacity.weight_bytes`` too.
        usable_bytes: of its memory, for weights, activations and KV together.
        activation_bytes: set aside for what a step computes.
        capacity: what fits in the rest.
    """

    shard: Shard
    usable_bytes: int
    activation_bytes: int
    capacity: Capacity


@dataclass(frozen=True)
class Memory:
    """A model on its devices.

    Attributes:
        dtype: the type that the model computes in.
        weight_dtype: the type that the weights are stored in.
        codec: the codec that KV is stored in, but for layers that are skipped.
        layout: of the KV of the whole model, on all devices together.
        devices: one for each pipeline stage; those of a stage are alike.
        max_num_batched_tokens: tokens of a step.
        tensor_parallel_size: devices of a stage.
        num_new: how many tokens a step writes of one request, beside what windows keep, where the engine is ours; None
            for what any engine needs at least.
    """

    dtype: str
    weight_dtype: WeightDtype
    codec: Codec
    layout: CacheLayout
    devices: tuple[DeviceMemory, ...]
    max_num_batched_tokens: int
    tensor_parallel_size: int = 1
    num_new: int | None = None

    @property
    def tightest(self) -> DeviceMemory:
        """The device that binds: where the fewest requests fit."""
        return min(self.devices, key=lambda device: device.capacity.max_concurrency)

    @property
    def max_model_len(self) -> int:
        """The longest sequence that is served."""
        return self.tightest.capacity.max_model_len

    @property
    def max_concurrency(self) -> float:
        """Requests of ``max_model_len`` that fit at once."""
        return self.tightest.capacity.max_concurrency


def activation_bytes(
    shape: ModelShape, shard: Shard, settings: PlanSettings, num_tokens: int, element_bytes: int
) -> int:
    """Return what a step of so many tokens needs beside weights and KV.

    ``tokens * (2 * hidden + widest / TP) * element_bytes``: the residual stream, what a layer reads from it, and what
    lies between its products at their widest; and on the stage with the output layer ``sequences * vocabulary * 4`` for
    logits. Buffers that an engine keeps for itself (graphs, workspaces) are no part of it.
    """
    widest = max(layer.activation_width for layer in shard.layers) // settings.tensor_parallel_size
    needed = num_tokens * (2 * shape.hidden_size + widest) * element_bytes
    if shard.holds_output:
        needed += (settings.max_num_seqs or _DEFAULT_NUM_SEQS) * shape.vocab_size * _LOGIT_BYTES
    return needed


def plan_memory(shape: ModelShape, device: Device, settings: PlanSettings) -> Memory:
    """Decide what fits: the same sum as a server's before it loads weights (``capacity.py``), device by device.

    Raises:
        ConfigError: heads or layers cannot be cut as asked; ``max_model_len`` is beyond the model, or it has no such
            layers as are skipped.
        DoesNotFitError: it does not fit; with the bytes that are missing.
    """
    check_parallel(shape, settings)
    if device.is_cpu and settings.num_devices > 1:
        message = f"A CPU is one device, and {settings.num_devices} are asked for."
        raise ConfigError(message, remedy="Leave out tensor_parallel_size and pipeline_parallel_size.")
    dtype, weight_dtype = _dtypes(shape, device, settings)
    codec = settings.codec(dtype)
    shape = shape.storing(settings.kv_cache_dtype_skip_layers, settings.skip_codec(dtype))
    limit = Limit(shape.max_positions)
    if settings.streaming_llm is not None:
        shape = shape.with_sinks(settings.streaming_llm, settings.streaming_llm_sinks)
        limit = Limit(MAX_ROPE_POSITIONS if isinstance(settings.max_model_len, int) else shape.max_positions)
    if device.is_cpu and shape.served_limit is not None:
        limit = Limit(shape.served_limit, f"{shape.model_type}'s longrope")
    asked = settings.max_model_len
    max_len = min(asked, limit.length) if isinstance(asked, int) else limit.length
    element_bytes = CODECS[dtype].element_bits // 8
    num_tokens = settings.max_num_batched_tokens or (_CPU_BATCHED_TOKENS if device.is_cpu else _GPU_BATCHED_TOKENS)
    num_tokens = max(num_tokens, settings.max_num_seqs or 0)
    num_new = num_tokens if device.is_cpu else None  # beside what windows keep, our own engine writes so many
    is_fused = device.is_cpu and dtype in _FUSED_DTYPES and _is_fused(shape, settings)
    rope_bytes = shape.num_ropes * max_len * shape.head_dim * _ROPE_BYTES if is_fused else 0
    devices = []
    for shard in shards_of(shape, settings, weight_dtype, codec, max_len, element_bytes):
        reserve = 0 if device.is_cpu else activation_bytes(shape, shard, settings, num_tokens, element_bytes)
        usable = device.memory_bytes if device.is_cpu else int(device.memory_bytes * settings.gpu_memory_utilization)
        try:
            capacity = plan_capacity(
                layout=shard.layout,
                weight_bytes=shard.weight_bytes + rope_bytes,
                limit=limit,
                max_model_len=asked,
                kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
                max_num_seqs=settings.max_num_seqs or 128,
                available_bytes=usable - reserve,
                max_num_batched_tokens=num_new,
                is_ours=not device.is_cpu,
            )
        except DoesNotFitError as error:
            where = f" (stage {shard.stage})" if settings.pipeline_parallel_size > 1 else ""
            message = f"{shape.name} on {device.name}{where}: {error.message}"
            raise DoesNotFitError(message, missing_bytes=error.missing_bytes, remedy=error.remedy) from error
        devices.append(DeviceMemory(shard, usable, reserve, capacity))
    if asked == "auto":  # what fits on every stage
        longest = min(device.capacity.max_model_len for device in devices)
        devices = [_up_to(each, longest, num_new) for each in devices]
    layout = shape.layout(codec, block_size=settings.block_size, max_len=max_len, state_element_bytes=element_bytes)
    num_shards = settings.tensor_parallel_size
    return Memory(dtype, weight_dtype, codec, layout, tuple(devices), num_tokens, num_shards, num_new)


def _up_to(device: DeviceMemory, max_model_len: int, num_new: int | None) -> DeviceMemory:
    """Return the device with shorter sequences."""
    num_blocks = device.shard.layout.num_blocks_for(max_model_len, num_new)
    capacity = replace(device.capacity, max_model_len=max_model_len, num_blocks_per_request=num_blocks)
    return replace(device, capacity=capacity)


def _is_fused(shape: ModelShape, settings: PlanSettings) -> bool:
    """Whether our own server's fused decoder computes it on a CPU, in the dtypes that it computes in."""
    return shape.is_fused and settings.block_size % _FUSED_SLOTS == 0


def _natural_dtype(shape: ModelShape, device: Device, settings: PlanSettings) -> str:
    """Return what ``auto`` is: on a CPU what our own server takes, on an accelerator 16 bit."""
    if device.is_cpu:
        return "bfloat16" if _is_fused(shape, settings) and device.multiplies_bfloat16 else "float32"
    return shape.dtype if shape.dtype in DTYPES and shape.dtype not in {"float32", "float64"} else "bfloat16"


def _dtypes(shape: ModelShape, device: Device, settings: PlanSettings) -> tuple[str, WeightDtype]:
    """Return what is computed in, and how the weights are stored."""
    dtype = {"half": "float16"}.get(settings.dtype, settings.dtype)
    if dtype == "auto":
        dtype = _natural_dtype(shape, device, settings)
    if settings.weight_dtype != "auto":
        return dtype, find_weight_dtype(settings.weight_dtype)
    if shape.quantization and not device.is_cpu:
        return dtype, stored_dtype(shape.quantization)
    return dtype, find_weight_dtype(DTYPES[dtype])
