"""GGUF files of the architecture ``gemma2``; what Gemma 3's have in common with them is here too.

Norms of Gemma's multiply by 1 more than their weights; a file has the sum.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pagefold.gguf.architecture import (
    Architecture,
    Weight,
    check_keys,
    check_tensors,
    num_positions,
    positive,
    read_epsilon,
    read_sizes,
    refusal,
    shortest,
)
from pagefold.gguf.header import GgufFormatError
from pagefold.gguf.llama import plain_layer, plain_weights
from pagefold.gguf.rope import read_rope
from pagefold.gguf.token_ids import special_token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.gguf.architecture import Sizes
    from pagefold.gguf.file import GgufFile

__all__ = ["GEMMA2", "gemma_config", "gemma_weights"]

_KEYS = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""With what they are where a header has none."""
_NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_ORDER = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_proj.weight",
    "self_attn.k_norm.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_feedforward_layernorm.weight",
)
"""In which a layer computes with them, and converted folders have them."""
_NUM_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The largest model of either family divides scores by the root of another number than the size of a head. No header
says so: llama.cpp knows it by its number of layers."""


def gemma_config(
    gguf: GgufFile, sizes: Sizes, class_name: str, layer_types: list[str], ropes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of a Gemma 2 or 3 without softcaps.

    Args:
        gguf: of the file.
        sizes: of the model.
        class_name: transformers' name of the model.
        layer_types: what each layer sees.
        ropes: everything that the config says of positions.
    """
    name = gguf.value("general.architecture", str)
    if "output.weight" in gguf.tensors:
        raise refusal(gguf, f"it has an output matrix of its own, which no {name} has")
    is_27b = sizes.num_layers == _NUM_LAYERS_OF_27B[name]
    return {
        "architectures": [class_name],
        "model_type": "gemma3_text" if name == "gemma3" else name,
        **sizes.as_config(),
        "query_pre_attn_scalar": sizes.hidden_size // sizes.num_heads if is_27b else sizes.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": num_positions(gguf, f"{name}.context_length"),
        "sliding_window": positive(gguf, f"{name}.attention.sliding_window"),
        "layer_types": layer_types,
        "rms_norm_eps": read_epsilon(gguf),
        **ropes,
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "tie_word_embeddings": True,
        **special_token_ids(gguf),
        "dtype": "float32",
    }


def gemma_weights(config: Mapping[str, Any], head_norms: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return all tensors of a Gemma 2 or 3, by transformers' names.

    Args:
        config: of the model.
        head_norms: of a layer; Gemma 2 has none.
    """
    norms = {name: _norm(gguf_name, config) for name, gguf_name in _NORMS.items()}
    layer = {**plain_layer(config), **head_norms, **norms}
    weights = plain_weights(config, {name: layer[name] for name in _ORDER if name in layer})
    weights["model.norm.weight"] = _norm("output_norm.weight", config)
    return weights


def _norm(gguf_name: str, config: Mapping[str, Any]) -> Weight:
    return Weight(gguf_name, (config["hidden_size"],), adds_one=True)


def _config(gguf: GgufFile) -> dict[str, Any]:
    check_keys(gguf, _KEYS)
    sizes = read_sizes(gguf)
    rope = read_rope(gguf, sizes.head_dim)
    # In turn, the window first.
    layer_types = [("sliding_attention", "full_attention")[layer % 2] for layer in range(sizes.num_layers)]
    ropes = {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
    return gemma_config(gguf, sizes, "Gemma2ForCausalLM", layer_types, ropes) | {
        name: _cap(gguf, f"gemma2.{name}", usual) for name, usual in _CAPS.items()
    }


def _cap(gguf: GgufFile, key: str, usual: float) -> float:
    cap = shortest(gguf.value(key, float, usual))
    if not 0 < cap < math.inf:
        message = f"{gguf.path}: {key} is {cap}."
        raise GgufFormatError(message)
    return cap


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    weights = gemma_weights(config, {})
    check_tensors(gguf, weights)
    return weights


GEMMA2 = Architecture(_config, _weights)
