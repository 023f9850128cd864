"""GGUF files of the architecture ``qwen2``: Qwen 2 and 2.5, which are Llamas with biases of q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.gguf.architecture import Architecture, Weight, check_keys, check_tensors
from pagefold.gguf.llama import plain_config, plain_layer, plain_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.gguf.file import GgufFile

__all__ = ["QWEN2"]


def _config(gguf: GgufFile) -> dict[str, Any]:
    check_keys(gguf)
    return plain_config(gguf, "qwen2", "Qwen2ForCausalLM", "<|endoftext|>", use_sliding_window=False)


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    layer = plain_layer(config)
    for one in "qkv":
        num_rows = layer[f"self_attn.{one}_proj.weight"].shape[0]
        layer[f"self_attn.{one}_proj.bias"] = Weight(f"attn_{one}.bias", (num_rows,))
    weights = plain_weights(config, layer)
    check_tensors(gguf, weights)
    return weights


QWEN2 = Architecture(_config, _weights)
