"""Tables of ropes that an engine keeps on a device: a cosine and a sine of each position that a model was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["rope_elements"]

_WITHOUT = ("gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "jamba", "nemotron_h")
"""Families without ropes."""
_OF_ORIGINAL = ("yarn", "deepseek_yarn")
"""Kinds of ropes whose table is ``factor`` times as long as what the model was first made for."""
_OF_ALL = ("linear", "dynamic")
"""Kinds whose table is ``factor`` times as long as what it is made for now."""
_MOST = 2**40


def rope_elements(config: Mapping[str, Any], model_type: str, head_dim: int, num_ropes: int) -> int:
    """Return the elements of all tables together: positions x rotated elements, whatever length is served.

    Written from ``vllm/model_executor/layers/rotary_embedding``. A config that stretches its rope, and has several,
    stretches the first: that of layers that see all.
    """
    if model_type in _WITHOUT or config.get("alibi"):
        return 0
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layers = [each for each in rope.values() if isinstance(each, dict)]
    ropes = by_layers or [rope, *({} for _ in range(num_ropes - 1))]
    positions = sum(_num_positions(each, config["max_position_embeddings"]) for each in ropes)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1)))
    share = share if type(share) in (int, float) and 0 < share <= 1 else 1
    rotated = config.get("qk_rope_head_dim") if config.get("kv_lora_rank") else int(head_dim * share)
    return int(positions * (rotated or head_dim))


def _num_positions(rope: Mapping[str, Any], positions: int) -> int:
    """Return how many positions the table of one rope has."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and 0 < factor < _MOST:
        if kind in _OF_ORIGINAL and type(original) is int:
            positions = int(original * factor)
        elif kind in _OF_ALL:
            positions = int(positions * factor)
    if kind == "longrope" and type(original) is int:
        positions += original  # one for short and one for long texts
    elif kind == "mrope" or "mrope_section" in rope:
        positions *= 4
    return min(positions, _MOST)
