"""Slab: as many bytes as the geometry says, a block is contiguous, copies are whole, in order, and touch no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagefold.kv import BlockId, CopyOp, KVGeometry
from pagefold.runner.slab import Slab

NUM_BLOCKS = 6
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=3, head_dim=4, element_bytes=4, block_size=5)
BLOCKS = st.integers(0, NUM_BLOCKS - 1).map(BlockId)
OPS = st.lists(st.builds(CopyOp, BLOCKS, BLOCKS, st.integers(0, GEOMETRY.block_size)), max_size=8)


def filled_slab() -> Slab:
    slab = Slab.allocate(GEOMETRY, NUM_BLOCKS, torch.float32)
    slab.data.copy_(torch.arange(slab.data.numel(), dtype=torch.float32).view(slab.data.shape))
    return slab


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_takes_the_bytes_that_the_geometry_says(dtype):
    geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, element_bytes=dtype.itemsize, block_size=4)
    slab = Slab.allocate(geometry, 7, dtype)
    assert slab.num_bytes == 7 * geometry.bytes_per_block
    assert slab.data[3].is_contiguous()
    assert slab.data[3].nbytes == geometry.bytes_per_block


def test_a_geometry_of_another_element_size_is_our_bug():
    with pytest.raises(AssertionError, match="element size"):
        Slab.allocate(GEOMETRY, 1, torch.float64)


def test_keys_and_values_are_views_of_the_same_bytes():
    slab = filled_slab()
    block, cell, slot, dim = 4, GEOMETRY.groups[0].cell(1, 2), 3, 1
    slab.keys[block, cell, slot, dim] = -1.0
    slab.values[block, cell, slot, dim] = -2.0
    assert slab.data[block, cell, 0, dim * GEOMETRY.block_size + slot] == -1.0  # K in panels
    assert slab.data[block, cell, 1, slot * GEOMETRY.head_dim + dim] == -2.0
    assert (slab.data < 0).sum() == 2


@pytest.mark.parametrize("num_tokens", [0, 1, GEOMETRY.block_size])
def test_a_copy_is_whole_and_leaves_every_other_block_as_it_was(num_tokens):
    slab = filled_slab()
    before = slab.data.clone()
    slab.copy([CopyOp(BlockId(4), BlockId(1), num_tokens)])
    assert torch.equal(slab.keys[1, :, :num_tokens], slab.keys[4, :, :num_tokens])
    assert torch.equal(slab.data[1], before[4])
    others = [0, 2, 3, 4, 5]
    assert torch.equal(slab.data[others], before[others])


def test_what_is_not_a_number_is_copied_bit_for_bit():
    slab = filled_slab()
    slab.data[0] = float("nan")
    slab.data[0, 0, 0, 0] = -0.0
    slab.copy([CopyOp(BlockId(0), BlockId(5), 2)])
    assert torch.equal(slab.data[5].view(torch.int32), slab.data[0].view(torch.int32))


@given(OPS)
def test_copies_are_made_one_after_another(ops):
    """The twin is a list of names: a block that was copied into is a source like any other."""
    slab, names = filled_slab(), list(range(NUM_BLOCKS))
    before = slab.data.clone()
    slab.copy(ops)
    for op in ops:
        names[op.dst] = names[op.src]
    assert torch.equal(slab.data, before[names])


@given(OPS, st.randoms())
def test_copies_as_the_core_plans_them_may_be_made_in_any_order(ops, random):
    """No block is written twice, and none that is written is read."""
    planned: list[CopyOp] = []
    for op in ops:
        written, read = {op.dst for op in planned}, {op.src for op in planned}
        if op.src != op.dst and op.dst not in written | read and op.src not in written:
            planned.append(op)
    one, other = filled_slab(), filled_slab()
    one.copy(planned)
    random.shuffle(planned)
    other.copy(planned)
    assert torch.equal(one.data, other.data)


def test_no_copies_change_nothing():
    slab = filled_slab()
    slab.copy([])
    assert torch.equal(slab.data, filled_slab().data)
