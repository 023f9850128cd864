"""Packing: what comes back is what went in, to the bit, whatever it was; and a slow twin writes the same streams."""

from __future__ import annotations

import struct
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pagefold.engine.verdicts import ROUNDED
from pagefold.kv import CODECS, KEEP_ALL, KeepRule, KVGeometry
from pagefold.runner.block_form import block_form
from pagefold.runner.cells import cell_places
from pagefold.runner.codec_slab import CODEC_LAYOUT, CODEC_ROWS_LAYOUT
from pagefold.transport.block_form import BlockForm
from pagefold.transport.kernel import RECIPROCALS
from pagefold.transport.packing import Packing
from pagefold.transport.tables import MAX_BITS, SCALES, code_lengths, tables

if TYPE_CHECKING:
    from numpy.typing import NDArray


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def _form(num_parts: int, num_rows: int, num_slots: int) -> BlockForm:
    """Return a form of parts that are K and V in turn, with a scale of 2 bytes a slot between them."""
    parts, planes, at = [], [], 0
    for index in range(num_parts):
        strides = (1, num_rows) if index % 2 else (num_slots, 1)
        parts.append((at, index % 2, num_rows, num_slots, *strides))
        at += num_rows * num_slots
        planes.append((at, at + 2 * num_slots, 2))
        at += 2 * num_slots
    return BlockForm(at, parts, planes)


def _back(packing: Packing, payload: bytes) -> tuple[bytes, bytes]:
    restored = packing.coarsened(memoryview(payload))
    packed = packing.pack(restored)
    into = bytearray(len(payload))
    assert packing.unpack(memoryview(packed), memoryview(into))
    assert into == restored
    return bytes(restored), packed


