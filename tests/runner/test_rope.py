"""The fused decoder's ropes: equal to the bit to those of transformers' models."""

from __future__ import annotations

import pytest
import torch
import transformers
from model_folders import SIZES, save_config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagefold.runner.fused.rope import rope_tables
from pagefold.runner.models import inspect_model

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [
    *({"rope_type": "default", "rope_theta": theta} for theta in (10000.0, 100000, 500000.0, 1e6, 1234.5)),
    *(
        LLAMA3 | {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": length}
        for theta, factor, length in ((500000.0, 8.0, 8192), (500000, 32, 8192), (1e4, 2.5, 64), (1e6, 8.0, 512))
    ),
    LLAMA3 | {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 500, "low_freq_factor": 0.7},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
]


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_a_table_is_that_of_transformers(tmp_path, rope, head_dim):
    folder = save_config(tmp_path, "LlamaConfig", SIZES | {"head_dim": head_dim}, rope_parameters=rope)
    spec = inspect_model(folder)
    assert spec.fused is not None, spec.not_fused
    num_positions = 1000
    (table,) = rope_tables(spec.fused, folder, num_positions)
    model = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(folder))
    cosines, sines = model(torch.zeros(1), torch.arange(num_positions)[None])
    assert table.shape == (num_positions, 2, head_dim)
    assert torch.equal(torch.from_numpy(table), torch.stack([cosines[0], sines[0]], dim=1))


GLOBAL = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("rope", GLOBAL, ids=str)
@pytest.mark.parametrize("pattern", [["sliding_attention", "full_attention"], ["full_attention"] * 2])
def test_layers_have_the_ropes_of_their_kinds(tmp_path, rope, pattern):
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    settings = {"head_dim": 32, "layer_types": pattern, "rope_parameters": ropes}
    folder = save_config(tmp_path, "Gemma3TextConfig", SIZES | settings)
    spec = inspect_model(folder)
    assert spec.fused is not None, spec.not_fused
    tables = torch.from_numpy(rope_tables(spec.fused, folder, 500))
    assert len(tables) == len(set(pattern))
    model = Gemma3RotaryEmbedding(transformers.AutoConfig.from_pretrained(folder))
    for layer, kind in enumerate(pattern):
        cosines, sines = model(torch.zeros(1), torch.arange(500)[None], kind)
        assert torch.equal(tables[spec.fused.rope_of_layer[layer]], torch.stack([cosines[0], sines[0]], dim=1))
