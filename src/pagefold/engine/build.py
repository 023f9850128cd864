"""From a blueprint to an engine: load weights, and put all parts together."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from pagefold.config import available_cpus, cache_dir
from pagefold.engine.adapters import NO_ADAPTERS, EngineAdapters
from pagefold.engine.draft_model import model_drafter
from pagefold.engine.drafting import NO_DRAFTING, Drafting
from pagefold.engine.engine import Engine
from pagefold.engine.intake import NO_INTAKE, ClosedIntake
from pagefold.engine.kept_counts import check_notes, chunk_notes
from pagefold.engine.limits import ModelLimits
from pagefold.engine.masking import kinds_of
from pagefold.engine.namespace import namespace_of
from pagefold.engine.on_card import ran_out
from pagefold.engine.overlapped import OverlappedEngine
from pagefold.engine.planning import hardware_of
from pagefold.engine.quantized_line import lines_of_quantized
from pagefold.engine.target_check import broken_targets
from pagefold.engine.tenant_limits import TenantLimits, check_fit
from pagefold.engine.verdicts import check_quality
from pagefold.events import CacheConfigured, Emit, ignore
from pagefold.kv import (
    DEFAULT_POLICY,
    NO_HOST,
    NO_QUOTAS,
    NO_RESIDUALS,
    NO_SLOW_TIERS,
    Arbiter,
    HostTier,
    KVCore,
    LinkModel,
    PinLimits,
    Quotas,
    Residuals,
    SlowTiers,
    blocks_per_place,
    make_policy,
)
from pagefold.memory.capacity import human_bytes
from pagefold.scheduler import (
    NO_GUARDRAILS,
    NO_TIERING,
    SCHEDULING_POLICIES,
    Guardrails,
    PrefillLimits,
    Rates,
    Scheduler,
    SchedulerLimits,
    Targets,
    Tiering,
)
from pagefold.speculation import NgramDrafter, StepCosts, TreeDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.config import EngineConfig
    from pagefold.engine.blueprint import Blueprint
    from pagefold.engine.intake import Intake
    from pagefold.kv import KVGeometry, Namespace
    from pagefold.memory.capacity import Capacity
    from pagefold.runner.adapter_slots import AdapterSlots
    from pagefold.runner.codecs.constants import CodecConstants
    from pagefold.runner.models import ModelSpec
    from pagefold.runner.torch_runner import TorchRunner
    from pagefold.speculation import Drafter, SpeculativeParams
    from pagefold.store import BlockStore
    from pagefold.structured.compiler import GrammarCompiler
    from pagefold.tokenizer import Tokenizer

__all__ = ["build_engine"]

_log = logging.getLogger(__name__)

_TIMED_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_UNTRIED_LINK = 1e-3, 1e9
"""Latency and bandwidth, in seconds and bytes a second, of a tier that could not be tried yet."""


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
        QualityError: a codec, a number format or a share is under the quality floor on this model.
    """
    from pagefold.runner.content import content_fingerprint  # noqa: PLC0415 - heavy; only when it is needed

    config, spec, geometry = blueprint.config, blueprint.spec, blueprint.geometry
    dtype = str(blueprint.dtype).removeprefix("torch.")
    names = () if blueprint.mask is None else blueprint.mask.names
    check_quality(
        config, dtype, lambda: content_fingerprint(spec.folder, cache_dir()), cache_dir(), _log.warning, masks=names
    )
    for line in [*hardware_of(blueprint).lines(blueprint), *lines_of_quantized(blueprint)]:
        say(line)
    limit = blueprint.limit
    if limit.what:
        longest = f"{limit.length:,} of {spec.max_positions:,} tokens"
        say(f"limit      {longest}, beyond which {limit.why}")
    blueprint = replace(blueprint, constants=_constants(blueprint, say))
    namespace = namespace_of(blueprint)
    if config.has_slow_tiers:  # refused before weights are loaded
        from pagefold.runner.block_form import block_form  # noqa: PLC0415 - only here
        from pagefold.runner.codec_slab import codec_layout_on  # noqa: PLC0415
        from pagefold.store import FrameFormat, open_stores  # noqa: PLC0415 - only here

        frames = FrameFormat.of(namespace, geometry)
        check_notes(geometry, frames.most_note_bytes)
        codec_layout = codec_layout_on(blueprint.device)
        stores = [*open_stores(config, frames, lambda: block_form(geometry, codec_layout)), *stores]
    stores = list(stores)
    with contextlib.ExitStack() as opened:
        for store in stores:
            opened.callback(store.close)
        engine = _assemble(blueprint, namespace, stores, emit, say)
        opened.pop_all()
    return engine


def _constants(blueprint: Blueprint, say: Callable[[str], None]) -> CodecConstants | None:
    """Return what the codec, if there is one, has to know of the model."""
    if blueprint.geometry.codec is None:
        return None
    import torch  # noqa: PLC0415 - heavy; only when it is needed

    from pagefold.engine.calibration import find_constants  # noqa: PLC0415

    try:
        return find_constants(blueprint, hardware_of(blueprint).decoder, say)
    except torch.OutOfMemoryError as error:
        raise ran_out(error) from error


