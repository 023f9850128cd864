"""From a config to a blueprint: resolve the model, read its config, and decide what fits. Loads no weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagefold.config import cache_dir
from pagefold.engine.adapters import plan_adapters
from pagefold.engine.blueprint import PACKED_DTYPES, Blueprint, why_not_packed, without_windows
from pagefold.engine.draft_model import capacity_of_draft, check_device, check_draft, draft_config, longest_of
from pagefold.engine.masking import check_groups, check_masking, find_mask, packing_keeps
from pagefold.engine.on_card import OnCard
from pagefold.engine.on_cpu import OnCpu
from pagefold.engine.tenant_limits import check_fit, check_layout
from pagefold.errors import ConfigError
from pagefold.files.json_object import read_json_object
from pagefold.kv import CODECS, KEEP_ALL, KV_CACHE_DTYPES, KeepRule, KVGeometry
from pagefold.memory.capacity import Capacity

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pagefold.config import EngineConfig
    from pagefold.engine.hardware import Hardware
    from pagefold.hub.progress import Progress
    from pagefold.runner.fused.families import FusedConfig
    from pagefold.runner.models import ModelSpec

__all__ = ["geometry_of", "hardware_of", "plan_engine"]

_NOTHING = Capacity(0, 0, 0, 1, 0, 1)

_INT4_GROUP = 32
_SCALE_BYTES = 4
"""Bytes of the scale and the zero point that a block keeps of one channel."""


def plan_engine(config: EngineConfig, *, progress: Progress | None = None) -> Blueprint:
    """Resolve the model, and one that drafts for it, read configs and headers, and decide what fits. Loads no weights.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError, BudgetTooSmallError: with what was wrong and what to do.
    """
    blueprint = _shape_of(config, progress)
    of_draft = draft_config(config)
    if of_draft is not None:
        check_device(of_draft, blueprint.device)
        try:
            draft = _shape_of(of_draft, progress)
        except ConfigError as error:
            msg = f"speculative_config: {error.message}"
            raise ConfigError(msg, remedy=error.remedy) from error
        check_draft(draft, blueprint)
        of_draft = replace(of_draft, max_model_len=longest_of(blueprint))  # its tables are no longer
        blueprint = replace(blueprint, draft=replace(draft, config=of_draft))
    blueprint = replace(blueprint, capacity=hardware_of(blueprint).capacity(blueprint))
    if blueprint.draft is not None:
        capacity = capacity_of_draft(blueprint.draft, blueprint.capacity)
        blueprint = replace(blueprint, draft=replace(blueprint.draft, capacity=capacity))
    check_layout(blueprint)
    check_fit(config.kv_quotas, blueprint.capacity)
    return blueprint


def _shape_of(config: EngineConfig, progress: Progress | None) -> Blueprint:
    """Return all that is decided of a model but for what fits, which nobody has weighed yet."""
    from pagefold.hub.catalog import resolve  # noqa: PLC0415 - heavy; only when it is needed
    from pagefold.hub.progress import silent  # noqa: PLC0415

    folder = resolve(config.model, cache_dir(), progress=progress or silent)
    import torch  # noqa: PLC0415

    from pagefold.runner.card import check_attention, choose_device, find_card  # noqa: PLC0415
    from pagefold.runner.models import inspect_model  # noqa: PLC0415

    card = None if config.device == "cpu" else find_card()
    device = choose_device(config.device, card)
    spec = inspect_model(folder)
    name = _dtype(config, device, spec)
    dtype: torch.dtype = getattr(torch, name)
    check_attention(config, device, dtype, spec.head_dim)
    not_fused = _why_not_fused(config, spec, name, device)
    _check_fused(config, spec, not_fused)
    if not_fused and config.quantization not in {None, "none"}:
        _check_quantization(config, spec, dtype, device)
    geometry, mask = geometry_of(config, spec, dtype), None
    if config.streaming_llm is not None:
        _check_streaming(config, spec, device)
        geometry = replace(geometry, keeps=_streaming_keeps(config, spec))
    elif config.masks:
        check_masking(config, spec, not_fused)
        geometry = replace(geometry, keeps=packing_keeps(spec))
        check_groups(geometry, spec)
        mask = find_mask(config, spec)
    elif not without_windows(config):
        geometry = replace(geometry, keeps=spec.keeps_within(_longest(config, spec)))  # else the window is the limit
    assert device == "cpu" or card is not None, "it was chosen"
    card = None if device == "cpu" else card
    adapters = plan_adapters(config, spec, not_fused, device)
    return Blueprint(config, spec, geometry, _NOTHING, dtype, not_fused, device, card, mask=mask, adapters=adapters)


def _check_streaming(config: EngineConfig, spec: ModelSpec, device: str) -> None:
    """See that ``streaming_llm`` is computed there, and does something, within what the model was made for.

    Raises:
        ConfigError: it is not so.
    """
    assert config.streaming_llm is not None, "nobody asked"
    name, most = spec.folder.name, config.streaming_llm + config.streaming_llm_sinks
    if device != "cpu":
        msg = f"streaming_llm is set, and is not computed on {device} yet."
        raise ConfigError(msg, remedy="Leave it out, or use device=cpu.")
    if not spec.has_rope:
        msg = f"streaming_llm is set, and {name} has no rope, by which its positions could be moved."
        raise ConfigError(msg, remedy="Leave it out, or use another model.")
    made_for = min(spec.max_positions, spec.endless_limit.length)
    if most > made_for:
        msg = f"streaming_llm and its sinks are {most} tokens together, and {name} was made for {made_for}."
        raise ConfigError(msg, remedy=f"Give at most {made_for - config.streaming_llm_sinks} for streaming_llm.")
    if spec.keeps and not any(_sees_more(keep, most) for keep in spec.keeps):
        widest = max(keep.window or 0 for keep in spec.keeps)
        msg = f"streaming_llm is {config.streaming_llm}, and no layer of {name} sees more than {widest} tokens anyway."
        raise ConfigError(msg, remedy="Leave it out, or give a smaller window.")


def _streaming_keeps(config: EngineConfig, spec: ModelSpec) -> tuple[KeepRule, ...]:
    """Return what each layer keeps with ``streaming_llm``: those that see more than that get a window and sink tokens.

    Where no sequence is longer than that, it hides nothing: they keep what they keep without it.
    """
    assert config.streaming_llm is not None, "nobody asked"
    asked = config.max_model_len
    longest = asked if isinstance(asked, int) else spec.max_positions
    most = config.streaming_llm + config.streaming_llm_sinks
    if longest <= most:
        return spec.keeps_within(longest)
    rule = KeepRule(config.streaming_llm, num_sinks=config.streaming_llm_sinks)
    keeps = spec.keeps or (KEEP_ALL,) * spec.num_layers
    return tuple(rule if _sees_more(keep, most) else keep for keep in keeps)


def _sees_more(keep: KeepRule, num_tokens: int) -> bool:
    """Whether layers see more than so many tokens as the model has them."""
    return keep.window is None or keep.window > num_tokens


def _longest(config: EngineConfig, spec: ModelSpec) -> int:
    """Return how long a sequence may be where windows are computed: a window that none passes is none."""
    longest = spec.windowed_limit.length
    return min(config.max_model_len, longest) if isinstance(config.max_model_len, int) else longest


def hardware_of(blueprint: Blueprint) -> Hardware:
    """Return what the model runs on."""
    return OnCpu() if blueprint.card is None else OnCard()


def _dtype(config: EngineConfig, device: str, spec: ModelSpec) -> str:
    """Return the dtype that is computed in: what was asked, or what the device is good at."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cpu":
        if _why_not_fused(config, spec, "bfloat16", device):
            return "float32"
        from pagefold.runner.fused.formats import natural_dtype  # noqa: PLC0415 - kernels come with it

        return natural_dtype()
    raw = read_json_object(spec.folder / "config.json")
    return "float16" if raw.get("dtype", raw.get("torch_dtype")) == "float16" else "bfloat16"


