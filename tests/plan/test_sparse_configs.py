"""Configs as people publish them, which lean on their family's defaults: the planner reads them as the server does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from pagefold.errors import UnsupportedModelError
from pagefold.kv import KEEP_ALL
from pagefold.plan import find_model
from pagefold.runner.models import inspect_model

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "num_hidden_layers": 10, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 32768,
}  # fmt: skip
PLAIN = {"model_type": "llama"} | SIZES


def save(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


LISTED = ["sliding_attention", "full_attention"] * 5
SERVED = [
    {},
    {"quantization_config": {}},
    *({"model_type": family} for family in (
        "mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "olmo3", "exaone4", "llama4_text",
        "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2", "smollm3", "ministral",
    )),
    {"model_type": "gemma3n_text", "activation_sparsity_pattern": [0.0] * 10, "num_kv_shared_layers": 0,
     "altup_num_inputs": 4, "laurel_rank": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "mistral", "sliding_window": 64},
    {"model_type": "mistral", "layer_types": None},
    {"model_type": "mistral", "layer_types": None, "sliding_window": None},
    {"model_type": "mistral", "layer_types": LISTED},
    {"model_type": "gemma2", "sliding_window_pattern": 5},
    {"model_type": "gemma3_text", "sliding_window_pattern": 3},
    {"model_type": "cohere2", "sliding_window": 64, "sliding_window_pattern": 3},
    {"model_type": "cohere2", "sliding_window": 64, "layer_types": LISTED},
    {"model_type": "olmo3", "sliding_window": 64, "sliding_window_pattern": 3},
    {"model_type": "exaone4", "sliding_window_pattern": 5},
    {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 10},
    {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 32},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4, "sliding_window": 64},
    {"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 4, "sliding_window": 64},
    {"model_type": "qwen2_moe", "use_sliding_window": True},
    {"model_type": "qwen3_moe", "use_sliding_window": True},
    {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None},
    {"model_type": "llama4_text", "no_rope_layer_interval": 2, "attention_chunk_size": 64},
    {"model_type": "gemma2", "attn_logit_softcapping": 30.0},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"quantization_config": {"quant_method": "fp8"}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
]  # fmt: skip


@pytest.mark.parametrize("raw", SERVED, ids=str)
def test_what_layers_keep_is_the_same_on_both_sides(raw: dict[str, Any], tmp_path: Path) -> None:
    folder = save(tmp_path, PLAIN | raw)
    spec, shape = inspect_model(folder), find_model(str(folder))
    assert shape.not_served == ""
    assert [layer.kv.keeps for layer in shape.layers] == [*(spec.keeps or (KEEP_ALL,) * spec.num_layers)]


REFUSED = [
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "weights quantized in the checkpoint"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "weights quantized in the checkpoint"),
    (
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        "weights quantized in the checkpoint",
    ),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "soft-capping of attention scores"),
    ({"attn_logit_softcapping": 50.0}, "soft-capping of attention scores"),
    ({"num_kv_shared_layers": 3}, "KV shared across layers"),
    ({"attention_chunk_size": 64, "layer_types": ["full_attention"] * 10}, "chunked attention"),
    ({"model_type": "starcoder2", "sliding_window": 64}, "sliding windows of this family"),
    ({"model_type": "starcoder2", "sliding_window": 64, "layer_types": None}, "sliding windows of this family"),
    ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "sliding windows of this family"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope of type dynamic"),
    ({"model_type": "falcon", "alibi": True}, "ALiBi position biases"),
    ({"model_type": "gemma3", "text_config": PLAIN | {"model_type": "gemma3_text"}}, "more than text"),
    ({"model_type": "gemma3", "vision_config": {}}, "more than text"),
    ({"model_type": "mistral3", "text_config": PLAIN | {"model_type": "mistral"}}, "more than text"),
]


@pytest.mark.parametrize(("raw", "why"), REFUSED, ids=str)
def test_what_is_refused_is_the_same_on_both_sides(raw: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = save(tmp_path, PLAIN | raw)
    with pytest.raises(UnsupportedModelError):
        inspect_model(folder)
    assert find_model(str(folder)).not_served == why


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "mixtral", "sliding_window": 64, "layer_types": LISTED},
        {"model_type": "mistral", "sliding_window": 0},
        {"model_type": "qwen3", "sliding_window": 64, "layer_types": LISTED},
        {"model_type": "cohere2", "sliding_window": None},
        {"model_type": "olmo3", "sliding_window": None},
        {"model_type": "gemma2", "sliding_window": None},
        {"model_type": "gpt_oss", "sliding_window": None},
        {"model_type": "exaone4", "sliding_window": None},
        {"model_type": "llama4_text", "attention_chunk_size": None},
        {"layer_types": ["full_attention"]},
        {"num_key_value_heads": 3},
    ],
    ids=str,
)
def test_what_contradicts_itself_is_the_same_error_on_both_sides(raw: dict[str, Any], tmp_path: Path) -> None:
    folder = save(tmp_path, PLAIN | raw)
    for read in (inspect_model, lambda folder: find_model(str(folder))):
        with pytest.raises(UnsupportedModelError) as refused:
            read(folder)
        assert refused.value.remedy
