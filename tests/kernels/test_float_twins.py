"""Products of float32 rows, with weights in float32 and in int8, against their twins, to the bit."""

from __future__ import annotations

import platform

import llvmlite.binding as llvm
import numpy as np
import pytest
from float_twins import floats_product, int8_product, round_column
from held_to_twins import hold, hold_in_shape, random_numbers

from pagefold.kernels.floats import MAX_STEPS, Floats, Int8Weights
from pagefold.kernels.formats import PANEL_WIDTH, column, convert, num_panels, pack

_IS_FUSED = platform.machine() != "x86_64" or bool(llvm.get_host_cpu_features().get("fma"))
pytestmark = pytest.mark.skipif(not _IS_FUSED, reason="the processor rounds products before it adds them")
FORMATS = [pytest.param(Floats(), floats_product, id="float32"), pytest.param(Int8Weights(), int8_product, id="int8")]
SHAPES = [
    (1, 1, 1),
    (1, PANEL_WIDTH, 2),
    (2, PANEL_WIDTH + 1, 3),
    (5, PANEL_WIDTH - 1, 67),
    (14, 33, MAX_STEPS),
    (15, 7, MAX_STEPS + 1),
    (29, 64, 2 * MAX_STEPS),
    (31, 32, 3 * MAX_STEPS + 5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("product_format", "twin"), FORMATS)
def test_products_are_the_twin_s(product_format, twin, shape):
    hold_in_shape(product_format, twin, shape)


@pytest.mark.parametrize("num_k", [67, MAX_STEPS + 67])
@pytest.mark.parametrize(("product_format", "twin"), FORMATS)
def test_what_is_not_a_number_and_what_is_too_small(product_format, twin, num_k):
    """Denormals stay what they are, in rows, in weights and on the way."""
    strange = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, -1e-45, 2.0**-126, 2.0**-70, -0.0, 0.0, 1.0]
    random = np.random.default_rng(5)
    for seed in range(8):
        x, w = random_numbers(seed, 6, num_k, spread=20), random_numbers(seed + 50, 40, num_k, spread=20)
        for row in range(len(x)):
            x[row, random.integers(num_k, size=3)] = random.choice(strange, 3)
        # A checkpoint's numbers are finite; small ones it may have.
        w[random.integers(40, size=30), random.integers(num_k, size=30)] = random.choice(strange[5:], 30)
        w[7] = 0.0
        hold(product_format, twin, x, w)
        hold(product_format, twin, x * np.float32(2.0**-110), w * np.float32(2.0**-40))


@pytest.mark.parametrize("num_k", [1, 67, MAX_STEPS + 1])
def test_columns_are_what_was_packed(num_k):
    w = random_numbers(3, 2 * PANEL_WIDTH + 5, num_k, spread=9)
    floats, numbers = pack(Floats(), w), pack(Int8Weights(), w)
    assert len(floats) == len(numbers) == num_panels(len(w))
    for index in (0, 1, PANEL_WIDTH - 1, PANEL_WIDTH, len(w) - 1):
        assert np.array_equal(column(Floats(), floats, index, num_k), w[index])
        rounded, scale = round_column(w[index])
        assert np.array_equal(column(Int8Weights(), numbers, index, num_k), rounded * scale)


@pytest.mark.parametrize("product_format", [Floats(), Int8Weights()], ids=lambda one: one.name)
def test_rows_stay_as_they_are(product_format):
    x = random_numbers(4, 5, 67)
    assert convert(product_format, x).tobytes() == x.tobytes()
