"""Part 3 of the equality rule: all implementations of attention are equal, and equal to torch's dense attention.

Bounds are absolute, for keys, values and queries of standard deviation 1, whose outputs are of size 1 and less:
``FLOAT64_BOUND`` for ``reference`` in float64, ``FLOAT32_BOUND`` for ``reference`` and ``cpu`` in float32.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivalence.attention_cases import Lengths, Shape, make_case
from pagefold.config import cache_dir
from pagefold.kernels import KERNEL_CACHE
from pagefold.runner.attention import choose_backend
from pagefold.runner.slab import Slab

FLOAT64_BOUND = 1e-14
FLOAT32_BOUND = 8e-6  # scores are sums of up to 256 products: some ten roundings of 6e-8, times values of up to 5

SHAPES = (
    Shape(block_size=16, head_dim=64, num_kv_heads=3, group=3),  # SmolLM2
    Shape(block_size=16, head_dim=16, num_kv_heads=4, group=1),  # MHA
    Shape(block_size=4, head_dim=128, num_kv_heads=1, group=8),  # MQA
    Shape(block_size=64, head_dim=256, num_kv_heads=2, group=2),
)
MORE_SHAPES = (
    Shape(block_size=16, head_dim=32, num_kv_heads=1, group=1, num_layers=1),
    Shape(block_size=32, head_dim=80, num_kv_heads=2, group=4),
    Shape(block_size=128, head_dim=96, num_kv_heads=3, group=2),
    Shape(block_size=256, head_dim=64, num_kv_heads=1, group=16),
    Shape(block_size=8, head_dim=128, num_kv_heads=8, group=4),
    Shape(block_size=16, head_dim=192, num_kv_heads=2, group=7),
    Shape(block_size=4, head_dim=20, num_kv_heads=5, group=3),
    Shape(block_size=16, head_dim=128, num_kv_heads=8, group=1),
)
SEQUENCES = st.lists(
    st.builds(
        Lengths,
        num_old=st.one_of(st.just(0), st.integers(0, 70), st.integers(0, 2000)),
        num_new=st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 130)),
        num_shared=st.one_of(st.just(0), st.integers(0, 2100)),
    ),
    min_size=1,
    max_size=6,
)


def outputs_and_slabs(case):
    """Run what there is: {name: (output, keys and values as they are afterwards, bound)}."""
    head_dim, block_size = case.query.shape[2], case.slab.block_size
    for name, dtype, bound in (
        ("reference", torch.float64, FLOAT64_BOUND),
        ("reference", torch.float32, FLOAT32_BOUND),
        ("cpu", torch.float32, FLOAT32_BOUND),
    ):
        attention = choose_backend(name, dtype, block_size=block_size, head_dim=head_dim)
        operands = case.to(dtype)
        yield f"{name} in {dtype}", attention(*operands).double(), operands[3], bound


def hold(case, sharpness=1.0):
    """Hold all to the dense twin; ``sharpness`` as the case has it: scores are rounded to so many ulps more."""
    expected = case.expected()
    assert not expected.isnan().any(), "the case is at fault"
    for name, output, slab, bound in outputs_and_slabs(case):
        assert output.shape == case.query.shape
        assert not output.isnan().any(), f"{name} has read what nothing may read"
        error = (output - expected).abs().max().item()
        assert error <= bound * sharpness, f"{name} is off by {error:.2e}"
        hold_writes(case, name, slab)


def hold_writes(case, name, slab):
    """The step's K and V are in their slots, bit for bit, and every other slot is as it was."""
    expected = Slab(case.slab.data.to(slab.data.dtype, copy=True), slab.keys.shape[-1])
    keys, values = expected.keys, expected.values
    for s in range(case.inputs.num_seqs):
        first, last = case.inputs.query_starts[s : s + 2].tolist()
        for h in range(case.key.shape[1]):
            cell = case.inputs.cells[s, case.layer, h]
            blocks, slots = case.places(s, h, np.arange(first - last, 0) + case.group.lengths[s, h])
            keys[blocks, cell, slots] = case.key[first:last, h].to(keys.dtype)
            values[blocks, cell, slots] = case.value[first:last, h].to(keys.dtype)
    np.testing.assert_array_equal(slab.data.numpy(), expected.data.numpy(), f"{name} has written elsewhere")


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_all_are_dense_attention(shape, sequences, per_head, seed):
    hold(make_case(shape, sequences, per_head=per_head, seed=seed))


@pytest.mark.long
@pytest.mark.parametrize("shape", [*SHAPES, *MORE_SHAPES], ids=str)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_all_are_dense_attention_in_full(shape, sequences, per_head, seed):
    hold(make_case(shape, sequences, per_head=per_head, seed=seed))


SOFTCAPPED = st.fixed_dictionaries(
    {"sharpness": st.sampled_from([1.0, 4.0]), "softcap": st.sampled_from([0.5, 5.0, 50.0])}
)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, per_head=st.booleans(), seed=st.integers(0, 2**32), capping=SOFTCAPPED)
def test_soft_capping_is_the_dense_twins(sequences, per_head, seed, capping):
    hold(make_case(SHAPES[0], sequences, per_head=per_head, seed=seed, **capping), capping["sharpness"])


