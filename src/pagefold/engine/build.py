"""From a config to an engine: resolve the model, plan the memory, and only then load weights."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pagefold.config import DROPPED_BITS, available_cpus, available_memory_bytes, cache_dir
from pagefold.engine.blocks import allocate_blocks
from pagefold.engine.blueprint import Blueprint
from pagefold.engine.engine import Engine, ModelLimits
from pagefold.engine.on_card import bound_use_of, build_runner, capacity_on_card, measure_link, ran_out
from pagefold.engine.overlapped import OverlappedEngine
from pagefold.engine.verdicts import check_quality
from pagefold.errors import ConfigError, DoesNotFitError
from pagefold.events import CacheConfigured, Emit, ignore
from pagefold.files.json_object import read_json_object
from pagefold.kv import (
    CODECS,
    KV_CACHE_DTYPES,
    Arbiter,
    HostTier,
    KVCore,
    KVGeometry,
    LinkModel,
    Namespace,
    PinLimits,
    Residuals,
    SlowTiers,
    make_policy,
)
from pagefold.memory.capacity import Capacity, human_bytes, plan_capacity
from pagefold.scheduler import SCHEDULING_POLICIES, Scheduler, SchedulerLimits, Tiering

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pagefold.config import EngineConfig
    from pagefold.hub.progress import Progress
    from pagefold.runner.codecs.constants import CodecConstants
    from pagefold.runner.models import ModelSpec
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import Decoder, OnQueries
    from pagefold.store import BlockStore, HostArena
    from pagefold.store.card_arena import CardArena
    from pagefold.structured.compiler import GrammarCompiler
    from pagefold.tokenizer import Tokenizer

__all__ = ["build_engine", "plan_engine"]

_log = logging.getLogger(__name__)

_NOTHING = Capacity(0, 0, 0, 1, 0, 1)

_UNTRIED_LINK = 1e-3, 1e9
"""Latency and bandwidth, in seconds and bytes a second, of a tier that could not be tried yet."""

_SCALE_BYTES = 4
"""Of a scale and a zero point of one channel."""

_MIN_STAGING_BLOCKS, _MAX_STAGING_BYTES, _STAGING_SHARE = 64, 2**30, 16
"""Host memory that slower tiers get if none is asked for: a share of what is free, within bounds."""


def plan_engine(config: EngineConfig, *, progress: Progress | None = None) -> Blueprint:
    """Resolve the model, read its config and headers, and decide what fits. Loads no weights.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError, BudgetTooSmallError: with what was wrong and what to do.
    """
    from pagefold.hub.catalog import resolve  # noqa: PLC0415 - heavy rooms are entered when they are needed
    from pagefold.hub.progress import silent  # noqa: PLC0415

    folder = resolve(config.model, cache_dir(), progress=progress or silent)
    import torch  # noqa: PLC0415

    from pagefold.runner.attention import choose_backend  # noqa: PLC0415
    from pagefold.runner.card import check_attention, choose_device, find_card  # noqa: PLC0415
    from pagefold.runner.models import inspect_model  # noqa: PLC0415

    card = None if config.device == "cpu" else find_card()
    device = choose_device(config.device, card)
    spec = inspect_model(folder)
    dtype: torch.dtype = getattr(torch, _dtype(config, device, spec))
    check_attention(config, device, dtype, spec.head_dim)
    geometry = _geometry(config, spec, dtype)
    is_fused = _is_fused(config, spec, dtype, device)
    if device == "cuda":
        assert card is not None, "it was chosen"
        _check_on_card(config)
        blueprint = Blueprint(config, spec, geometry, _NOTHING, dtype, is_fused, device, card)
        host_bytes = _pinned_bytes(config, geometry)
        return replace(blueprint, capacity=capacity_on_card(blueprint, bound_use_of(blueprint), host_bytes))
    available_bytes = available_memory_bytes()
    capacity = plan_capacity(
        layout=geometry.layout,
        weight_bytes=spec.num_parameters * (1 if config.quantization else dtype.itemsize),
        model_max_len=spec.max_exact_len,
        model_limit=spec.limit,
        max_model_len=config.max_model_len,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        max_num_seqs=config.max_num_seqs,
        available_bytes=available_bytes,
        host_bytes=_host_bytes(config, geometry, available_bytes),
        allow_streaming=config.allow_streaming,
    )
    choose_backend(
        config.attention_backend,
        dtype,
        block_size=config.block_size,
        head_dim=spec.head_dim,
        codes_a_byte=_codes_a_byte(geometry),
    )
    return Blueprint(config, spec, geometry, capacity, dtype, is_fused)


def _check_on_card(config: EngineConfig) -> None:
    """Refuse what only a CPU can do yet.

    Raises:
        ConfigError: with what to leave out.
    """
    if config.allow_streaming:
        msg = "allow_streaming is set, and a card does not read the host's memory yet."
        raise ConfigError(msg, remedy="Leave it out, or use device=cpu.")


def _dtype(config: EngineConfig, device: str, spec: ModelSpec) -> str:
    """Return the dtype that is computed in: what was asked, or what the device is good at."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cpu":
        return "float32"
    raw = read_json_object(spec.folder / "config.json")
    return "float16" if raw.get("dtype", raw.get("torch_dtype")) == "float16" else "bfloat16"


