"""Memory of a device: weights, what an engine takes beside them, and what is left for blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError, DoesNotFitError
from pagefold.kv import CODECS
from pagefold.memory.capacity import Capacity, plan_capacity
from pagefold.memory.limit import MAX_ROPE_POSITIONS, Limit
from pagefold.plan.drafts import NO_DRAFTS, Beside, Drafts, Part, plan_drafts
from pagefold.plan.forms import Forms
from pagefold.plan.parallel import Shard, check_parallel, shards_of
from pagefold.plan.reserve import CONTEXT_BYTES, Profiling, Reserve, Step
from pagefold.plan.settings import DTYPES
from pagefold.plan.span import Span
from pagefold.plan.weights import WeightDtype, as_in_file, find_weight_dtype, stored_dtype

if TYPE_CHECKING:
    from pagefold.kv import CacheLayout, Codec
    from pagefold.plan.engine import Engine
    from pagefold.plan.settings import PlanSettings
    from pagefold.plan.shape import ModelShape
    from pagefold.plan.tables import Device

__all__ = ["DeviceMemory", "Memory", "plan_memory", "tokens_in"]

_FUSED_SLOTS = 4
"""What our own server's fused decoder takes the slots of a block in."""
_FUSED_DTYPES = "float32", "bfloat16"
"""What it computes in."""
_WIDE_EXPERTS = ("B200", "MI300X")
"""Devices whose kernels of MXFP4 want experts of widths of 256."""
_ROPE_BYTES = 2 * 4
"""Of each element of a head and position: a cosine and a sine, in float32."""
_ROUNDED, _QUANTIZED, _ESTIMATED = 0.006, 0.02, 0.05
"""By which share weights may be more: an allocator rounds, formats have scales and padding of their own, and a family
whose parameters are not counted may have others."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the memory of one device goes to.

    Attributes:
        shard: what it holds of the model. What lies beside the weights is in ``capacity.weight_bytes`` too.
        usable_bytes: of its memory, for all that an engine counts.
        reserve: what it takes beside weights and KV.
        capacity: what fits in the rest; at best, where nothing is likely to.
        weights: how much they may be.
        kv: how much KV may get.
        free_bytes: of its memory, beside all that an engine takes, graphs included where they lie beside its share.
        fits: whether it fits even where all is as unfavourable as it may be.
        drafts: what drafts take of it.
    """

    shard: Shard
    usable_bytes: int
    reserve: Reserve
    capacity: Capacity
    weights: Span
    kv: Span
    free_bytes: int
    fits: bool
    drafts: Drafts = NO_DRAFTS

    @property
    def activation_bytes(self) -> int:
        """What is set aside for what a step computes."""
        return self.reserve.activations.likely

    @property
    def spans(self) -> dict[str, Span]:
        """How much each part may be, by the names that starts' logs are read by."""
        return {
            "weights": self.weights,
            "activations": self.reserve.activations,
            "outside": self.reserve.outside,
            "graphs": self.reserve.graphs,
            "kv": self.kv,
        }


