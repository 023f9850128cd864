"""FusedConfig: all that the fused decoder needs to know of a model. Imports nothing heavy: it is asked before torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "FusedConfig", "Rope", "read_fused_config"]

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
"""Activations of the MLP by transformers' names, with ours (``kernels/rows.py``)."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What all models of a family have, and in which fields of their configs the rest is.

    Attributes:
        has_biases, has_head_norms, has_product_norms, adds_one_to_norms: see :class:`FusedConfig`.
        scales_embeddings: whether embeddings are multiplied by the root of their size.
        activation: the field with the activation.
        scale: the field with the number whose root scores are divided by; empty where that is the size of a head.
        attention_softcap, logit_softcap: fields with softcaps; empty where there are none.
    """

    has_biases: bool = False
    has_head_norms: bool = False
    has_product_norms: bool = False
    adds_one_to_norms: bool = False
    scales_embeddings: bool = False
    activation: str = "hidden_act"
    scale: str = ""
    attention_softcap: str = ""
    logit_softcap: str = ""


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(has_biases=True),
    "qwen3": _Family(has_head_norms=True),
    "gemma2": _Family(
        has_product_norms=True,
        adds_one_to_norms=True,
        scales_embeddings=True,
        activation="hidden_activation",
        scale="query_pre_attn_scalar",
        attention_softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
    ),
    "gemma3_text": _Family(
        has_head_norms=True,
        has_product_norms=True,
        adds_one_to_norms=True,
        scales_embeddings=True,
        activation="hidden_activation",
        scale="query_pre_attn_scalar",
        logit_softcap="final_logit_softcapping",
    ),
}
FAMILIES = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn q and k.

    Attributes:
        kind: transformers' name of it.
        theta: base of the wavelengths.
        factor: of ``linear`` and ``llama3``; 1 in other kinds.
        low_freq_factor, high_freq_factor, original_max_positions: of ``llama3``; 1 and 0 in other kinds.
        layer_type: the kind of layers that it is of, by transformers' name; empty where all layers have one rope.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    layer_type: str = ""


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """A model that the fused decoder computes.

    Attributes:
        num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size: its sizes.
        epsilon: of the norms.
        ropes: of q and k.
        rope_of_layer: which of them each layer has.
        is_tied: whether the embedding is the head's matrix too.
        activation: of the MLP: ``silu`` or ``gelu``.
        attention_scale: what scores are multiplied by.
        attention_softcap: of scores; 0 for none.
        logit_softcap: of logits; 0 for none.
        embedding_factor: what embeddings are multiplied by.
        has_biases: whether q, k and v have biases.
        has_head_norms: whether the heads of q and k are normed.
        has_product_norms: whether what attention and the MLP come to is normed before it is added.
        adds_one_to_norms: whether norms multiply by 1 more than their weights.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]
    is_tied: bool
    activation: str
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    embedding_factor: float
    has_biases: bool
    has_head_norms: bool
    has_product_norms: bool
    adds_one_to_norms: bool


def read_fused_config(facts: Mapping[str, Any]) -> FusedConfig | str:
    """Read a config; return a string instead that says what of such a model the fused decoder does not compute.

    Args:
        facts: ``to_dict()`` of transformers' config; or a ``config.json`` that :func:`~pagefold.runner.plain_config.
            read_plain_config` has let pass.
    """
    name = str(facts["model_type"])
    family = _FAMILIES.get(name)
    if family is None:
        return f"the family {name} (it knows {', '.join(FAMILIES)})"
    why_not = _why_not(facts, family)
    if why_not:
        return why_not
    ropes = _read_ropes(facts)
    if isinstance(ropes, str):
        return ropes
    num_heads, hidden_size = int(facts["num_attention_heads"]), int(facts["hidden_size"])
    head_dim = int(facts.get("head_dim") or hidden_size // num_heads)
    return FusedConfig(
        num_layers=int(facts["num_hidden_layers"]),
        hidden_size=hidden_size,
        intermediate_size=int(facts["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(facts.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        vocab_size=int(facts["vocab_size"]),
        epsilon=float(facts["rms_norm_eps"]),
        ropes=ropes,
        rope_of_layer=_rope_of_layer(facts, ropes),
        is_tied=bool(facts["tie_word_embeddings"]),
        activation=ACTIVATIONS[facts.get(family.activation, "silu")],
        attention_scale=float((facts[family.scale] if family.scale else head_dim) ** -0.5),
        attention_softcap=_softcap(facts, family.attention_softcap),
        logit_softcap=_softcap(facts, family.logit_softcap),
        embedding_factor=hidden_size**0.5 if family.scales_embeddings else 1.0,
        has_biases=family.has_biases,
        has_head_norms=family.has_head_norms,
        has_product_norms=family.has_product_norms,
        adds_one_to_norms=family.adds_one_to_norms,
    )


def _why_not(facts: Mapping[str, Any], family: _Family) -> str:
    """Return what of a model's layers is not computed; empty where there is nothing."""
    activation = facts.get(family.activation, "silu")
    if activation not in ACTIVATIONS:
        return f"the activation {activation}"
    if facts.get("mlp_bias"):
        return "biases in the MLP"
    if not family.has_biases and facts.get("attention_bias"):
        return "a bias behind attention"
    if facts.get("use_bidirectional_attention"):
        return "attention to later tokens"
    return ""


def _softcap(facts: Mapping[str, Any], field: str) -> float:
    return float(facts.get(field) or 0.0) if field else 0.0


def _read_ropes(facts: Mapping[str, Any]) -> tuple[Rope, ...] | str:
    """Read the ropes in their older spelling (``rope_theta`` and ``rope_scaling``) or in ``rope_parameters``.

    These may have one for each kind of layers.
    """
    written: Mapping[str, Any] = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    by_layer_type = {name: one for name, one in written.items() if isinstance(one, dict)}
    if not by_layer_type:
        rope = _read_rope(written, facts.get("rope_theta"))
        return rope if isinstance(rope, str) else (rope,)
    ropes = []
    for layer_type in sorted(set(facts["layer_types"])):
        rope = _read_rope(by_layer_type.get(layer_type, {}), None, layer_type)
        if isinstance(rope, str):
            return rope
        ropes.append(rope)
    return tuple(ropes)


def _read_rope(written: Mapping[str, Any], theta: object, layer_type: str = "") -> Rope | str:
    """Read one rope; ``theta`` is what the config says of it elsewhere."""
    kind = str(written.get("rope_type", written.get("type", "default")))
    if kind != "proportional" and written.get("partial_rotary_factor") not in (None, 1):
        return "a rope of a part of the head"
    numbers = {"theta": written.get("rope_theta", theta)}
    if kind == "linear":
        numbers["factor"] = written.get("factor")
    if kind == "llama3":
        numbers |= {name: written.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        numbers["original_max_positions"] = written.get("original_max_position_embeddings")
    for name, number in numbers.items():
        if type(number) not in (int, float):
            return f"a rope with {name} {number!r}"
    return Rope(kind, **numbers, layer_type=layer_type)


def _rope_of_layer(facts: Mapping[str, Any], ropes: tuple[Rope, ...]) -> tuple[int, ...]:
    """Return which of its ropes each layer has."""
    if not ropes[0].layer_type:
        return (0,) * int(facts["num_hidden_layers"])
    kinds = [rope.layer_type for rope in ropes]
    return tuple(kinds.index(kind) for kind in facts["layer_types"])
