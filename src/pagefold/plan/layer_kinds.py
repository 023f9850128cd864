"""Kinds of a model's layers, from its config: as the config lists them, or as transformers would for its family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CHUNKED_FAMILIES", "kind_throughout", "kinds_of", "lists_kinds", "with_defaults"]

CHUNKED_FAMILIES = ("llama4_text",)
"""Families whose layers with rope attend by chunks."""

_WINDOWED_THROUGHOUT = ("mistral", "mixtral", "phi3", "qwen3_moe")
"""Families whose layers all have the window, if there is one: they read no ``layer_types``. See the runner's."""
_WINDOWED_EVERYWHERE = (*_WINDOWED_THROUGHOUT, "ministral", "starcoder2")

_PERIODS = {
    "gemma2": 2, "gpt_oss": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4, "gemma3n_text": 5, "gemma3_text": 6,
}  # fmt: skip
"""Families of which one layer in so many has no window, the last of them."""
_READING_PERIODS = ("cohere2", "exaone4", "gemma3_text")
"""Those of them that read it from ``sliding_window_pattern``."""

_LISTED = (*_PERIODS, "qwen2", "qwen2_moe", "qwen3", "ministral")
"""Families whose ``layer_types`` transformers lists where a config does not."""

_OF_4096 = ("cohere2", "exaone4", "gemma2", "gemma3_text", "ministral", "mistral", "olmo3")
_QWENS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_DEFAULTS: dict[str, dict[str, Any]] = {
    **{family: {"sliding_window": 4096} for family in _OF_4096},
    **{family: {"sliding_window": 4096, "max_window_layers": 28} for family in _QWENS},
    "gemma3n_text": {"sliding_window": 512},
    "gpt_oss": {"sliding_window": 128},
    "llama4_text": {"attention_chunk_size": 8192},
}
"""What transformers takes where a config lacks a field that says how many tokens layers keep. Null is no lack of it."""

_OTHER_NAMES = {"attention": "full_attention", "full": "full_attention"}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its family's defaults in place of what it lacks, and without a window that is not in use."""
    model_type = str(config.get("model_type") or "")
    whole = {**_DEFAULTS.get(model_type, {}), **config}
    if model_type.startswith("qwen") and not whole.get("use_sliding_window"):
        whole["sliding_window"] = None
    return whole


def kinds_of(config: Mapping[str, Any], model_type: str) -> list[str]:
    """Return the kind of each layer, in the words of ``layer_types``."""
    layers = range(config["num_hidden_layers"])
    listed = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(listed, list) and len(listed) == len(layers):
        return [_OTHER_NAMES.get(str(kind), str(kind)) for kind in listed]
    if config.get("attn_layer_period"):
        period, offset = config["attn_layer_period"], config.get("attn_layer_offset") or 0
        return ["full_attention" if i % period == offset else "mamba" for i in layers]
    if config.get("attn_layer_indices") is not None:
        return ["full_attention" if i in config["attn_layer_indices"] else "mamba" for i in layers]
    if model_type in CHUNKED_FAMILIES or config.get("attention_chunk_size"):
        period = config.get("no_rope_layer_interval") or 4
        use_rope = config.get("no_rope_layers") or [(i + 1) % period for i in layers]
        return ["chunked_attention" if uses_rope else "full_attention" for uses_rope in use_rope]
    if config.get("full_attention_interval"):
        every = config["full_attention_interval"]
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
    return ["sliding_attention" if _has_window(config, model_type, i) else "full_attention" for i in layers]


def _has_window(config: Mapping[str, Any], model_type: str, layer: int) -> bool:
    period, asked = _PERIODS.get(model_type), config.get("sliding_window_pattern")
    if period is not None:  # whether or not there is a window: what it lacks is found out then
        return bool((layer + 1) % (asked or period if model_type in _READING_PERIODS else period))
    if config.get("sliding_window") is None:
        return False
    if model_type == "qwen2_moe":
        return not layer % 2 and layer < (config.get("max_window_layers") or 0)
    if model_type.startswith("qwen") and model_type not in _WINDOWED_THROUGHOUT:
        return layer >= (config.get("max_window_layers") or 0)
    asked = asked or config.get("_sliding_window_pattern")
    return bool((layer + 1) % asked) if asked else model_type in _WINDOWED_EVERYWHERE


def kind_throughout(config: Mapping[str, Any], model_type: str) -> str:
    """Return of what kind all layers are of a family that reads no ``layer_types``; empty of others."""
    if model_type not in _WINDOWED_THROUGHOUT:
        return ""
    return "full_attention" if config.get("sliding_window") is None else "sliding_attention"


def lists_kinds(config: Mapping[str, Any], model_type: str) -> bool:
    """Whether a model of transformers knows which of its layers have windows: from the config, or by its family."""
    if config.get("layer_types") or model_type in _WINDOWED_THROUGHOUT:
        return True
    return model_type in _LISTED and not config.get("layers_block_type")
