"""What fits: bytes by formula, and refusals whose remedies work."""

from __future__ import annotations

import re

import pytest

from pagefold.errors import BudgetTooSmallError, ConfigError
from pagefold.kv import CODECS, KEEP_ALL, KeepRule, KVGeometry
from pagefold.memory.capacity import KV_SHARE_OF_FREE_MEMORY, Capacity, plan_capacity
from pagefold.memory.limit import Limit

GIB = 2**30
SMOLLM2 = KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, element_bytes=2)


def plan(**changes: object) -> Capacity:
    facts: dict[str, object] = {
        "layout": SMOLLM2.layout,
        "weight_bytes": GIB,
        "limit": Limit(8192),
        "max_model_len": None,
        "kv_cache_memory_bytes": None,
        "max_num_seqs": 128,
        "available_bytes": 64 * GIB,
    }
    return plan_capacity(**(facts | changes))


# Bytes.


@pytest.mark.parametrize(
    ("model", "shape", "bytes_per_token"),
    [
        ("SmolLM2-135M", (30, 3, 64), 23_040),
        ("Llama-3-70B", (80, 8, 128), 327_680),
        ("70B with 64 KV heads (MHA)", (80, 64, 128), 2_621_440),
        ("Llama-2-7B (MHA)", (32, 32, 128), 524_288),
        ("Llama-2-13B (MHA)", (40, 40, 128), 819_200),
        ("Llama-3-8B, Mistral-7B", (32, 8, 128), 131_072),
        ("Llama-3.2-1B", (16, 8, 64), 32_768),
        ("Qwen3-8B", (36, 8, 128), 147_456),
        ("Qwen3-0.6B", (28, 8, 128), 114_688),
        ("Qwen2.5-7B", (28, 4, 128), 57_344),
        ("Qwen2.5-1.5B", (28, 2, 128), 28_672),
        ("Qwen2.5-0.5B", (24, 2, 64), 12_288),
        ("a 7B with one KV head (MQA)", (32, 1, 128), 16_384),
    ],
)
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_bytes_of_a_token_in_fp16(model, shape, bytes_per_token, block_size):
    geometry = KVGeometry(*shape, element_bytes=2, block_size=block_size)
    assert geometry.bytes_per_token == bytes_per_token, model
    assert geometry.bytes_per_block == bytes_per_token * block_size
    assert KVGeometry(*shape, element_bytes=4, block_size=block_size).bytes_per_token == 2 * bytes_per_token


def test_5000_tokens_of_a_70b_are_1_6_gb_not_50_mb():
    gqa = KVGeometry(80, 8, 128, element_bytes=2)
    assert 5000 * gqa.bytes_per_token == 1_638_400_000
    assert gqa.bytes_per_block == 5_242_880
    assert gqa.num_blocks(45 * 10**9) == 8_583
    assert gqa.num_blocks(45 * GIB) == 9_216


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (8192, 512)])
def test_blocks_of_a_sequence(num_tokens, num_blocks):
    assert SMOLLM2.num_blocks_for(num_tokens) == num_blocks


# What fits.


def test_a_budget_is_cut_to_whole_blocks():
    capacity = plan(kv_cache_memory_bytes=1000 * SMOLLM2.bytes_per_block + 5)
    assert capacity.num_blocks == 1000
    assert capacity.num_tokens == 16_000
    assert capacity.kv_budget_bytes == 1000 * SMOLLM2.bytes_per_block
    assert capacity.max_concurrency == pytest.approx(1000 / 512)
    assert capacity.max_model_len == 8192


def test_the_default_is_a_share_of_what_the_weights_leave():
    capacity = plan(available_bytes=3 * GIB)
    assert capacity.kv_budget_bytes <= 2 * GIB * KV_SHARE_OF_FREE_MEMORY < capacity.kv_budget_bytes + 16 * 23_040


