"""Products in every format, against their twins, to the bit."""

from __future__ import annotations

import tracemalloc

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from format_twins import fma, pairs_product, quads_product, round_group, turned
from held_to_twins import hold, hold_in_shape, random_numbers

from pagefold.kernels.floats import Int8Weights
from pagefold.kernels.formats import PANEL_WIDTH, column, convert, multiply, num_panels, pack
from pagefold.kernels.pairs import MAX_STEPS, Pairs, bfloat16_pairs, round_to_bfloat16
from pagefold.kernels.quads import GROUP, Quads, int8_quads

_FEATURES = llvm.get_host_cpu_features()
_HAS_PAIRS, _HAS_QUADS = (bool(_FEATURES.get(name)) for name in ("avx512bf16", "avx512vnni"))
FORMATS = [
    pytest.param(Pairs(is_native=False), pairs_product, id="pairs-widened"),
    pytest.param(
        Pairs(is_native=True),
        pairs_product,
        id="pairs",
        marks=pytest.mark.skipif(not _HAS_PAIRS, reason="the processor does not multiply pairs"),
    ),
    pytest.param(Quads(is_native=False), quads_product, id="quads-widened"),
    pytest.param(
        Quads(is_native=True),
        quads_product,
        id="quads",
        marks=pytest.mark.skipif(not _HAS_QUADS, reason="the processor does not multiply quads"),
    ),
]
SHAPES = [
    (1, 1, 1),
    (1, PANEL_WIDTH, 2),
    (2, PANEL_WIDTH + 1, 3),
    (3, 5, 4),
    (4, 2 * PANEL_WIDTH, GROUP),
    (3, PANEL_WIDTH + 2, GROUP - 1),
    (5, PANEL_WIDTH - 1, GROUP + 1),
    (2, 3, GROUP + 32),
    (6, 17, 100),
    (7, 40, 3 * GROUP - 2),
    (14, 33, 2 * MAX_STEPS),
    (15, 7, 2 * MAX_STEPS + 1),
    (29, 64, 576),
    (31, 32, 1537),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("product_format", "twin"), FORMATS)
def test_products_are_the_twin_s(product_format, twin, shape):
    hold_in_shape(product_format, twin, shape)


@pytest.mark.parametrize(("product_format", "twin"), FORMATS)
def test_what_is_not_a_number_and_what_is_too_small(product_format, twin):
    strange = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, -1e-40, 2.0**-126, 2.0**-70, -0.0, 0.0, 1.0]
    random = np.random.default_rng(5)
    for seed in range(12):
        x = random_numbers(seed, 6, 67, spread=20)
        w = random_numbers(seed + 50, 40, 67, spread=20)
        for row in range(len(x)):
            x[row, random.integers(67, size=3)] = random.choice(strange, 3)
        # A checkpoint's numbers are finite; small ones it may have.
        w[random.integers(40, size=30), random.integers(67, size=30)] = random.choice(strange[5:], 30)
        hold(product_format, twin, x, w)


@pytest.mark.parametrize(("product_format", "twin"), [one for one in FORMATS if "pairs" in one.id])
def test_small_sums_are_zero_on_the_way_too(product_format, twin):
    """Also where sums of several passes are added up."""
    for seed in range(8):
        num_k = (40, 1030)[seed % 2]
        x, w = (
            random_numbers(seed, 5, num_k, spread=3) * np.float32(2.0**-60),
            random_numbers(seed + 9, 33, num_k, spread=3),
        )
        hold(product_format, twin, x, w * np.float32(2.0**-66))