@pytest.mark.parametrize("num_slots", [1, 2, 4, 8, 16, 32, 256])
@pytest.mark.parametrize("num_rows", [4, 32, 80, 256])
def test_every_block_comes_back_to_the_bit(rng: np.random.Generator, num_rows: int, num_slots: int) -> None:
    form = _form(int(rng.integers(1, 6)), num_rows, num_slots)
    packing = Packing(form)
    size = form.block_bytes
    kinds = [
        rng.bytes(size),
        bytes(size),
        b"\x80\x7f" * (size // 2),
        rng.normal(0, float(rng.uniform(0.3, 60)), size).clip(-127, 127).astype(np.int8).tobytes(),
        packing.trial_block(),
    ]
    for payload in kinds:
        assert _back(packing, payload)[0] == payload


def test_a_slow_twin_writes_the_same_streams(rng: np.random.Generator) -> None:
    form = _form(4, 8, 16)
    block = np.frombuffer(rng.normal(0, 25, form.block_bytes).clip(-127, 127).astype(np.int8).tobytes(), np.uint8)
    packed = Packing(form).pack(block.data)
    lengths = struct.unpack_from("<4I", packed)
    at = 20
    for lane, length in enumerate(lengths):
        bits = int.from_bytes(packed[at : at + 4 * length], "little")
        at += 4 * length
        for symbol, table in _symbols(block, form, lane):
            code = int(tables().codes[table, symbol])
            size = code >> 16
            assert bits & ((1 << size) - 1) == code & 0xFFFF
            bits >>= size
        assert bits == 0


def _symbols(block: NDArray[np.uint8], form: BlockForm, lane: int) -> list[tuple[int, int]]:
    """Return what a stream holds, and with which tables, one number at a time."""
    found: list[tuple[int, int]] = []
    for begin, kind, num_rows, num_slots, row_stride, slot_stride in form.parts:
        left: dict[int, list[int]] = {}
        for row in range(num_rows):
            numbers = [int(block[begin + row * row_stride + s * slot_stride].view(np.int8)) for s in range(num_slots)]
            left[row] = []
            for slot, number in enumerate(numbers):
                total, factor = sum(numbers[:slot]), int(RECIPROCALS[kind, slot])
                if kind:
                    guess = (total * factor + 2**15) >> 16
                else:
                    guess = (total * factor + (numbers[slot - 1] << 16 if slot else 0) + 2**16) >> 17
                left[row].append((number - guess + 128) % 256 - 128)
        first = {row: sum(map(abs, values[1:4])) for row, values in left.items()}
        mean = sum(first.values()) // num_rows
        for slot in range(4):
            table = ((13, 20) if slot else (15, 21))[kind]
            found += [(left[row][slot] % 256, table) for row in range(lane, num_rows, 4)]
        for row in range(lane, num_rows, 4):
            scale = min(((54, 76)[kind] * mean + (30, 18)[kind] * first[row]) >> 4, 8191)
            table = min(range(len(SCALES)), key=lambda k: abs(SCALES[k] - scale))
            found += [(value % 256, table) for value in left[row][4:]]
    return found


def test_codes_are_prefix_codes_and_nearly_optimal(rng: np.random.Generator) -> None:
    weights = [int(weight) for weight in rng.integers(1, 10**6, size=256) ** 2]
    lengths = code_lengths(weights)
    assert max(lengths) <= MAX_BITS
    assert sum(2.0**-length for length in lengths) == 1.0
    shares = np.array(weights) / sum(weights)
    assert (shares * lengths).sum() < -(shares * np.log2(shares)).sum() + 0.1
    for table in tables().symbols:
        assert (np.bincount(table & 0xFF, minlength=256) > 0).all()


def test_correlated_codes_become_smaller_and_rounded_ones_much(rng: np.random.Generator) -> None:
    form = _form(20, 64, 16)
    walks = rng.normal(0, 6, (20, 16, 64)).cumsum(1) + rng.normal(0, 15, (20, 1, 64))
    codes = walks.clip(-127, 127).astype(np.int8)
    block = np.zeros(form.block_bytes, np.uint8)
    for (begin, kind, *_), values in zip(form.parts, codes, strict=True):
        ordered = values if kind else values.T
        block[begin : begin + 1024] = ordered.reshape(-1).view(np.uint8)
    sizes = []
    for dropped_bits in range(3):
        restored, packed = _back(Packing(form, dropped_bits), block.tobytes())
        begin = form.parts[0][0]
        was, now = (
            np.frombuffer(data, np.int8)[begin : begin + 1024].astype(int) for data in (block.tobytes(), restored)
        )
        assert abs(was - now).max() <= 2**dropped_bits - (dropped_bits > 0)
        assert not (now % 2**dropped_bits).any()
        again, _ = _back(Packing(form, dropped_bits), restored)
        assert again == restored
        sizes.append(len(packed) / form.block_bytes)
    assert 0.9 > sizes[0] > sizes[1] > sizes[2]


def test_what_is_damaged_never_does_more_than_give_wrong_bytes(rng: np.random.Generator) -> None:
    form = _form(6, 16, 16)
    packing = Packing(form)
    packed = packing.pack(memoryview(packing.trial_block()))
    into = memoryview(bytearray(form.block_bytes))
    for _ in range(300):
        damaged = bytearray(packed)
        for _ in range(int(rng.integers(1, 5))):
            damaged[int(rng.integers(len(damaged)))] = int(rng.integers(256))
        packing.unpack(memoryview(damaged[: int(rng.integers(len(damaged) + 1))]), into)
        packing.unpack(memoryview(damaged), into)
    assert not packing.unpack(memoryview(b""), into)
    assert not packing.unpack(memoryview(packed + b"x"), into)
    bomb = bytearray(packed)
    assert packing.unpack(memoryview(bomb), into)


@pytest.mark.parametrize(
    "name", [None, "float16", "int8_per_token_head", "int4_per_token_head", "k8v4", "fp8_e4m3", "kivi2"]
)
@pytest.mark.parametrize("layout", [CODEC_LAYOUT, CODEC_ROWS_LAYOUT])
def test_every_byte_of_a_block_is_in_its_plan_once(rng: np.random.Generator, layout: str, name: str | None) -> None:
    codec = None if name is None else CODECS[name]
    skipped = (1,) if name == "int8_per_token_head" else ()
    geometry = KVGeometry(3, 2, 32, 4, 16, codec, skipped, CODECS["float16"] if skipped else None)
    form = block_form(geometry, layout)
    seen = np.zeros(geometry.bytes_per_block, int)
    for begin, _, num_rows, num_slots, row_stride, slot_stride in form.parts:
        for row in range(num_rows):
            seen[begin + row * row_stride : begin + row * row_stride + num_slots * slot_stride : slot_stride] += 1
    for begin, end, _ in form.planes:
        seen[begin:end] += 1
    assert (seen == 1).all()
    assert bool(form.parts) == (name in ROUNDED)
    payload = rng.normal(0, 1, geometry.bytes_per_block // 4 + 1).astype(np.float32).tobytes()[: form.block_bytes]
    restored, packed = _back(Packing(form), payload)
    assert restored == payload
    if name is None:
        assert len(packed) < 0.95 * len(payload)  # signs and exponents of numbers are alike


@pytest.mark.parametrize("skipped", [(0,), (1,), (0, 1), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("layout", [CODEC_LAYOUT, CODEC_ROWS_LAYOUT])
def test_what_one_cache_group_has_in_16_bit_is_not_rounded_as_codes_of_another(rng, layout, skipped) -> None:
    keeps = (KeepRule(8), KEEP_ALL) * 2
    codecs = CODECS["int8_per_token_head"], skipped, CODECS["float16"]
    geometry = KVGeometry(4, 2, 32, 4, 16, *codecs, keeps)
    form = block_form(geometry, layout)
    spans = [(begin, begin + num_rows * num_slots) for begin, _, num_rows, num_slots, *_ in form.parts]
    spans += [(begin, end) for begin, end, _ in form.planes]
    assert sorted(place for span in spans for place in range(*span)) == list(range(form.block_bytes))
    payload = rng.bytes(form.block_bytes)
    assert _back(Packing(form), payload)[0] == payload
    restored, _ = _back(Packing(form, 2), payload)
    changed = {place for place in range(form.block_bytes) if restored[place] != payload[place]}
    for layer, head in product(range(4), range(2)):
        cell = cell_places(geometry)[geometry.cell(layer, head)]
        exact = range(cell.keys if layer in skipped else cell.key_scales, cell.end)
        assert changed.isdisjoint(exact), f"layer {layer} has other numbers there"
    assert bool(changed) == bool(form.parts) == (skipped in {(0,), (1,), (0, 1)})
