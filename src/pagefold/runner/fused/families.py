"""FusedConfig: all that the fused decoder needs to know of a model. Imports nothing heavy: it is asked before torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "FusedConfig", "Rope", "read_fused_config"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn q and k.

    Attributes:
        kind: transformers' name of it.
        theta: base of the wavelengths.
        factor, low_freq_factor, high_freq_factor, original_max_positions: of ``llama3``; 1 and 0 in other kinds.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """A model that the fused decoder computes.

    Attributes:
        family: one of :data:`FAMILIES`.
        num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size: its sizes.
        epsilon: of the norms.
        rope: of q and k.
        is_tied: whether the embedding is the head's matrix too.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    rope: Rope
    is_tied: bool

    @property
    def has_biases(self) -> bool:
        """Whether q, k and v have biases."""
        return self.family == "qwen2"

    @property
    def has_head_norms(self) -> bool:
        """Whether the heads of q and k are normed."""
        return self.family == "qwen3"

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by: the same in all families."""
        return float(self.head_dim**-0.5)


def read_fused_config(facts: Mapping[str, Any]) -> FusedConfig | str:
    """Read a config; return a string instead that says what of such a model the fused decoder does not compute.

    Args:
        facts: ``to_dict()`` of transformers' config; or a ``config.json`` that :func:`~pagefold.runner.plain_config.
            read_plain_config` has let pass.
    """
    family = str(facts["model_type"])
    if family not in FAMILIES:
        return f"the family {family} (it knows {', '.join(FAMILIES)})"
    if facts.get("hidden_act", "silu") != "silu":
        return f"the activation {facts['hidden_act']}"
    if facts.get("mlp_bias"):
        return "biases in the MLP"
    if family != "qwen2" and facts.get("attention_bias"):
        return "a bias behind attention"
    rope = _read_rope(facts)
    if isinstance(rope, str):
        return rope
    num_heads, hidden_size = int(facts["num_attention_heads"]), int(facts["hidden_size"])
    return FusedConfig(
        family=family,
        num_layers=int(facts["num_hidden_layers"]),
        hidden_size=hidden_size,
        intermediate_size=int(facts["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(facts.get("num_key_value_heads") or num_heads),
        head_dim=int(facts.get("head_dim") or hidden_size // num_heads),
        vocab_size=int(facts["vocab_size"]),
        epsilon=float(facts["rms_norm_eps"]),
        rope=rope,
        is_tied=bool(facts["tie_word_embeddings"]),
    )


def _read_rope(facts: Mapping[str, Any]) -> Rope | str:
    """Read the rope in its older spelling (``rope_theta`` and ``rope_scaling``) or in ``rope_parameters``."""
    written: Mapping[str, Any] = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    kind = str(written.get("rope_type", written.get("type", "default")))
    if kind != "proportional" and written.get("partial_rotary_factor") not in (None, 1):
        return "a rope of a part of the head"
    numbers = {"theta": written.get("rope_theta", facts.get("rope_theta"))}
    if kind == "llama3":
        numbers |= {name: written.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        numbers["original_max_positions"] = written.get("original_max_position_embeddings")
    for name, number in numbers.items():
        if type(number) not in (int, float):
            return f"a rope with {name} {number!r}"
    return Rope(kind, **numbers)