@pytest.mark.parametrize(("product_format", "twin"), FORMATS)
def test_a_row_does_not_depend_on_its_company(product_format, twin):
    x, w = random_numbers(3, 61, 200), random_numbers(4, 50, 200)
    panels = pack(product_format, w)
    together = multiply(product_format, x, panels)
    for first, last in [(0, 1), (3, 10), (7, 21), (20, 61), (60, 61)]:
        alone = multiply(product_format, x[first:last], panels)
        assert np.array_equal(together[first:last].view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize(("product_format", "twin"), FORMATS)
def test_bytes_are_those_that_are_said(product_format, twin):
    for num_k in (1, 2, 63, 64, 65, 576):
        panels, rows = (
            pack(product_format, random_numbers(1, 40, num_k)),
            convert(product_format, random_numbers(2, 3, num_k)),
        )
        assert panels.shape == (num_panels(40), product_format.panel_bytes(num_k))
        assert rows.shape == (3, product_format.row_bytes(num_k))


def test_bfloat16_takes_half_and_int8_a_scale_and_a_sum_a_group_more_than_a_quarter():
    assert Pairs(is_native=False).panel_bytes(576) == 2 * 576 * PANEL_WIDTH
    assert Quads(is_native=False).panel_bytes(576) == (576 + 9 * (4 + 2)) * PANEL_WIDTH


@pytest.mark.parametrize(("product_format", "twin"), FORMATS)
def test_a_column_comes_back(product_format, twin):
    for num_k in (1, 5, 64, 131, 576):
        w = random_numbers(7, PANEL_WIDTH + 9, num_k, spread=4)
        panels = pack(product_format, w)
        for index in (0, 5, PANEL_WIDTH - 1, PANEL_WIDTH + 8):
            if isinstance(product_format, Pairs):
                expected = torch.from_numpy(w[index]).to(torch.bfloat16).to(torch.float32).numpy()
            else:
                groups = [round_group(w[index, begin : begin + GROUP]) for begin in range(0, num_k, GROUP)]
                expected = np.concatenate([turned(numbers.astype(np.float32) * scale) for numbers, scale in groups])
            got = column(product_format, panels, index, num_k)
            assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def _turning():
    """Hadamard's matrix of a group over 8, as Sylvester made it."""
    matrix = np.ones((1, 1))
    while len(matrix) < GROUP:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix / 8


def test_turning_is_hadamard_s_matrix_and_its_own_inverse():
    matrix = _turning()
    assert np.array_equal(matrix @ matrix, np.eye(GROUP))
    for seed in range(20):
        group = random_numbers(seed, GROUP, spread=6)
        once, largest = turned(group), np.abs(group).max()
        np.testing.assert_allclose(once, matrix @ group, rtol=0, atol=largest * 1e-5)
        np.testing.assert_allclose(turned(once), group, rtol=0, atol=largest * 1e-5)


def _without_turning(numbers):
    """Numbers rounded group by group as they are."""
    groups = numbers.reshape(len(numbers), -1, GROUP)
    scales = np.abs(groups).max(2, keepdims=True) / 127
    return (np.rint(groups / scales) * scales).reshape(numbers.shape)


@pytest.mark.parametrize("where", ["rows", "columns", "both"])
def test_an_outlier_does_not_spoil_its_neighbours(where):
    quads, num_k = Quads(is_native=False), 4 * GROUP
    x, w = random_numbers(11, 16, num_k), random_numbers(12, 40, num_k)
    if where != "columns":
        x[:, 5::GROUP] *= 50
    if where != "rows":
        w[:, 9::GROUP] *= 50  # not those that are multiplied with the rows' outliers
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    turned_error = _error(multiply(quads, x, pack(quads, w))[:, : len(w)], exact)
    plain_error = _error(_without_turning(x) @ _without_turning(w).T, exact)
    assert turned_error < plain_error / 2


def _error(got, exact):
    return np.sqrt(np.mean((got - exact) ** 2))


@pytest.mark.parametrize(("product_format", "twin"), [one for one in FORMATS if "quads" in one.id])
def test_groups_of_infinity_and_of_numbers_too_large_to_turn_give_nan(product_format, twin):
    num_k = 2 * GROUP + 5
    calm = random_numbers(1, 1, num_k)
    w = random_numbers(2, 9, num_k)
    for strange in (np.nan, np.inf, -np.inf):
        for k in (0, 77, num_k - 1):  # in a group that is turned, and in the last, which is not
            x = calm.copy()
            x[0, k] = strange
            assert np.isnan(hold(product_format, twin, x, w)[0, : len(w)]).all()
    for number, is_lost in ((3e38, True), (6e37, True), (4e37, False), (1e-39, False), (1e-45, False)):
        x = calm.copy()
        x[0, GROUP : 2 * GROUP] = number
        assert np.isnan(hold(product_format, twin, x, w * np.float32(0.01))[0, : len(w)]).all() == is_lost
        columns = w.copy()
        columns[3, :GROUP] = number
        y = hold(product_format, twin, calm * np.float32(0.01), columns)
        assert [np.isnan(one) for one in y[0, : len(w)]] == [is_lost and n == 3 for n in range(len(w))]


@pytest.mark.parametrize("product_format", [Int8Weights(), Quads(is_native=False)], ids=lambda one: one.name)
def test_packing_takes_little_memory_beside_the_matrix(product_format):
    w = random_numbers(1, 8192, 512)
    panels = pack(product_format, w)  # what it compiles is not counted
    tracemalloc.start()
    try:
        product_format.pack(w, panels)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < w.nbytes / 4
    alone = pack(product_format, w[4000:4100])
    assert np.array_equal(column(product_format, alone, 77, 512), column(product_format, panels, 4077, 512))


def test_rounding_is_torch_s():
    bits = np.random.default_rng(3).integers(0, 2**32, 200_000, dtype=np.uint32)
    numbers = np.concatenate([bits.view(np.float32), np.float32([np.nan, np.inf, -np.inf, 3.4e38, 1e-45, -0.0])])
    expected = torch.from_numpy(numbers).to(torch.bfloat16)
    got = torch.from_numpy(round_to_bfloat16(numbers).view(np.int16)).view(torch.bfloat16)
    is_nan = torch.from_numpy(np.isnan(numbers))
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))
    rows = convert(Pairs(is_native=False), numbers[None])
    assert np.array_equal(rows[0, : 2 * len(numbers)].view(np.uint16), round_to_bfloat16(numbers))


def test_the_twin_s_multiply_add_rounds_once():
    from fractions import Fraction

    a, b, c = (random_numbers(seed, 4000, spread=14) for seed in (1, 2, 3))
    for x, y, z, got in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))
        error = abs(Fraction(float(got)) - exact)
        assert error <= min(abs(Fraction(float(one)) - exact) for one in (below, above))


def test_the_instruction_is_used_where_it_is():
    assert bfloat16_pairs() == Pairs(is_native=_HAS_PAIRS)
    assert int8_quads() == Quads(is_native=_HAS_QUADS)
