"""What our own server does of a model that the planner plans for: whether it runs it, how far, and by which decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError
from pagefold.plan.layer_kinds import CHUNKED_FAMILIES, lists_kinds
from pagefold.quantized import read_quantization

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["is_fused", "num_ropes", "served_limit", "why_not_served"]

_SHARING = ("gemma3n_text",)
"""Families that are served though some layers read the K and V of others."""
_SOFT_CAPPING = ("gemma2",)
"""Families that are served with soft-capped scores."""
_LONGROPE = ("phi3",)
"""Families that are served with ``longrope``, up to its original length."""
_OLD_LONGROPES = ("su", "yarn")
"""What it was once called there."""
_STATIC_ROPES = ("default", "linear", "llama3", "yarn", "proportional", "mrope")
"""Kinds of rope whose frequencies do not depend on the batch. See the runner's."""

_FUSED = {
    "llama": "hidden_act",
    "mistral": "hidden_act",
    "qwen2": "hidden_act",
    "qwen3": "hidden_act",
    "gemma2": "hidden_activation",
    "gemma3_text": "hidden_activation",
}
"""Families of the server's fused decoder, with the field that names their activation."""
_FUSED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Numbers that it needs of a rope of such a kind."""
_ROPES_BY_LAYER = ("gemma3_text",)
"""Families whose layers with windows have a rope of their own, however a config writes them."""
_FUSED_HEAD = 8
"""What it takes a head's numbers in."""


def served_limit(config: Mapping[str, Any], model_type: str) -> int | None:
    """Return how long a sequence the server takes on a CPU, where windows are computed; None for all positions."""
    if model_type not in _LONGROPE or _rope_kinds(config, model_type) != {"longrope"}:
        return None
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    limit = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return limit if type(limit) is int and 0 < limit < config["max_position_embeddings"] else None


def is_fused(config: Mapping[str, Any], model_type: str, head_dim: int) -> bool:
    """Whether the server's fused decoder computes it: see ``read_fused_config`` of the runner."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {}
    by_layer = [one for one in rope.values() if isinstance(one, dict)]
    has_odd_bias = config.get("mlp_bias") or (config.get("attention_bias") and model_type != "qwen2")
    return (
        model_type in _FUSED
        and (config.get(_FUSED[model_type]) or _FUSED_ACTIVATIONS[0]) in _FUSED_ACTIVATIONS
        and not has_odd_bias
        and not config.get("use_bidirectional_attention")
        and all(_is_fused_rope(one, config.get("partial_rotary_factor")) for one in by_layer or [rope])
        and head_dim % _FUSED_HEAD == 0
    )


def num_ropes(config: Mapping[str, Any], model_type: str, kinds: Sequence[str]) -> int:
    """Return how many ropes a model has: one, or one for each kind of layers."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layer = isinstance(rope, dict) and any(isinstance(one, dict) for one in rope.values())
    return len(set(kinds)) if by_layer or model_type in _ROPES_BY_LAYER else 1


def _is_fused_rope(rope: Mapping[str, Any], partial_factor: object) -> bool:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    is_whole = rope.get("partial_rotary_factor", partial_factor) in (None, 1)
    numbers = [rope.get(name) for name in _ROPE_NUMBERS.get(kind, ())]
    return (is_whole or kind == "proportional") and all(type(one) in (int, float) for one in numbers)


def why_not_served(config: Mapping[str, Any], model_type: str, kinds: Sequence[str], *, is_of_text: bool) -> str:
    """Return what of a model the server does not compute; empty where it runs it. See the runner's ``models.py``."""
    served = {"full_attention", "sliding_attention"} | (
        {"chunked_attention"} if model_type in CHUNKED_FAMILIES else set()
    )
    odd_kinds = sorted(set(kinds) - served)
    odd_ropes = sorted(_rope_kinds(config, model_type).difference(_STATIC_ROPES))
    is_longrope = odd_ropes == ["longrope"] and model_type in _LONGROPE
    shares = config.get("num_kv_shared_layers") and model_type not in _SHARING
    reasons = {
        "more than text": not is_of_text,
        "latent attention": config.get("kv_lora_rank"),
        "KV shared across layers": shares or config.get("use_cla"),
        "weights quantized in the checkpoint": _is_refused_quantization(config),
        "soft-capping of attention scores": config.get("attn_logit_softcapping") and model_type not in _SOFT_CAPPING,
        f"layers of {' and '.join(odd_kinds)}": odd_kinds,
        "chunked attention": config.get("attention_chunk_size") and model_type not in CHUNKED_FAMILIES,
        "sliding windows of this family": "sliding_attention" in kinds and not lists_kinds(config, model_type),
        "ALiBi position biases": config.get("alibi"),
        f"rope of type {' and '.join(odd_ropes)}": odd_ropes and not is_longrope,
    }
    return next((reason for reason, is_there in reasons.items() if is_there), "")


def _is_refused_quantization(config: Mapping[str, Any]) -> bool:
    """Whether the weights are quantized in a way that the server does not compute."""
    try:
        read_quantization(config)
    except UnsupportedModelError:
        return True
    return False


def _rope_kinds(config: Mapping[str, Any], model_type: str) -> set[str]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        return set()
    by_layer = [one for one in rope.values() if isinstance(one, dict)]
    kinds = {str(one.get("rope_type") or one.get("type") or "default") for one in by_layer or [rope]}
    return {"longrope" if kind in _OLD_LONGROPES and model_type in _LONGROPE else kind for kind in kinds}