@pytest.mark.parametrize(("max_num_seqs", "num_tokens"), [(128, 128 * 8192), (4, 2**18)])
def test_the_default_stops_where_more_could_not_be_used(max_num_seqs, num_tokens):
    assert plan(available_bytes=4096 * GIB, max_num_seqs=max_num_seqs).num_tokens == num_tokens


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len"), [(1, 16), (3, 48), (511, 511 * 16), (512, 8192), (5000, 8192)]
)
def test_auto_takes_what_fits_up_to_the_model(num_blocks, max_model_len):
    capacity = plan(kv_cache_memory_bytes=num_blocks * SMOLLM2.bytes_per_block, max_model_len="auto")
    assert (capacity.num_blocks, capacity.max_model_len) == (num_blocks, max_model_len)


def test_three_lines_say_what_there_is():
    lines = plan(kv_cache_memory_bytes=GIB, max_model_len=4096).lines()
    assert lines == [
        "weights    1.00 GiB",
        "KV budget  1023.75 MiB = 2,912 blocks of 16 tokens = 46,592 tokens",
        "fits       11.4 requests of max_model_len = 4,096 tokens at once",
    ]


def test_of_several_groups_a_token_takes_a_slot_in_each():
    """Of the budget, of the host's memory, and of the tokens that a default budget has room for at least."""
    grouped = KVGeometry(4, 2, 16, element_bytes=4, keeps=(KeepRule(24), KEEP_ALL) * 2).layout
    assert len(grouped.groups) == 2
    facts = {"layout": grouped, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    capacity = plan(**facts, kv_cache_memory_bytes=2000 * grouped.bytes_per_block)
    assert capacity.num_tokens == 16_000
    assert plan(**facts).num_tokens == 2**18 > 8192
    host = plan(**facts, host_bytes=1000 * grouped.bytes_per_block)
    assert host.num_host_blocks == 1000
    assert host.lines()[-1].endswith("for 8,000 tokens that were evicted")


# Refusals.


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("max_model_len", [2, 16, 17, 4096, None, "auto"])
@pytest.mark.parametrize("budget", [1, 23_040, 16 * 23_040 - 1, 16 * 23_040, 100 * 16 * 23_040])
def test_a_refusal_names_the_smallest_budget_that_works(block_size, max_model_len, budget):
    geometry = KVGeometry(30, 3, 64, element_bytes=2, block_size=block_size)
    facts = {"layout": geometry.layout, "max_model_len": max_model_len}
    try:
        plan(**facts, kv_cache_memory_bytes=budget)
    except BudgetTooSmallError as refusal:
        smallest = int(re.search(r"kv_cache_memory_bytes=(\d+)", refusal.remedy)[1])
        assert smallest > budget
        capacity = plan(**facts, kv_cache_memory_bytes=smallest)
        assert capacity.max_concurrency >= 1
        with pytest.raises(BudgetTooSmallError, match=f"kv_cache_memory_bytes={smallest}"):
            plan(**facts, kv_cache_memory_bytes=smallest - 1)
        if fits := re.search(r"at most (\d+) fits", refusal.remedy):
            longest = int(fits[1])
            assert (
                plan(layout=geometry.layout, kv_cache_memory_bytes=budget, max_model_len=longest).max_model_len
                == longest
            )
            assert (
                plan(layout=geometry.layout, kv_cache_memory_bytes=budget, max_model_len="auto").max_model_len
                == longest
            )
            with pytest.raises(BudgetTooSmallError):
                plan(layout=geometry.layout, kv_cache_memory_bytes=budget, max_model_len=longest + 1)


def test_a_default_that_is_too_small_names_a_budget_that_works():
    needed = 512 * SMOLLM2.bytes_per_block
    facts = {"weight_bytes": GIB, "available_bytes": GIB + needed + 5}  # half of it is the default
    with pytest.raises(BudgetTooSmallError, match=f"kv_cache_memory_bytes={needed}"):
        plan(**facts)
    assert plan(**facts, kv_cache_memory_bytes=needed).num_blocks == 512


def test_no_budget_is_named_that_would_be_refused_in_its_turn():
    needed = 512 * SMOLLM2.bytes_per_block
    facts = {"weight_bytes": GIB, "available_bytes": GIB + needed - 1}
    with pytest.raises(BudgetTooSmallError, match="No budget works") as refusal:
        plan(**facts)
    assert "kv_cache_memory_bytes=" not in str(refusal.value)
    longest = int(re.search(r"at most (\d+) fits", refusal.value.remedy)[1])
    assert plan(**facts, max_model_len=longest).max_model_len == longest
    with pytest.raises(BudgetTooSmallError, match="a smaller model or a machine with more memory"):
        plan(weight_bytes=GIB, available_bytes=GIB + 100)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"The weights need 131\.50 GiB, and 64\.00 GiB"):
        plan(weight_bytes=int(131.5 * GIB))  # a 70B in its own dtype
    with pytest.raises(ConfigError, match="The weights need"):
        plan(weight_bytes=64 * GIB)


