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

__all__ = [
    "BEYOND_WINDOWS",
    "EOS_TOKEN_IDS",
    "FAMILIES",
    "MAX_POSITIONS",
    "VOCAB_SIZE",
    "WINDOW",
    "gemma2",
    "save_tiny_model",
]

VOCAB_SIZE = 307
MAX_POSITIONS = 4096
EOS_TOKEN_IDS = (2, 50, 60, 70, 80, 90)  # enough of them for some outputs to end early
WINDOW = 24
"""Of the families of ``BEYOND_WINDOWS``: no multiple of a block, and of no prompt but the shortest."""
_SHARPNESS = 2.0  # gain of q and of k: scores of normal q and k have its square as standard deviation


def _llama(num_kv_heads: int) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        from transformers import LlamaConfig

        return LlamaConfig(**_sizes(num_kv_heads=num_kv_heads))

    return make


def _qwen3() -> PretrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(**_sizes(num_kv_heads=2, head_dim=32), use_sliding_window=False)


def _mistral(sliding_window: int | None = None) -> PretrainedConfig:
    from transformers import MistralConfig

    return MistralConfig(**_sizes(num_kv_heads=1, num_layers=3), sliding_window=sliding_window)


def _llama3() -> PretrainedConfig:
    from transformers import LlamaConfig

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 512}
    return LlamaConfig(
        **_sizes(num_kv_heads=2), rope_parameters=rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    )


def _qwen2(sliding_window: int = MAX_POSITIONS) -> PretrainedConfig:
    """With a window in the upper layer, which nothing passes if it is not asked for."""
    from transformers import Qwen2Config

    windows = {"use_sliding_window": True, "sliding_window": sliding_window, "max_window_layers": 1}
    return Qwen2Config(**_sizes(num_kv_heads=2), **windows)


def _phi3() -> PretrainedConfig:
    """With a window that nothing passes, and heads that are rotated in part."""
    from transformers import Phi3Config

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return Phi3Config(**_sizes(num_kv_heads=2), sliding_window=MAX_POSITIONS - 1, rope_parameters=rope)


def _phi3_long() -> PretrainedConfig:
    """Longer than the longest prompt of the suite, and shorter than ``MAX_POSITIONS``: its short factors count."""
    from transformers import Phi3Config

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [4.0 + i for i in range(8)]}
    lengths = {"original_max_position_embeddings": MAX_POSITIONS - 512}
    return Phi3Config(**_sizes(num_kv_heads=2), **lengths, rope_parameters=rope | factors | lengths)


def gemma2(sliding_window: int = MAX_POSITIONS) -> PretrainedConfig:
    """Return a Gemma 2 whose soft-capping bites: scores are of the size of its cap."""
    from transformers import Gemma2Config

    capping = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
    return Gemma2Config(**_sizes(num_kv_heads=2), **capping, sliding_window=sliding_window)


def gemma3(sliding_window: int = 24) -> PretrainedConfig:
    """Return a Gemma 3 of two full and two sliding layers, which have another rope; no prompt fits into its windows."""
    from transformers import Gemma3TextConfig

    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    layer_types = ["sliding_attention", "full_attention"] * 2
    windows = {"sliding_window": sliding_window, "layer_types": layer_types, "rope_parameters": ropes}
    return Gemma3TextConfig(**_sizes(num_kv_heads=2, num_layers=4), **windows, query_pre_attn_scalar=24)


def _gpt_neox() -> PretrainedConfig:
    from transformers import GPTNeoXConfig

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    sizes = {
        name: value for name, value in _sizes(num_kv_heads=4).items() if name not in {"num_key_value_heads", "head_dim"}
    }
    return GPTNeoXConfig(**sizes, rope_parameters=rope)


def _mistral_window() -> PretrainedConfig:
    from transformers import MistralConfig

    return MistralConfig(**_sizes(num_kv_heads=1, num_layers=3), sliding_window=WINDOW)


def _phi3_window() -> PretrainedConfig:
    from transformers import Phi3Config

    return Phi3Config(**_sizes(num_kv_heads=2), sliding_window=WINDOW)


def _qwen2_window() -> PretrainedConfig:
    """With windows in its upper layers."""
    from transformers import Qwen2Config

    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return Qwen2Config(**_sizes(num_kv_heads=2, num_layers=3), **windows)


def _qwen3_window() -> PretrainedConfig:
    """With the layers listed that have windows."""
    from transformers import Qwen3Config

    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": layer_types}
    return Qwen3Config(**_sizes(num_kv_heads=2, num_layers=3), **windows)


def _llama4() -> PretrainedConfig:
    """Chunks and rope in every other layer, a temperature that rises in the others, and experts in these."""
    from transformers import Llama4TextConfig

    tuning = {"attn_temperature_tuning": True, "floor_scale": 16, "attn_scale": 0.5}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    layers = {"attention_chunk_size": WINDOW, "no_rope_layer_interval": 2, "intermediate_size_mlp": 80}
    return Llama4TextConfig(**_sizes(num_kv_heads=2, num_layers=4), **tuning, **experts, **layers)


def _gpt_oss() -> PretrainedConfig:
    """With sinks, whose scores are as large as those of tokens."""
    from transformers import GptOssConfig

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(**_sizes(num_kv_heads=2, num_layers=3), **experts, sliding_window=WINDOW, rope_parameters=rope)


