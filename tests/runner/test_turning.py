"""Keys at other positions: as transformers' ropes turn them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagefold.runner.codecs.constants import RANGE
from pagefold.runner.codecs.turning import Turning
from pagefold.runner.fused.families import read_fused_config
from pagefold.runner.fused.rope import rope_tables

KINDS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_keys_are_turned_as_the_model_turns_them(kind, tmp_path):
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=1024, rope_parameters=KINDS[kind]
    )
    config.save_pretrained(tmp_path)
    fused = read_fused_config(config.to_dict())
    turning = Turning(torch.from_numpy(rope_tables(fused, tmp_path, 1000)[0]))
    still = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))

    def computed(positions):
        cosines, sines = LlamaRotaryEmbedding(config)(still, positions[None])
        return apply_rotary_pos_emb(still[None, None], still[None, None], cosines, sines)[1][0, 0].double()

    here, there = torch.tensor([0, 7, 300]), torch.tensor([999, 8, 41])
    moved = turning.turned(turning.turned_back(computed(here), here), there)
    torch.testing.assert_close(moved, computed(there), atol=2e-3, rtol=0)  # angles are float32, up to 999


def test_means_over_ranges_are_those_of_their_positions():
    angles = torch.arange(600.0)[:, None] * torch.tensor([1.0, 0.01]).repeat(2)
    turning = Turning(torch.stack((angles.cos(), angles.sin()), 1))
    vector = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    every = turning.turned(vector.expand(600, 4), torch.arange(600))
    expected = torch.stack([part.mean(0) for part in every.split(RANGE)])
    torch.testing.assert_close(turning.over_ranges(vector), expected)
    assert turning.num_ranges == len(expected) == 3


def test_nothing_turns_where_the_rope_is_not_known():
    turning = Turning.none(8)
    vectors = torch.randn(5, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 3, 4000])
    assert torch.equal(turning.turned(vectors, positions), vectors)
    assert torch.equal(turning.turned_back(vectors, positions), vectors)
    assert torch.equal(turning.over_ranges(vectors[0]), vectors[:1])
