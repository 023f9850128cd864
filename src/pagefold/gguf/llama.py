"""GGUF files of the architecture ``llama``: Llama, Mistral, SmolLM and whoever else is built so.

What it has in common with others that are built nearly so, is here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.gguf.architecture import (
    Architecture,
    Weight,
    check_keys,
    check_tensors,
    num_positions,
    read_epsilon,
    read_sizes,
    refusal,
    weights_of_layers,
)
from pagefold.gguf.rope import FREQUENCIES, read_rope
from pagefold.gguf.token_ids import special_token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.gguf.file import GgufFile

__all__ = ["LLAMA", "plain_config", "plain_layer", "plain_weights"]

_LAYOUT = "llama.tensor_data_layout"
_ORIGINAL_LAYOUT = "Meta AI original pth"


def plain_config(gguf: GgufFile, family: str, class_name: str, *ends: str, **own: object) -> dict[str, Any]:
    """Return the config of a decoder that is built like Llama.

    Args:
        gguf: of the file.
        family: transformers' name of the family.
        class_name: transformers' name of the model.
        ends: tokens that end what such a model says in chats, beside those of all families.
        own: what else the family's configs have.
    """
    name = gguf.value("general.architecture", str)
    sizes = read_sizes(gguf)
    rope = read_rope(gguf, sizes.head_dim)
    return {
        "architectures": [class_name],
        "model_type": family,
        **sizes.as_config(),
        "hidden_act": "silu",
        "max_position_embeddings": num_positions(gguf, f"{name}.context_length"),
        "rms_norm_eps": read_epsilon(gguf),
        # In both spellings: transformers 5 reads the second, what was written for 4 reads the first.
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        **own,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **special_token_ids(gguf, *ends),
        "dtype": "float32",
    }


def plain_layer(config: Mapping[str, Any], rows_of_pairs: int = 0) -> dict[str, Weight]:
    """Return the tensors of one layer of a decoder that is built like Llama, by transformers' names in it.

    Args:
        config: of the model.
        rows_of_pairs: of q and k; see :class:`~pagefold.gguf.architecture.Weight`.
    """
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "input_layernorm.weight": Weight("attn_norm.weight", (hidden,)),
        "self_attn.q_proj.weight": Weight("attn_q.weight", (rows, hidden), rows_of_pairs),
        "self_attn.k_proj.weight": Weight("attn_k.weight", (kv_rows, hidden), rows_of_pairs),
        "self_attn.v_proj.weight": Weight("attn_v.weight", (kv_rows, hidden)),
        "self_attn.o_proj.weight": Weight("attn_output.weight", (hidden, rows)),
        "post_attention_layernorm.weight": Weight("ffn_norm.weight", (hidden,)),
        "mlp.gate_proj.weight": Weight("ffn_gate.weight", (inner, hidden)),
        "mlp.up_proj.weight": Weight("ffn_up.weight", (inner, hidden)),
        "mlp.down_proj.weight": Weight("ffn_down.weight", (hidden, inner)),
    }


def plain_weights(config: Mapping[str, Any], layer: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return all tensors of a model with such layers, by transformers' names."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    weights = {"model.embed_tokens.weight": Weight("token_embd.weight", (vocab, hidden))}
    weights |= weights_of_layers(layer, config["num_hidden_layers"])
    weights["model.norm.weight"] = Weight("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = Weight("output.weight", (vocab, hidden))
    return weights


def _config(gguf: GgufFile) -> dict[str, Any]:
    check_keys(gguf, ("tensor_data_layout",))
    layout = gguf.value(_LAYOUT, str, _ORIGINAL_LAYOUT)
    if layout != _ORIGINAL_LAYOUT:
        raise refusal(gguf, f"its tensors lie as {layout!r} says")
    return plain_config(gguf, "llama", "LlamaForCausalLM", attention_bias=False, mlp_bias=False)


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    weights = plain_weights(config, plain_layer(config, config["head_dim"]))
    check_tensors(gguf, weights, (FREQUENCIES,))
    return weights


LLAMA = Architecture(_config, _weights)
