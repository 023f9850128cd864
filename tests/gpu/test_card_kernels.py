"""On a card: the kernels are dense attention, with NaN in all that nobody wrote."""

from __future__ import annotations

from random import Random

import pytest
import torch
from equivalence.attention_cases import Lengths, Shape, make_case
from equivalence.coded_cases import attend_coded, encode_extremes
from equivalence.sealed_cases import attend_sealed, seal_extremes

from pagefold.kv import KEEP_ALL, KeepRule
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.slab import ROWS_LAYOUT

BOUNDS = {torch.float32: 8e-6, torch.float16: 2 * 2**-9, torch.bfloat16: 2 * 2**-6}
"""As in ``equivalence/test_cuda_kernels.py``."""

SHAPES = [Shape(16, 64, 3, 3), Shape(16, 128, 8, 4), Shape(32, 80, 1, 20), Shape(64, 256, 1, 5), Shape(4, 32, 4, 1)]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_dense_attention(shape, dtype, card):
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape

    random = Random()
    for per_head in (False, True):
        seed = random.randrange(2**32)
        lengths = [Lengths(random.choice([0, 17, 3000]), random.choice([1, 1, 1, 9, 500])) for _ in range(12)]
        case = make_case(shape, lengths, per_head=per_head, seed=seed)
        case.round_to(dtype)
        heads = shape.num_kv_heads * shape.group, shape.num_kv_heads, shape.head_dim
        attention = CudaAttention(HeadShape(dtype, *heads, card.capability, card.num_processors))
        got = attention(*case.to(dtype, ROWS_LAYOUT, "cuda")).double().cpu()
        assert (got - case.expected()).abs().max() <= BOUNDS[dtype], f"seed {seed}, {lengths}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_cache_group_sees_what_it_keeps(shape, dtype, card):
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape

    random = Random()
    rules = KeepRule(random.randint(1, 600)), KeepRule(random.randint(1, 600), is_chunked=True), KEEP_ALL
    for layer in range(len(rules)):
        seed = random.randrange(2**32)
        lengths = [Lengths(random.choice([0, 17, 3000]), random.choice([1, 1, 1, 9, 500])) for _ in range(12)]
        case = make_case(shape, lengths, per_head=False, seed=seed, rules=rules, layer=layer)
        case.round_to(dtype)
        case.poison_unseen()
        heads = shape.num_kv_heads * shape.group, shape.num_kv_heads, shape.head_dim
        attention = CudaAttention(HeadShape(dtype, *heads, card.capability, card.num_processors))
        got = attention(*case.to(dtype, ROWS_LAYOUT, "cuda")).double().cpu()
        assert (got - case.expected()).abs().max() <= BOUNDS[dtype], f"seed {seed}, {lengths}, {rules[layer]}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", sorted(set(CELL_CODECS) - {"float32", "fp8", "kivi2"}))
def test_codes_are_read_and_written_as_the_reference_does(name, dtype, card):
    """Also in bits: who encodes on a card and who does on a CPU write the same bytes."""
    random = Random()
    bound = 3e-5 if dtype == torch.float32 else 4 * BOUNDS[dtype]
    for shape in SHAPES:
        for per_head in (False, True):
            seed = random.randrange(2**32)
            lengths = [Lengths(random.choice([0, 17, 900]), random.choice([1, 1, 1, 9, 200])) for _ in range(8)]
            attend_coded(name, shape, lengths, str(dtype)[6:], bound, card=card, per_head=per_head, seed=seed)


@pytest.mark.parametrize("name", sorted(set(CELL_CODECS) - {"float32", "fp8", "kivi2"}))
def test_what_no_model_computes_is_encoded_as_the_reference_does(name, card):
    encode_extremes(name, card=card)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sealed_blocks_are_read_and_written_as_the_reference_does(shape, dtype, card):
    """Also in bits, and residuals too."""
    random, bound = Random(), 3e-5 if dtype == torch.float32 else 4 * BOUNDS[dtype]
    for softcap in (0.0, 5.0):
        seed = random.randrange(2**32)
        sequences = [
            (random.choice([0, 17, 64, 900]), random.choice([1, 1, 1, 9, 200]), random.choice([0, 900]))
            for _ in range(8)
        ]
        rule = KeepRule(random.randint(1, 400)) if softcap else KEEP_ALL
        kept = {"rule": rule, "trims": True}
        attend_sealed(shape, sequences, str(dtype)[6:], bound, card=card, seed=seed, softcap=softcap, **kept)


@pytest.mark.parametrize("head_dim", [32, 80])
def test_what_no_model_computes_is_sealed_as_the_reference_does(head_dim, card):
    seal_extremes(head_dim, card=card)
