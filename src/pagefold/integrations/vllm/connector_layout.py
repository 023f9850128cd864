"""The name of a layout: all that decides how the bytes of vLLM's blocks are to be read, and by which weights they came.

Blocks go to disks and other machines under this name; whoever has another one finds none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.integrations.vllm.model_names import name_of_model
from pagefold.kv import Namespace

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ["attention_isa", "block_tokens", "check_layout", "layout_of", "pages_by_layer"]

_KEEPS_ALL = {"FullAttentionSpec", "MLAAttentionSpec"}
"""vLLM's kinds of layers that keep all tokens of a request, by the name of their spec."""

_REMEDY = "Leave the connector out for this model."


def check_layout(vllm_config: VllmConfig, kv_cache_config: object) -> None:
    """See that vLLM's blocks can be kept.

    Raises:
        ConfigError: they cannot; says why.
    """
    groups = kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        msg = f"PagefoldConnector keeps one group of KV caches, and this model has {len(groups)} ({kinds})."
        raise ConfigError(msg, remedy="Start vLLM with --disable-hybrid-kv-cache-manager, or leave the connector out.")
    spec = groups[0].kv_cache_spec
    others = {type(one).__name__ for one in _specs(spec, groups[0].layer_names).values()} - _KEEPS_ALL
    if others:
        msg = f"PagefoldConnector keeps layers that see all tokens, and this model has {', '.join(sorted(others))}."
        raise ConfigError(msg, remedy=_REMEDY)
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            msg = f"PagefoldConnector does not know {name}={getattr(parallel, name)}."
            raise ConfigError(msg, remedy="Use tensor parallelism alone, or leave the connector out.")


def block_tokens(kv_cache_config: object) -> int:
    """Return the tokens of vLLM's blocks."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)  # type: ignore[attr-defined]


def pages_by_layer(kv_cache_config: object) -> dict[str, int]:
    """Return the bytes of each layer's pages."""
    group = kv_cache_config.kv_cache_groups[0]  # type: ignore[attr-defined]
    specs = _specs(group.kv_cache_spec, group.layer_names)
    return {layer: int(spec.page_size_bytes) for layer, spec in specs.items()}  # type: ignore[attr-defined]


def attention_isa(vllm_config: VllmConfig, device_type: str) -> str:
    """Return what else decides how a page is arranged on this machine: on CPUs, the instruction set of attention.

    Raises:
        ConfigError: this vLLM does not say it.
    """
    if device_type != "cpu":
        return device_type
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - of CPU builds

        model, cache = vllm_config.model_config, vllm_config.cache_config
        return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))
    except (ImportError, TypeError) as error:
        msg = f"This vLLM does not say for which instruction set it arranges blocks ({error})."
        raise ConfigError(msg, remedy="Leave disk_path and remote_url out, or use a known version of vLLM.") from None


def layout_of(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor], version: str, *, leaves: bool) -> Namespace:
    """Return what names the blocks of this vLLM.

    Args:
        vllm_config: vLLM's settings.
        kv_caches: its tensors, by layer.
        version: of vLLM.
        leaves: whether blocks leave this process; else the contents of weights are not looked at.

    Raises:
        ConfigError: blocks leave, and the model's files or how its pages are arranged is not known.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    first = next(iter(kv_caches.values()))
    shapes = [f"{tuple(one.shape[1:])}/{tuple(one.stride()[1:])}/{one.dtype}" for one in kv_caches.values()]
    isa = attention_isa(vllm_config, first.device.type) if leaves else first.device.type
    parts = (
        f"vllm {version}",
        isa,
        str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        " ".join(f"{layer} {shape}" for layer, shape in zip(kv_caches, shapes, strict=True)),
        f"block {cache.block_size}",
        f"tp {parallel.tensor_parallel_size}",
        f"hash {cache.prefix_caching_hash_algo}",
    )
    return Namespace(
        model=name_of_model(vllm_config) if leaves else str(model.model),
        layout="/".join(parts),
        dtype=f"{model.dtype}/{cache.cache_dtype}/{sorted(map(str, getattr(cache, 'kv_cache_dtype_skip_layers', ())))}",
    )


def _specs(spec: object, layers: list[str]) -> dict[str, object]:
    """Return the spec of each layer of a group."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return dict.fromkeys(layers, spec) if by_layer is None else dict(by_layer)