def _assemble(
    blueprint: Blueprint, namespace: Namespace, stores: list[BlockStore], emit: Emit, say: Callable[[str], None]
) -> Engine:
    """Load weights, and put all parts together; ``stores`` keeps only those that are worth having."""
    import torch  # noqa: PLC0415 - heavy; only when it is needed

    from pagefold.tokenizer import Tokenizer  # noqa: PLC0415

    config, spec, geometry = blueprint.config, blueprint.spec, blueprint.geometry
    torch.set_num_threads(config.threads or available_cpus())
    tokenizer = Tokenizer(spec.folder) if (spec.folder / "tokenizer_config.json").is_file() else None
    hardware = hardware_of(blueprint)
    runner, capacity, arena, measure_link, slots = hardware.ready(blueprint, say)
    runner.warm_up()
    num_held = blueprint.capacity.num_host_blocks
    notes = chunk_notes(geometry) if stores else None
    host = HostTier(num_held, notes_unsaved=bool(stores), notes=notes) if num_held else NO_HOST
    slow, arbiter = NO_SLOW_TIERS, None
    if stores or measure_link is not None:
        compute_s = runner.seconds_per_token()
        arbiter = Arbiter(
            geometry.bytes_per_block,
            geometry.block_size,
            compute_s_per_token=compute_s,
            blocks_per_place=blocks_per_place(group.keeps for group in geometry.groups),
        )
        if measure_link is not None:
            measure_link(arbiter, say)
        slow = _slow_tiers(config, host, arbiter, stores, say)
    configured = _configured(config, capacity, geometry, has_stores=slow.is_on)
    emit(configured)
    check_fit(config.kv_quotas, capacity)  # on a card more is known now
    quotas = Quotas() if config.kv_quotas else NO_QUOTAS
    num_places = capacity.num_blocks // configured.blocks_per_place
    core = KVCore(
        capacity.num_blocks,
        block_size=config.block_size,
        rules=[group.keeps for group in geometry.groups],
        policy=quotas.policy(
            make_policy(config.eviction_policy, num_places, emit),
            partial(make_policy, config.eviction_policy, num_places),
        ),
        enable_prefix_caching=config.enable_prefix_caching,
        pin_limits=PinLimits(config.max_pinned_share, config.pin_half_life_s),
        host=host,
        slow=slow,
        arbiter=arbiter,
        allow_streaming=config.allow_streaming,
        residuals=Residuals(capacity.num_residuals, config.block_size) if capacity.num_residuals else NO_RESIDUALS,
        quotas=quotas,
        emit=emit,
    )
    scheduler = Scheduler(
        core,
        SchedulerLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            PrefillLimits(
                config.max_num_partial_prefills, config.max_long_partial_prefills, config.long_prefill_token_threshold
            ),
        ),
        guardrails=_guardrails(config, runner),
        policy=SCHEDULING_POLICIES[config.scheduling_policy](config.priority_aging_s),
        admission=config.admission,
        emit=emit,
    )
    tiering = NO_TIERING
    intake: Intake = NO_INTAKE
    if slow.is_on:
        from pagefold.store import TransferThreads  # noqa: PLC0415 - only here

        assert arena is not None, "slow tiers go through the host's"
        move = partial(arena.carry_out, blocks=runner.slab.as_bytes())
        tiering = Tiering(scheduler, slow, TransferThreads(arena, stores), arena, move, emit=emit)
        intake = _intake(blueprint, stores)
    adapters = _adapters(blueprint, slots)
    drafting = NO_DRAFTING
    if config.max_draft_tokens:
        by_model = None
        if blueprint.draft is not None:
            ready = hardware_of(blueprint.draft).ready(blueprint.draft, say)
            by_model = model_drafter(ready.runner, blueprint.draft, spec.vocab_size, config.max_num_seqs)
        drafting = _drafting(config, scheduler, runner, by_model, say)
    ends = frozenset() if tokenizer is None or not core.trims else tokenizer.message_end_ids
    kind = OverlappedEngine if hardware.computes_apart and not tiering.is_on else Engine
    return kind(
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        limits=ModelLimits(
            spec.vocab_size, spec.eos_token_ids, namespace, ends.union(spec.eos_token_ids), kinds_of(blueprint)
        ),
        capacity=capacity,
        tenants=TenantLimits(config.kv_quotas, capacity),
        tiering=tiering,
        intake=intake,
        drafting=drafting,
        adapters=adapters,
        compiler=None if tokenizer is None else _compiler(tokenizer, spec),
        seed=config.seed,
        request_timeout_s=config.request_timeout_s,
        emit=emit,
    )


