"""GGUF files of the architecture ``gemma3``: the text part of Gemma 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.gguf.architecture import Architecture, Weight, check_keys, check_tensors, read_sizes, refusal
from pagefold.gguf.gemma2 import gemma_config, gemma_weights
from pagefold.gguf.rope import read_rope, read_theta

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.gguf.file import GgufFile

__all__ = ["GEMMA3"]

_KEYS = ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa")
# Each sixth layer sees everything, the others a window.
_PERIOD = 6
_THETA, _THETA_IN_WINDOWS = 1_000_000.0, 10_000.0


def _config(gguf: GgufFile) -> dict[str, Any]:
    check_keys(gguf, _KEYS)
    sizes = read_sizes(gguf)
    period = gguf.value("gemma3.attention.sliding_window_pattern", int, _PERIOD)
    if period < 1:
        raise refusal(gguf, f"a full layer after each {period}")
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(sizes.num_layers)]
    # What scales positions does so where a layer sees everything.
    rope = read_rope(gguf, sizes.head_dim, _THETA)
    theta_in_windows = read_theta(gguf, _THETA_IN_WINDOWS, "rope.freq_base_swa")
    # In both spellings: transformers 5 reads the last, what was written for 4 reads the two others.
    ropes = {
        "rope_theta": rope["rope_theta"],
        "rope_local_base_freq": theta_in_windows,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta_in_windows},
        },
    }
    return gemma_config(gguf, sizes, "Gemma3ForCausalLM", kinds, ropes)


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, Weight]:
    head_norms = {
        f"self_attn.{one}_norm.weight": Weight(f"attn_{one}_norm.weight", (config["head_dim"],), adds_one=True)
        for one in "qk"
    }
    weights = gemma_weights(config, head_norms)
    check_tensors(gguf, weights)
    return weights


GEMMA3 = Architecture(_config, _weights)
