"""GGUF files of the architecture ``phi3``: Phi 3, 3.5 and 4, whose q, k and v are one matrix, and gate and up another.

So are they in transformers' model, in the same order: gate before up.
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
from pagefold.gguf.llama import plain_weights
from pagefold.gguf.rope import read_theta
from pagefold.gguf.token_ids import special_token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.gguf.architecture import Sizes
    from pagefold.gguf.file import GgufFile

__all__ = ["PHI3"]

_KEYS = ("attention.sliding_window",)
_WINDOW = "phi3.attention.sliding_window"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_TOLERANCE = 1e-5


def _config(gguf: GgufFile) -> dict[str, Any]:
    check_keys(gguf, _KEYS)
    sizes = read_sizes(gguf)
    if sizes.num_heads * sizes.head_dim != sizes.hidden_size:
        raise refusal(gguf, f"its {sizes.num_heads} heads of {sizes.head_dim} are not {sizes.hidden_size} wide")
    max_positions = num_positions(gguf, "phi3.context_length")
    original = positive(gguf, "phi3.rope.scaling.original_context_length", max_positions)
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **sizes.as_config(),
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "original_max_position_embeddings": original,
        "sliding_window": positive(gguf, _WINDOW) if gguf.value(_WINDOW, int, 0) else None,
        "rms_norm_eps": read_epsilon(gguf),
        "rope_parameters": _rope(gguf, sizes, max_positions, original),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **special_token_ids(gguf, "<|endoftext|>"),
        "dtype": "float32",
    }


def _rope(gguf: GgufFile, sizes: Sizes, max_positions: int, original: int) -> dict[str, Any]:
    """Return the rope: the default one, or LongRoPE (Ding et al. 2024), whose factors are tensors of the file."""
    num_rotated = gguf.value("phi3.rope.dimension_count", int, sizes.head_dim)
    kind = gguf.value("phi3.rope.scaling.type", str, "none")
    if kind not in ("none", "longrope"):
        raise refusal(gguf, f"it scales its positions by {kind!r}, which no Phi 3 does")
    is_possible = 0 < num_rotated <= sizes.head_dim and num_rotated % 2 == 0 and 1 < original <= max_positions
    if not is_possible:
        message = f"{gguf.path}: its rope of {num_rotated} numbers and {original} positions contradicts its sizes."
        raise GgufFormatError(message)
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": read_theta(gguf),
        "partial_rotary_factor": num_rotated / sizes.head_dim,
    }
    found = [name for name in (_LONG, _SHORT) if name in gguf.tensors]
    if not found:
        if kind == "longrope":
            message = f"{gguf.path}: its longrope has no factors."
            raise GgufFormatError(message)
        return rope
    for name in (_LONG, _SHORT):
        if name not in found or gguf.tensors[name].shape != (num_rotated // 2,):
            message = f"{gguf.path}: the tensor {name} of shape {(num_rotated // 2,)} is missing."
            raise GgufFormatError(message)
    rope |= {
        "rope_type": "longrope",
        "long_factor": _factors(gguf, _LONG),
        "short_factor": _factors(gguf, _SHORT),
        "original_max_position_embeddings": original,
    }
    # What cosines and sines are multiplied by; transformers computes the same where nothing is said.
    usual = math.sqrt(1 + math.log(max_positions / original) / math.log(original))
    factor = gguf.value("phi3.rope.scaling.attn_factor", float, usual)
    if not 0 < factor < math.inf:
        message = f"{gguf.path}: its cosines and sines are multiplied by {factor}."
        raise GgufFormatError(message)
    return rope if abs(factor - usual) < _TOLERANCE else rope | {"attention_factor": shortest(factor)}


def _factors(gguf: GgufFile, name: str) -> list[float]:
    factors = [shortest(number) for number in gguf.read(name).tolist()]
    if not all(0 < factor < math.inf for factor in factors):
        message = f"{gguf.path}: {name} has factors that no rope has."
        raise GgufFormatError(message)
    return factors


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm.weight": Weight("attn_norm.weight", (hidden,)),
        "self_attn.qkv_proj.weight": Weight("attn_qkv.weight", (rows + 2 * kv_rows, hidden)),
        "self_attn.o_proj.weight": Weight("attn_output.weight", (hidden, rows)),
        "post_attention_layernorm.weight": Weight("ffn_norm.weight", (hidden,)),
        "mlp.gate_up_proj.weight": Weight("ffn_up.weight", (2 * inner, hidden)),
        "mlp.down_proj.weight": Weight("ffn_down.weight", (hidden, inner)),
    }
    weights = plain_weights(config, layer)
    check_tensors(gguf, weights, (_LONG, _SHORT))
    return weights


PHI3 = Architecture(_config, _weights)
