"""Bytes per token and block: every model of the table by formula, and the index of a cell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.kv import CacheGroup, KVGeometry

MODELS = {
    # name: layers, KV heads, head_dim, bytes a token in fp16 (shared reference table)
    "Llama-3-70B": (80, 8, 128, 327_680),
    "70B with 64 KV heads": (80, 64, 128, 2_621_440),
    "Llama-2-7B": (32, 32, 128, 524_288),
    "Llama-2-13B": (40, 40, 128, 819_200),
    "Llama-3-8B": (32, 8, 128, 131_072),
    "Llama-3.2-1B": (16, 8, 64, 32_768),
    "Qwen3-8B": (36, 8, 128, 147_456),
    "Qwen3-0.6B": (28, 8, 128, 114_688),
    "Qwen2.5-7B": (28, 4, 128, 57_344),
    "Qwen2.5-1.5B": (28, 2, 128, 28_672),
    "Qwen2.5-0.5B": (24, 2, 64, 12_288),
    "SmolLM2-135M": (30, 3, 64, 23_040),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token(name: str) -> None:
    num_layers, num_kv_heads, head_dim, bytes_per_token = MODELS[name]
    geometry = KVGeometry(num_layers, num_kv_heads, head_dim, element_bytes=2)
    assert geometry.bytes_per_token == bytes_per_token
    assert geometry.bytes_per_block == 16 * bytes_per_token


def test_a_block_of_70b_is_5_mib_and_a_budget_is_whole_blocks() -> None:
    geometry = KVGeometry(80, 8, 128, element_bytes=2)
    assert geometry.bytes_per_block == 5 * 2**20
    assert geometry.num_blocks(45 * 10**9) == 8_583
    assert geometry.num_blocks(45 * 2**30) == 9_216
    assert geometry.num_blocks(5 * 2**20 - 1) == 0


@given(
    geometry=st.builds(
        KVGeometry,
        num_layers=st.integers(1, 100),
        num_kv_heads=st.integers(1, 128),
        head_dim=st.integers(1, 512),
        element_bytes=st.sampled_from((1, 2, 4, 8)),
        block_size=st.sampled_from((1, 4, 16, 32, 128)),
    ),
    budget_bytes=st.integers(0, 2**48),
)
def test_everything_follows_from_the_shape(geometry: KVGeometry, budget_bytes: int) -> None:
    num_cells = geometry.num_layers * geometry.num_kv_heads
    assert geometry.bytes_per_token == 2 * num_cells * geometry.head_dim * geometry.element_bytes
    assert geometry.bytes_per_block == geometry.bytes_per_token * geometry.block_size
    assert geometry.bytes_per_block == geometry.cell_bytes * num_cells
    num_blocks = geometry.num_blocks(budget_bytes)
    assert num_blocks * geometry.bytes_per_block <= budget_bytes < (num_blocks + 1) * geometry.bytes_per_block


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (5000, 313)])
def test_blocks_for_a_sequence_are_a_ceiling(num_tokens: int, num_blocks: int) -> None:
    assert KVGeometry(1, 1, 1, 2).num_blocks_for(num_tokens) == num_blocks


def test_a_plain_model_has_one_group_with_all_cells() -> None:
    (group,) = KVGeometry(3, 2, 64, element_bytes=2, block_size=16).groups
    assert group == CacheGroup(layers=(0, 1, 2), num_kv_heads=2, block_size=16)
    assert group.num_cells == 6
    assert [group.cell(layer, head) for layer in range(3) for head in range(2)] == list(range(6))


def test_a_group_counts_cells_by_its_own_layers() -> None:
    group = CacheGroup(layers=(1, 4, 7), num_kv_heads=2, block_size=16)
    assert group.cell(4, 1) == 3
    with pytest.raises(ValueError, match=r"not in tuple"):
        group.cell(2, 0)
