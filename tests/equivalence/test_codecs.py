"""Part 3 of the equality rule: codecs. Encoding is deterministic in bits, attention reads only what is stored.

The kernel is held to the reference, which decodes what it gathers and attends as ever: outputs within ``BOUND``, for
keys, values and queries of standard deviation 1 (a rotated head of 256 numbers is summed eight times more), and slabs
equal in bytes. Slots that were never written hold NaN, or the largest code where a codec has none.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivalence.attention_cases import Lengths, Shape, make_case
from equivalence.coded_cases import encoded, some_constants, some_moments
from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS, long_but
from equivalence.suite import Trial, Workload
from equivalence.test_fused import AloneOutputs
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.engine.verdicts import FORMAT
from pagefold.kv import CODECS, KVGeometry
from pagefold.kv.codec import num_wide
from pagefold.runner.attention import choose_backend
from pagefold.runner.codec_slab import CODEC_LAYOUT, CODEC_ROWS_LAYOUT, CodecSlab
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.basis import basis_for_queries, fitted_basis, into_basis, plain_basis
from pagefold.runner.codecs.constants import RANGE
from pagefold.runner.codecs.levels import REACH, codes_of, levels_of
from pagefold.runner.codecs.vectors import scales_of
from pagefold.runner.sealed_slab import SEALED_LAYOUT, SealedSlab

BOUND = 3e-5

SHAPES = (
    Shape(block_size=16, head_dim=64, num_kv_heads=3, group=3),  # SmolLM2
    Shape(block_size=16, head_dim=32, num_kv_heads=4, group=1),  # MHA
    Shape(block_size=32, head_dim=128, num_kv_heads=1, group=8),  # MQA
    Shape(block_size=16, head_dim=256, num_kv_heads=2, group=2),
    Shape(block_size=8, head_dim=80, num_kv_heads=2, group=4),
    Shape(block_size=4, head_dim=40, num_kv_heads=1, group=3),
)
NAMES = sorted(set(CELL_CODECS) - {"float32", "fp8", "kivi2"})  # kivi2: test_kivi2.py
QUICK_NAMES = ("int8_per_token_head", "int4_per_token_head", "k8v4")
SEQUENCES = st.lists(
    st.builds(
        Lengths,
        num_old=st.one_of(st.just(0), st.integers(0, 70), st.integers(0, 800)),
        num_new=st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 60)),
        num_shared=st.one_of(st.just(0), st.integers(0, 900)),
    ),
    min_size=1,
    max_size=4,
)


def hold(case, name, seed, sharpness=1.0):
    """Hold the kernel to the reference."""
    shape = {"block_size": case.slab.block_size, "head_dim": case.slab.head_dim}
    operands = [tensor.float() for tensor in (case.query, case.key, case.value)]
    scoring = [one.float() if isinstance(one, torch.Tensor) else one for one in case.scoring]
    outputs, slabs = [], encoded(case, name, seed)
    for backend, slab in zip(("reference", "cpu"), slabs, strict=True):
        attention = choose_backend(backend, torch.float32, **shape, codes_a_byte=CELL_CODECS[name].codes_a_byte)
        outputs.append(attention(*operands, slab, case.inputs, case.layer, *scoring))
    assert not outputs[0].isnan().any(), "the reference has read what nothing may read"
    error = (outputs[0] - outputs[1]).abs().max().item()
    assert error <= BOUND * sharpness, f"{name} is off by {error:.2e}"
    assert torch.equal(slabs[0].data, slabs[1].data), f"{name} is not encoded alike"


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", long_but(QUICK_NAMES, NAMES))
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(shape=st.sampled_from(SHAPES), sequences=SEQUENCES, per_head=st.booleans(), seed=st.integers(0, 2**32))
def test_the_kernel_reads_and_writes_what_the_reference_does(name, shape, sequences, per_head, seed):
    hold(make_case(shape, sequences, per_head=per_head, seed=seed), name, seed)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) for name in ("int8_per_token_head", "int4_per_token_head")] + ["k8v4"],
)
def test_a_softcap_sees_what_centring_takes_off(name):
    hold(make_case(SHAPES[0], [Lengths(100, 9), Lengths(3, 1)], per_head=True, seed=5, softcap=5.0), name, 5)


@pytest.mark.parametrize("name", long_but(QUICK_NAMES, NAMES))
def test_outputs_are_near_those_of_what_was_not_encoded(name):
    """Fewer bits, coarser outputs; but those of the tokens' own values, not of others'."""
    case = make_case(SHAPES[0], [Lengths(300, 3), Lengths(40, 20, 32)], per_head=False, seed=11)
    _, slab = encoded(case, name, 11)
    operands = [tensor.float() for tensor in (case.query, case.key, case.value)]
    output = choose_backend("auto", torch.float32, block_size=16, head_dim=64)(
        *operands, slab, case.inputs, case.layer, case.scale
    )
    size = case.expected().std().item()
    asked = {16: 0.02, 8: 0.15, 4: 0.6}[CELL_CODECS[name].values.bits]
    assert (output - case.expected()).std().item() < asked * size


@pytest.mark.parametrize("block_size", long_but([16], [16, 48]))
@pytest.mark.parametrize("name", long_but(["int4_per_token_head"], ["int4_per_token_head", "k8v4"]))
def test_each_range_of_positions_has_its_centre(name, block_size):
    """What is taken off K there is added to scores again: also where a split of the work ends within a range."""
    shape = SHAPES[0]._replace(block_size=block_size)
    sequences = [Lengths(num_old, 3) for num_old in (1, 254, 255, 257, 511, 767, 1100)]
    hold(make_case(shape, sequences, per_head=False, seed=7), name, 7)
    constants = some_constants(1, 64, 7)
    for entry, place in ((0, 0), (1, 1), (RANGE - 1, 1), (RANGE, 2), (2 * RANGE, 3), (3 * RANGE, 3), (9 * RANGE, 3)):
        assert torch.equal(constants.centre_keys(0, torch.tensor([entry]))[0], constants.key_centres[0, place])


FORMATS = {name: CELL_CODECS[name].values for name in NAMES} | {"two widths": CELL_CODECS["int4_per_token_head"].keys}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), exponent=st.integers(-140, 30), zeros=st.booleans())
def test_vectors_are_encoded_alone_and_within_their_bound(name, seed, exponent, zeros):
    """Each vector's codes follow from it alone; nothing is lost to scale, from denormal to large."""
    form = FORMATS[name]
    vectors = torch.randn(7, 64, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (exponent / 2)
    vectors = (vectors * 2.0 ** (exponent / 2)) * (0.0 if zeros else 1.0)
    codes, scales = form.encode(vectors)
    assert codes.shape[1] == form.num_code_bytes(64)
    for at in range(len(vectors)):
        alone = form.encode(vectors[at : at + 1])
        assert torch.equal(alone[0][0], codes[at])
        assert torch.equal(alone[1][0], scales[at])
    if not form.num_scales:
        return
    errors, largest = form.decode(codes, scales) - vectors, vectors.abs().amax(1)
    scale = scales[:, :1].float()
    is_within = errors.abs() <= scale / 2 * 1.001 + vectors.abs() * 1e-6
    if name in {"int8_per_token_head", "int4_plain"}:
        assert is_within.all()
        steps = 127 if form.bits == 8 else 15
        span = largest if form.bits == 8 else vectors.amax(1) - vectors.amin(1)
        least = largest / 64 / steps  # the zero point is a bfloat16 too
        assert (scale[:, 0] <= span / steps * 1.02 + least + 2.0**-126).all()
    elif name in {"int4_per_token_head", "k8v4"}:
        is_within = errors.abs() <= 1.2 * scale + vectors.abs() * 1e-6
        assert (is_within | (vectors.abs() > REACH * scale)).all()  # finer steps for the others
        assert (scale[:, 0] <= largest / REACH * 1.01 + 2.0**-126).all()
        at_most = (1.2 * largest / REACH * 1.01 + 2.0**-126).double() ** 2 * 64
        assert (errors.double().square().sum(1) <= at_most).all()
    elif name == "two widths":
        assert is_within[:, : num_wide(64)].all()
        assert (errors.abs() <= 1.2 * scale + vectors.abs() * 1e-6).all()
        wide = vectors[:, : num_wide(64)].abs().amax(1) / 127
        narrow = vectors[:, num_wide(64) :].abs().amax(1) / REACH
        assert (scale[:, 0] <= torch.maximum(wide, narrow) * 1.01 + 2.0**-126).all()


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_hidden(name, bad):
    """A model that computes NaN is found out, not made plausible; infinity saturates, or is NaN."""
    form = FORMATS[name]
    for place in (3, 31):
        vectors = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
        vectors[0, place] = bad
        decoded = form.decode(*form.encode(vectors))
        assert decoded[0].isnan().any() or abs(decoded[0, place]) > 100
        assert not decoded[1].isnan().any()


def test_a_scale_is_the_best_of_those_that_are_tried():
    """A vector with one number far out gets finer steps for all others, and less error in all."""
    form = FORMATS["k8v4"]
    vectors = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    vectors[:, 0] = 4.0
    codes, scales = form.encode(vectors)
    assert (scales[:, 0].float() < 4.0 / REACH).any()
    coarse = scales_of(vectors.abs().amax(1, keepdim=True), REACH).float()
    unclipped = (levels_of(codes_of(vectors / coarse)) * coarse - vectors).square().sum(1)
    assert ((form.decode(codes, scales) - vectors).square().sum(1) <= unclipped * 1.0001).all()


def test_levels_are_those_that_normal_numbers_need():
    """A number gets the nearest level, or nearly, and a normal vector loses a sixth less than in equal steps."""
    levels = levels_of(torch.arange(16.0))
    assert torch.equal(codes_of(levels), torch.arange(16.0))
    assert levels.abs().max() == REACH
    steps = levels.diff()
    assert (steps[7:].diff() > 0).all()
    numbers = torch.linspace(-1.5 * REACH, 1.5 * REACH, 20001)
    codes = codes_of(numbers)
    assert (codes.diff() >= 0).all(), "a larger number has no smaller code"
    nearest = (numbers[:, None] - levels).abs().amin(1)
    assert ((numbers - levels_of(codes)).abs() <= nearest + steps.max() / 20).all()
    vectors = torch.randn(2000, 64, generator=torch.Generator().manual_seed(2))
    largest = vectors.abs().amax(1, keepdim=True)
    equal = ((vectors / largest * 7.5 + 7.5).round() - 7.5) * largest / 7.5
    ours = levels_of(codes_of(vectors / largest * REACH)) * largest / REACH
    assert (ours - vectors).square().mean() < 5 / 6 * (equal - vectors).square().mean()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("head_dim", [4, 20, 32, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["fitted", "flat", "empty", "plain"])
def test_products_are_the_same_in_a_basis(head_dim, kind):
    """A key in its basis and a query in its own give the score that they gave, also where next to nothing is known."""
    generator = torch.Generator().manual_seed(head_dim)
    keys, queries = some_moments(head_dim, generator)
    if kind == "flat":  # one direction only
        keys, queries = torch.zeros_like(keys), torch.ones_like(queries)
        keys[0, 0] = 1.0
    if kind == "empty":
        keys, queries = torch.zeros_like(keys), torch.zeros_like(queries)
    basis = plain_basis(head_dim) if kind == "plain" else fitted_basis(keys, queries)
    assert basis.isfinite().all()
    key, query = torch.randn(2, 30, head_dim, generator=generator)
    here = into_basis(key, basis).double(), into_basis(query, basis_for_queries(basis)).double()
    error = ((here[0] * here[1]).sum(1) - (key.double() * query).sum(1)).abs().max()
    assert error < (1e-4 if kind in {"fitted", "plain"} else 1e-2)


def test_a_fitted_basis_spends_bits_where_scores_need_them():
    """Scores of keys and queries that are large in few directions lose less than half, in squares, of what they did."""
    generator = torch.Generator().manual_seed(1)
    mixers = torch.linalg.qr(torch.randn(2, 64, 64, generator=generator))[0]
    sizes = 2.0 ** torch.linspace(2, -2, 64)
    keys, queries = torch.randn(2, 3000, 64, generator=generator) * sizes @ mixers
    moments = [(part[:2000].double().T @ part[:2000].double()) / 2000 for part in (keys, queries)]
    form, lost = FORMATS["two widths"], {}
    for name, basis in (("plain", plain_basis(64)), ("fitted", fitted_basis(*moments))):
        decoded = form.decode(*form.encode(into_basis(keys[2000:], basis))) @ basis_for_queries(basis).T
        lost[name] = ((decoded - keys[2000:]) @ queries[2000:].T).square().mean().item()
    assert lost["fitted"] < 0.5 * lost["plain"]


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("name", sorted(set(CELL_CODECS) - {"kivi2"}))
def test_a_slab_has_the_bytes_of_its_geometry(name, head_dim, block_size):
    geometry = KVGeometry(3, 2, head_dim, 4, block_size, CODECS[name], (0, 2), CODECS["float16"])
    slab = CodecSlab.allocate(geometry, 5)
    assert slab.num_bytes == 5 * geometry.bytes_per_block == 5 * slab.places[-1].end
    assert slab.as_bytes().shape == (5, geometry.bytes_per_block)
    assert slab.data[2].is_contiguous()
    assert geometry.layer_begins == tuple(slab.places[2 * layer].keys for layer in range(3))
    assert geometry.bytes_per_block == 2 * sum(map(geometry.cell_bytes, range(3)))
    assert geometry.bytes_per_block == geometry.bytes_per_token * block_size


def test_bytes_that_come_to_mean_something_else_get_another_name():
    """Who changes what is stored, or what that stands for, renames layouts and voids verdicts: disks hold old ones."""
    meaning = hashlib.sha256()
    numbers = (torch.arange(32 * 64).view(32, 64) * 37 % 101 - 50) / 16
    blocks = torch.zeros(32, dtype=torch.int64)
    for name in sorted(set(CELL_CODECS) - {"kivi2"}):
        slab = CodecSlab.allocate(KVGeometry(1, 1, 64, 4, 32, CODECS[name]), 1)
        slab.write(0, blocks, torch.arange(32), (numbers, numbers.flip(0)))
        meaning.update(slab.as_bytes().tobytes())
        for form in (CELL_CODECS[name].keys, CELL_CODECS[name].values):
            meaning.update(form.decode(*form.encode(numbers)).numpy().tobytes())
    sealed = SealedSlab.allocate(KVGeometry(1, 1, 64, 4, 32, CODECS["kivi2"]), 1, 1)
    sealed.seal(0, 0, numbers.half(), numbers.flip(0).half())
    meaning.update(sealed.as_bytes().tobytes())
    meaning.update(torch.cat(sealed.read(0, blocks, torch.arange(32))).numpy().tobytes())
    layouts = CODEC_LAYOUT, CODEC_ROWS_LAYOUT, SEALED_LAYOUT
    assert layouts == ("codec-panels-v3", "codec-rows-v3", "sealed-panels-v1")
    assert (FORMAT, meaning.hexdigest()[:16]) == (4, "f533adcacfb278a7")


@pytest.mark.parametrize("name", NAMES)
def test_a_card_has_the_same_codes_in_rows(name):
    """Only K's codes lie elsewhere in their part: all of a token's behind each other."""
    geometry = KVGeometry(1, 2, 64, 4, 16, CODECS[name])
    constants = some_constants(2, 64, 0)
    blocks, entries, kv = torch.ones(16, dtype=torch.int64), torch.arange(16), torch.randn(2, 16, 64)
    panels, rows = (
        CodecSlab(torch.zeros(2, geometry.bytes_per_block, dtype=torch.uint8), geometry, constants, layout)
        for layout in (CODEC_LAYOUT, CODEC_ROWS_LAYOUT)
    )
    for slab in (panels, rows):
        slab.write(1, blocks, entries, tuple(kv))
    assert all(map(torch.equal, panels.read(1, blocks, entries), rows.read(1, blocks, entries)))
    places, unit = rows.places[1], max(1, CELL_CODECS[name].keys.bits // 8)
    of_keys = slice(places.keys, places.values)
    assert torch.equal(panels.data[:, places.values :], rows.data[:, places.values :])
    turned = panels.data[1, of_keys].view(-1, 16, unit).transpose(0, 1)
    assert torch.equal(rows.data[1, of_keys].view(turned.shape), turned)


@pytest.mark.parametrize(
    ("name", "share"), [("int8_per_token_head", 0.54), ("int4_per_token_head", 0.29), ("k8v4", 0.42), ("fp8", 0.5)]
)
def test_bytes_a_token_against_16_bit(name, share):
    """Of a head of 64, scales included: what is asked."""
    ours, exact = (KVGeometry(30, 3, 64, 2, 16, codec).bytes_per_token for codec in (CODECS[name], None))
    assert ours <= share * exact


CODED = [
    replace(setting, dtype="float32", attention_backend="auto", kv_cache_dtype=name, name=f"{setting.name}-{name}")
    for setting in SETTINGS
    if setting.block_size == 16
    for name in ("int8_per_token_head", "int4_per_token_head")
]
SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)


@pytest.fixture(scope="module")
def coded_alone(tiny_folder):
    made = {}

    def make(name):
        if name not in made:
            made[name] = AloneOutputs(tiny_folder("qwen3"), SHORT.num_outputs, kv_cache_dtype=name)
        return made[name]

    return make


QUICK = ("chunks of 17-int8", "host tier-int8")


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "setting",
    [pytest.param(one, marks=[] if one.name.startswith(QUICK) else pytest.mark.long) for one in CODED],
    ids=lambda setting: setting.name,
)
def test_outputs_do_not_depend_on_company_or_history(setting, tiny_folder, coded_alone):
    """Chunks, sharing, copy-on-write, preemption, offload and damage: every token is that of a request alone."""
    trial = Trial(setting, SHORT, tiny_folder("qwen3"))
    trial.run()
    trial.assert_exact(coded_alone(setting.kv_cache_dtype))


def test_a_skipped_layer_is_exact_to_16_bit():
    """Layers of two codecs lie in one block, and each cell is read as what it is."""
    geometry = KVGeometry(2, 2, 32, 4, 16, CODECS["int4_per_token_head"], (1,), CODECS["float16"])
    slab = CodecSlab.allocate(geometry, 2)
    keys, values = torch.randn(2, 5, 32)
    slots = torch.arange(5)
    for cell in range(4):
        slab.write(cell, torch.ones(5, dtype=torch.int64), slots, (keys, values))
    coarse, fine = (slab.read(cell, torch.ones(5, dtype=torch.int64), slots) for cell in (0, 3))
    np.testing.assert_array_equal(fine[0], keys.half().float())
    np.testing.assert_array_equal(fine[1], values.half().float())
    assert 0.01 < (coarse[0] - keys).abs().max() < 0.5
