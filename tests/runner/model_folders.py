"""Folders as ``save_pretrained`` writes them: tiny configs of many families, with a model's weights or a few zeros."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SIZES", "save_config", "save_model"]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_config(folder: Path, config: str, settings: dict[str, Any], **written: object) -> Path:
    """Write the config of that class, then ``written`` into its JSON as it is, and weights of 15 elements."""
    from safetensors.torch import save_file

    getattr(transformers, config)(**settings).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | written))
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(()), "c": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def save_model(folder: Path, config: str, settings: dict[str, Any], *, seed: int = 0) -> Path:
    """Write a model of that config with random weights, float64, large enough that outputs differ."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    model.save_pretrained(folder)
    return folder