def geometry_of(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> KVGeometry:
    """Return what a block holds.

    Raises:
        ConfigError: the codec cannot pack the model's heads, or layers are to be skipped that it has not.
    """
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype.itemsize, config.block_size
    unknown = [layer for layer in config.kv_cache_dtype_skip_layers if not 0 <= layer < spec.num_layers]
    if unknown:
        msg = f"kv_cache_dtype_skip_layers has {unknown[0]}, and {spec.folder.name} has {spec.num_layers} layers."
        raise ConfigError(msg, remedy=f"Give layers between 0 and {spec.num_layers - 1}.")
    for layer in config.kv_cache_dtype_skip_layers if spec.sources else ():
        if spec.sources[layer] != layer:
            msg = f"kv_cache_dtype_skip_layers has {layer}, which reads the K and V of layer {spec.sources[layer]}."
            raise ConfigError(msg, remedy="Give layers that have their own.")
    name = KV_CACHE_DTYPES.get(config.kv_cache_dtype)
    if name is None or f"torch.{name}" == str(dtype):
        return KVGeometry(*shape, sources=spec.sources)
    from pagefold.runner.codecs import CELL_CODECS  # noqa: PLC0415 - torch comes with it

    wanted = CELL_CODECS[name].cannot_pack(spec.head_dim)
    if wanted:
        msg = f"{name} cannot store heads of {spec.head_dim} numbers, which {spec.folder.name} has."
        raise ConfigError(msg, remedy=f"It takes {wanted}; int8_per_token_head takes any.")
    skipped = tuple(sorted(set(config.kv_cache_dtype_skip_layers)))
    if CELL_CODECS[name].seals:
        _check_sealing(config, spec)
    skip_codec = CODECS["bfloat16" if str(dtype) == "torch.bfloat16" else "float16"]
    return KVGeometry(*shape, CODECS[name], skipped, skip_codec if skipped else None, sources=spec.sources)


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


def _why_not_fused(config: EngineConfig, spec: ModelSpec, dtype: str, device: str) -> str:
    """Return what the fused decoder does not go with, so that transformers computes the layers; empty if it does."""
    return next(_in_its_way(config, spec, dtype, device), "")


def _in_its_way(config: EngineConfig, spec: ModelSpec, dtype: str, device: str) -> Iterator[str]:
    """Yield what the fused decoder does not go with, the model itself first."""
    if spec.not_fused:
        yield spec.not_fused
    if device != "cpu":
        yield f"device={device} (it computes on CPUs)"
    if dtype not in PACKED_DTYPES:
        yield f"dtype={dtype} (it computes in {' and '.join(PACKED_DTYPES)})"
    if config.block_size % 4:
        yield f"block_size={config.block_size} (it takes multiples of 4)"
    if spec.head_dim % 8:
        yield f"heads of {spec.head_dim} numbers (it takes multiples of 8)"
    if config.attention_backend == "reference":
        yield "attention_backend=reference"
    if config.model_impl == "transformers":
        yield "model_impl=transformers"
    from pagefold.runner.fused.formats import processor_lacks  # noqa: PLC0415 - kernels come with it

    if config.quantization == "int4" and spec.fused is not None:
        odd = [size for size in _column_sizes(spec.fused) if size % _INT4_GROUP]
        yield from (f"int4 of columns of {size} numbers (it takes multiples of {_INT4_GROUP})" for size in odd)
    kinds = spec.stored_kinds.values() if config.quantization is None else ()
    lacking = processor_lacks(dtype, config.quantization, kinds)
    if lacking:
        yield f"a processor without {lacking}"


def _column_sizes(fused: FusedConfig) -> tuple[int, ...]:
    """Return how many numbers the columns of a model's matrices have."""
    return fused.hidden_size, fused.intermediate_size, fused.num_heads * fused.head_dim


def _check_fused(config: EngineConfig, spec: ModelSpec, not_fused: str) -> None:
    """See that the fused decoder is there if it was asked for, or what only it gives.

    Args:
        config: what was asked.
        spec: the model.
        not_fused: why it is not there; empty if it is.

    Raises:
        ConfigError: it was asked for, and is not there.
    """
    if not not_fused:
        return
    if config.model_impl == "pagefold":
        msg = f"model_impl is pagefold for {spec.folder.name}: the fused decoder does not go with {not_fused}."
        raise ConfigError(msg, remedy="Use model_impl=auto or transformers.")
    if config.batch_invariant:
        msg = f"batch_invariant takes the fused decoder for {spec.folder.name}, and that does not go with {not_fused}."
        raise ConfigError(msg, remedy="Leave batch_invariant out, or change that.")


def _check_quantization(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str) -> None:
    """See that packed layers can have the weights of a model that transformers computes in the format that was asked.

    Raises:
        ConfigError: they cannot.
    """
    from pagefold.runner.packed.outline import outline_of  # noqa: PLC0415 - transformers comes with it

    why_not = why_not_packed(config, str(dtype), device)
    if why_not:
        msg = f"quantization takes packed layers for {spec.folder.name}, and they do not go with {why_not}."
        raise ConfigError(msg, remedy="Leave quantization out, or change that.")
    packable = outline_of(spec.folder, spec.fingerprint, dtype).packable
    odd = {name: size for name, size in packable.column_sizes().items() if size % _INT4_GROUP}
    if config.quantization == "int4" and odd:
        name, size = next(iter(odd.items()))
        what = f"{len(odd)} matrices with columns that are no multiples of {_INT4_GROUP}, such as {name} of {size}"
        msg = f"quantization is int4, and {spec.folder.name} ({spec.model_type}) has {what}."
        raise ConfigError(msg, remedy="Use int8, w8a8_int8, or another model.")
    others = packable.others
    if others:
        what = f"{len(others)} matrices that are not in layers which can be packed, such as {others[0]}"
        msg = f"quantization is {config.quantization}, and {spec.folder.name} ({spec.model_type}) has {what}."
        raise ConfigError(msg, remedy="Leave quantization out, or use another model.")