def _pinned_bytes(config: EngineConfig, geometry: KVGeometry) -> int:
    """Return how much of the host's memory is pinned for a card's blocks.

    Raises:
        DoesNotFitError: the host has not so much.
    """
    available_bytes = available_memory_bytes()
    host_bytes = _host_bytes(config, geometry, available_bytes)
    if host_bytes > available_bytes:
        msg = f"kv_offloading_size is {human_bytes(host_bytes)}, and {human_bytes(available_bytes)} of memory are free."
        raise DoesNotFitError(msg, missing_bytes=host_bytes - available_bytes, remedy="Give less: it is pinned.")
    return host_bytes


def _geometry(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> KVGeometry:
    """Return what a block holds.

    Raises:
        ConfigError: the codec cannot pack the model's heads, or layers are to be skipped that it has not.
    """
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype.itemsize, config.block_size
    unknown = [layer for layer in config.kv_cache_dtype_skip_layers if not 0 <= layer < spec.num_layers]
    if unknown:
        msg = f"kv_cache_dtype_skip_layers has {unknown[0]}, and {spec.folder.name} has {spec.num_layers} layers."
        raise ConfigError(msg, remedy=f"Give layers between 0 and {spec.num_layers - 1}.")
    name = KV_CACHE_DTYPES.get(config.kv_cache_dtype)
    if name is None or f"torch.{name}" == str(dtype):
        return KVGeometry(*shape)
    from pagefold.runner.codecs import CELL_CODECS  # noqa: PLC0415 - torch comes with it

    wanted = CELL_CODECS[name].cannot_pack(spec.head_dim)
    if wanted:
        msg = f"{name} cannot store heads of {spec.head_dim} numbers, which {spec.folder.name} has."
        raise ConfigError(msg, remedy=f"It takes {wanted}; int8_per_token_head takes any.")
    skipped = tuple(sorted(set(config.kv_cache_dtype_skip_layers)))
    if CELL_CODECS[name].seals:
        _check_sealing(config, spec)
    skip_codec = CODECS["bfloat16" if str(dtype) == "torch.bfloat16" else "float16"]
    return KVGeometry(*shape, CODECS[name], skipped, skip_codec if skipped else None)


def _check_sealing(config: EngineConfig, spec: ModelSpec) -> None:
    """Refuse what cannot be where blocks are sealed when they are full.

    Raises:
        ConfigError: with what to leave out.
    """
    if config.kv_cache_dtype_skip_layers:
        msg = f"kv_cache_dtype_skip_layers is set, and {config.kv_cache_dtype} seals blocks in all layers at once."
        raise ConfigError(msg, remedy="Leave it out, or use another kv_cache_dtype.")
    if config.allow_streaming:
        msg = f"allow_streaming is set, and {config.kv_cache_dtype} does not stream yet."
        raise ConfigError(msg, remedy="Leave one of them out.")
    if _SCALE_BYTES * spec.head_dim % config.block_size:
        msg = f"block_size is {config.block_size}, and {config.kv_cache_dtype} shares scales among its tokens."
        raise ConfigError(msg, remedy=f"Use a power of two that divides {_SCALE_BYTES * spec.head_dim}, as 16 or 32.")


def _codes_a_byte(geometry: KVGeometry) -> int:
    from pagefold.runner.codecs import CELL_CODECS  # noqa: PLC0415 - torch comes with it

    return 1 if geometry.codec is None else CELL_CODECS[geometry.codec.name].codes_a_byte


def _host_bytes(config: EngineConfig, geometry: KVGeometry, available_bytes: int) -> int:
    """Return how much of the host's memory is for blocks: what was asked, or a little if all go through it."""
    if config.kv_offloading_size or not config.has_slow_tiers:
        return int(config.kv_offloading_size * 2**30)
    least = _MIN_STAGING_BLOCKS * geometry.bytes_per_block
    return max(least, min(_MAX_STAGING_BYTES, available_bytes // _STAGING_SHARE))


def _is_fused(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str = "cpu") -> bool:
    """Decide who computes the layers.

    Raises:
        ConfigError: the fused decoder, or what only it gives, was asked for and cannot be had.
    """
    why_not = spec.not_fused
    if device != "cpu":
        why_not = f"device={device} (it computes on CPUs)"
    if not why_not and str(dtype) != "torch.float32":
        why_not = f"{dtype} (it computes in float32)"
    if not why_not and (config.block_size % 4 or spec.head_dim % 8):
        why_not = f"block_size {config.block_size} with head_dim {spec.head_dim}"
    if not why_not and config.attention_backend == "reference":
        why_not = "attention_backend=reference"
    if why_not and config.model_impl == "pagefold":
        msg = f"The fused decoder does not compute {spec.folder.name}: not {why_not}."
        raise ConfigError(msg, remedy="Use model_impl=auto or transformers.")
    is_fused = not why_not and config.model_impl != "transformers"
    wanted = "batch_invariant" if config.batch_invariant else "quantization" if config.quantization else ""
    if wanted and not is_fused:
        why_not = why_not or "model_impl=transformers"
        msg = f"{wanted} takes the fused decoder, which {spec.folder.name} cannot have: not {why_not}."
        raise ConfigError(msg, remedy=f"Leave {wanted} out, or change that.")
    return is_fused


def build_engine(
    blueprint: Blueprint,
    *,
    emit: Emit = ignore,
    say: Callable[[str], None] = _log.info,
    stores: Sequence[BlockStore] = (),
) -> Engine:
    """Load weights, allocate blocks, warm up, and return an engine that is ready.

    Args:
        blueprint: what was decided.
        emit: where events go.
        say: takes the lines that a start prints.
        stores: slow tiers of one's own, behind those of the config. There must be a host tier then.

    Raises:
        UnsupportedModelError: the model calls its attention in a way that would be computed wrongly.
        ConfigError: a slow tier cannot be used, and must be.
        QualityError: the codec is under the quality floor on this model.
    """
    from pagefold.runner.content import content_fingerprint  # noqa: PLC0415 - heavy rooms are entered when they are needed

    config, spec, geometry = blueprint.config, blueprint.spec, blueprint.geometry
    dtype = str(blueprint.dtype).removeprefix("torch.")
    check_quality(config, dtype, lambda: content_fingerprint(spec.folder, cache_dir()), cache_dir(), _log.warning)
    if blueprint.card is None:
        for line in blueprint.capacity.lines():
            say(line)
    else:
        say(f"card       {blueprint.card.name}")
    if spec.limit:
        longest = f"{spec.max_exact_len:,} of {spec.max_positions:,} tokens"
        say(f"limit      {longest}, beyond which {spec.limit} is not computed yet")
    blueprint = replace(blueprint, constants=_constants(blueprint, say))
    namespace = _namespace(blueprint)
    if config.has_slow_tiers:  # refused before weights are loaded
        from pagefold.runner.block_plan import block_plan  # noqa: PLC0415 - only here
        from pagefold.runner.codec_slab import codec_layout_on  # noqa: PLC0415
        from pagefold.store import FrameFormat, open_stores  # noqa: PLC0415 - only here

        frames = FrameFormat.of(namespace, geometry)
        codec_layout = codec_layout_on(blueprint.device)
        stores = [*open_stores(config, frames, lambda: block_plan(geometry, codec_layout)), *stores]
    stores = list(stores)
    with contextlib.ExitStack() as opened:
        for store in stores:
            opened.callback(store.close)
        engine = _assemble(blueprint, namespace, stores, emit, say)
        opened.pop_all()
    return engine


def _constants(blueprint: Blueprint, say: Callable[[str], None]) -> CodecConstants | None:
    if blueprint.geometry.codec is None:
        return None
    import torch  # noqa: PLC0415 - heavy rooms are entered when they are needed

    from pagefold.engine.calibration import find_constants  # noqa: PLC0415

    try:
        return find_constants(blueprint, _decoder, say)
    except torch.OutOfMemoryError as error:
        raise ran_out(error) from error


def _namespace(blueprint: Blueprint) -> Namespace:
    """Return what all blocks of the model share, whoever computes: other weights or another decoder give other bytes.

    What leaves this process is named by what the model's files hold, which is the same on every machine.
    """
    from pagefold.runner.codec_slab import codec_layout_on  # noqa: PLC0415 - torch comes with it
    from pagefold.runner.content import content_fingerprint  # noqa: PLC0415 - only with slow tiers
    from pagefold.runner.slab import layout_on  # noqa: PLC0415 - torch comes with it

    config, spec = blueprint.config, blueprint.spec
    decoder = f"fused-{config.quantization or 'plain'}" if blueprint.is_fused else "transformers"
    geometry = blueprint.geometry
    layout = layout_on(blueprint.device)
    if geometry.codec is not None:
        from pagefold.runner.codecs import CELL_CODECS  # noqa: PLC0415 - torch comes with it
        from pagefold.runner.sealed_slab import sealed_layout_on  # noqa: PLC0415

        arrangement_on = sealed_layout_on if CELL_CODECS[geometry.codec.name].seals else codec_layout_on
        arrangement = arrangement_on(blueprint.device)
        skipped = ",".join(map(str, geometry.skip_layers))
        from pagefold.engine.calibration import digest_of  # noqa: PLC0415

        layout = f"{arrangement}/{geometry.codec.name}/{skipped}/{digest_of(blueprint.constants)}"
    if DROPPED_BITS[config.kv_transport_codec]:  # then no block is sure to be what was computed
        layout += f"/{config.kv_transport_codec}"
    return Namespace(
        model=content_fingerprint(spec.folder, cache_dir()) if config.has_slow_tiers else spec.fingerprint,
        layout=f"{layout}/{geometry.block_size}/{decoder}",
        dtype=str(blueprint.dtype),
    )


def _assemble(
    blueprint: Blueprint, namespace: Namespace, stores: list[BlockStore], emit: Emit, say: Callable[[str], None]
) -> Engine:
    """Load weights, and put all parts together; ``stores`` keeps only those that are worth having."""
    import torch  # noqa: PLC0415 - heavy rooms are entered when they are needed

    from pagefold.runner.torch_runner import TorchRunner  # noqa: PLC0415
    from pagefold.tokenizer import Tokenizer  # noqa: PLC0415

    config, spec, geometry, capacity = blueprint.config, blueprint.spec, blueprint.geometry, blueprint.capacity
    torch.set_num_threads(config.threads or available_cpus())
    tokenizer = Tokenizer(spec.folder) if (spec.folder / "tokenizer_config.json").is_file() else None
    num_held = capacity.num_host_blocks
    arena: HostArena | None = None
    card_arena = None
    if blueprint.card is not None:
        arena = card_arena = _card_arena(blueprint, num_held) if num_held else None
        model = _load_on_card(blueprint)
        runner, capacity = build_runner(blueprint, model, say, arena)
    else:
        num_read = capacity.num_blocks + (num_held if config.allow_streaming else 0)  # blocks that attention reads
        slab = allocate_blocks(blueprint, num_read, capacity.num_residuals)
        behind = slab.as_bytes()[capacity.num_blocks :] if config.allow_streaming else None
        arena = _host_arena(blueprint, num_held, behind) if num_held else None
        runner = TorchRunner(_decoder(blueprint, slab), geometry, slab, arena)
    runner.warm_up()
    host = HostTier(num_held, notes_unsaved=bool(stores)) if num_held else None
    slow = arbiter = None
    if stores or card_arena is not None:
        compute_s = runner.seconds_per_token()
        arbiter = Arbiter(geometry.bytes_per_block, geometry.block_size, compute_s_per_token=compute_s)
        if card_arena is not None:
            measure_link(card_arena, runner, arbiter, say)
        slow = _slow_tiers(config, host, arbiter, stores, say)
    core = KVCore(
        capacity.num_blocks,
        block_size=config.block_size,
        policy=make_policy(config.eviction_policy),
        enable_prefix_caching=config.enable_prefix_caching,
        pin_limits=PinLimits(config.max_pinned_share, config.pin_half_life_s),
        host=host,
        slow=slow,
        arbiter=None if card_arena is None else arbiter,
        allow_streaming=config.allow_streaming,
        residuals=Residuals(capacity.num_residuals) if capacity.num_residuals else None,
        emit=emit,
    )
    scheduler = Scheduler(
        core,
        SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens),
        policy=SCHEDULING_POLICIES[config.scheduling_policy](config.priority_aging_s),
        emit=emit,
    )
    tiering = None
    if slow is not None:
        from pagefold.store import Transfer  # noqa: PLC0415 - only here

        assert arena is not None, "slow tiers go through the host's"
        move = partial(arena.carry_out, blocks=runner.slab.as_bytes())
        tiering = Tiering(scheduler, slow, Transfer(arena, stores), arena, move, emit=emit)
    emit(CacheConfigured(_cache_settings(config, capacity)))
    # A card computes by itself; on a CPU there is nobody who could do something else meanwhile.
    kind = Engine if blueprint.card is None or tiering is not None else OverlappedEngine
    return kind(
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        limits=ModelLimits(spec.vocab_size, spec.eos_token_ids, namespace),
        capacity=capacity,
        tiering=tiering,
        compiler=None if tokenizer is None else _compiler(tokenizer, spec),
        seed=config.seed,
        request_timeout_s=config.request_timeout_s,
        emit=emit,
    )


def _cache_settings(config: EngineConfig, capacity: Capacity) -> dict[str, str]:
    """Return what an engine's cache is, by vLLM's names. A device's blocks are vLLM's GPU blocks, also on a CPU."""
    return {
        "block_size": str(config.block_size),
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
        "num_cpu_blocks": str(capacity.num_host_blocks),
        "num_gpu_blocks": str(capacity.num_blocks),
    }


def _slow_tiers(
    config: EngineConfig, host: HostTier | None, arbiter: Arbiter, stores: list[BlockStore], say: Callable[[str], None]
) -> SlowTiers | None:
    """Try every store, and return what decides about those that work; ``stores`` keeps only these.

    One that is too slow now stays: what it holds is computed until the arbiter tries it again.
    """
    for store in list(stores):
        verdict = store.self_test()
        say(verdict.told)
        if store.is_out:
            arbiter.links[store.tier] = LinkModel(*_UNTRIED_LINK)
            continue
        if verdict.ok:
            arbiter.links[store.tier] = LinkModel(verdict.latency_s, verdict.read_bytes_per_s)
            if not arbiter.is_fast(store.tier):
                load_s, compute_s = arbiter.block_bytes / verdict.read_bytes_per_s, arbiter.compute_s(1)
                what = f"to read a block takes {1e3 * load_s:.2f} ms, to compute it {1e3 * compute_s:.2f} ms"
                say(f"           too slow now: {what}; it is tried again from time to time")
            continue
        stores.remove(store)
        store.close()
    if not stores:
        return None
    assert host is not None, "slow tiers go through the host's"
    return SlowTiers(host, config.kv_write_policy, arbiter)


def _decoder(blueprint: Blueprint, slab: AnySlab, on_queries: OnQueries | None = None) -> Decoder:
    """Load the weights into who computes the layers. transformers is imported for its own decoder only.

    Args:
        blueprint: the model.
        slab: where its KV goes.
        on_queries: told each layer's queries of a step.
    """
    config, spec, max_model_len = blueprint.config, blueprint.spec, blueprint.capacity.max_model_len
    if blueprint.card is not None:
        from pagefold.runner.cuda_decoder import CudaDecoder  # noqa: PLC0415 - only here

        model = _load_on_card(blueprint)
        return CudaDecoder(model, slab, None, max_model_len=max_model_len, on_queries=on_queries)
    if blueprint.is_fused:
        from pagefold.runner.fused.decoder import FusedDecoder  # noqa: PLC0415 - compiles
        from pagefold.runner.fused.weights import pack_model  # noqa: PLC0415

        assert spec.fused is not None, "a fused decoder of a model that it does not compute"
        weights = pack_model(spec.fused, spec.folder, max_model_len, is_int8=config.quantization == "int8")
        num_threads = config.threads or available_cpus()
        return FusedDecoder(spec.fused, weights, slab, num_threads=num_threads, on_queries=on_queries)
    from pagefold.runner.attention import choose_backend  # noqa: PLC0415
    from pagefold.runner.loader import load_model  # noqa: PLC0415
    from pagefold.runner.transformers_decoder import TransformersDecoder, told_queries  # noqa: PLC0415

    attention = choose_backend(
        config.attention_backend,
        blueprint.dtype,
        block_size=slab.block_size,
        head_dim=spec.head_dim,
        codes_a_byte=_codes_a_byte(blueprint.geometry),
    )
    if on_queries is not None:
        attention = told_queries(attention, on_queries)
    return TransformersDecoder(load_model(spec.folder, blueprint.dtype), slab, attention, max_model_len=max_model_len)


def _host_arena(blueprint: Blueprint, num_blocks: int, memory: Any) -> HostArena:  # noqa: ANN401 - an array's view
    """Return host memory for blocks, or ``memory`` as such if there is any."""
    from pagefold.store import HostArena  # noqa: PLC0415 - only here

    return HostArena(num_blocks, blueprint.capacity.host_bytes // num_blocks, memory)


def _card_arena(blueprint: Blueprint, num_blocks: int) -> CardArena:
    """Return pinned host memory for a card's blocks."""
    import torch  # noqa: PLC0415

    from pagefold.store.card_arena import CardArena  # noqa: PLC0415 - only here

    return CardArena(num_blocks, blueprint.capacity.host_bytes // num_blocks, torch.device(blueprint.device))


def _load_on_card(blueprint: Blueprint) -> Any:  # noqa: ANN401 - transformers' models have no common type
    """Load the weights onto the card.

    Raises:
        DoesNotFitError: others took its memory meanwhile.
    """
    import torch  # noqa: PLC0415

    from pagefold.runner.loader import load_model  # noqa: PLC0415

    try:
        return load_model(blueprint.spec.folder, blueprint.dtype, blueprint.device)
    except torch.OutOfMemoryError as error:
        raise ran_out(error) from error


def _compiler(tokenizer: Tokenizer, spec: ModelSpec) -> GrammarCompiler:
    """Return a compiler whose masks cover the model's vocabulary, and the tokenizer's where that is larger."""
    from pagefold.structured.compiler import GrammarCompiler  # noqa: PLC0415 - it starts processes; only here

    return GrammarCompiler(tokenizer.to_json(), max(spec.vocab_size, tokenizer.vocab_size), spec.eos_token_ids)
