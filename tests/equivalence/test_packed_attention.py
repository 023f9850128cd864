"""The kernel of CPUs where chunks are packed: dense attention under the mask, and the same to the bit however dealt.

Bounds are those of ``runner/test_packed_reference.py``.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivalence.attention_cases import Shape
from equivalence.packed_cases import KEEPERS, PackedCase, cut, steps_of
from equivalence.packed_kernel import TOKEN_CODECS, as_stored, run_kernel
from equivalence.settings import long_but

FLOAT32_BOUND = 8e-6
CODES_BOUND = 3e-5  # as in ``test_codecs.py``
SMALL = Shape(block_size=16, head_dim=16, num_kv_heads=2, group=2)
SHAPES = (
    Shape(block_size=16, head_dim=64, num_kv_heads=3, group=3),
    Shape(block_size=16, head_dim=32, num_kv_heads=9, group=1),  # marks of two bytes
    Shape(block_size=32, head_dim=128, num_kv_heads=1, group=4),
    Shape(block_size=16, head_dim=256, num_kv_heads=1, group=2, num_layers=1),
)


def each(case, size, **how):
    """Compute sequences that run alone, one behind the other, cut into steps of one size."""
    return run_kernel(case, [[(seq, n)] for seq, length in enumerate(case.lengths) for n in cut(length, size)], **how)


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("size", [150, 40, 5])
def test_it_is_dense_attention_under_the_mask(keeper, size):
    case = PackedCase(SMALL, [150, 40], KEEPERS[keeper], chunk_size=32)
    case.hold(each(case, size), FLOAT32_BOUND)


@pytest.mark.parametrize("shape", long_but(SHAPES[:1], SHAPES), ids=str)
def test_heads_of_all_sizes_are_dense_attention(shape):
    case = PackedCase(shape, [300], KEEPERS["half"], chunk_size=64)
    case.hold(each(case, 170), FLOAT32_BOUND)


@pytest.mark.parametrize("change", [{"softcap": 3.0}, {"sink_size": 2.0}], ids=str)
def test_capped_scores_and_learned_sinks(change):
    case = PackedCase(SMALL, [150, 77], KEEPERS["half"], chunk_size=32, **change)
    case.hold(each(case, 60), FLOAT32_BOUND)


@pytest.mark.long
@pytest.mark.parametrize("in_pairs", [False, True], ids=["numbers", "pairs"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 2**32), keeper=st.sampled_from(sorted(KEEPERS)))
def test_bits_hang_on_nothing_but_the_sequence(in_pairs, data, seed, keeper):
    lengths = data.draw(st.lists(st.integers(1, 170), min_size=1, max_size=3))
    case = PackedCase(SMALL, lengths, KEEPERS[keeper], seed=seed, chunk_size=32)
    alone = each(case, 1, in_pairs=in_pairs, num_threads=1)
    dealt = run_kernel(case, data.draw(steps_of(lengths, 170)), in_pairs=in_pairs)
    for one, other in zip(alone, dealt, strict=True):
        assert torch.equal(one, other)
    if not in_pairs:
        case.hold(alone, FLOAT32_BOUND)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("codec", long_but(["int8_per_token_head", "k8v4", "int4_plain"], TOKEN_CODECS))
def test_codes_are_dense_attention_over_what_is_stored(codec):
    """Also behind the first range of positions, where other constants are taken off K; with learned sinks, softcaps."""
    shape = Shape(block_size=16, head_dim=64, num_kv_heads=2, group=3)
    for change in ({"sink_size": 2.0}, {"softcap": 3.0}):
        case = PackedCase(shape, [700, 90], KEEPERS["half"], chunk_size=64, **change)
        as_stored(case, codec).hold(each(case, 170, codec=codec), CODES_BOUND)


@pytest.mark.parametrize("codec", long_but(["int4_per_token_head"], TOKEN_CODECS))
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 2**32), keeper=st.sampled_from(sorted(KEEPERS)))
def test_bits_of_codes_hang_on_nothing_but_the_sequence(codec, data, seed, keeper):
    lengths = data.draw(st.lists(st.integers(1, 170), min_size=1, max_size=3))
    case = PackedCase(SMALL, lengths, KEEPERS[keeper], seed=seed, chunk_size=32)
    alone = each(case, 1, codec=codec, num_threads=1)
    dealt = run_kernel(case, data.draw(steps_of(lengths, 170)), codec=codec)
    for one, other in zip(alone, dealt, strict=True):
        assert torch.equal(one, other)
    as_stored(case, codec).hold(alone, CODES_BOUND)


@pytest.mark.parametrize("codec", long_but([""], ["", "k8v4"]))
def test_who_sees_all_has_the_bits_of_a_server_where_nothing_is_packed(codec):
    """Beside others in the same steps, of whom some have the same tokens."""
    lengths = [700, 600, 700, 30]
    case = PackedCase(SMALL, lengths, KEEPERS["half"], exact=(1, 2))
    for operands in (case.query, case.key, case.value):
        operands[0] = operands[2].clone()
    steps = [[(0, 300), (1, 250), (2, 600)], [(0, 399), (1, 349), (2, 99)], [(3, 29)], [(seq, 1) for seq in range(4)]]
    mixed = run_kernel(case, steps, codec=codec)
    as_stored(case, codec).hold(mixed, CODES_BOUND) if codec else case.hold(mixed, FLOAT32_BOUND)
    alone = PackedCase(SMALL, lengths, KEEPERS["half"], exact=range(4))
    alone.query, alone.key, alone.value = case.query, case.key, case.value
    exact = run_kernel(alone, steps, codec=codec, packs=False)
    for seq in (1, 2):
        assert torch.equal(mixed[seq], exact[seq])


def test_pairs_are_near_dense_attention():
    case = PackedCase(SMALL, [200], KEEPERS["half"], chunk_size=32)
    (output,) = each(case, 64, in_pairs=True)
    assert not output.isnan().any()
    error = (output.double() - case.dense(0)).square().mean().sqrt().item()
    assert error < 0.01
