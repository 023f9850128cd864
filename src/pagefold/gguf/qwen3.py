"""GGUF files of the architecture ``qwen3``: the dense ones of Qwen 3, which norm the heads of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.gguf.architecture import Architecture, Weight, check_keys, check_tensors
from pagefold.gguf.llama import plain_config, plain_layer, plain_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.gguf.file import GgufFile

__all__ = ["QWEN3"]


def _config(gguf: GgufFile) -> dict[str, Any]:
    check_keys(gguf)
    own = {"attention_bias": False, "use_sliding_window": False}
    return plain_config(gguf, "qwen3", "Qwen3ForCausalLM", "<|endoftext|>", **own)


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    layer = plain_layer(config)
    for one in "qk":
        layer[f"self_attn.{one}_norm.weight"] = Weight(f"attn_{one}_norm.weight", (config["head_dim"],))
    weights = plain_weights(config, layer)
    check_tensors(gguf, weights)
    return weights


QWEN3 = Architecture(_config, _weights)