def _adapters(blueprint: Blueprint, slots: AdapterSlots | None) -> EngineAdapters:
    """Return the adapters of an engine, with those that are there from the start."""
    if blueprint.adapters is None or slots is None:
        return NO_ADAPTERS
    config = blueprint.config
    adapters = EngineAdapters(blueprint.adapters, slots, config.max_loras, config.max_lora_rank)
    for module, _ in blueprint.adapters.folders:
        adapters.install(adapters.read(module.name, module.path))
    return adapters


def _intake(blueprint: Blueprint, stores: list[BlockStore]) -> Intake:
    """Return what takes blocks of prefix files into slow tiers, where a prefix is one path of blocks."""
    from pagefold.engine.prefix_layout import prefix_layout_of, why_no_prefixes  # noqa: PLC0415 - only with slow tiers
    from pagefold.store.prefix_intake import PrefixIntake  # noqa: PLC0415

    why = why_no_prefixes(blueprint)
    return ClosedIntake(why) if why else PrefixIntake(prefix_layout_of(blueprint), stores)


def _guardrails(config: EngineConfig, runner: TorchRunner) -> Guardrails:
    """Return what keeps the targets, if there are any, with what this machine takes before it is busy."""
    targets = Targets(_seconds(config.target_ttft_ms), _seconds(config.target_itl_ms))
    if targets == Targets():
        return NO_GUARDRAILS
    (step_s,) = runner.seconds_of_steps([1])
    for told in broken_targets(targets, step_s):
        _log.warning(told)
    return Guardrails.of(
        targets,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        rates=Rates.measured_at_start(1, runner.seconds_per_token()),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _drafting(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: TorchRunner,
    by_model: Callable[[], Drafter] | None,
    say: Callable[[str], None],
) -> Drafting:
    """Return what drafts for requests, with what steps take here; ``by_model`` makes who does so with a model."""
    most = config.max_draft_tokens
    sizes = [size for size in _TIMED_STEPS if size <= most + 1]
    costs = StepCosts(sizes, runner.seconds_of_steps(sizes))

    tree = cache(lambda: TreeDrafter(scheduler.core))  # one for all, from when somebody asks for it
    model = None if by_model is None else cache(by_model)

    def drafter_for(params: SpeculativeParams) -> Drafter:
        if params.method == "ngram":
            return NgramDrafter(params.prompt_lookup_min, params.prompt_lookup_max)
        if params.is_by_model:
            assert model is not None, "a request for a draft model that is not there is refused"
            return model()
        return tree()

    told = f"drafts     up to {most} in a step"
    if config.speculative_config is not None and config.speculative_config.method == "tree":
        told += f"; their index takes {human_bytes(tree().index.num_bytes)}"
    say(told)
    return Drafting(scheduler, config.speculative_config, drafter_for, costs, most)


def _configured(config: EngineConfig, capacity: Capacity, geometry: KVGeometry, *, has_stores: bool) -> CacheConfigured:
    """Return what an engine's cache is, by vLLM's names. A device's blocks are vLLM's GPU blocks, also on a CPU."""
    settings = {
        "block_size": str(config.block_size),
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
        "num_cpu_blocks": str(capacity.num_host_blocks),
        "num_gpu_blocks": str(capacity.num_blocks),
        "sliding_window": str(config.streaming_llm),
    }
    policy = DEFAULT_POLICY if config.eviction_policy == "default" else config.eviction_policy
    has_disk = has_stores and config.kv_disk_path is not None
    return CacheConfigured(
        settings,
        capacity.num_blocks,
        config.block_size,
        policy,
        publishes=config.enable_prefix_caching,
        num_host_blocks=capacity.num_host_blocks,
        num_disk_blocks=geometry.num_blocks(int(config.kv_disk_size * 2**30)) if has_disk else 0,
        blocks_per_place=blocks_per_place(group.keeps for group in geometry.groups),
        bytes_per_block=geometry.bytes_per_block,
    )


def _slow_tiers(
    config: EngineConfig, host: HostTier, arbiter: Arbiter, stores: list[BlockStore], say: Callable[[str], None]
) -> SlowTiers:
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
                load_s, compute_s = arbiter.place_bytes / verdict.read_bytes_per_s, arbiter.compute_s(1)
                what = f"to read a block takes {1e3 * load_s:.2f} ms, to compute it {1e3 * compute_s:.2f} ms"
                say(f"           too slow now: {what}; it is tried again from time to time")
            continue
        stores.remove(store)
        store.close()
    if not stores:
        return NO_SLOW_TIERS
    assert host.is_on, "slow tiers go through the host's"
    return SlowTiers(host, config.kv_write_policy, arbiter)


def _compiler(tokenizer: Tokenizer, spec: ModelSpec) -> GrammarCompiler:
    """Return a compiler whose masks cover the model's vocabulary, and the tokenizer's where that is larger."""
    from pagefold.structured.compiler import GrammarCompiler  # noqa: PLC0415 - it starts processes; only here

    return GrammarCompiler(tokenizer.to_json(), max(spec.vocab_size, tokenizer.vocab_size), spec.eos_token_ids)
