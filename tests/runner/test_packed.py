"""Units: no two kept entries share a slot, no unit is left out, and counts alone say where everything is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.runner.attention.packed import KeptUnits, PackedInputs, UnitShape

SHAPES = st.builds(UnitShape, st.sampled_from([1, 4, 16, 64, 256]), st.integers(1, 24))
NUM_KEPT = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 32, 255, 256]), st.integers(0, 256))
COUNTS = st.tuples(st.integers(1, 5), st.integers(1, 4)).flatmap(
    lambda size: st.lists(
        st.lists(NUM_KEPT, min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]
    ).map(lambda rows: np.array(rows, np.int32))
)


def granted(shape, counts, spare=0):
    """A chunk in blocks whose ids are in no order."""
    num_blocks = shape.num_blocks_for(counts) + spare
    ids = np.random.default_rng(len(counts)).permutation(3 * num_blocks + 1)[:num_blocks].astype(np.int32)
    return KeptUnits(shape, ids, counts)


def by_hand(chunk):
    """Yield layer, head, and where its entries lie: cells are handed out one by one, slots one by one."""
    every_cell = ((block, cell) for block in chunk.block_ids.tolist() for cell in range(chunk.shape.num_cells))
    for layer, row in enumerate(chunk.counts.tolist()):
        for head, count in enumerate(row):
            places = []
            for entry in range(count):
                slot = entry % chunk.shape.block_size
                if not slot:
                    block, cell = next(every_cell)
                places.append((block, cell, slot))
            yield layer, head, places


@given(SHAPES, COUNTS, st.integers(0, 3))
def test_they_are_where_a_walk_by_hand_puts_them(shape, counts, spare):
    chunk = granted(shape, counts, spare)
    taken = []
    for layer, head, places in by_hand(chunk):
        slots = chunk.slots(layer, head)
        assert list(zip(*(column.tolist() for column in slots), strict=True)) == places
        units = chunk.units(layer, head)
        assert chunk.first_unit(layer, head) == len(taken)
        own = list(dict.fromkeys(place[:2] for place in places))
        assert list(zip(*(column.tolist() for column in units), strict=True)) == own
        assert all(column.dtype == np.int32 for column in (*slots, *units))
        taken += own
    assert len(set(taken)) == len(taken) == shape.num_units(counts)
    assert len({block for block, _ in taken}) == shape.num_blocks_for(counts) == len(chunk.block_ids) - spare
    num_slots = shape.num_blocks_for(counts) * shape.num_cells * shape.block_size
    assert shape.num_unused_slots(counts) == num_slots - counts.sum() >= 0


@given(SHAPES, COUNTS)
def test_no_chunk_takes_more_blocks_than_one_that_keeps_everything(shape, counts):
    most = shape.most_blocks(256, *counts.shape)
    assert shape.num_blocks_for(counts) <= most == shape.num_blocks_for(np.full_like(counts, 256))


@given(SHAPES, COUNTS, st.data())
def test_where_a_layer_lies_does_not_depend_on_those_behind_it(shape, counts, data):
    layer = data.draw(st.integers(0, len(counts) - 1))
    most = shape.most_blocks(256, *counts.shape)
    whole = KeptUnits(shape, np.arange(most, dtype=np.int32), counts)
    so_far = np.where(np.arange(len(counts))[:, None] <= layer, counts, 0)
    early = KeptUnits(shape, whole.block_ids, so_far)
    for head in range(counts.shape[1]):
        for one, other in zip(whole.slots(layer, head), early.slots(layer, head), strict=True):
            np.testing.assert_array_equal(one, other)


def test_nothing_kept_takes_nothing():
    shape, counts = UnitShape(16, 6), np.zeros((2, 3), np.int32)
    chunk = KeptUnits(shape, np.zeros(0, np.int32), counts)
    assert shape.num_units(counts) == shape.num_blocks_for(counts) == shape.num_unused_slots(counts) == 0
    assert [len(column) for column in (*chunk.units(1, 2), *chunk.slots(1, 2))] == [0] * 5


def test_everything_kept_takes_as_many_blocks_as_it_did_whole():
    shape = UnitShape(16, 6)
    counts = np.full((2, 3), 256, np.int32)
    assert shape.most_blocks(256, 2, 3) == shape.num_blocks_for(counts) == 256 // 16
    assert not shape.num_unused_slots(counts)


def test_one_entry_by_one_head_takes_one_block():
    shape, counts = UnitShape(16, 6), np.zeros((2, 3), np.int32)
    counts[1, 1] = 1
    chunk = KeptUnits(shape, np.array([7], np.int32), counts)
    assert [column.tolist() for column in chunk.slots(1, 1)] == [[7], [0], [0]]
    assert shape.num_unused_slots(counts) == 6 * 16 - 1


def test_blocks_that_were_not_granted_are_our_bug():
    chunk = KeptUnits(UnitShape(16, 2), np.array([7], np.int32), np.array([[16, 16, 1]], np.int32))
    assert chunk.units(0, 1).cells.tolist() == [1]
    with pytest.raises(AssertionError, match="granted"):
        chunk.units(0, 2)


@given(st.sampled_from([1, 4, 256]), st.integers(0, 3000))
def test_a_token_sees_its_chunk_and_the_one_before_it_whole(size, entry):
    packed = PackedInputs(size, 1, ())
    older = [chunk for chunk in range(entry // size + 1) if chunk < entry // size - 1]
    assert packed.num_packed(entry) == len(older)
    assert packed.first_whole(entry) == len(older) * size


def test_sinks_lie_in_the_first_chunk():
    with pytest.raises(AssertionError, match="first chunk"):
        PackedInputs(4, 5, ())
