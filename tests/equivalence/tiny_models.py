"""Tiny decoders with random weights, on which the exact part of the equality rule is decided.

Their weights are drawn so that greedy outputs tell mistakes: attention is sharp (scores have a standard deviation of
about 4), so that single far tokens decide; embeddings are not tied, so that outputs do not fall into repeating their
last token. ``test_suite.py`` holds that a wrong block changes what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PretrainedConfig

__all__ = ["EOS_TOKEN_IDS", "FAMILIES", "MAX_POSITIONS", "VOCAB_SIZE", "save_tiny_model"]

VOCAB_SIZE = 307
MAX_POSITIONS = 4096
EOS_TOKEN_IDS = (2, 50, 60, 70, 80, 90)  # enough of them for some outputs to end early
_SHARPNESS = 2.0  # gain of q and of k: scores of normal q and k have its square as standard deviation


def _llama(num_kv_heads: int) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        from transformers import LlamaConfig

        return LlamaConfig(**_sizes(num_kv_heads=num_kv_heads))

    return make


def _qwen3() -> PretrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(**_sizes(num_kv_heads=2, head_dim=32), use_sliding_window=False)


def _mistral() -> PretrainedConfig:
    from transformers import MistralConfig

    return MistralConfig(**_sizes(num_kv_heads=1, num_layers=3), sliding_window=None)


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama(num_kv_heads=2),
    "qwen3": _qwen3,
    "mistral": _mistral,
    "llama-mha": _llama(num_kv_heads=4),
    "llama-mqa": _llama(num_kv_heads=1),
}
"""Configs by name: Llama with grouped, multi-head and multi-query attention, Qwen3 (norms of q and k), Mistral."""


def _sizes(*, num_kv_heads: int, head_dim: int = 16, num_layers: int = 2) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": list(EOS_TOKEN_IDS),
        "pad_token_id": 0,
    }


def save_tiny_model(family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Path:
    """Write the model of that family into ``folder``, as ``save_pretrained`` does; return the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            parameter.copy_(_draw(name, parameter, generator))
    model.save_pretrained(folder)
    return folder


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return _SHARPNESS + 0.2 * noise
    if parameter.dim() == 1:  # a norm
        return 1.0 + 0.2 * noise
    if "embed_tokens" in name:
        return noise
    gain = _SHARPNESS if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    return gain * noise * parameter.shape[1] ** -0.5
