"""Products with GGML's blocks, against their twins and against the library that defines the kinds, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from block_twins import blocks_product, decoded, random_blocks, round_row_group
from gguf.quants import dequantize
from held_to_twins import bits_of, random_numbers

from pagefold.kernels.block_kinds import KINDS
from pagefold.kernels.blocks import Blocks, blocks_of
from pagefold.kernels.emit import IS_WIDE, MAX_LANES
from pagefold.kernels.formats import PANEL_WIDTH, call, column, convert, multiply, num_panels

NATIVE = blocks_of("Q4_0").is_native
MEANS = [pytest.param(False, id="widened")]
MEANS += [pytest.param(True, id="native", marks=pytest.mark.skipif(not NATIVE, reason="the processor lacks vpdpbusd"))]


def packed(product_format, blocks, row_order=None):
    num = len(blocks if row_order is None else row_order)
    num_k = blocks.shape[1] // product_format.kind.block_bytes * product_format.kind.numbers
    panels = np.full((num_panels(num), product_format.panel_bytes(num_k)), 0xA5, np.uint8)
    blocks = blocks.view()
    blocks.flags.writeable = False  # as those of a file that is mapped
    product_format.pack_blocks(blocks, panels, row_order)
    return panels


def hold(product_format, x, blocks):
    """Hold ``x @ w.T`` to the twin; return it."""
    y = multiply(product_format, x, packed(product_format, blocks))[:, : len(blocks)]
    with np.errstate(all="ignore"):
        expected = blocks_product(product_format.name, x, blocks)
    assert np.array_equal(bits_of(y), bits_of(expected))
    return y


def as_library(kind, blocks):
    with np.errstate(all="ignore"):
        return dequantize(blocks, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_the_library_s(kind):
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (KINDS[kind].numbers, KINDS[kind].block_bytes) == (numbers, num_bytes)
    blocks = random_blocks(kind, 7, 512)
    twin = decoded(kind, blocks)
    assert np.array_equal(twin.codes.astype(np.float32) * twin.factors + twin.minima, as_library(kind, blocks))


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_is_what_the_library_makes_of_the_row(kind):
    product_format = blocks_of(kind)
    num = PANEL_WIDTH + 5
    any_bytes = np.random.default_rng(3).integers(0, 256, random_blocks(kind, num, 768).shape, dtype=np.uint8)
    for blocks in (random_blocks(kind, num, 768), any_bytes):  # halves of the latter are infinite, NaN and subnormal
        panels, expected = packed(product_format, blocks), as_library(kind, blocks)
        for index in range(num):
            assert np.array_equal(bits_of(column(product_format, panels, index, 768)), bits_of(expected[index]))


@pytest.mark.parametrize("is_native", MEANS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_twin_s(kind, is_native):
    product_format, numbers = Blocks(KINDS[kind], is_native), KINDS[kind].numbers
    stretch = 1024  # longer ones are cut
    for num_rows, num, num_k in [
        (1, 1, numbers),
        (2, PANEL_WIDTH + 1, 3 * numbers),
        (31, 5, 256),
        (7, 3, stretch + 512),
    ]:
        for spread in (0, 12):
            x = random_numbers(num_rows, num_rows, num_k, spread=spread)
            hold(product_format, x, random_blocks(kind, num, num_k, seed=num, spread=2))


@pytest.mark.parametrize("is_native", MEANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_company(kind, is_native):
    product_format = Blocks(KINDS[kind], is_native)
    x, panels = random_numbers(3, 301, 1280), packed(product_format, random_blocks(kind, 20, 1280))
    together = multiply(product_format, x, panels)
    for first, last in [(0, 1), (3, 5), (7, 10), (20, 24), (30, 36), (36, 43), (50, 65), (300, 301), (0, 200)]:
        alone = multiply(product_format, x[first:last], panels)
        assert np.array_equal(bits_of(together[first:last]), bits_of(alone))


@pytest.mark.parametrize("is_native", MEANS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_no_work(kind, is_native):
    """As the head's where no token of a step is the last that is known of its request."""
    product_format, num_k = Blocks(KINDS[kind], is_native), 2 * KINDS[kind].numbers
    panels = packed(product_format, random_blocks(kind, 3, num_k))
    assert multiply(product_format, random_numbers(0, 0, num_k), panels).shape[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_all_ones_and_rows_of_the_largest_numbers_do_not_overflow(kind):
    numbers = KINDS[kind].numbers
    for byte in (0x00, 0x80, 0xFF):
        blocks = random_blocks(kind, 4, 2 * numbers)
        halves = {"Q6_K": slice(208, None)}.get(kind, slice(2 * KINDS[kind].halves))
        kept = blocks.reshape(4, 2, -1)[..., halves].copy()
        blocks[:] = byte
        blocks.reshape(4, 2, -1)[..., halves] = kept
        signs = np.random.default_rng(1).choice(np.float32([-1, 1]), (9, 2 * numbers))
        signs[0], signs[1] = 1, -1
        hold(blocks_of(kind), signs, blocks)


def _with_strange_halves(kind, num_k):
    """Blocks whose scales are zero, subnormal, the largest there are, and negative."""
    blocks = random_blocks(kind, 40, num_k)
    rows = blocks.reshape(-1, KINDS[kind].block_bytes)
    random = np.random.default_rng(4)
    for at in {"Q6_K": (208,)}.get(kind, range(0, 2 * KINDS[kind].halves, 2)):
        halves = random.choice(np.float16([0, -0.0, 6e-8, -6e-8, 6e-5, 65504, -65504, 1, 0.01]), len(rows))
        rows[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_zero_tiny_and_huge(kind):
    x = random_numbers(2, 8, 512, spread=3)
    x[1], x[2, :64], x[3] = 0, 1e-42, x[3] * np.float32(1e33)
    x[4, 32:64], x[5, 5] = -0.0, 1e-45
    hold(blocks_of(kind), x, _with_strange_halves(kind, 512))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_has_no_number_gives_none(kind):
    blocks, x = random_blocks(kind, 9, 256), random_numbers(1, 10, 256)
    for row, strange in enumerate((np.nan, np.inf, -np.inf)):
        x[row, (0, 77, 255)[row]] = strange
    y = hold(blocks_of(kind), x, blocks)
    assert np.isnan(y[:3]).all()
    assert np.isfinite(y[3:]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_int8_holds_exactly_are_multiplied_with_what_the_file_says(kind):
    """Within what a chain of float32 rounds."""
    random, blocks = np.random.default_rng(5), random_blocks(kind, 30, 512)
    x = random.integers(-126, 127, (9, 512)).astype(np.float32)
    x[:, ::32] = 127
    x *= 2.0 ** random.integers(-4, 5, (9, 1)).astype(np.float32)
    w = as_library(kind, blocks).astype(np.float64)
    y = multiply(blocks_of(kind), x, packed(blocks_of(kind), blocks))[:, :30]
    twin = decoded(kind, blocks)
    sizes = np.abs(x) @ (np.abs(twin.codes * twin.factors) + np.abs(twin.minima)).T.astype(np.float64)
    roundings = 4 * (512 // 16)
    assert (np.abs(y - x @ w.T) <= sizes * roundings * 2.0**-24).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_added_to_what_is_there(kind):
    product_format = blocks_of(kind)
    panels = packed(product_format, random_blocks(kind, PANEL_WIDTH, 512))
    for num_rows in (1, 4, 40):
        rows = convert(product_format, random_numbers(3, num_rows, 512))
        once, again = np.zeros((num_rows, PANEL_WIDTH), np.float32), random_numbers(7, num_rows, PANEL_WIDTH)
        before = again.copy()
        for y, adds in ((once, 0), (again, 1)):
            at_x, at_y = (rows.ctypes.data, rows.strides[0]), (y.ctypes.data, y.strides[0])
            call(
                product_format.tiles().product,
                *at_x,
                panels.ctypes.data,
                512,
                num_rows,
                *at_y,
                adds,
                panels.ctypes.data,
            )
        assert np.array_equal(again, once + before)


@pytest.mark.parametrize("kind", KINDS)
def test_panels_have_the_bytes_of_the_file_and_columns_beyond_are_zeros(kind):
    product_format, num_k = blocks_of(kind), 768
    blocks = random_blocks(kind, 3 * PANEL_WIDTH, num_k)
    assert packed(product_format, blocks).nbytes == blocks.nbytes
    x = random_numbers(2, 40, num_k)
    assert convert(product_format, x).shape == (40, product_format.row_bytes(num_k))
    for rows in (x, x[:2]):
        y = multiply(product_format, rows, packed(product_format, blocks[: PANEL_WIDTH + 3]))
        assert not y[:, PANEL_WIDTH + 3 :].any()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_rows_of_a_file_may_be_in_another_order(kind):
    product_format, num = blocks_of(kind), 40 * PANEL_WIDTH + 7  # packed in several pieces
    blocks, order = random_blocks(kind, num, 256), np.random.default_rng(0).permutation(num)
    assert np.array_equal(packed(product_format, blocks, order), packed(product_format, blocks[order]))
    assert np.array_equal(
        column(product_format, packed(product_format, blocks, order), num - 1, 256),
        as_library(kind, blocks)[order[num - 1]],
    )


def test_rows_are_rounded_to_nearest_by_groups_with_their_sums():
    x = random_numbers(9, 5, 96, spread=6)
    x[0, :32], x[1, :32] = 0, 1e-42
    rows = convert(blocks_of("Q4_0"), x).reshape(5, 3, -1)
    for t, group in np.ndindex(5, 3):
        numbers, scale = round_row_group(x[t, 32 * group : 32 * group + 32])
        found = rows[t, group]
        assert np.array_equal(found[:32].view(np.int8), numbers)
        assert found[32:36].view(np.float32)[0] == scale
        assert found[36:40].view(np.int16).tolist() == [numbers[:16].sum(), numbers[16:].sum()]
        assert found[40:44].view(np.float32)[0] == np.float32(numbers.sum()) * scale


WIDE = """
import numpy as np
from pagefold.kernels import emit

emit.MAX_LANES = 16  # its instructions are still those of narrow vectors: they take the halves

from pagefold.kernels import formats, object_code

assert formats.PANEL_WIDTH == 32
original = object_code.addresses_in
object_code.addresses_in = lambda name, build, functions: original(f"{name}-wide", build, functions)
import test_blocks

np.savez(sys.argv[1], **test_blocks.computed())
"""


def computed():
    """Products and columns of every kind, by its name."""
    found = {}
    for kind in KINDS:
        product_format, blocks = Blocks(KINDS[kind], is_native=False), random_blocks(kind, 70, 1280)
        panels = packed(product_format, blocks)
        found[kind] = np.concatenate(
            [
                multiply(product_format, random_numbers(num, num, 1280, spread=3), panels)[:, :70]
                for num in (1, 3, 8, 37)
            ]
        )
        found[f"{kind} back"] = np.stack([column(product_format, panels, index, 1280) for index in (0, 31, 69)])
    return found


@pytest.mark.skipif(MAX_LANES != 8, reason="imitates vectors of 16 on a processor that has 8")
def test_wide_panels_have_the_same_bits(tmp_path):
    file = tmp_path / "computed.npz"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", f"import sys\n{WIDE}", str(file)], env=environment, check=True, timeout=300)
    told, expected = np.load(file), computed()
    assert set(told.files) == set(expected)
    for name, numbers in expected.items():
        assert np.array_equal(bits_of(told[name]), bits_of(numbers)), name


CROSS = """
import sys
import llvmlite.binding as llvm

has = dict.fromkeys(("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx2", "f16c", "fma"), True)
llvm.get_host_cpu_features = lambda: has

from pagefold.kernels.block_kinds import KINDS
from pagefold.kernels.block_tiles import block_module
from pagefold.kernels.blocks import blocks_of

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
cpu, is_native = sys.argv[1], sys.argv[1] != "skylake-avx512"
assert blocks_of("Q4_K").is_native
for kind in KINDS.values():
    module = block_module(kind, is_native=is_native)
    module.triple = "x86_64-unknown-linux-gnu"
    code = llvm.parse_assembly(str(module))
    code.verify()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu, opt=2)
    llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2)).getModulePassManager().run(
        code, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    )
    text = machine.emit_assembly(code)
    words = ("vpdpbusd",) if is_native else ("vpmaddubsw", "vpmaddwd")
    for word in words:
        assert any(word in line and "zmm" in line for line in text.splitlines()), (kind.name, word)
    assert ("vpmaddubsw" in text) != is_native, kind.name
"""


@pytest.mark.parametrize("processor", ["skylake-avx512", "icelake-server"])
def test_code_for_other_processors_is_made_of_their_instructions(processor):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", CROSS, processor], env=environment, check=True, timeout=300)


def test_the_instruction_is_used_where_it_is():
    assert all(blocks_of(kind) == Blocks(KINDS[kind], NATIVE) for kind in KINDS)
    assert NATIVE <= IS_WIDE
    assert "vpdpbusd" in blocks_of("Q4_0").means
    assert len({blocks_of(kind).arithmetic for kind in KINDS}) == len(KINDS)
