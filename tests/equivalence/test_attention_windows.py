"""Part 3 of the equality rule where cache groups keep windows and chunks: all implementations are dense attention.

And part 1: what a token gets is the same, to the bit, however its prompt was cut into chunks, whatever else is in the
batch, and whether blocks that nobody sees any more were given back or not. Bounds are those of ``test_attention.py``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import masking_utils

from equivalence.attention_cases import Lengths, Shape, make_case
from equivalence.coded_cases import encoded
from equivalence.sealed_cases import SealedCase
from equivalence.settings import long_but
from equivalence.test_attention import SEQUENCES, SHAPES, hold
from equivalence.test_codecs import BOUND
from equivalence.test_codecs import hold as hold_coded
from pagefold.kv import CODECS, KEEP_ALL, KeepRule, KVGeometry
from pagefold.runner.attention import AttentionInputs, GroupInputs, choose_backend
from pagefold.runner.attention.cpu import CpuAttention
from pagefold.runner.attention.cuda.columns import most_blocks_seen, plan_columns
from pagefold.runner.attention.dealing import WorkDealer
from pagefold.runner.attention.device_columns import DeviceColumns
from pagefold.runner.attention.work import Keeps, first_seen
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.slab import Slab

SIZES = st.one_of(st.sampled_from([1, 2, 15, 16, 17, 64, 255, 256, 257, 512, 700]), st.integers(1, 1200))
RULES = st.one_of(st.just(KEEP_ALL), SIZES.map(KeepRule), SIZES.map(lambda size: KeepRule(size, is_chunked=True)))
GROUPS = st.lists(RULES, min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 40])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_rules_are_the_masks_of_transformers(window, is_chunked):
    padding = torch.zeros(1, dtype=torch.int64)
    overlays = masking_utils.sliding_window_overlay(window), masking_utils.chunked_overlay(window, padding)
    sees, rule = overlays[is_chunked], KeepRule(window, is_chunked)
    for q in range(3 * window + 5):
        seen = [k for k in range(q + 1) if sees(0, 0, q, k)]
        assert seen == list(range(rule.first_seen(q), q + 1))
        assert first_seen.py_func(Keeps.of(rule), 0, q) == rule.first_seen(q)
        assert first_seen.py_func(Keeps.of(KEEP_ALL), 0, q) == KEEP_ALL.first_seen(q) == 0


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, rules=GROUPS, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_all_are_dense_attention(shape, sequences, rules, per_head, seed):
    hold(make_case(shape, sequences, per_head=per_head, seed=seed, rules=rules))


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    sequences=SEQUENCES,
    rules=GROUPS,
    per_head=st.booleans(),
    trims=st.sampled_from([True, False, None]),
    softcap=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 2**32),
)
def test_all_are_dense_attention_in_full(shape, sequences, rules, **how):
    hold(make_case(shape, sequences, rules=rules, **how))


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("window", long_but([17], [1, 15, 16, 17, 255, 256, 257, 272, 600]))
def test_boundaries_of_windows_blocks_and_splits(window, is_chunked):
    """Queries one before, at and one behind where a window, a block and a split of the work ends; rows and tiles."""
    ends = {edge + more for edge in (16, 256, 512, window, 2 * window) for more in (-1, 0, 1)}
    edges = [Lengths(end, num_new) for end in sorted(ends) for num_new in (1, 5)]
    rules = KeepRule(window, is_chunked), KEEP_ALL
    hold(make_case(SHAPES[1], [*edges, Lengths(250, 300)], per_head=False, seed=window, rules=rules, trims=True))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("rule", [KeepRule(300), KeepRule(40), KeepRule(300, is_chunked=True)], ids=str)
def test_what_others_share_is_not_told(rule):
    """Sequences that lean on blocks of each other, some of which only one of them has kept."""
    chain = [Lengths(900, 3), Lengths(900, 1, 896), Lengths(700, 64, 700), Lengths(764, 5, 752), Lengths(1200, 1, 640)]
    for trims in (True, False, None):
        hold(make_case(SHAPES[0], chain, per_head=False, seed=9, rules=(rule,), trims=trims))


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, rules=GROUPS, seed=st.integers(0, 2**32))
def test_a_result_does_not_tell_what_was_given_back(sequences, rules, seed):
    """To the bit: of tables from the first entry on, of trimmed ones, and of tables that begin anywhere between."""
    cases = [
        make_case(SHAPES[0], sequences, per_head=False, seed=seed, rules=rules, trims=trims)
        for trims in (False, True, None)
    ]
    whole, *trimmed = (CpuAttention(2)(*case.to(torch.float32)) for case in cases)
    assert not whole.isnan().any()
    for output in trimmed:
        assert torch.equal(output, whole)


class Conversation:
    """One sequence of one layer a cache group, computed step by step. Blocks that nobody sees any more become NaN.

    Args:
        rules: of the groups.
        num_tokens: of the sequence.
    """

    SHAPE = Shape(block_size=16, head_dim=32, num_kv_heads=2, group=3)

    def __init__(self, rules, num_tokens):
        shape, random = self.SHAPE, torch.Generator().manual_seed(7)
        self.rules = rules
        heads = shape.num_kv_heads * shape.group, shape.num_kv_heads, shape.num_kv_heads
        self.operands = [
            [torch.randn(num_tokens, num, shape.head_dim, generator=random) for num in heads] for _ in rules
        ]
        self.num_blocks = len(rules) * (-(-num_tokens // shape.block_size) + 11)

    def run(self, chunks, *, trims, is_alone=True):
        """Return the outputs of each layer, with prompts cut so, and beside another sequence or not."""
        shape = self.SHAPE
        size, num_kv_heads = shape.block_size, shape.num_kv_heads
        slab = Slab.allocate(KVGeometry(1, num_kv_heads, shape.head_dim, 4, size), self.num_blocks, torch.float32)
        slab.data.fill_(float("nan"))
        free = np.random.default_rng(len(chunks)).permutation(self.num_blocks).tolist()
        beside = [[free.pop() for _ in range(10)] for _ in self.rules]  # of a sequence that another one computes
        tables, firsts = [[] for _ in self.rules], [0] * len(self.rules)
        attention, outputs, start = CpuAttention(2), [[] for _ in self.rules], 0
        for num_new in chunks:
            end = start + num_new
            for rule, table, group in zip(self.rules, tables, range(len(self.rules)), strict=True):
                while trims and firsts[group] + size <= rule.first_seen(start):
                    slab.data[table[0]] = float("nan")
                    free.insert(0, table.pop(0))
                    firsts[group] += size
                while firsts[group] + len(table) * size < end:
                    table.append(free.pop())
            rows = [(tables, firsts, end)]
            counts = [num_new]
            if not is_alone:
                rows.insert(0, (beside, [0] * len(self.rules), 150))
                counts.insert(0, 150)
            inputs = self._inputs(rows, counts)
            for group, operands in enumerate(self.operands):
                here = [operand[start:end] for operand in operands]
                if not is_alone:
                    here = [torch.cat((torch.ones_like(operand[:150]), operand[start:end])) for operand in operands]
                out = attention(*here, slab, inputs, group, shape.head_dim**-0.5)
                outputs[group].append(out[-num_new:])
            start = end
        return [torch.cat(own) for own in outputs]

    def _inputs(self, rows, counts):
        num_kv_heads, num_seqs = self.SHAPE.num_kv_heads, len(rows)
        groups = []
        for group, rule in enumerate(self.rules):
            own = [tables[group] for tables, _, _ in rows]
            padded = np.zeros((num_seqs, 1, max(map(len, own))), np.int32)
            for row, table in zip(padded, own, strict=True):
                row[0, : len(table)] = table
            ends = np.array([[end] for _, _, end in rows], np.int32)
            groups.append(
                GroupInputs(
                    np.broadcast_to(padded, (num_seqs, num_kv_heads, padded.shape[2])),
                    np.broadcast_to(ends, (num_seqs, num_kv_heads)),
                    np.array([firsts[group] for _, firsts, _ in rows], np.int32),
                    rule,
                )
            )
        num_layers = len(self.rules)
        cells = np.broadcast_to(np.arange(num_kv_heads, dtype=np.int32), (num_seqs, num_layers, num_kv_heads))
        return AttentionInputs(np.cumsum([0, *counts], dtype=np.int32), tuple(groups), tuple(range(num_layers)), cells)


@pytest.mark.long
def test_a_result_does_not_tell_how_a_prompt_was_cut():
    """To the bit: in one step, in chunks, token by token; with others beside; with blocks given back as it runs."""
    rules = KEEP_ALL, KeepRule(1), KeepRule(40), KeepRule(300), KeepRule(512), KeepRule(200, is_chunked=True)
    conversation = Conversation(rules, 700)
    whole = conversation.run([700], trims=False)
    assert not any(output.isnan().any() for output in whole)
    for chunks in ([300, 1, 200, 17, 13, 169], [256, 256, 188], [650, *[1] * 50], [13] * 53 + [11]):
        for trims, is_alone in ((True, True), (False, True), (True, False)):
            for rule, expected, found in zip(
                rules, whole, conversation.run(chunks, trims=trims, is_alone=is_alone), strict=True
            ):
                assert torch.equal(found, expected), f"{rule}, {chunks[:6]}, {trims}, {is_alone}"


def test_splits_that_all_see_whole_are_dealt_once():
    """Of eight sequences that share 2,048 tokens and keep 1,024 of them: the splits inside their windows."""
    num_seqs, size = 8, 16
    shared, own = np.arange(2048 // size), 4
    tables = np.stack([np.concatenate([shared, 1000 + own * s + np.arange(own)]) for s in range(num_seqs)])
    lengths = np.full((num_seqs, 1), 2048 + own * size, np.int32)
    dealer = WorkDealer(2000, size, 1)
    starts = np.arange(num_seqs + 1, dtype=np.int32)
    cells = np.zeros((num_seqs, 2, 1), np.int32)
    cells = np.broadcast_to(cells[:1], cells.shape)
    whole, window = (
        GroupInputs(tables[:, None].astype(np.int32), lengths, np.zeros(num_seqs, np.int32), rule)
        for rule in (KEEP_ALL, KeepRule(1024))
    )
    work = dealer.deal(AttentionInputs(starts, (whole, window), (0, 1), cells))
    dealt = [work.items[begin:end, 1] for begin, end in pairwise(work.item_starts)]
    # All see from entry 1088 on: the end of split 4, then 5 to 7, which all have, and the beginning of 8.
    assert np.bincount(dealt[0], minlength=9).tolist() == [1] * 8 + [num_seqs]
    assert np.bincount(dealt[1], minlength=9).tolist() == [0] * 4 + [num_seqs] + [1] * 3 + [num_seqs]
    assert (dealer._owner == -1).all()


NAMES = [name for name in CODECS if name in {"float16", "int8_per_token_head", "int4_per_token_head", "k8v4"}]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, rule=RULES, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_codes_are_read_as_the_reference_reads_them(name, sequences, rule, per_head, seed):
    hold_coded(make_case(SHAPES[0], sequences, per_head=per_head, seed=seed, rules=(rule,)), name, seed)


SEALED = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 70), st.integers(0, 800)),
        st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 150)),
        st.one_of(st.just(0), st.integers(0, 900)),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(sequences=SEALED, rule=RULES, softcap=st.sampled_from([0.0, 4.0]), seed=st.integers(0, 2**32))
def test_sealed_blocks_are_read_as_the_reference_reads_them(sequences, rule, softcap, seed):
    """Of trimmed tables and whole ones: to the bit the same."""
    outputs = []
    for trims in (False, True):
        case = SealedCase(SHAPES[0], sequences, seed, rule, trims=trims)
        expected, plain = case.run("reference", softcap=softcap)
        output, slab = case.run("cpu", softcap=softcap)
        assert not expected.isnan().any(), "the reference has read what nothing may read"
        assert (output - expected).abs().max().item() <= BOUND
        assert torch.equal(plain.data, slab.data), "blocks are not sealed alike"
        outputs.append(output)
    assert torch.equal(*outputs)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, rules=GROUPS, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_a_card_is_told_of_the_blocks_that_a_step_sees_and_of_no_others(sequences, rules, per_head, seed):
    inputs = make_case(SHAPES[0], sequences, per_head=per_head, seed=seed, rules=rules).inputs
    size, num_new = SHAPES[0].block_size, np.diff(inputs.query_starts)
    columns = DeviceColumns.of(plan_columns(inputs, 16, size))
    assert len(columns.groups) == len(rules)
    for rule, group, ours in zip(rules, inputs.groups, columns.groups, strict=True):
        num_heads = group.lengths.shape[1]
        tables, lengths = (
            np.broadcast_to(of, (len(sequences), num_heads, *of.shape[2:])) for of in (ours.tables, ours.lengths)
        )
        assert np.array_equal(lengths, group.lengths)
        assert tables.shape[2] % 16 == 0
        for s in range(len(sequences)):
            firsts = [rule.first_seen(int(length) - int(num_new[s])) // size for length in group.lengths[s]]
            assert ours.first_blocks[s] == (min(firsts) if rule.trims else group.firsts[s] // size)
            for h in range(num_heads):
                seen = np.arange(firsts[h], -(-int(group.lengths[s, h]) // size))
                expected = group.tables[s, h, seen - group.firsts[s] // size]
                assert np.array_equal(tables[s, h, seen - ours.first_blocks[s]], expected)


@given(
    window=st.integers(1, 100), is_chunked=st.booleans(), size=st.sampled_from([1, 4, 16]), entry=st.integers(0, 999)
)
def test_what_a_token_sees_lies_in_no_more_blocks_than_a_graph_has_room_for(window, is_chunked, size, entry):
    rule = KeepRule(window, is_chunked)
    num_blocks = entry // size - rule.first_seen(entry) // size + 1
    assert num_blocks <= most_blocks_seen(rule, entry + 1, size) <= most_blocks_seen(rule, 1000, size)
    assert most_blocks_seen(KEEP_ALL, entry + 1, size) == entry // size + 1


@pytest.mark.long
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, rules=GROUPS, name=st.sampled_from(NAMES), seed=st.integers(0, 2**32))
def test_codes_of_several_groups_do_not_tell_what_was_given_back(sequences, rules, name, seed):
    """To the bit, by both implementations; what is given back, or never written, is poison."""
    shape = {"block_size": SHAPES[0].block_size, "head_dim": SHAPES[0].head_dim}
    outputs = {"reference": [], "cpu": []}
    for trims in (False, True):
        case = make_case(SHAPES[0], sequences, per_head=False, seed=seed, rules=rules, trims=trims)
        operands = [tensor.float() for tensor in (case.query, case.key, case.value)]
        for backend, slab in zip(outputs, encoded(case, name, seed), strict=True):
            attention = choose_backend(backend, torch.float32, **shape, codes_a_byte=CELL_CODECS[name].codes_a_byte)
            outputs[backend].append(attention(*operands, slab, case.inputs, case.layer, case.scale))
    for both in outputs.values():
        assert not both[0].isnan().any()
        assert torch.equal(*both)


@pytest.mark.parametrize(
    "rule", long_but([KeepRule(40)], [KeepRule(40), KeepRule(300), KeepRule(64, is_chunked=True)]), ids=str
)
@pytest.mark.parametrize("backend", long_but(["reference"], ["reference", "cpu"]))
def test_groups_that_a_sequence_fills_together_are_sealed_together(backend, rule):
    """Each layer's outputs, blocks and residuals are those of a step in which its group is the only one."""
    sequences = [(300, 1, 0), (64, 70, 0), (0, 130, 0), (47, 1, 0), (511, 1, 0), (512, 40, 0)]
    cases = [SealedCase(SHAPES[0], sequences, 7, kept, trims=True) for kept in (rule, KEEP_ALL)]
    windowed, whole = (case.inputs.groups[0] for case in cases)
    num_blocks = len(cases[0].slab.data)
    behind = np.broadcast_to(whole.tables[:, :1] + np.int32(num_blocks), whole.tables.shape)
    groups = windowed, replace(whole, tables=behind)
    together = SealedCase(SHAPES[0], sequences, 7, rule, trims=True)
    together.inputs = replace(together.inputs, groups=groups, group_of_layer=(0, 1))
    together.slab.data = torch.cat([case.slab.data for case in cases])
    parts = slice(num_blocks), slice(num_blocks, None)
    for layer, (case, part) in enumerate(zip(cases, parts, strict=True)):
        expected, plain = case.run(backend, layer=layer)
        output, slab = together.run(backend, layer=layer)
        apart = (output != expected).nonzero()
        assert not len(apart), f"layer {layer}: {len(apart)} numbers, at {apart[:: 1 + len(apart) // 20].tolist()}"
        assert torch.equal(slab.data[part], plain.data)
        assert torch.equal(slab.residuals.view(torch.int16), plain.residuals.view(torch.int16))


def test_groups_that_a_sequence_fills_apart_are_not_sealed():
    case = SealedCase(SHAPES[0], [(20, 1, 0)], 7)
    (group,) = case.inputs.groups
    other = replace(group, lengths=group.lengths - np.int32(1))
    case.inputs = replace(case.inputs, groups=(group, other), group_of_layer=(0, 1))
    with pytest.raises(AssertionError, match="filled apart"):
        case.run("cpu")
