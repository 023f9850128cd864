"""A processor without AVX-512 computes the same bits: imitated in a process that is told to have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagefold.kernels.emit import IS_WIDE
from pagefold.kernels.floats import Floats, Int8Weights
from pagefold.kernels.formats import column, multiply, pack
from pagefold.kernels.pairs import bfloat16_pairs
from pagefold.kernels.quads import int8_quads

# Lanes are chosen, and code is compiled, by what this function says.
WITHOUT = """
import sys
import llvmlite.binding as llvm

has = llvm.get_host_cpu_features()
for name in has:
    has[name] = has[name] and not name.startswith(("avx512", "avx10", "evex512"))
llvm.get_host_cpu_features = lambda: has

import numpy as np
from test_without_avx512 import computed

from pagefold.kernels.emit import MAX_LANES

assert MAX_LANES == 8
np.savez(sys.argv[1], **computed())
"""


def computed():
    """What comes out of each format by its name: products, and columns that are read back."""
    random = np.random.default_rng(0)
    found = {}
    for product_format in (Floats(), Int8Weights(), bfloat16_pairs(), int8_quads()):
        for num_k in (1, 63, 65, 96, 100, 576):
            x, w = (
                (random.standard_normal((num, num_k)) * 2.0 ** random.integers(-8, 9, (num, num_k))).astype(np.float32)
                for num in (5, 48)
            )
            panels = pack(product_format, w)
            found[f"{product_format.name} {num_k}"] = multiply(product_format, x, panels)[:, : len(w)]
            columns = [column(product_format, panels, index, num_k) for index in (0, 15, 16, 47)]
            found[f"{product_format.name} {num_k} back"] = np.stack(columns)
    return found


@pytest.mark.skipif(not IS_WIDE, reason="this processor has none: the other tests of formats are of it")
def test_products_and_columns_have_the_same_bits(tmp_path):
    file, here = tmp_path / "computed.npz", Path(__file__).parent
    path = os.pathsep.join([str(here), *sys.path])
    environment = os.environ | {"PAGEFOLD_CACHE": str(tmp_path), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", WITHOUT, str(file)], env=environment, check=True, timeout=300)
    told, expected = np.load(file), computed()
    assert set(told.files) == set(expected)
    for name, numbers in expected.items():
        assert np.array_equal(told[name].view(np.uint32), numbers.view(np.uint32)), name
