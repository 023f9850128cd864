"""Attention over pairs of bfloat16: near dense attention, never beyond what is attended to, and the same however dealt.

Queries and weights are rounded to bfloat16 too. So it is held to a twin that does the same in float64, to which it is
near, and to dense attention, from which it is no further than torch's own attention in bfloat16.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivalence.attention_cases import Lengths, Shape, make_case
from equivalence.test_attention import MORE_SHAPES, SEQUENCES, SHAPES
from pagefold.runner.attention import choose_backend
from pagefold.runner.attention.cpu import CpuAttention
from pagefold.runner.slab import PAIRS_LAYOUT, Slab

NEAR = 4e-3  # a weight whose neighbours are one part in 256 away may be rounded to the other one
_SPLIT = 256


def in_pairs(case):
    """Run a case whose numbers are bfloat16; return the output and the slab afterwards."""
    query, key, value, _, *rest = case.to(torch.float32)
    slab = Slab(torch.empty_like(case.slab.data, dtype=torch.bfloat16), case.slab.head_dim, PAIRS_LAYOUT)
    shape = slab.values.shape
    slab.keys.copy_(case.slab.keys.unflatten(-1, (-1, 2)))
    slab.values.copy_(case.slab.values.unflatten(2, (shape[2], 2)))
    return CpuAttention(2)(query, key, value, slab, *rest).double(), slab


def rounded(numbers):
    return numbers.float().bfloat16().double()


def twin(case):
    """Attention query by query in float64, with queries and weights as bfloat16, weights split by split."""
    out = torch.empty_like(case.query)
    group = case.query.shape[1] // case.key.shape[1]
    size = case.slab.block_size
    split = size * max(1, _SPLIT // size)
    for (s, h), (keys, values) in case.dense.items():
        first, last = case.inputs.query_starts[s : s + 2].tolist()
        for t in range(first, last):
            end = len(keys) - (last - t) + 1
            for head in range(h * group, (h + 1) * group):
                query = rounded(case.query[t, head] * (case.scale * math.log2(math.e)))
                scores = keys[:end] @ query
                total, weighted = 0.0, torch.zeros(len(query), dtype=torch.float64)
                for begin in range(0, end, split):
                    part = scores[begin : begin + split]
                    weights = torch.exp2(part - part.max())
                    factor = torch.exp2(part.max() - scores.max())
                    total = total + factor * weights.sum()
                    weighted = weighted + factor * (rounded(weights) @ values[begin : begin + split][: len(part)])
                out[t, head] = weighted / total
    return out


def hold(case):
    case.round_to(torch.bfloat16)
    output, slab = in_pairs(case)
    assert not output.isnan().any(), "it has read what nothing may read"
    assert (output - twin(case)).abs().max() <= NEAR
    expected = case.expected()
    head_dim = case.query.shape[2]
    theirs = choose_backend("reference", torch.bfloat16, block_size=case.slab.block_size, head_dim=head_dim)
    limit = (theirs(*case.to(torch.bfloat16)).double() - expected).square().mean()
    assert (output - expected).square().mean() <= limit
    hold_writes(case, slab)


def hold_writes(case, slab):
    """The step's K and V are in their slots, and every other slot is as it was."""
    expected = Slab(torch.empty_like(slab.data), slab.head_dim, PAIRS_LAYOUT)
    expected.keys.copy_(case.slab.keys.unflatten(-1, (-1, 2)))
    expected.values.copy_(case.slab.values.unflatten(2, (slab.values.shape[2], 2)))
    for s in range(case.inputs.num_seqs):
        first, last = case.inputs.query_starts[s : s + 2].tolist()
        for h in range(case.key.shape[1]):
            cell = case.inputs.cells[s, case.layer, h]
            entries = torch.from_numpy(np.arange(first - last, 0) + case.group.lengths[s, h])
            blocks, _ = case.places(s, h, entries.numpy())
            expected.write(
                cell, torch.from_numpy(blocks).long(), entries, (case.key[first:last, h], case.value[first:last, h])
            )
    assert torch.equal(slab.data.view(torch.int16), expected.data.view(torch.int16))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_it_is_the_twin_s(shape, sequences, per_head, seed):
    hold(make_case(shape, sequences[:3], per_head=per_head, seed=seed))


@pytest.mark.long
@pytest.mark.parametrize("shape", [*SHAPES, *MORE_SHAPES], ids=str)
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_it_is_the_twin_s_in_full(shape, sequences, per_head, seed):
    hold(make_case(shape, sequences, per_head=per_head, seed=seed))


@pytest.mark.parametrize("per_head", [False, True])
def test_boundaries_of_pairs_blocks_and_chunks(per_head):
    """Lengths one before, at and one behind every boundary: the last slot's partner is never read."""
    edges = [Lengths(num_old, num_new) for num_old in (0, 1, 2, 15, 16, 17, 31) for num_new in (1, 2, 15, 16, 17)]
    hold(make_case(SHAPES[0], edges, per_head=per_head, seed=1))


def test_what_is_read_and_written_is_the_same_by_the_slab_and_in_its_bytes():
    shape = Shape(block_size=8, head_dim=16, num_kv_heads=1, group=1)
    data = torch.zeros(3, 2, 2, shape.block_size * shape.head_dim, dtype=torch.bfloat16)
    slab = Slab(data, shape.head_dim, PAIRS_LAYOUT)
    kv = torch.randn(5, 16), torch.randn(5, 16)
    blocks, entries = torch.tensor([2, 2, 0, 1, 1]), torch.tensor([3, 4, 0, 7, 6])
    slab.write(1, blocks, entries, kv)
    read = slab.read(1, blocks, entries)
    assert all(torch.equal(found, given.bfloat16()) for found, given in zip(read, kv, strict=True))
    words = data.view(3, 2, 2, -1)[2, 1]
    assert torch.equal(words[0].view(8, 8, 2)[:, 3].flatten(), kv[0][0].bfloat16()), "K: [head_dim / 2][slot] words"
    assert torch.equal(words[1].view(4, 16, 2)[1, :, 1], kv[1][0].bfloat16()), "V: [slot / 2][head_dim] words"
