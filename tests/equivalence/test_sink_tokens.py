"""Part 3 of the equality rule with sink tokens: the first tokens stay in sight of all, beside the window.

Each query looks at them turned, as if the window followed them at once (StreamingLLM: Xiao et al., 2023). They are one
more partial result, folded last: so a result tells neither how work was dealt nor how a prompt was cut, and as long as
a window hides nothing it is that of the window alone.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivalence.attention_cases import Lengths, Shape, make_case
from equivalence.sealed_cases import SealedCase
from equivalence.settings import long_but
from equivalence.test_attention import SEQUENCES, SHAPES, hold
from equivalence.test_codecs import SHAPES as CODED_SHAPES
from equivalence.test_codecs import hold as hold_coded
from pagefold.kv import KEEP_ALL, KeepRule
from pagefold.runner.attention import choose_backend
from pagefold.runner.attention.cpu import CpuAttention

SIZES = st.one_of(st.sampled_from([1, 2, 15, 16, 17, 64, 255, 256, 257, 512, 700]), st.integers(1, 1200))
SINKS = st.one_of(st.just(4), st.sampled_from([1, 15, 16, 17, 33, 300, 600]))
RULES = st.builds(lambda window, num_sinks: KeepRule(window, num_sinks=num_sinks), SIZES, SINKS)
SHAPE = Shape(block_size=16, head_dim=64, num_kv_heads=2, group=3)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("shape", long_but(SHAPES[:3], SHAPES), ids=str)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, rule=RULES, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_all_are_dense_attention(shape, sequences, rule, per_head, seed):
    hold(make_case(shape, sequences, per_head=per_head, seed=seed, rules=(rule, KEEP_ALL)))


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    sequences=SEQUENCES,
    rules=st.tuples(RULES, st.one_of(RULES, SIZES.map(KeepRule))),
    per_head=st.booleans(),
    trims=st.sampled_from([True, False, None]),
    softcap=st.sampled_from([0.0, 5.0]),
    sink_size=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**32),
)
def test_all_are_dense_attention_in_full(shape, sequences, rules, **how):
    hold(make_case(shape, sequences, rules=rules, **how))


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, rule=RULES, seed=st.integers(0, 2**32))
def test_a_result_does_not_tell_what_was_given_back(sequences, rule, seed):
    """To the bit: of tables from the first entry on, of trimmed ones, and of tables that begin anywhere between."""
    how = {"per_head": False, "seed": seed, "rules": (rule,)}
    cases = [make_case(SHAPES[0], sequences, trims=trims, **how) for trims in (False, True, None)]
    for case in cases[1:]:
        case.turned = cases[0].turned
    whole, *trimmed = (CpuAttention(2)(*case.to(torch.float32)) for case in cases)
    assert not whole.isnan().any()
    for output in trimmed:
        assert torch.equal(output, whole)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("num_sinks", long_but([257, 700], [256, 257, 300, 512, 700, 2000]))
@pytest.mark.parametrize("trims", long_but([True], [True, False]))
def test_sink_tokens_of_several_splits_are_dense_attention(num_sinks, trims):
    """More of them than a split has entries: where windows begin far behind them, and where they begin among them."""
    sequences = [Lengths(900, 1), Lengths(900, 6), Lengths(250, 64), Lengths(700, 1, 320), Lengths(1400, 64)]
    rules = (KeepRule(64, num_sinks=num_sinks),)
    hold(make_case(SHAPE, sequences, per_head=False, seed=num_sinks, rules=rules, trims=trims))
    hold(make_case(SHAPE, sequences, per_head=True, seed=num_sinks, rules=rules, trims=trims))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "rule", [KeepRule(300, num_sinks=4), KeepRule(40, num_sinks=20), KeepRule(40, num_sinks=600)], ids=str
)
def test_a_token_alone_gets_what_it_gets_in_a_prompt_to_the_bit(rule, num_threads):
    """One token's parts are dealt one by one and merged; those of a prompt's tile are folded as it goes."""
    how = {"per_head": False, "seed": 5, "rules": (rule,), "trims": False}
    case = make_case(SHAPE, [Lengths(700, 64)], **how)
    query, key, value, slab, inputs, *others = case.to(torch.float32)
    *scoring, turned = others
    whole = CpuAttention(num_threads)(query, key, value, slab, inputs, *scoring, turned)
    alone = make_case(SHAPE, [Lengths(763, 1)], **how).inputs
    alone = type(alone)(alone.query_starts, inputs.groups, alone.group_of_layer, inputs.cells)
    last = CpuAttention(2)(query[-1:], key[-1:], value[-1:], slab, alone, *scoring, turned[-1:])
    assert torch.equal(last, whole[-1:])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_where_the_window_hides_nothing_there_are_none_to_the_bit(backend):
    """Whatever the turned queries are, which nobody looks by."""
    case = make_case(SHAPE, [Lengths(250, 40), Lengths(511, 1)], per_head=False, seed=3, rules=(KeepRule(600),))
    attention = choose_backend(backend, torch.float32, block_size=16, head_dim=64)
    without = attention(*case.to(torch.float32))
    case = make_case(
        SHAPE, [Lengths(250, 40), Lengths(511, 1)], per_head=False, seed=3, rules=(KeepRule(600, num_sinks=4),)
    )
    case.turned = torch.full_like(case.query, torch.nan)
    assert torch.equal(attention(*case.to(torch.float32)), without)


@pytest.mark.long
@pytest.mark.parametrize("name", ["k8v4", "int8_per_token_head", "int4_per_token_head"])
@pytest.mark.parametrize("num_new", [1, 60])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_codes_are_read_as_the_reference_reads_them(name, num_new, softcap):
    """What centring takes off scores is another number by the turned query."""
    rule = KeepRule(200, num_sinks=20)
    sequences = [Lengths(600, num_new), Lengths(210, num_new), Lengths(3, 1)]
    hold_coded(
        make_case(CODED_SHAPES[0], sequences, per_head=True, seed=5, rules=(rule,), softcap=softcap, sharpness=2.0),
        name,
        5,
        2.0,
    )


@pytest.mark.long
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("num_sinks", [4, 17])
def test_sealed_blocks_are_read_as_the_reference_reads_them(num_sinks, softcap):
    sequences = [(300, 1, 0), (64, 70, 0), (0, 130, 0), (47, 1, 0), (511, 1, 0), (512, 40, 0)]
    outputs = []
    for trims in (False, True):
        case = SealedCase(SHAPES[0], sequences, 7, KeepRule(40, num_sinks=num_sinks), trims=trims)
        expected, plain = case.run("reference", softcap=softcap)
        output, slab = case.run("cpu", softcap=softcap)
        assert not expected.isnan().any(), "the reference has read what nothing may read"
        assert (output - expected).abs().max().item() <= 2e-5
        assert torch.equal(plain.data, slab.data), "blocks are not sealed alike"
        outputs.append(output)
    assert torch.equal(*outputs)