def test_a_budget_beyond_what_the_weights_leave_is_refused():
    left = 63 * GIB
    with pytest.raises(ConfigError, match=f"63.00 GiB \\({left:,} bytes\\)") as refusal:
        plan(kv_cache_memory_bytes=left + 1)
    assert not isinstance(refusal.value, BudgetTooSmallError)
    assert plan(kv_cache_memory_bytes=left).kv_budget_bytes <= left


def test_a_length_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"made for 8192 positions\. Give at most 8192"):
        plan(max_model_len=8193)
    assert plan(max_model_len=8192).max_model_len == 8192


def test_a_length_beyond_what_is_computed_rightly_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"4097, but beyond 4096 tokens X is not computed yet\. Give at most 4096\."):
        plan(max_model_len=4097, limit=Limit(4096, "X"))
    for asked in (4096, None, "auto"):
        assert plan(max_model_len=asked, limit=Limit(4096, "X")).max_model_len == 4096


def test_a_length_that_a_setting_ends_is_refused_with_the_setting():
    limit = Limit(4096, "X", "allow_streaming")
    said = r"beyond 4096 tokens X is not computed while allow_streaming is set\. "
    with pytest.raises(ConfigError, match=said + r"Give at most 4096, or start without allow_streaming\."):
        plan(max_model_len=4097, limit=limit)
    for asked in (4096, None, "auto"):
        assert plan(max_model_len=asked, limit=limit).context == limit
    assert plan(max_model_len=4095, limit=limit).context == Limit(4095)
    assert plan(limit=Limit(4096, "X")).context == Limit(4096)


def test_unsealed_blocks_are_part_of_the_budget():
    """Each sequence that may run has one in 16 bit, beside the blocks: what is left of a budget is blocks."""
    kivi2 = KVGeometry(30, 3, 64, 4, 16, CODECS["kivi2"])
    budget = 8 * kivi2.residual_bytes + 600 * kivi2.bytes_per_block + 5
    found = plan(layout=kivi2.layout, kv_cache_memory_bytes=budget, max_num_seqs=8)
    assert (found.num_blocks, found.num_residuals) == (600, 8)
    assert found.residual_bytes == 8 * 16 * SMOLLM2.bytes_per_token
    assert found.kv_budget_bytes == found.block_bytes + found.residual_bytes == budget - 5
    assert "unsealed blocks of 8 requests" in " ".join(found.lines())
    with pytest.raises(BudgetTooSmallError, match="max_num_seqs = 9") as caught:
        plan(layout=kivi2.layout, kv_cache_memory_bytes=budget - 100 * kivi2.bytes_per_block, max_num_seqs=9)
    smallest = int(re.search(r"kv_cache_memory_bytes=(\d+)", caught.value.remedy)[1])
    assert plan(layout=kivi2.layout, kv_cache_memory_bytes=smallest, max_num_seqs=9).num_blocks == 512
    assert plan(layout=kivi2.layout, max_num_seqs=8).kv_budget_bytes > 8 * kivi2.residual_bytes
