"""make_inputs: a plan's columns as tensors, equal to loops over rows, tokens, layers and heads; all of it broadcast."""

from __future__ import annotations

from array import array

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagefold.kv import CODECS, KEEP_ALL, BlockId, BlockTable, CacheGroup, KeepRule, KVGeometry
from pagefold.runner.inputs import _group_inputs, _layers_of, make_inputs
from pagefold.steps import StepPlan

ROWS = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(0, 70)), st.one_of(st.just(1), st.integers(1, 40)), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)
"""(start, tokens, how often the row samples)."""


@st.composite
def geometries(draw):
    return KVGeometry(draw(st.integers(1, 4)), draw(st.integers(1, 4)), 8, 4, draw(st.sampled_from([1, 4, 16])))


def plan_of(rows, block_size, data):
    plan = StepPlan(0)
    for row, (start, num_tokens, num_samples) in enumerate(rows):
        plan.token_ids.extend(data.draw(st.lists(st.integers(0, 500), min_size=num_tokens, max_size=num_tokens)))
        plan.starts.append(start)
        plan.num_tokens.append(num_tokens)
        num_blocks = -(-(start + num_tokens) // block_size) + data.draw(st.integers(0, 2))  # some have room to spare
        ids = data.draw(st.lists(st.integers(0, 99), min_size=num_blocks, max_size=num_blocks))
        plan.tables.append([BlockTable(map(BlockId, ids))])
        plan.sampling_rows += [row] * num_samples
    return plan


@given(ROWS, geometries(), st.data())
def test_every_token_has_its_position_and_every_position_its_block(rows, geometry, data):
    plan = plan_of(rows, geometry.block_size, data)
    inputs = make_inputs(plan, geometry)
    attention, group = inputs.attention, inputs.attention.groups[0]
    assert inputs.token_ids.tolist() == [plan.token_ids.tolist()]
    assert inputs.positions.tolist() == [[start + i for start, num_tokens, _ in rows for i in range(num_tokens)]]
    assert attention.num_seqs == len(rows)
    first = 0
    for row, (start, num_tokens, _) in enumerate(rows):
        last = first + num_tokens
        assert attention.query_starts[row : row + 2].tolist() == [first, last]
        first = last
        for head in range(geometry.num_kv_heads):
            assert group.lengths[row, head] == start + num_tokens
            for position in range(start + num_tokens):
                at = position // geometry.block_size
                assert group.tables[row, head, at] == plan.block_ids[row][at]
            for layer in range(geometry.num_layers):
                assert attention.cells[row, layer, head] == geometry.groups[0].cell(layer, head)


@given(ROWS, geometries(), st.data())
def test_logits_are_wanted_of_the_last_token_of_each_row_that_samples_once(rows, geometry, data):
    plan = plan_of(rows, geometry.block_size, data)
    of_rows, of_samples, first = [], [], 0
    for _, num_tokens, num_samples in rows:
        first += num_tokens
        of_rows += [first - 1] * bool(num_samples)
        of_samples += [first - 1] * num_samples
    inputs = make_inputs(plan, geometry)
    assert inputs.logit_rows.tolist() == of_rows
    assert inputs.logit_rows.dtype == torch.int64
    taken = inputs.logit_rows if inputs.samples is None else inputs.logit_rows[inputs.samples]
    assert taken.tolist() == of_samples
    assert (inputs.samples is None) == (of_rows == of_samples)


@given(ROWS, geometries(), st.data())
def test_types_and_shapes_are_those_of_the_signature_and_nothing_is_copied(rows, geometry, data):
    inputs = make_inputs(plan_of(rows, geometry.block_size, data), geometry)
    attention, heads, layers = inputs.attention, geometry.num_kv_heads, geometry.num_layers
    group = attention.groups[0]
    width = max(-(-(start + num_tokens) // geometry.block_size) for start, num_tokens, _ in rows)
    assert group.tables.shape == (len(rows), heads, width)
    assert group.lengths.shape == (len(rows), heads)
    assert attention.cells.shape == (len(rows), layers, heads)
    columns = (attention.query_starts, group.tables, group.lengths, group.firsts, attention.cells)
    assert all(column.dtype == np.int32 for column in columns)
    assert (inputs.token_ids.dtype, inputs.positions.dtype) == (torch.int64, torch.int64)
    assert group.tables.strides[1] == group.lengths.strides[1] == attention.cells.strides[0] == 0


def test_a_prefill_and_a_decode_row():
    """The plain case, written out: five tokens of a new prompt, then the 18th token of another sequence."""
    plan = StepPlan(3, token_ids=array("i", [7, 8, 9, 10, 11, 42]), starts=[0, 17], num_tokens=[5, 1])
    plan.tables, plan.sampling_rows = [[BlockTable(map(BlockId, ids))] for ids in ([3, 9], [5, 4, 6, 2, 8, 1])], [1]
    inputs = make_inputs(plan, KVGeometry(num_layers=2, num_kv_heads=1, head_dim=8, element_bytes=4, block_size=4))
    assert inputs.positions.tolist() == [[0, 1, 2, 3, 4, 17]]
    assert inputs.attention.query_starts.tolist() == [0, 5, 6]
    assert inputs.attention.groups[0].lengths.tolist() == [[5], [18]]
    assert inputs.attention.groups[0].tables[0, 0, :2].tolist() == [3, 9]
    assert inputs.attention.groups[0].tables[1, 0].tolist() == [5, 4, 6, 2, 8]
    assert inputs.attention.cells.tolist() == [[[0], [1]], [[0], [1]]]
    assert inputs.logit_rows.tolist() == [5]


def test_tables_of_a_group_that_has_given_blocks_back():
    """Three sequences that keep 8 tokens: of 5, of 21, whose table begins with entry 12, and of 40."""
    group = CacheGroup((0, 2), num_kv_heads=2, block_size=4, keeps=KeepRule(8))
    firsts, ends = np.array([0, 12, 32], np.int32), np.array([5, 21, 40])
    tables = [BlockTable(ids) for ids in ([7, 8, 9], [1, 2, 3], [4, 5])]
    inputs = _group_inputs(tables, firsts, ends, group)
    assert inputs.tables[:, 0].tolist() == [[7, 8, 0], [1, 2, 3], [4, 5, 0]]
    assert inputs.lengths.tolist() == [[5, 5], [21, 21], [40, 40]]
    assert inputs.firsts.tolist() == [0, 12, 32]
    assert inputs.keeps == KeepRule(8)
    assert inputs.tables.strides[1] == inputs.lengths.strides[1] == 0


def test_tables_of_sink_tokens_are_of_the_first_blocks_wherever_a_table_begins():
    """Five sink tokens in blocks of 4: of a table from the begin, of one that has given blocks back, of a short one."""
    group = CacheGroup((0, 2), num_kv_heads=2, block_size=4, keeps=KeepRule(8, num_sinks=5))
    tables = [BlockTable([7, 8, 9]), BlockTable([4, 5], 8, [2, 3]), BlockTable([6])]
    firsts, ends = np.array([0, 32, 0], np.int32), np.array([12, 40, 3])
    inputs = _group_inputs(tables, firsts, ends, group)
    assert inputs.sink_tables[:, 1].tolist() == [[7, 8], [2, 3], [6, 0]]
    assert inputs.keeps == KeepRule(8, num_sinks=5)
    assert _group_inputs(tables[:1], firsts[:1], ends[:1], CacheGroup((0,), 2, 4)).sink_tables.size == 0


KEEPS = KeepRule(8), KeepRule(8), KEEP_ALL, KeepRule(8), KEEP_ALL, KeepRule(8)


def test_each_layer_has_cells_in_blocks_of_its_own_group():
    group_of_layer, cells = _layers_of(KVGeometry(6, 2, 8, 4, keeps=KEEPS))
    assert group_of_layer == (0, 0, 2, 1, 2, 1)
    assert cells.tolist() == [[0, 1], [2, 3], [0, 1], [0, 1], [2, 3], [2, 3]]
    assert cells.dtype == np.int32


def test_each_layers_cells_of_codes_have_numbers_of_their_own():
    """Constants differ from layer to layer, also of cells that lie in the same place of their groups' blocks."""
    group_of_layer, cells = _layers_of(KVGeometry(6, 2, 8, 4, codec=CODECS["k8v4"], keeps=KEEPS))
    assert group_of_layer == (0, 0, 2, 1, 2, 1)
    assert cells.flatten().tolist() == [*range(12)]
