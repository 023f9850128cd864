"""Packed attention is dense attention under the very mask, and tells nothing of steps, of batches or of what was freed.

Numbers are as in ``equivalence/test_attention.py``: of standard deviation 1, so bounds are absolute.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equivalence.attention_cases import Shape
from equivalence.packed_cases import KEEPERS, NUM_SINKS, PackedCase, cut, keep_some, steps_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagefold.kv import KVGeometry
from pagefold.runner.attention import AttentionInputs, GroupInputs
from pagefold.runner.attention.packed import KeptUnits, PackedInputs, UnitShape
from pagefold.runner.attention.packed_reference import pack_chunk, packed_attention, write_whole
from pagefold.runner.attention.reference import reference_attention
from pagefold.runner.slab import LAYOUT, PAIRS_LAYOUT, ROWS_LAYOUT, Slab

CHUNK = 256

FLOAT64_BOUND = 1e-14
FLOAT32_BOUND = 8e-6

SMALL = Shape(block_size=16, head_dim=8, num_kv_heads=2, group=2)
ONE_HEAD = Shape(block_size=16, head_dim=8, num_kv_heads=1, group=2, num_layers=1)
SHAPES = (
    Shape(block_size=16, head_dim=32, num_kv_heads=4, group=1),  # MHA
    Shape(block_size=16, head_dim=64, num_kv_heads=3, group=3, num_layers=1),
    Shape(block_size=4, head_dim=128, num_kv_heads=1, group=4, num_layers=1),  # MQA
    Shape(block_size=64, head_dim=256, num_kv_heads=1, group=2, num_layers=1),
    Shape(block_size=256, head_dim=20, num_kv_heads=2, group=1),
)


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("size", [90, 32, 13])
def test_it_is_dense_attention_under_the_mask(keeper, size):
    case = PackedCase(SMALL, [140, 40], KEEPERS[keeper], chunk_size=32)
    case.hold(case.run_each(size), FLOAT64_BOUND)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_of_all_sizes_are_dense_attention(shape):
    case = PackedCase(shape, [200], KEEPERS["half"], chunk_size=64)
    case.hold(case.run_each(150), FLOAT64_BOUND)
    case.hold(case.run_each(150, torch.float32), FLOAT32_BOUND)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("edge", [CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK])
def test_lengths_at_every_boundary(edge):
    """Sequences that end one before, at and one behind where a chunk does; the last tokens in steps of their own."""
    lengths = [edge - 1, edge, edge + 1]
    case = PackedCase(ONE_HEAD, lengths, KEEPERS["half"], seed=edge)
    steps = [[(seq, length - 6)] for seq, length in enumerate(lengths)]
    steps += [[(seq, num) for seq in range(len(lengths))] for num in (5, 1)]
    case.hold(case.run(steps), FLOAT64_BOUND)


@pytest.mark.long
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    share=st.floats(0.0, 1.0),
    shape=st.builds(Shape, st.sampled_from([4, 16, 64]), st.just(8), st.integers(1, 3), st.integers(1, 3), st.just(2)),
    how=st.fixed_dictionaries(
        {
            "softcap": st.sampled_from([0.0, 5.0]),
            "sink_size": st.sampled_from([0.0, 3.0]),
            "num_cells": st.integers(6, 9),
            "chunk_size": st.sampled_from([4, 16, 20]),
            "seed": st.integers(0, 2**32),
        }
    ),
    data=st.data(),
)
def test_any_sequences_in_any_steps_are_dense_attention(lengths, share, shape, how, data):
    case = PackedCase(shape, lengths, keep_some(share), **how)
    case.hold(case.run(data.draw(steps_of(lengths, 70))), FLOAT64_BOUND)


@pytest.mark.quick(every=7)
@pytest.mark.parametrize(
    ("keeper", "dtype"),
    [*((keeper, torch.float32) for keeper in KEEPERS), ("half", torch.float64), ("half", torch.bfloat16)],
    ids=str,
)
def test_a_result_does_not_tell_how_a_prompt_was_cut(keeper, dtype):
    """To the bit: token by token, in steps that end anywhere, in one step; whatever was given back."""
    case = PackedCase(SMALL._replace(num_layers=1), [130], KEEPERS[keeper], sink_size=1.0, chunk_size=32)
    (whole,) = case.run_each(130, dtype, gives_back=False)
    assert not whole.isnan().any()
    for size in (1, 17, 32, 90):
        assert torch.equal(*case.run_each(size, dtype), whole), f"in steps of {size}"


@pytest.mark.long
def test_a_result_does_not_tell_how_a_long_prompt_was_cut():
    case = PackedCase(ONE_HEAD, [1030], KEEPERS["half"])
    (whole,) = case.run_each(1030, torch.float32, gives_back=False)
    assert not whole.isnan().any()
    for size in (1, 17, 256, 700):
        assert torch.equal(*case.run_each(size, torch.float32), whole), f"in steps of {size}"


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_of_all_sizes_do_not_tell_how_a_prompt_was_cut(shape):
    case = PackedCase(shape._replace(num_layers=1), [140], KEEPERS["half"], chunk_size=48)
    (whole,) = case.run_each(140, torch.float32)
    for size in (17, 48):
        assert torch.equal(*case.run_each(size, torch.float32), whole), f"in steps of {size}"


def test_a_result_does_not_tell_who_else_is_in_the_batch():
    lengths = [120, 33, 3, 90]
    case = PackedCase(SMALL, lengths, KEEPERS["half"], seed=5, chunk_size=32)
    alone = case.run_each(40, torch.float32)
    parts = [cut(length, size) for length, size in zip(lengths, (9, 33, 1, 89), strict=True)]
    steps = [[(seq, own[at]) for seq, own in enumerate(parts) if at < len(own)] for at in range(max(map(len, parts)))]
    for batched in (steps, [step[::-1] for step in steps]):
        for expected, found in zip(alone, case.run(batched, torch.float32), strict=True):
            assert torch.equal(found, expected)


def test_what_a_head_keeps_is_nothing_to_the_others():
    one, other = (PackedCase(SMALL, [110], KEEPERS[keeper], chunk_size=32) for keeper in ("nothing", "one head"))
    (without,), (with_it,) = one.run_each(50), other.run_each(50)
    own = torch.zeros_like(without, dtype=torch.bool)
    own[-1, 2 * 32 :, -SMALL.group :] = True
    assert torch.equal(with_it[~own], without[~own])
    assert (with_it[own] != without[own]).any()


@pytest.mark.parametrize("layout", [ROWS_LAYOUT, PAIRS_LAYOUT])
def test_how_numbers_lie_in_a_block_is_nothing_to_the_result(layout):
    case = PackedCase(SMALL, [110], KEEPERS["half"], chunk_size=32)
    panels, others = (case.run_each(50, torch.bfloat16, layout=name) for name in (LAYOUT, layout))
    assert torch.equal(*panels, *others)


def test_layers_that_pack_nothing_take_no_units():
    case = PackedCase(SMALL._replace(num_layers=4), [110], KEEPERS["half"], masked=(1, 3), chunk_size=32)
    case.hold(case.run_each(50), FLOAT64_BOUND)


def test_up_to_two_chunks_it_is_attention_to_everything():
    case = PackedCase(SMALL._replace(num_layers=1), [2 * CHUNK], KEEPERS["nothing"], softcap=5.0, sink_size=2.0)
    (found,) = case.run_each(200)
    tables = np.broadcast_to(np.arange(32, dtype=np.int32), (1, 2, 32))
    lengths, cells = np.full((1, 2), 2 * CHUNK, np.int32), np.arange(2, dtype=np.int32).reshape(1, 1, 2)
    inputs = AttentionInputs.of_one_group(np.array([0, 2 * CHUNK], np.int32), tables, lengths, cells)
    slab = Slab.allocate(KVGeometry(1, 2, SMALL.head_dim, 8, 16), 32, torch.float64)
    operands = case.query[0][0], case.key[0][0], case.value[0][0], slab, inputs, 0
    expected = reference_attention(*operands, case.scale, case.softcap, case.sinks)
    assert (found[0] - expected).abs().max() <= FLOAT64_BOUND


class Packed:
    """One sequence of three chunks in two heads, whose tables differ; its first chunk is packed."""

    def __init__(self, dtype=torch.float32, *, num_layers=1, sources=()):
        num_entries, size, random = 3 * CHUNK, 16, torch.Generator().manual_seed(3)
        num_own = (max(sources) + 1) if sources else num_layers
        self.key, self.value = (torch.randn(num_entries, 2, 8, generator=random).to(dtype) for _ in range(2))
        self.query = torch.randn(num_entries, 4, 8, generator=random).to(dtype)
        self.slab = Slab.allocate(KVGeometry(1, 2, 8, dtype.itemsize, size), 140, dtype)
        self.slab.data.fill_(torch.nan)
        ids = np.random.default_rng(3).permutation(140).astype(np.int32)
        tables = ids[:96].reshape(1, 2, 48)
        group = GroupInputs(
            tables, np.full((1, 2), num_entries, np.int32), np.zeros(1, np.int32), sink_tables=tables[:, :, :1]
        )
        cells = np.zeros((1, num_layers, 2), np.int32) + np.arange(2, dtype=np.int32)
        starts = np.array([0, num_entries], np.int32)
        self.inputs = AttentionInputs(starts, (group,), (0,) * num_layers, cells, sources=sources)
        self.keep = torch.rand(num_layers, 2, CHUNK, generator=random) < 0.5
        self.keep[:, :, :NUM_SINKS] = False
        self.keep[num_own:] = False
        counts = self.keep.sum(-1).numpy().astype(np.int32)
        self.chunk = KeptUnits(UnitShape(size, 2), ids[96:], counts)
        self.packed = PackedInputs(CHUNK, NUM_SINKS, ((self.chunk,),))
        write_whole(self.key, self.value, self.slab, self.inputs, 0)

    def last(self, num_rows):
        """Return the inputs of a step with its last token, in so many rows that share all."""
        (group,) = self.inputs.groups
        tables, lengths, firsts, sink_tables = (
            np.repeat(own, num_rows, axis=0) for own in (group.tables, group.lengths, group.firsts, group.sink_tables)
        )
        group = GroupInputs(tables, lengths, firsts, sink_tables=sink_tables)
        cells = np.repeat(self.inputs.cells, num_rows, axis=0)
        return AttentionInputs(np.arange(num_rows + 1, dtype=np.int32), (group,), self.inputs.group_of_layer, cells)

    def pack(self):
        pack_chunk(self.slab, self.inputs, self.packed, 0, 0, self.keep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_packed_is_what_was_kept_bit_for_bit_and_nothing_else_is_written(dtype):
    one = Packed(dtype)
    before = one.slab.data.clone()
    one.pack()
    expected = Slab(before, 8)
    for h in range(2):
        blocks, cells, slots = (torch.from_numpy(column).long() for column in one.chunk.slots(0, h))
        expected.keys[blocks, cells, slots] = one.key[:CHUNK, h][one.keep[0, h]]
        expected.values[blocks, cells, slots] = one.value[:CHUNK, h][one.keep[0, h]]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(one.slab.data.view(bits), expected.data.view(bits))


def test_sequences_may_share_what_is_packed():
    one = Packed()
    one.pack()
    alone = packed_attention(one.query[-1:], one.slab, one.last(1), one.packed, 0, 1.0)
    both = PackedInputs(CHUNK, NUM_SINKS, one.packed.chunks * 2)
    twice = packed_attention(one.query[-1:].repeat(2, 1, 1), one.slab, one.last(2), both, 0, 1.0)
    assert not alone.isnan().any()
    assert torch.equal(twice, alone.repeat(2, 1, 1))


def test_a_layer_without_keys_of_its_own_reads_what_its_source_has_kept():
    one = Packed(num_layers=2, sources=(0, 0))
    one.pack()
    own, others = (packed_attention(one.query, one.slab, one.inputs, one.packed, layer, 1.0) for layer in range(2))
    assert torch.equal(own[2 * CHUNK :], others[2 * CHUNK :])


def test_what_cannot_be_is_our_bug():
    one = Packed()
    one.keep[0, 0, 0] = True
    with pytest.raises(AssertionError, match="sinks"):
        one.pack()
    one.keep[0, 0, 0] = False
    one.chunk.counts[0, 1] -= 1
    with pytest.raises(AssertionError, match="directory"):
        one.pack()
    one.inputs.groups[0].firsts[0] = 2 * CHUNK
    with pytest.raises(AssertionError, match="before its table"):
        packed_attention(one.query, one.slab, one.inputs, one.packed, 0, 1.0)