@dataclass(frozen=True)
class Memory:
    """A model on its devices.

    Attributes:
        engine: whose memory it is.
        forms: how it stores the model.
        utilization: share of a device's memory that it takes.
        dtype: the type that the model computes in.
        weight_dtype: the type that the weights are stored in.
        codec: the codec that KV is stored in, but for layers that are skipped.
        layout: of the KV of the whole model, on all devices together.
        devices: one for each pipeline stage; those of a stage are alike.
        max_num_batched_tokens: tokens of a step.
        max_num_seqs: sequences that run at once, where that ends it before memory does; None where nothing does.
        tensor_parallel_size: devices of a stage.
        num_new: how many tokens a step writes of one request, beside what windows keep.
    """

    engine: Engine
    forms: Forms
    utilization: float
    dtype: str
    weight_dtype: WeightDtype
    codec: Codec
    layout: CacheLayout
    devices: tuple[DeviceMemory, ...]
    max_num_batched_tokens: int
    max_num_seqs: int | None
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

    @property
    def concurrency_ends(self) -> tuple[float, float]:
        """The fewest and the most requests of ``max_model_len`` that may fit at once."""
        ends = [
            [
                device.shard.layout.num_blocks(num_bytes - device.capacity.residual_bytes)
                / device.capacity.num_blocks_per_request
                for num_bytes in (device.kv.low, device.kv.high)
            ]
            for device in self.devices
        ]
        return min(low for low, _ in ends), min(high for _, high in ends)

    @property
    def fits(self) -> bool:
        """Whether it fits on every device even where all is as unfavourable as it may be."""
        return all(device.fits for device in self.devices)

    @property
    def keeps_all_alike(self) -> bool:
        """Whether embeddings and norms are stored as matrices are."""
        return not self.forms.keeps_16_bit or not self.weight_dtype.is_quantized

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks of the device that binds hold in every layer."""
        return tokens_in(self.tightest.shard.layout, self.tightest.capacity.num_blocks)


def tokens_in(layout: CacheLayout, num_blocks: int) -> int:
    """Return how many tokens so many blocks hold in every layer: each group has blocks of its own of a token.

    The bytes of a token are no measure of it, where groups are padded.
    """
    sizes = {group.block_size for group in layout.groups}
    if len(sizes) == 1:
        return num_blocks // len(layout.groups) * layout.block_size
    return int(num_blocks / sum(1 / group.block_size for group in layout.groups))


def plan_memory(shape: ModelShape, device: Device, settings: PlanSettings) -> Memory:
    """Decide what fits: the same sum as a server's before it loads weights (``capacity.py``), device by device.

    Raises:
        ConfigError: heads or layers cannot be cut as asked; ``max_model_len`` is beyond the model, or it has no such
            layers as are skipped.
        DoesNotFitError: it does not fit even where all is as favourable as it may be; with the bytes that are missing
            where all is as is likely.
    """
    check_parallel(shape, settings)
    if device.is_cpu and settings.num_devices > 1:
        message = f"A CPU is one device, and {settings.num_devices} are asked for."
        raise ConfigError(message, remedy="Leave out tensor_parallel_size and pipeline_parallel_size.")
    engine, cut = settings.engine_on(device), _cut(shape, device, settings)
    shape, asked = cut.shape, settings.max_model_len
    num_tokens = max(settings.max_num_batched_tokens or engine.num_batched_tokens(device), settings.max_num_seqs or 0)
    num_seqs = settings.max_num_seqs or engine.num_seqs(device)
    if not engine.is_ours:  # vLLM's default is no more than a step has tokens
        num_seqs = min(num_seqs, num_tokens)
    profiling = Profiling(engine, shape, device, settings, Step(num_tokens, num_seqs, cut.forms.element_bytes))
    drafts = plan_drafts(shape, device, settings, Beside(cut.forms.max_len, num_tokens), _only_part)
    fit = _Fit(shape, device, settings, cut.limit, num_tokens, num_seqs, drafts)
    devices = [fit.on(part.shard, part.weights, profiling.reserve(part.shard)) for part in cut.parts]
    if asked == "auto":  # what fits on every stage
        longest = min(each.capacity.max_model_len for each in devices)
        devices = [_up_to(each, longest, num_tokens) for each in devices]
    layout = cut.forms.layout(shape.kv_layers, shape.layers, 1)
    assert layout is not None, "checked above"
    bound = settings.max_num_seqs if engine.is_ours else num_seqs
    return Memory(
        engine=engine,
        forms=cut.forms,
        utilization=settings.utilization_on(device),
        dtype=cut.dtype,
        weight_dtype=cut.forms.weights,
        codec=cut.forms.codec,
        layout=layout,
        devices=tuple(devices),
        max_num_batched_tokens=num_tokens,
        max_num_seqs=bound,
        tensor_parallel_size=settings.tensor_parallel_size,
        num_new=num_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """A model as an engine stores it, cut for its devices.

    Attributes:
        shape: the model, with the windows and codecs that are asked for.
        limit: of the length of a sequence.
        dtype: the type that it computes in.
        forms: how it is stored.
        parts: of each device.
    """

    shape: ModelShape
    limit: Limit
    dtype: str
    forms: Forms
    parts: tuple[Part, ...]


def _cut(shape: ModelShape, device: Device, settings: PlanSettings) -> _Cut:
    """Cut a model for its devices."""
    engine = settings.engine_on(device)
    dtype, weight_dtype = _dtypes(shape, device, settings)
    shape = shape.storing(settings.kv_cache_dtype_skip_layers, settings.skip_codec(dtype))
    limit = Limit(shape.max_positions)
    if settings.streaming_llm is not None:
        shape = shape.with_sinks(settings.streaming_llm, settings.streaming_llm_sinks)
        limit = Limit(MAX_ROPE_POSITIONS if isinstance(settings.max_model_len, int) else shape.max_positions)
    if device.is_cpu and shape.served_limit is not None:
        limit = Limit(shape.served_limit, f"{shape.model_type}'s longrope")
    asked = settings.max_model_len
    max_len = min(asked, limit.length) if isinstance(asked, int) else limit.length
    forms = Forms(
        engine=engine,
        weights=weight_dtype,
        codec=settings.codec(dtype),
        block_size=settings.block_size,
        max_len=max_len,
        element_bytes=CODECS[dtype].element_bits // 8,
        expert_multiple=256 if device.name.startswith(_WIDE_EXPERTS) else 128,
    )
    is_fused = device.is_cpu and dtype in _FUSED_DTYPES and _is_fused(shape, settings)
    rope_bytes = shape.num_ropes * max_len * shape.head_dim * _ROPE_BYTES if is_fused else 0
    is_exact = device.is_cpu or engine.is_ours
    parts = tuple(
        Part(shard, _weights(shape, shard, weight_dtype, rope_bytes, is_exact=is_exact))
        for shard in shards_of(shape, settings, forms)
    )
    return _Cut(shape, limit, dtype, forms, parts)


def _only_part(shape: ModelShape, device: Device, settings: PlanSettings) -> Part:
    """Return a model on the only device that it has."""
    (part,) = _cut(shape, device, settings).parts
    return part


@dataclass(frozen=True, slots=True)
class _Fit:
    """What is asked of each device of a replica.

    Attributes:
        shape, device, settings: of the plan.
        limit: of the length of a sequence.
        num_tokens: of a step.
        num_seqs: sequences at once.
        drafts: what drafts take.
    """

    shape: ModelShape
    device: Device
    settings: PlanSettings
    limit: Limit
    num_tokens: int
    num_seqs: int
    drafts: Drafts

    def on(self, shard: Shard, weights: Span, reserve: Reserve) -> DeviceMemory:
        """Return what fits of a shard.

        Raises:
            DoesNotFitError: even where all is as favourable as it may be.
        """
        low, likely, high = self._usable()
        engine = self.settings.engine_on(self.device)
        taken = reserve.activations + reserve.outside
        if engine.graphs_in_budget:
            taken += reserve.graphs
        is_likely = True
        try:
            capacity = self._capacity(shard, weights.likely, likely - taken.likely)
        except DoesNotFitError as error:
            capacity_then = self._at_best(shard, weights.low, high - taken.low)
            if capacity_then is None or taken.low == taken.high:
                raise self._named(shard, error) from error
            capacity, is_likely = replace(capacity_then, weight_bytes=weights.likely), False
        budget = capacity.kv_budget_bytes
        given = self.settings.kv_cache_memory_bytes
        ends = [
            budget if given is not None or self.device.is_cpu else max(0, usable - weight_bytes - reserved)
            for usable, weight_bytes, reserved in (
                (low, weights.high, taken.high),
                (high, weights.low, taken.low),
            )
        ]
        kv = Span(min(ends[0], budget), budget, max(ends[1], budget))
        beside = 0 if engine.graphs_in_budget else reserve.graphs.likely
        free = max(0, self.device.memory_bytes - likely - beside) if not self.device.is_cpu else 0
        fits = is_likely and self._fits(shard, capacity, low - weights.high - taken.high, reserve)
        return DeviceMemory(shard, likely, reserve, capacity, weights, kv, free, fits, self.drafts)

    def _usable(self) -> tuple[int, int, int]:
        """Return how much of the device's memory the engine may take: at least, likely and at most."""
        memory = self.device.memory_bytes
        if self.device.is_cpu:
            return memory, memory, memory
        ends = self.device.memory_ends or (memory, memory)
        share = self.settings.utilization_on(self.device)
        of_all = [int(each * share) for each in (ends[0], memory, ends[1])]
        if self.settings.kv_cache_memory_bytes is not None and not self.settings.engine_on(self.device).is_ours:
            of_all = [each - CONTEXT_BYTES for each in (ends[0], memory, ends[1])]  # vLLM asks for no share then
        return of_all[0], of_all[1], of_all[2]

    def _capacity(self, shard: Shard, weight_bytes: int, available: int) -> Capacity:
        return plan_capacity(
            layout=shard.layout,
            weight_bytes=weight_bytes,
            limit=self.limit,
            max_model_len=self.settings.max_model_len,
            kv_cache_memory_bytes=self.settings.kv_cache_memory_bytes,
            max_num_seqs=self.num_seqs,
            available_bytes=available - self.drafts.num_bytes,
            max_num_batched_tokens=self.num_tokens,
            is_ours=not self.device.is_cpu,
            draft=self.drafts.share,
        )

    def _at_best(self, shard: Shard, weight_bytes: int, available: int) -> Capacity | None:
        """Return what fits where all is as favourable as it may be; None where nothing does."""
        try:
            return self._capacity(shard, weight_bytes, available)
        except DoesNotFitError:
            return None

    def _fits(self, shard: Shard, capacity: Capacity, left: int, reserve: Reserve) -> bool:
        """Whether a request fits in what is left at least, and what lies beside the engine's share fits there."""
        if self.device.is_cpu:
            return True
        needed = capacity.kv_budget_bytes
        if self.settings.kv_cache_memory_bytes is None:
            length = capacity.max_model_len if self.settings.max_model_len != "auto" else 2
            needed = shard.layout.num_blocks_for(length, self.num_tokens) * shard.layout.bytes_per_block
            needed += capacity.residual_bytes
        engine = self.settings.engine_on(self.device)
        graphs = 0 if engine.graphs_in_budget else reserve.graphs.high
        if self.settings.kv_cache_memory_bytes is not None and not engine.is_ours:
            return left >= needed + graphs  # no share is asked for: the context is off already
        beside = CONTEXT_BYTES + graphs
        memory = (self.device.memory_ends or (self.device.memory_bytes, 0))[0]
        return left >= needed and (engine.is_ours or memory - self._usable()[0] >= beside)

    def _named(self, shard: Shard, error: DoesNotFitError) -> DoesNotFitError:
        where = f" (stage {shard.stage})" if self.settings.pipeline_parallel_size > 1 else ""
        message = f"{self.shape.name} on {self.device.name}{where}: {error.message}"
        return DoesNotFitError(message, missing_bytes=error.missing_bytes, remedy=error.remedy)


def _weights(shape: ModelShape, shard: Shard, stored: WeightDtype, rope_bytes: int, *, is_exact: bool) -> Span:
    """Return how much the weights of a shard may be, with what lies beside them."""
    likely = shard.weight_bytes + shard.extra_bytes + rope_bytes
    if is_exact:
        return Span.exactly(likely)
    more = _QUANTIZED if stored.is_quantized else _ROUNDED
    if shape.is_estimate and shape.exact_parameters is None:
        more = _ESTIMATED
    return Span(round(likely * (1 - more)), likely, round(likely * (1 + more)))


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
    if shape.blocks is not None and device.is_cpu and dtype in _FUSED_DTYPES and _is_fused(shape, settings):
        return dtype, as_in_file(shape.blocks, shape.num_parameters, find_weight_dtype(DTYPES[dtype]))
    if shape.quantization and not device.is_cpu:
        return dtype, stored_dtype(shape.quantization)
    return dtype, find_weight_dtype(DTYPES[dtype])
