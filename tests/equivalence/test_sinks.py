"""Part 3 of the equality rule with learned sinks: a score of each head that has its share of the softmax, and no value.

It is added once, when all splits that a token sees are folded: so a result tells neither how these were dealt nor how a
prompt was cut.
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
from equivalence.test_attention_windows import RULES
from equivalence.test_codecs import SHAPES as CODED_SHAPES
from equivalence.test_codecs import hold as hold_coded
from pagefold.kv import KEEP_ALL, KeepRule
from pagefold.runner.attention import choose_backend
from pagefold.runner.attention.cpu import CpuAttention

SHARP = st.sampled_from([1.0, 4.0])


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, rule=RULES, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_all_are_dense_attention(shape, sequences, rule, per_head, seed):
    hold(make_case(shape, sequences, per_head=per_head, seed=seed, rules=(rule, KEEP_ALL), sink_size=3.0))


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    sequences=SEQUENCES,
    rule=RULES,
    per_head=st.booleans(),
    sharpness=SHARP,
    softcap=st.sampled_from([0.0, 5.0]),
    sink_size=st.sampled_from([0.1, 3.0, 20.0]),
    seed=st.integers(0, 2**32),
)
def test_all_are_dense_attention_in_full(shape, sequences, rule, **how):
    hold(make_case(shape, sequences, rules=(rule,), **how), how["sharpness"])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("rule", [KEEP_ALL, KeepRule(40)], ids=str)
def test_a_sink_of_minus_infinity_is_none_to_the_bit(backend, rule):
    sequences = [Lengths(900, 1), Lengths(300, 70), Lengths(0, 5)]
    case = make_case(SHAPES[0], sequences, per_head=False, seed=3, rules=(rule,))
    shape = {"block_size": case.slab.block_size, "head_dim": case.query.shape[2]}
    attention = choose_backend(backend, torch.float32, **shape)
    without = attention(*case.to(torch.float32))
    case.sinks = torch.full((case.query.shape[1],), -torch.inf, dtype=torch.float64)
    assert torch.equal(attention(*case.to(torch.float32)), without)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_sink_far_above_all_scores_leaves_nothing_and_no_nan(backend):
    case = make_case(SHAPES[0], [Lengths(300, 1), Lengths(0, 70)], per_head=False, seed=3)
    shape = {"block_size": case.slab.block_size, "head_dim": case.query.shape[2]}
    case.sinks = torch.full((case.query.shape[1],), 1e4, dtype=torch.float64)
    assert not choose_backend(backend, torch.float32, **shape)(*case.to(torch.float32)).any()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("rule", [KEEP_ALL, KeepRule(300), KeepRule(300, is_chunked=True)], ids=str)
def test_a_token_alone_gets_what_it_gets_in_a_prompt_to_the_bit(rule, num_threads):
    """One token's splits are dealt one by one and merged; those of a prompt's tile are folded as it goes."""
    shape = Shape(block_size=16, head_dim=64, num_kv_heads=2, group=3)
    how = {"per_head": False, "seed": 5, "rules": (rule,), "trims": False, "sink_size": 3.0}
    case = make_case(shape, [Lengths(700, 64)], **how)
    query, key, value, slab, inputs, *scoring = case.to(torch.float32)
    whole = CpuAttention(num_threads)(query, key, value, slab, inputs, *scoring)
    alone = make_case(shape, [Lengths(763, 1)], **how).inputs
    group = inputs.groups[0]
    alone = type(alone)(alone.query_starts, (group,), alone.group_of_layer, inputs.cells)
    last = CpuAttention(2)(query[-1:], key[-1:], value[-1:], slab, alone, *scoring)
    assert torch.equal(last, whole[-1:])


@pytest.mark.parametrize("softcap", long_but([0.0], [0.0, 5.0]))
def test_blocks_that_are_sealed_have_sinks_too(softcap):
    shape = Shape(block_size=16, head_dim=64, num_kv_heads=2, group=2)
    sequences = [(100, 1, 0), (37, 8, 0), (0, 90, 0), (64, 40, 32)]
    case = SealedCase(shape, sequences, 7)
    sinks = 3 * torch.randn(4, generator=torch.Generator().manual_seed(7))
    (expected, _), (found, _) = (case.run(name, softcap=softcap, sinks=sinks) for name in ("reference", "cpu"))
    plain, _ = case.run("cpu", softcap=softcap)
    assert (expected - plain).abs().max() > 0.05
    assert (expected - found).abs().max() < 2e-5


@pytest.mark.parametrize("name", long_but(["k8v4"], ["int8_per_token_head", "int4_per_token_head", "k8v4"]))
@pytest.mark.parametrize("num_new", [1, 9, 60])
def test_what_centring_takes_off_scores_is_not_taken_off_a_sink(name, num_new):
    sequences = [Lengths(600, num_new), Lengths(3, 1)]
    hold_coded(make_case(CODED_SHAPES[0], sequences, per_head=True, seed=5, sink_size=3.0), name, 5)
