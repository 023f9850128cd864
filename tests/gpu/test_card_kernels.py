"""On a card: the kernels are dense attention, with NaN in all that nobody wrote."""

from __future__ import annotations

from random import Random

import pytest
import torch
from equivalence.attention_cases import Lengths, Shape, make_case

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
        for name in ("query", "key", "value"):
            setattr(case, name, getattr(case, name).to(dtype).double())
        case.slab.data.copy_(case.slab.data.to(dtype).double())
        case.dense = {
            at: (keys.to(dtype).double(), values.to(dtype).double()) for at, (keys, values) in case.dense.items()
        }
        heads = shape.num_kv_heads * shape.group, shape.num_kv_heads, shape.head_dim
        attention = CudaAttention(HeadShape(dtype, *heads, card.capability, card.num_processors))
        got = attention(*case.to(dtype, ROWS_LAYOUT, "cuda")).double().cpu()
        assert (got - case.expected()).abs().max() <= BOUNDS[dtype], f"seed {seed}, {lengths}"
