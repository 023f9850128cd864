"""GGUF files of the architecture ``llama``, as SmolLM2 has it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pagefold.hub.architecture import (
    Architecture,
    Weight,
    check_tensors,
    read_sizes,
    shortest,
    special_token_ids,
    weights_of_layers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from pagefold.hub.gguf import GgufFile

__all__ = ["LLAMA"]


def _config(gguf: GgufFile) -> dict[str, Any]:
    sizes = read_sizes(gguf)
    rope_theta = shortest(gguf.value("llama.rope.freq_base", float, 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes.as_config(),
        "hidden_act": "silu",
        "max_position_embeddings": gguf.value("llama.context_length", int),
        "rms_norm_eps": shortest(gguf.value("llama.attention.layer_norm_rms_epsilon", float)),
        # In both spellings: transformers 5 reads the second, what was written for 4 reads the first.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **special_token_ids(gguf),
        "dtype": "float32",
    }


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config["head_dim"]
    rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    split_pairs = partial(_split_pairs, head_dim=head_dim)
    inside = {
        "input_layernorm": Weight("attn_norm", (hidden,)),
        "self_attn.q_proj": Weight("attn_q", (rows, hidden), split_pairs, head_dim),
        "self_attn.k_proj": Weight("attn_k", (kv_rows, hidden), split_pairs, head_dim),
        "self_attn.v_proj": Weight("attn_v", (kv_rows, hidden)),
        "self_attn.o_proj": Weight("attn_output", (hidden, rows)),
        "post_attention_layernorm": Weight("ffn_norm", (hidden,)),
        "mlp.gate_proj": Weight("ffn_gate", (inner, hidden)),
        "mlp.up_proj": Weight("ffn_up", (inner, hidden)),
        "mlp.down_proj": Weight("ffn_down", (hidden, inner)),
    }
    weights = {"model.embed_tokens.weight": Weight("token_embd.weight", (vocab, hidden))}
    weights |= weights_of_layers(inside, config["num_hidden_layers"])
    weights["model.norm.weight"] = Weight("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = Weight("output.weight", (vocab, hidden))
    check_tensors(gguf, weights)
    return weights


def _split_pairs(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Put rows of Q or K, float32 [n * head_dim, hidden], into transformers' order.

    Rotation works on pairs of rows of a head. GGUF stores the two of a pair side by side; transformers has one in the
    first and one in the second half of the head.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


LLAMA = Architecture(_config, _weights)
