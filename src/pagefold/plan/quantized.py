"""Quantized: how many of a layer's parameters a quantized checkpoint stores in fewer bits; the rest stays in 16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.plan.parameters import has_gate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pagefold.plan.kept import Kept
    from pagefold.plan.parameters import Experts

__all__ = ["NOTHING_QUANTIZED", "LayerFacts", "Quantized", "quantized_of"]

_PREFIXES = ("model.layers", "language_model.model.layers", "model.language_model.layers", "transformer.h")
"""Where checkpoints have their layers."""


class Quantized(NamedTuple):
    """Parameters of a layer, as ``DecoderLayer`` cuts them.

    Attributes:
        split: of those that tensor parallelism divides.
        whole: of those that every device has.
        kv: of the projections to K and V.
        experts: of routed experts.
    """

    split: int = 0
    whole: int = 0
    kv: int = 0
    experts: int = 0


NOTHING_QUANTIZED = Quantized()


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What is known of a layer where its modules are counted.

    Attributes:
        index: of the layer.
        head_dim: elements of a head.
        keeps_kv: whether it has attention.
        has_own_kv: whether it projects to K and V.
        recurrent: parameters of its state's part.
        dense_width: of its dense feed-forward part; 0 where it has none.
        experts: its experts; None where it has none.
    """

    index: int
    head_dim: int
    keeps_kv: bool
    has_own_kv: bool
    recurrent: int
    dense_width: int
    experts: Experts | None


def quantized_of(config: Mapping[str, Any], model_type: str, facts: LayerFacts, kept: Kept) -> Quantized:
    """Return what of a layer is quantized where matrices of products are, but for what ``kept`` names."""
    found = dict.fromkeys(Quantized._fields, 0)
    for part, names, count in _modules(config, model_type, facts):
        known = [f"{prefix}.{facts.index}.{name}" for prefix in _PREFIXES for name in names]
        if not kept.keeps(known):
            found[part] += count
    return Quantized(**found)


def _modules(
    config: Mapping[str, Any], model_type: str, facts: LayerFacts
) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield (part, names, parameters) of each matrix; biases, norms and routers are in none."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if facts.keeps_kv and config.get("kv_lora_rank"):
        yield from _latent(config, hidden, heads)
    elif facts.keeps_kv:
        kv_heads = config.get("num_key_value_heads") or heads
        queries, keys = hidden * heads * facts.head_dim, hidden * kv_heads * facts.head_dim
        yield "split", ("self_attn.q_proj", "self_attn.qkv_proj"), queries
        yield "split", ("self_attn.o_proj", "self_attn.dense"), queries
        if facts.has_own_kv:
            yield "kv", ("self_attn.k_proj", "self_attn.qkv_proj"), keys
            yield "kv", ("self_attn.v_proj", "self_attn.qkv_proj"), keys
    if facts.recurrent:
        yield "split", ("mamba.in_proj", "linear_attn.in_proj"), facts.recurrent
    if facts.experts is not None:
        one = (
            (3 if has_gate(model_type) else 2)
            * hidden
            * (config.get("moe_intermediate_size") or config["intermediate_size"])
        )
        names = ("mlp.experts.0.up_proj", "block_sparse_moe.experts.0.w1", "feed_forward.experts.0.up_proj")
        yield "experts", names, facts.experts.num_experts * one
        shared = ("mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj", "feed_forward.shared_expert.up_proj")
        yield "split", shared, facts.experts.shared_parameters
    elif facts.dense_width:
        matrix = hidden * facts.dense_width
        if has_gate(model_type):
            yield "split", ("mlp.gate_proj", "mlp.gate_up_proj"), matrix
        yield "split", ("mlp.up_proj", "mlp.gate_up_proj", "mlp.fc1"), matrix
        yield "split", ("mlp.down_proj", "mlp.fc2"), matrix


def _latent(config: Mapping[str, Any], hidden: int, heads: int) -> Iterator[tuple[str, tuple[str, ...], int]]:
    rank, rope, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
    nope = config["qk_nope_head_dim"]
    yield "whole", ("self_attn.kv_a_proj_with_mqa",), hidden * (rank + rope)
    yield "split", ("self_attn.kv_b_proj",), rank * heads * (nope + value)
    yield "split", ("self_attn.o_proj",), heads * value * hidden
    query_rank = config.get("q_lora_rank")
    if query_rank:
        yield "whole", ("self_attn.q_a_proj",), hidden * query_rank
        yield "split", ("self_attn.q_b_proj",), query_rank * heads * (nope + rope)
    else:
        yield "split", ("self_attn.q_proj",), hidden * heads * (nope + rope)
