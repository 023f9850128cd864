"""On a card a step is queued without waiting: shown without one, on tensors that have a device and no numbers.

Torch's ``meta`` tensors refuse what would read a number (``item``, ``tolist``, a condition), and what would mix them
with tensors of the host. So what passes here waits for nothing, and leaves nothing on the wrong device.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from equivalence.tiny_models import FAMILIES

from pagefold.kv import CODECS, BlockId, BlockTable, KVGeometry, ResidualCopy
from pagefold.kv.codec import KV_CACHE_DTYPES
from pagefold.runner.attention.cuda.columns import plan_columns
from pagefold.runner.attention.device_columns import DeviceColumns
from pagefold.runner.attention.reference import reference_attention
from pagefold.runner.codec_slab import CODEC_ROWS_LAYOUT, CodecSlab
from pagefold.runner.codecs.constants import CodecConstants
from pagefold.runner.cuda_decoder import CudaDecoder
from pagefold.runner.finite import are_finite
from pagefold.runner.inputs import fill_in, late_tokens, make_inputs, on_card
from pagefold.runner.loader import register_attention
from pagefold.runner.logits import adjust
from pagefold.runner.sampler import sample, sample_on_card
from pagefold.runner.sealed_slab import SEALED_ROWS_LAYOUT, SealedSlab
from pagefold.runner.slab import ROWS_LAYOUT, Slab
from pagefold.sampling import SamplingParams
from pagefold.steps import StepPlan

META = torch.device("meta")


def make_plan() -> StepPlan:
    """Make a plan of a chunk, a decoding row and a finished prompt, whose sampling asks for everything."""
    plan = StepPlan(0)
    plan.token_ids = array("i", [5, 6, 7, 8, 9, 10])
    plan.starts, plan.num_tokens = [0, 7, 0], [3, 1, 2]
    plan.tables = [[BlockTable(map(BlockId, ids))] for ids in ([0], [1, 2], [3])]
    plan.sampling_rows = [1, 2]
    plan.sampling = [
        SamplingParams(top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
    ]
    plan.seeds, plan.draws = [1, 2], [3, 1]
    plan.adjusted, plan.histories = [0, 1], [array("i", [5, 6, 7, 8]), array("i", [9, 10])]
    plan.banned = [frozenset({2}), frozenset()]
    plan.masked, plan.masks = [1], [bytes([255] * 39)]
    return plan


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3-longrope", "gemma2", "gpt-neox"])
def test_a_step_of_a_model_is_queued_without_waiting(family):
    from transformers import AutoModelForCausalLM

    config = FAMILIES[family]()
    with META:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=register_attention()
        ).eval()
    num_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    geometry = KVGeometry(config.num_hidden_layers, num_kv_heads, head_dim, 2, 4)
    data = Slab.allocate(geometry, 4, torch.bfloat16, META).data
    decoder = CudaDecoder(model, Slab(data, head_dim, ROWS_LAYOUT), None, max_model_len=64)
    logits = decoder.logits(make_inputs(make_plan(), geometry))
    assert logits.device == META
    assert logits.shape == (2, config.vocab_size)
    states = decoder.states()
    assert (states.device, states.shape) == (META, (6, 2 * num_kv_heads * head_dim))
    assert are_finite(states).shape == (6,)


@pytest.mark.parametrize("name", ["float16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "k8v4", "int4"])
def test_codes_are_encoded_and_read_without_waiting(name):
    """By the reference; and what kernels are given is on the card."""
    pytest.importorskip("triton")
    from pagefold.runner.attention.cuda.blocks import CardBlocks

    geometry = KVGeometry(2, 2, 32, 2, 4, CODECS[KV_CACHE_DTYPES.get(name, name)])
    constants = CodecConstants.unknown(4, 32, num_ranges=2)
    slab = CodecSlab(torch.empty(4, geometry.bytes_per_block, dtype=torch.uint8, device=META), geometry, constants)
    slab.layout = CODEC_ROWS_LAYOUT
    inputs = make_inputs(make_plan(), geometry).attention
    query, key, value = (torch.empty(6, heads, 32, dtype=torch.bfloat16, device=META) for heads in (4, 2, 2))
    assert reference_attention(query, key, value, slab, inputs, 0, 1.0).shape == query.shape
    blocks = CardBlocks.of(slab)
    tensors = [part for name in CardBlocks.__slots__ if isinstance(part := getattr(blocks, name), torch.Tensor)]
    assert len(tensors) == 9
    assert {part.device for part in tensors} == {META}


def test_blocks_are_sealed_and_read_without_waiting():
    """By the reference; and what kernels are given is on the card."""
    pytest.importorskip("triton")
    from pagefold.runner.attention.cuda.blocks import CardBlocks

    geometry = KVGeometry(2, 2, 32, 2, 4, CODECS["kivi2"])
    slab = SealedSlab.allocate(geometry, 4, 3, torch.zeros(4, 2, 32), META)
    slab.layout = SEALED_ROWS_LAYOUT
    plan = make_plan()
    plan.residual_ids, plan.residual_copies = [0, 2, 1], [ResidualCopy(0, 1)]
    slab.copy_residuals(plan.residual_copies)
    inputs = make_inputs(plan, geometry).attention
    query, key, value = (torch.empty(6, heads, 32, dtype=torch.bfloat16, device=META) for heads in (4, 2, 2))
    output = reference_attention(query, key, value, slab, inputs, 0, 1.0)
    assert (output.shape, output.device) == (query.shape, META)
    blocks = CardBlocks.of(slab)
    tensors = [part for name in CardBlocks.__slots__ if isinstance(part := getattr(blocks, name), torch.Tensor)]
    assert len(tensors) == 9
    assert {part.device for part in tensors} == {META}
    assert DeviceColumns.of(plan_columns(inputs, 1, 4)).residual_ids.tolist() == [0, 2, 1]


@pytest.mark.parametrize("num_processors", [58, 108, 132])
def test_what_was_captured_stays_where_it_is(num_processors):
    """A step between the captured sizes, which does not replay, needs no more room than was made for all of them."""
    pytest.importorskip("triton")
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape

    for num_kv_heads in (1, 2, 3, 5, 8, 32):
        heads = HeadShape(torch.bfloat16, num_kv_heads, num_kv_heads, 16, num_processors=num_processors)
        attention = CudaAttention(heads)
        attention.reserve(64, META)
        room = attention._partials
        for num_rows in range(1, 65):
            attention._room(num_rows, attention.num_splits(num_rows), META)
            assert attention._partials is room, f"{num_rows} rows of {num_kv_heads} KV heads"


def test_late_tokens_are_taken_on_the_card_without_waiting():
    plan = make_plan()
    plan.late, plan.late_from = [3], [1]
    sampled = torch.zeros(2, dtype=torch.int64, device=META)
    late = late_tokens(plan, sampled)
    inputs = replace(make_inputs(plan, KVGeometry(1, 1, 8, 2, 4)), late=late)
    there = on_card(inputs, META, 0, 4)
    assert (there.token_ids.device, there.token_ids.shape, there.late) == (META, (1, 6), None)


def test_late_tokens_are_those_of_the_step_before():
    plan = make_plan()
    plan.late, plan.late_from = [3, 5], [1, 0]
    inputs = make_inputs(plan, KVGeometry(1, 1, 8, 2, 4))
    fill_in(inputs.token_ids, late_tokens(plan, torch.tensor([70, 80])))
    assert inputs.token_ids.tolist() == [[5, 6, 7, 80, 9, 70]]


def test_what_is_sampled_is_left_on_the_card():
    plan = make_plan()
    logits = adjust(torch.zeros(2, 307, dtype=torch.bfloat16, device=META), plan)
    token_ids = sample_on_card(logits, plan.sampling, plan.seeds, plan.draws)
    assert (token_ids.device, token_ids.shape, token_ids.dtype) == (META, (2,), torch.int64)


def test_reading_a_number_would_be_refused():
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(1, device=META).tolist()


def test_what_is_sampled_so_is_what_sample_samples():
    plan = make_plan()
    for seed in range(20):
        logits = 3 * torch.randn(2, 307, generator=torch.Generator().manual_seed(seed))
        how = plan.sampling, [seed, seed], plan.draws
        assert sample_on_card(logits, *how).tolist() == sample(logits, *how)
