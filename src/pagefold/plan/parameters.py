"""How many parameters the layers of each family have, from its config.

Each family's count equals, parameter by parameter, what transformers builds from the same config; a test holds that for
every row of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "COUNTED_FAMILIES",
    "Experts",
    "attention_parameters",
    "experts_of",
    "has_gate",
    "mlp_parameters",
    "norm_parameters",
]

COUNTED_FAMILIES = frozenset(
    {
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gemma3n_text", "phi3",
        "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text", "jamba", "smollm3", "gpt_neox", "cohere2", "olmo3",
        "gemma", "granite", "phi", "qwen2_moe",
    }
)  # fmt: skip
"""Families whose parameters are counted exactly."""

_FOUR_NORMS = ("gemma2", "gemma3_text", "gemma3n_text")
_QK_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
_QKV_BIASES = ("qwen2", "qwen2_moe", "phi")
"""Families whose projections have biases whatever the config says."""
_WITHOUT_GATE = (
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron", "nemotron_h",
    "opt", "persimmon", "phi", "starcoder2",
)  # fmt: skip
"""Families with two matrices in a feed-forward layer, not three."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer.

    Attributes:
        num_experts: of the layer.
        num_active: how many of them a token uses.
        parameters: how many parameters all experts have.
        router_parameters: of what chooses among them.
        shared_parameters: of the experts that every token uses.
        width: elements between the two products, of all experts that a token uses.
    """

    num_experts: int
    num_active: int
    parameters: int
    router_parameters: int
    shared_parameters: int
    width: int


def attention_parameters(config: Mapping[str, Any], model_type: str, head_dim: int) -> tuple[int, int, int]:
    """Return (split, KV projections, whole) parameters of one attention layer."""
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, num_heads)
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    split = 2 * hidden * num_heads * head_dim
    kv = 2 * hidden * num_kv_heads * head_dim
    if config.get("attention_bias") or model_type in _QKV_BIASES:
        split += num_heads * head_dim
        kv += 2 * num_kv_heads * head_dim
    whole = hidden if model_type == "phi" else 0  # the bias of its output projection
    if model_type in {"llama", "gpt_oss", "gpt_neox", "smollm3", "cohere2", "olmo3"} and config.get("attention_bias"):
        whole += hidden  # of the output projection
    if model_type == "gpt_oss":
        split += num_heads  # sinks
    if model_type in _QK_NORMS or model_type == "gemma3n_text":
        whole += 2 * head_dim
    if model_type == "olmo3":  # its norms of q and k are of all heads
        whole += (num_heads + num_kv_heads) * head_dim
    return split, kv, whole


def _latent_attention(config: Mapping[str, Any], hidden: int, num_heads: int) -> tuple[int, int, int]:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key_dim = config["qk_nope_head_dim"] + rope
    split = num_heads * config["v_head_dim"] * hidden
    split += rank * num_heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
    whole = hidden * (rank + rope) + rank
    query_rank = config.get("q_lora_rank")
    if query_rank:
        whole += hidden * query_rank + query_rank
        split += query_rank * num_heads * key_dim
    else:
        split += hidden * num_heads * key_dim
    return split, 0, whole


def mlp_parameters(config: Mapping[str, Any], model_type: str, width: int) -> int:
    """Return the parameters of a dense feed-forward layer of that width."""
    hidden = config["hidden_size"]
    if model_type in {"gpt_neox", "phi"}:
        return int(2 * hidden * width + hidden + width)
    return int((3 if has_gate(model_type) else 2) * hidden * width)


def has_gate(model_type: str) -> bool:
    """Whether a family's feed-forward layers have a gate beside what goes up and down."""
    return model_type not in _WITHOUT_GATE


def norm_parameters(config: Mapping[str, Any], model_type: str) -> int:
    """Return the parameters of a layer's norms of the residual stream."""
    hidden: int = config["hidden_size"]
    if model_type == "gpt_neox":
        return 4 * hidden
    if model_type == "phi":  # one norm, with a bias
        return 2 * hidden
    if model_type == "cohere2":
        return hidden
    return (4 if model_type in _FOUR_NORMS else 2) * hidden


def experts_of(config: Mapping[str, Any], model_type: str, layer: int) -> Experts | None:
    """Return the experts of that layer; None where it has a dense feed-forward layer."""
    num_experts = next(
        (config[name] for name in ("num_local_experts", "n_routed_experts", "num_experts") if config.get(name)), 0
    )
    if num_experts <= 1 or not _is_sparse(config, model_type, layer):
        return None
    hidden = config["hidden_size"]
    num_active = config.get("num_experts_per_tok") or (1 if model_type == "llama4_text" else 2)
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    each = mlp_parameters(config, model_type, width)
    router = num_experts * hidden
    if model_type == "gpt_oss":
        each += 2 * width + hidden
        router += num_experts
    shared = 0
    if model_type == "llama4_text":
        shared = each
    elif config.get("n_shared_experts"):
        shared = config["n_shared_experts"] * each
    elif config.get("shared_expert_intermediate_size"):
        shared = 3 * hidden * config["shared_expert_intermediate_size"] + hidden
    return Experts(
        num_experts, num_active, num_experts * each, router, shared, num_active * width + shared // hidden // 3
    )


def _is_sparse(config: Mapping[str, Any], model_type: str, layer: int) -> bool:
    if model_type.startswith("deepseek"):
        return layer >= (config.get("first_k_dense_replace") or 0)
    if model_type == "jamba":
        return bool(layer % config["expert_layer_period"] == config["expert_layer_offset"])
    if model_type == "llama4_text":
        listed = config.get("moe_layers")
        if listed is not None:
            return layer in listed
        return bool((layer + 1) % (config.get("interleave_moe_layer_step") or 1) == 0)
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    return bool((layer + 1) % (config.get("decoder_sparse_step") or 1) == 0)
