"""GGUF files of the architecture ``gemma3``: the text part of Gemma 3, in the sizes that do not scale their positions.

The header says less than a config does: what is not in it is the same in all models of the family, and llama.cpp has it
in its code. So a key that is not known here is refused, since it may say that something is not the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.hub.architecture import (
    Architecture,
    Weight,
    check_tensors,
    read_sizes,
    refusal,
    shortest,
    special_token_ids,
    weights_of_layers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from pagefold.hub.gguf import GgufFile

__all__ = ["GEMMA3"]

# Each sixth layer sees everything, the others a window.
_PERIOD = 6
_THETA, _THETA_IN_WINDOWS = 1_000_000.0, 10_000.0
_END_OF_TURN = "<end_of_turn>"

_KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "vocab_size",
}


def _config(gguf: GgufFile) -> dict[str, Any]:
    sizes = read_sizes(gguf)
    keys = {key.removeprefix("gemma3.") for key in gguf.metadata if key.startswith("gemma3.")}
    if keys - _KNOWN_KEYS:
        raise refusal(gguf, f"its header has gemma3.{min(keys - _KNOWN_KEYS)}, whose meaning is not known here")
    if "output.weight" in gguf.tensors:
        raise refusal(gguf, "it has an output matrix of its own, which no Gemma 3 has")
    period = gguf.value("gemma3.attention.sliding_window_pattern", int, _PERIOD)
    if period < 1:
        raise refusal(gguf, f"a full layer after each {period}")
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(sizes.num_layers)]
    theta = shortest(gguf.value("gemma3.rope.freq_base", float, _THETA))
    theta_in_windows = shortest(gguf.value("gemma3.rope.freq_base_swa", float, _THETA_IN_WINDOWS))
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **sizes.as_config(),
        # Only the largest Gemma 3 has another one than its heads' length, and that one scales its positions.
        "query_pre_attn_scalar": sizes.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": gguf.value("gemma3.context_length", int),
        "sliding_window": gguf.value("gemma3.attention.sliding_window", int),
        "layer_types": kinds,
        "rms_norm_eps": shortest(gguf.value("gemma3.attention.layer_norm_rms_epsilon", float)),
        # In both spellings: transformers 5 reads the last, what was written for 4 reads the two others.
        "rope_theta": theta,
        "rope_local_base_freq": theta_in_windows,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta_in_windows},
        },
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "tie_word_embeddings": True,
        **special_token_ids(gguf),
        **_end_ids(gguf),
        "dtype": "float32",
    }


def _end_ids(gguf: GgufFile) -> dict[str, list[int]]:
    # A model that chats ends its turns by a token of its own, which few headers name: llama.cpp knows it by its text.
    end = gguf.value("tokenizer.ggml.eos_token_id", int)
    tokens = gguf.values("tokenizer.ggml.tokens", str)
    if "tokenizer.chat_template" not in gguf.metadata or _END_OF_TURN not in tokens:
        return {}
    end_of_turn = tokens.index(_END_OF_TURN)
    return {} if end_of_turn == end else {"eos_token_id": [end, end_of_turn]}


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    inside = {
        "input_layernorm": _norm("attn_norm", hidden),
        "self_attn.q_proj": Weight("attn_q", (rows, hidden)),
        "self_attn.q_norm": _norm("attn_q_norm", head_dim),
        "self_attn.k_proj": Weight("attn_k", (kv_rows, hidden)),
        "self_attn.k_norm": _norm("attn_k_norm", head_dim),
        "self_attn.v_proj": Weight("attn_v", (kv_rows, hidden)),
        "self_attn.o_proj": Weight("attn_output", (hidden, rows)),
        "post_attention_layernorm": _norm("post_attention_norm", hidden),
        "pre_feedforward_layernorm": _norm("ffn_norm", hidden),
        "mlp.gate_proj": Weight("ffn_gate", (inner, hidden)),
        "mlp.up_proj": Weight("ffn_up", (inner, hidden)),
        "mlp.down_proj": Weight("ffn_down", (hidden, inner)),
        "post_feedforward_layernorm": _norm("post_ffw_norm", hidden),
    }
    weights = {"model.embed_tokens.weight": Weight("token_embd.weight", (config["vocab_size"], hidden))}
    weights |= weights_of_layers(inside, config["num_hidden_layers"])
    weights["model.norm.weight"] = _norm("output_norm.weight", hidden)
    check_tensors(gguf, weights)
    return weights


def _norm(gguf_name: str, length: int) -> Weight:
    return Weight(gguf_name, (length,), _minus_one)


def _minus_one(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a norm's scales as the model has them, which adds 1 to them when it computes; GGUF stores the sum."""
    return scales - 1


GEMMA3 = Architecture(_config, _weights)
