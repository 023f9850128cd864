"""Tables of ropes that an engine keeps on a device: a cosine and a sine of each position that a model was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["rope_elements"]

_WITHOUT = ("gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "jamba", "nemotron_h")
"""Families without ropes."""
_STRETCHED = ("yarn", "deepseek_yarn", "linear", "dynamic")
"""Kinds of ropes whose table is ``factor`` times as long as what the model was first made for."""
_MOST = 2**40


def rope_elements(config: Mapping[str, Any], model_type: str, head_dim: int, num_ropes: int) -> int:
    """Return the elements of all tables together: positions x rotated elements, whatever length is served.

    Written from ``vllm/model_executor/layers/rotary_embedding``.
    """
    if model_type in _WITHOUT or config.get("alibi"):
        return 0
    positions = config["max_position_embeddings"]
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if kind in _STRETCHED and isinstance(factor, int | float) and type(original) is int and 0 < factor < _MOST:
        positions = int(original * factor)
    elif kind == "longrope" and type(original) is int:
        positions += original  # one for short and one for long texts
    elif kind == "mrope" or "mrope_section" in rope:
        positions *= 4
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1)))
    share = share if type(share) in (int, float) and 0 < share <= 1 else 1
    rotated = config.get("qk_rope_head_dim") if config.get("kv_lora_rank") else int(head_dim * share)
    return int(min(positions, _MOST) * (rotated or head_dim) * num_ropes)
