"""Fields of a ``config.json``: that those that are read are there, and of the kind and size that they must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["check_fields", "check_kinds", "lacks"]

_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")

_AT_LEAST_1 = (
    *_NEEDED, "num_key_value_heads", "head_dim", "num_global_key_value_heads", "global_head_dim", "v_head_dim",
    "attn_layer_period", "full_attention_interval", "cla_share_factor", "expert_layer_period",
    "interleave_moe_layer_step", "decoder_sparse_step", "altup_num_inputs", "no_rope_layer_interval",
)  # fmt: skip
_AT_LEAST_0 = (
    "sliding_window", "attention_chunk_size", "sliding_window_pattern", "_sliding_window_pattern", "attn_layer_offset",
    "max_window_layers", "num_kv_shared_layers", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size", "first_k_dense_replace",
    "num_local_experts", "n_routed_experts", "num_experts", "num_experts_per_tok", "n_shared_experts",
    "expert_layer_offset", "mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_d_ssm", "mamba_dt_rank",
    "mamba_n_groups", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
    "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "laurel_rank",
    "original_max_position_embeddings",
)  # fmt: skip
_MOST_LAYERS, _MOST = 10_000, 2**40

_LISTS = (
    "layer_types", "layers_block_type", "attn_layer_indices", "no_rope_layers", "moe_layers", "mlp_only_layers",
)  # fmt: skip
_OBJECTS = ("quantization_config", "rope_scaling", "rope_parameters", "per_layer_config")

_UNREAD = (
    "attn_type_list", "block_configs", "block_types", "cross_attention_layers", "full_attn_idxs", "linear_attn_config",
)  # fmt: skip
"""Fields by which families say what their layers keep, in ways that nobody reads here."""


def lacks(name: str, fields: Sequence[str]) -> ConfigError:
    """Return the error of a config without these fields."""
    message = f"The config of {name} lacks {', '.join(fields)}."
    return ConfigError(message, remedy="Give a whole config.json, as transformers writes it.")


def check_fields(config: Mapping[str, Any], name: str) -> None:
    """Check what is read of a config.

    Raises:
        ConfigError: a field is missing, of another kind or absurd; names it.
        UnsupportedModelError: two contradict each other, or what its layers keep is said in one that is not read.
    """
    missing = [field for field in _NEEDED if config.get(field) is None]
    if missing:
        raise lacks(name, missing)
    for field in _AT_LEAST_1 + _AT_LEAST_0:
        _check_number(config, name, field, 1 if field in _AT_LEAST_1 else 0)
    widths = config.get("intermediate_size")
    for width in widths if isinstance(widths, list) else [widths]:
        _check_number({"intermediate_size": width}, name, "intermediate_size", 0)
    for fields, kind in ((_LISTS, list), (_OBJECTS, dict)):
        for field in fields:
            if not isinstance(config.get(field), kind | None):
                raise _bad(name, field, config[field], "a list" if kind is list else "an object")
    _check_heads(config, name)
    num_layers = config["num_hidden_layers"]
    for field in ("layer_types", "layers_block_type", "no_rope_layers", "intermediate_size"):
        of = config.get(field)
        if isinstance(of, list) and len(of) != num_layers and (of or field == "intermediate_size"):
            message = f"The config of {name} has {num_layers} layers, and {field} is of {len(of)}."
            raise UnsupportedModelError(message, remedy=f"Check num_hidden_layers and {field}.")
    unread = [field for field in _UNREAD if config.get(field)]
    if unread and not config.get("layer_types"):
        message = f"{name} says in {', '.join(unread)} what its layers keep, which is not read here."
        raise UnsupportedModelError(message, remedy="Plan for another model, or name its layer_types in the config.")


def check_kinds(config: Mapping[str, Any], name: str, kinds: Sequence[str], *, throughout: str) -> None:
    """Check the kinds of a config's layers against what it says of them elsewhere.

    Args:
        config: what is read.
        name: of the model, for errors.
        kinds: of its layers.
        throughout: of what kind all its layers are, whatever ``layer_types`` lists; empty where it is as listed.

    Raises:
        UnsupportedModelError: two fields contradict each other, or a window holds no token; names them.
    """
    if throughout and set(kinds) != {throughout}:
        message = f"{name} lists layer_types, which its layers do not follow: all are {throughout}, by sliding_window."
        raise UnsupportedModelError(message, remedy="Take layer_types out of config.json, or mend it.")
    for kind, field in (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")):
        if kind in kinds and not config.get(field):
            message = f"{name} has layers of {kind}, and {field} is {config.get(field)}."
            raise UnsupportedModelError(message, remedy=f"Check layer_types and {field}, a whole number of at least 1.")
    num_own = len(kinds) - (config.get("num_kv_shared_layers") or 0)
    lacking = sorted(set(kinds) - set(kinds[: max(0, num_own)]))
    if lacking:
        message = (
            f"{name} has {len(kinds)} layers, and num_kv_shared_layers is {len(kinds) - num_own}: "
            f"there is no layer of {lacking[0]} whose K and V they could read."
        )
        raise UnsupportedModelError(message, remedy="Check num_kv_shared_layers and layer_types.")


def _check_number(config: Mapping[str, Any], name: str, field: str, least: int) -> None:
    value = config.get(field)
    most = _MOST_LAYERS if field == "num_hidden_layers" else _MOST
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise _bad(name, field, value, f"a whole number, at least {least} and at most {most:,}")


def _check_heads(config: Mapping[str, Any], name: str) -> None:
    num_heads, num_kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        message = f"The config of {name} has {num_heads} attention heads for {num_kv_heads} KV heads."
        raise UnsupportedModelError(message, remedy="KV heads must divide the attention heads.")
    if config.get("head_dim") is None and num_heads > config["hidden_size"]:
        message = f"The config of {name} has {num_heads} attention heads for a hidden_size of {config['hidden_size']}."
        raise ConfigError(message, remedy="Check both, or give head_dim.")


def _bad(name: str, field: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"The config of {name} says {field} = {repr(value)[:80]}.", remedy=f"It must be {allowed}.")
