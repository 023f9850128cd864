"""Layers with a state of constant size: what they keep of a sequence, and their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["recurrent_parameters", "state_elements"]


def state_elements(config: Mapping[str, Any], model_type: str) -> int | None:
    """Return the elements of the state of one such layer, its convolution included; None where it is not known how."""
    hidden = config["hidden_size"]
    if model_type == "jamba":
        inner = config["mamba_expand"] * hidden
        return int(inner * (config["mamba_d_state"] + config["mamba_d_conv"] - 1))
    if model_type in {"bamba", "granitemoehybrid", "falcon_h1"}:
        inner = config.get("mamba_d_ssm") or config["mamba_expand"] * hidden
        channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
        return int(inner * config["mamba_d_state"] + channels * (config["mamba_d_conv"] - 1))
    if model_type == "nemotron_h":
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        channels = inner + 2 * config["n_groups"] * config["ssm_state_size"]
        return int(inner * config["ssm_state_size"] + channels * (config["conv_kernel"] - 1))
    if config.get("linear_num_value_heads"):  # gated delta rule: qwen3_next and its kin
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return int(
            values * config["linear_key_head_dim"] + (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1)
        )
    return None


def recurrent_parameters(config: Mapping[str, Any], model_type: str) -> int:
    """Return the parameters of one such layer; of other families than Jamba roughly."""
    hidden = config["hidden_size"]
    if model_type != "jamba":
        return int(6 * hidden * hidden)
    inner, states, rank = config["mamba_expand"] * hidden, config["mamba_d_state"], config["mamba_dt_rank"]
    projections = 2 * hidden * inner + inner * (rank + 2 * states) + rank * inner + inner + inner * hidden
    convolution = inner * config["mamba_d_conv"] + (inner if config.get("mamba_conv_bias") else 0)
    return int(projections + convolution + inner * states + inner + rank + 2 * states)