@pytest.mark.long
@pytest.mark.parametrize("shape", [*SHAPES, *MORE_SHAPES], ids=str)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(sequences=SEQUENCES, per_head=st.booleans(), seed=st.integers(0, 2**32), capping=SOFTCAPPED)
def test_soft_capping_is_the_dense_twins_in_full(shape, sequences, per_head, seed, capping):
    hold(make_case(shape, sequences, per_head=per_head, seed=seed, **capping), capping["sharpness"])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_what_is_nan_stays_nan(softcap):
    """In the row of the query and KV head that it came in by, and nowhere else."""
    case = make_case(SHAPES[0], [Lengths(20, 3)], per_head=False, seed=6, softcap=softcap)
    case.query[1, 4, 0] = float("nan")
    for name, output, _, _ in outputs_and_slabs(case):
        assert output.isnan().all(-1).nonzero().tolist() == [[1, 4]], name
        assert output.isnan().any(-1).sum() == 1, name


@pytest.mark.parametrize("per_head", [False, True])
def test_boundaries_of_blocks_and_chunks(per_head):
    """Lengths one before, at and one behind every boundary, new tokens on both sides of it."""
    shape = SHAPES[0]
    edges = [Lengths(num_old, num_new) for num_old in (0, 1, 15, 16, 17, 31, 32) for num_new in (1, 15, 16, 17)]
    hold(make_case(shape, edges, per_head=per_head, seed=1))


def test_blocks_written_in_the_same_step_are_read():
    """Each sequence leans on blocks of the one before, most of them written in this very step."""
    chain = [Lengths(0, 64), Lengths(64, 48, 64), Lengths(112, 5, 112), Lengths(112, 5, 112), Lengths(100, 1, 96)]
    hold(make_case(SHAPES[0], chain, per_head=False, seed=2))
    hold(make_case(SHAPES[0], chain, per_head=True, seed=3))


@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("sharpness", [30.0, 1e3, 1e5])
def test_scores_far_apart_do_not_overflow(sharpness, softcap):
    """Softmax of scores in the thousands: close to its largest score's value, never NaN or infinite."""
    sequences = [Lengths(200, 3), Lengths(0, 40), Lengths(15, 1)]
    case = make_case(SHAPES[0], sequences, per_head=False, seed=4, sharpness=sharpness, softcap=softcap)
    expected = case.expected()
    for name, output, _, bound in outputs_and_slabs(case):
        error = (output - expected).abs().max().item()
        # A score of size `sharpness` is rounded to `sharpness` ulps, and the weights follow it exponentially.
        assert error <= bound * sharpness, f"{name} is off by {error:.2e}"


def test_equal_scores_share_evenly():
    case = make_case(SHAPES[0], [Lengths(48, 1)], per_head=False, seed=5)
    case.query.zero_()
    hold(case)


KERNELS = """
import sys, torch
sys.path.insert(0, {tests!r})
from equivalence.attention_cases import Lengths, Shape, make_case
from pagefold.runner.attention.cpu import CpuAttention
from pagefold.kernels.compiled import num_kernels_compiled
shape = Shape(block_size=4, head_dim=4, num_kv_heads=1, group=1)
case = make_case(shape, [Lengths(3, 2)], per_head=False, seed=0)
assert (CpuAttention(2)(*case.to(torch.float32)).double() - case.expected()).abs().max() < 1e-5
print(num_kernels_compiled())
"""


def _num_compiled(cache: Path) -> str:
    return _said(KERNELS, cache)


def _said(program_text: str, cache: Path) -> str:
    tests = Path(__file__).resolve().parents[1]
    program = [sys.executable, "-c", program_text.format(tests=str(tests))]
    environment = {**os.environ, "PAGEFOLD_CACHE": str(cache)}
    return subprocess.run(program, env=environment, check=True, capture_output=True, text=True).stdout.strip()


FIRST_START = """
import hashlib, sys, torch
sys.path.insert(0, {tests!r})
from equivalence.attention_cases import Lengths, Shape, make_case
from pagefold.runner.attention.cpu import CpuAttention
shape = Shape(block_size=16, head_dim=64, num_kv_heads=2, group=3)
case = make_case(shape, [Lengths(20, 3), Lengths(600, 1), Lengths(300, 280)], per_head=False, seed=1)
print(hashlib.sha256(CpuAttention(2)(*case.to(torch.float32)).numpy().tobytes()).hexdigest())
"""


@pytest.mark.long
def test_a_first_start_says_to_the_bit_what_a_second_one_says(tmp_path):
    """The first compiles; code that Numba has just compiled is not what it keeps."""
    first, second = [_said(FIRST_START, tmp_path) for _ in range(2)]
    assert first == second


@pytest.mark.long
def test_a_second_process_compiles_nothing_unless_the_cache_is_damaged(tmp_path):
    """In a copy of the cache that all tests share: compiling once, after the damage, takes long enough."""
    _num_compiled(cache_dir())
    for file in _compiled_files(KERNEL_CACHE):
        copy = tmp_path / file.relative_to(cache_dir())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    _num_compiled(tmp_path)  # what another worker wrote just then may not have been copied whole
    assert _num_compiled(tmp_path) == "0"
    files = _compiled_files(tmp_path)
    assert len(files) >= 5
    for file in files:
        os.truncate(file, 100)
    # How work is dealt, attention, its tiles, and those of rows.
    assert [_num_compiled(tmp_path) for _ in range(2)] == ["4", "0"]


def _compiled_files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*.*") if file.suffix in {".nbi", ".nbc", ".o"}]