def _cohere2() -> PretrainedConfig:
    """Three layers with windows and rope, and one with neither; both parts of a layer read the same."""
    from transformers import Cohere2Config

    return Cohere2Config(**_sizes(num_kv_heads=2, num_layers=4), sliding_window=WINDOW, logit_scale=1.0)


def _olmo3() -> PretrainedConfig:
    """Three layers with windows and one without; norms behind attention, and of all heads at once."""
    from transformers import Olmo3Config

    return Olmo3Config(**_sizes(num_kv_heads=2, num_layers=4), sliding_window=WINDOW)


def _gemma3n() -> PretrainedConfig:
    """Of six layers the last three read the K and V of the second and the third: windows and all tokens."""
    from transformers import Gemma3nTextConfig

    kinds = {"s": "sliding_attention", "f": "full_attention"}
    shared = {"layer_types": [kinds[letter] for letter in "ssfsfs"], "num_kv_shared_layers": 3}
    streams = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 8}
    pattern = {"activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], "altup_num_inputs": 2}
    return Gemma3nTextConfig(
        **_sizes(num_kv_heads=2, num_layers=6), **shared, **streams, **pattern, sliding_window=WINDOW
    )


def _mixtral(sliding_window: int | None) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        from transformers import MixtralConfig

        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return MixtralConfig(**_sizes(num_kv_heads=2), **experts, sliding_window=sliding_window)

    return make


def _qwen3_moe() -> PretrainedConfig:
    """Experts in every layer but the first."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return Qwen3MoeConfig(**_sizes(num_kv_heads=2), **experts, mlp_only_layers=[0])


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama(num_kv_heads=2),
    "qwen3": _qwen3,
    "mistral": _mistral,
    "llama-mha": _llama(num_kv_heads=4),
    "llama-mqa": _llama(num_kv_heads=1),
    "llama3": _llama3,
    "qwen2": _qwen2,
    "phi3": _phi3,
    "phi3-longrope": _phi3_long,
    "gemma2": gemma2,
    "gemma2-window-64": lambda: gemma2(sliding_window=64),
    "gemma3": gemma3,
    "gpt-neox": _gpt_neox,
    "mistral-window-40": lambda: _mistral(sliding_window=40),
    "qwen2-window-24": lambda: _qwen2(sliding_window=24),
    "mixtral": _mixtral(None),
    "qwen3-moe": _qwen3_moe,
    "mistral-window": _mistral_window,
    "phi3-window": _phi3_window,
    "gemma2-window": lambda: gemma2(sliding_window=WINDOW),
    "qwen2-window": _qwen2_window,
    "qwen3-window": _qwen3_window,
    "mixtral-window": _mixtral(WINDOW),
    "llama4": _llama4,
    "gpt-oss": _gpt_oss,
    "cohere2": _cohere2,
    "olmo3": _olmo3,
    "gemma3n": _gemma3n,
}
"""Configs by name: Llama with grouped, multi-head and multi-query attention and with Llama 3's rope, Qwen3 (norms of q
and k), Mistral, Qwen2 (biases of q, k and v), Phi-3 (packed weights), Gemma 2 (soft-capping), Gemma 3 (two ropes),
GPT-NeoX (packed weights, biases, parallel residuals, rotated in part), Mixtral and Qwen3-MoE (experts); and those of
``BEYOND_WINDOWS``."""

BEYOND_WINDOWS = (
    "mistral-window", "phi3-window", "gemma2-window", "qwen2-window", "qwen3-window", "mixtral-window", "llama4",
    "gpt-oss", "cohere2", "olmo3", "gemma3n",
)  # fmt: skip
"""Families with windows or chunks of ``WINDOW`` tokens, which nearly all prompts pass: ``test_families.py``'s."""


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


def save_tiny_model(
    family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float64, vocab_size: int = VOCAB_SIZE
) -> Path:
    """Write the model of that family into ``folder``, as ``save_pretrained`` does; return the folder."""
    from transformers import AutoModelForCausalLM

    config = FAMILIES[family]()
    config.vocab_size = vocab_size
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            parameter.copy_(_draw(name, parameter, generator, family))
    model.save_pretrained(folder)
    return folder


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator, family: str) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if parameter.dim() == 1 or name.endswith("bias"):
        centre, deviation = _spread(name, family)
        return centre + deviation * noise
    if "embed_tokens" in name and family.startswith("gemma"):  # which scales them itself
        return noise * parameter.shape[1] ** -0.5
    if "embed_" in name:
        return noise
    sharp = ("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "query_key_value.weight")
    gain = _SHARPNESS if name.endswith(sharp) else 1.0
    return gain * noise * parameter.shape[1] ** -0.5


def _spread(name: str, family: str) -> tuple[float, float]:
    """Return around what numbers a bias, a norm or what else is one row is drawn, and their standard deviation."""
    is_gemma3n = family == "gemma3n"
    if name.endswith("sinks"):
        return 4.0, 2.0  # about as large as the largest score of some tokens
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return (1.0 if is_gemma3n else _SHARPNESS), 0.2  # Gemma 3n does not scale its scores
    adds_one = family.startswith("gemma") and not is_gemma3n
    return (0.0 if name.endswith("bias") or adds_one else 1.0), 0.2
