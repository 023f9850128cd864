"""Which models the fused decoder computes. Imports nothing heavy: it is asked before weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["FAMILIES", "why_not_fused"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def why_not_fused(config: PretrainedConfig) -> str:
    """Return what of a model of this config the fused decoder does not compute; empty if there is nothing."""
    family = str(config.model_type)
    facts: dict[str, Any] = config.to_dict()
    if family not in FAMILIES:
        return f"the family {family} (it knows {', '.join(FAMILIES)})"
    if facts.get("hidden_act", "silu") != "silu":
        return f"the activation {facts['hidden_act']}"
    if facts.get("mlp_bias"):
        return "biases in the MLP"
    if family != "qwen2" and facts.get("attention_bias"):
        return "a bias behind attention"
    return ""
