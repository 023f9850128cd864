"""Ceilings of this processor: multiply-adds of a format's instruction, and bytes read from memory, a second.

Multiply-adds are counted in a loop that has all in registers: independent sums, each of which is added to by the
instruction that the format's tile is made of, or by what stands for it on a processor that lacks it. How many sums hide
the instruction's latency best is tried. Bytes are read from a buffer that no cache holds, in so many streams, fetched
ahead or not, as is best. Both are written in LLVM's own language, as the tiles are, and are run on all cores at once.

Where a machine is shared, both change from one second to the next, by a factor of two for memory. So a ceiling is
measured right before and right behind what is held to it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from pagefold.config import available_cpus
from pagefold.kernels.emit import I64, MAX_LANES, entry
from pagefold.kernels.object_code import addresses_in
from pagefold.kernels.pairs import PairEmitter, Pairs
from pagefold.kernels.quads import Quads, _QuadEmitter
from pagefold.kernels.words import I32_P, WORD_BYTES, WordEmitter

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagefold.kernels.formats import ProductFormat

__all__ = ["Ceilings", "Rates", "cache_bytes", "instruction_of"]

_NUM_SUMS = (8, 12, 16, 24)
_SUMS_A_RUN = 60_000_000  # some 20 ms
_STREAMS = ((1, 0), (1, 4096), (2, 0), (4, 0), (4, 4096))
"""How many are read at once, and how many bytes ahead they are fetched."""
_LINES_A_ROUND = 4
_MIN_BUFFER, _BUFFER_IN_CACHES = 2**28, 4
_REPEATS = 3
_KEPT: list[tuple[NDArray[np.generic], ...]] = []
"""What compiled loops read and write: they have only addresses."""
_PAIR_OF_SMALL, _QUAD_OF_ONES, _SMALL = 0x3A833A83, 0x01010101, 1e-3


@dataclass(frozen=True)
class Rates:
    """What all cores together can do.

    Attributes:
        multiply_adds: a second, by the name of the instruction.
        bytes_read: from memory, a second.
    """

    multiply_adds: dict[str, float]
    bytes_read: float

    def operations_of(self, product_format: ProductFormat) -> float:
        """Return the operations a second in a format: two a multiply-add."""
        return 2 * self.multiply_adds[instruction_of(product_format)]

    def and_then(self, other: Rates) -> Rates:
        """Return what holds between two times at which it was measured: the means."""
        return Rates(
            {name: (rate + other.multiply_adds[name]) / 2 for name, rate in self.multiply_adds.items()},
            (self.bytes_read + other.bytes_read) / 2,
        )


class Ceilings:
    """Finds which loops are fastest, and measures with them, as often as is asked.

    Args:
        product_formats: whose instructions count.
    """

    def __init__(self, *product_formats: ProductFormat) -> None:
        self._loops: dict[str, Callable[[], float]] = {}
        for name, one in {instruction_of(one): one for one in product_formats}.items():
            self._loops[name] = _fastest([_multiply_adds(one, num, address) for num, address in _loops(one).items()])
        self._read = _fastest([_bytes_read(address) for address in _readers().values()])

    def now(self) -> Rates:
        """Measure; it takes some 30 ms for each instruction, and leaves nothing in the caches."""
        return Rates({name: run() for name, run in self._loops.items()}, self._read())


def instruction_of(product_format: ProductFormat) -> str:
    """Return what multiplies and adds in a format on this processor."""
    match product_format:
        case Pairs(is_native=True):
            return "vdpbf16ps"
        case Pairs():
            return "float32 multiply-adds for vdpbf16ps"
        case Quads(is_native=True):
            return "vpdpbusd"
        case Quads():
            return "vpmaddwd for vpdpbusd"
        case _:
            return "float32 multiply-add"


def cache_bytes() -> int:
    """Return the size of the largest cache, as the system tells it; 0 if it does not."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="utf-8").strip()
        number = text.rstrip("KM")
        sizes.append(int(number) * {"K": 2**10, "M": 2**20}.get(text[len(number) :], 1))
    return max(sizes)


def _fastest(runs: list[Callable[[], float]]) -> Callable[[], float]:
    return max(runs, key=lambda run: max(run() for _ in range(_REPEATS)))


def _multiply_adds(product_format: ProductFormat, num_sums: int, address: int) -> Callable[[], float]:
    """Return what measures multiply-adds a second of a loop, on all cores at once."""
    num_cores, num_rounds = available_cpus(), _SUMS_A_RUN // num_sums
    operands = np.full(2 * MAX_LANES, _operand(product_format), np.uint32)
    sums = np.zeros((num_cores, num_sums, MAX_LANES), np.float32)
    calls = [_call(address, operands.ctypes.data, num_rounds, sums[core].ctypes.data) for core in range(num_cores)]
    numbers_a_word = {Pairs: 2, Quads: 4}.get(type(product_format), 1)
    num = num_cores * num_rounds * num_sums * MAX_LANES * numbers_a_word
    _KEPT.append((operands, sums))
    return lambda: num / _seconds_together(calls)


def _operand(product_format: ProductFormat) -> int:
    """Return a word of small numbers: sums of them stay numbers."""
    if isinstance(product_format, Quads):
        return _QUAD_OF_ONES
    return _PAIR_OF_SMALL if isinstance(product_format, Pairs) else int(np.float32(_SMALL).view(np.uint32))


def _bytes_read(address: int) -> Callable[[], float]:
    """Return what measures bytes a second of a way of reading, on all cores at once."""
    buffer, num_cores = _buffer(), available_cpus()
    size = len(buffer) // num_cores
    sums = np.zeros((num_cores, MAX_LANES), np.uint32)
    calls = [
        _call(address, buffer[core * size :].ctypes.data, size, sums[core].ctypes.data) for core in range(num_cores)
    ]
    _KEPT.append((buffer, sums))
    return lambda: num_cores * size / _seconds_together(calls)


@cache
def _buffer() -> NDArray[np.uint8]:
    """Return what is read: larger than any cache, and written, so that its pages are memory."""
    size = max(_MIN_BUFFER, _BUFFER_IN_CACHES * cache_bytes())
    return np.ones(size, np.uint8)


def _call(address: int, *arguments: int) -> Callable[[], None]:
    """Return a call of a function by address, which lets go of the GIL."""
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)
    return lambda: function(*arguments)


def _seconds_together(calls: list[Callable[[], None]]) -> float:
    """Return the seconds from when the first of some calls began, a thread and core each, until the last ended."""
    ready = threading.Barrier(len(calls))
    cores = sorted(os.sched_getaffinity(0))
    spans: list[tuple[float, float]] = []

    def run(core: int, call: Callable[[], None]) -> None:
        if len(calls) > 1:
            os.sched_setaffinity(0, {core})  # of this thread: else two may begin on one core, and stay there
        ready.wait()
        begin = time.perf_counter()
        call()
        spans.append((begin, time.perf_counter()))

    threads = [threading.Thread(target=run, args=each) for each in zip(cores, calls, strict=False)]
    assert len(threads) == len(calls), "more calls than cores"
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def _name(what: str) -> str:
    """Return a name under which compiled code is kept: another one when this file changes."""
    return f"benchmark-{what}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"


@cache
def _loops(product_format: ProductFormat) -> dict[int, int]:
    """Return addresses of (operands, num_rounds, sums), by how many sums they have."""
    names = {num: f"sums_{num}" for num in _NUM_SUMS}

    def build() -> ir.Module:
        module = ir.Module()
        for num, name in names.items():
            _add_loop(module, name, product_format, num)
        return module

    code = addresses_in(_name(instruction_of(product_format).replace(" ", "-")), build, names.values())
    return {num: code[name] for num, name in names.items()}


def _add_loop(module: ir.Module, name: str, product_format: ProductFormat, num_sums: int) -> None:
    builder, (operands, num_rounds, sums) = entry(module, name, 3)
    operands = builder.inttoptr(operands, I32_P)
    emit, multiply_add = _multiplier(builder, product_format, operands)
    sums = builder.inttoptr(sums, emit.words.as_pointer())
    places = [cgutils.alloca_once(builder, emit.words) for _ in range(num_sums)]
    for index, place in enumerate(places):
        builder.store(builder.load(builder.gep(sums, [I64(index)]), align=WORD_BYTES), place)
    with cgutils.for_range(builder, num_rounds, intp=I64):
        for place in places:
            builder.store(multiply_add(builder.load(place)), place)
    for index, place in enumerate(places):
        builder.store(builder.load(place), builder.gep(sums, [I64(index)]), align=WORD_BYTES)
    builder.ret_void()


def _multiplier(
    builder: ir.IRBuilder, product_format: ProductFormat, operands: ir.Value
) -> tuple[WordEmitter, Callable[[ir.Value], ir.Value]]:
    """Return an emitter, and what emits one multiply-add to a sum, as words, by a format's instruction."""
    if isinstance(product_format, Quads):
        quads = _QuadEmitter(builder, MAX_LANES, is_native=product_format.is_native)
        factors = quads.factors(builder.load(operands, align=WORD_BYTES))
        columns = quads.widen(quads.load_words(operands, MAX_LANES))

        def sum_quads(total: ir.Value) -> ir.Value:
            # Without the instruction a product does not depend on the sum: it must not leave the loop.
            fresh = columns if product_format.is_native else [_opaque(builder, column) for column in columns]
            return quads.sum_quads(factors, fresh, total)

        return quads, sum_quads
    is_pairs = isinstance(product_format, Pairs)
    emit = PairEmitter(builder, MAX_LANES, is_native=is_pairs and product_format.is_native)
    x, w = (emit.load_words(operands, first) for first in (0, MAX_LANES))

    def add(total: ir.Value) -> ir.Value:
        floats = emit.as_floats(total)
        if is_pairs:
            return emit.as_words(emit.sum_pairs(x, w, floats))
        return emit.as_words(emit.fma(emit.as_floats(x), emit.as_floats(w), floats))

    return emit, add


def _opaque(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return a value that the compiler knows nothing of, without an instruction for it."""
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=v,0", [value], side_effect=True)


@cache
def _readers() -> dict[tuple[int, int], int]:
    """Return addresses of (buffer, num_bytes, sums), by streams and bytes ahead."""
    names = {each: f"read_{each[0]}_{each[1]}" for each in _STREAMS}

    def build() -> ir.Module:
        module = ir.Module()
        for (num_streams, ahead), name in names.items():
            _add_reader(module, name, num_streams, ahead)
        return module

    code = addresses_in(_name("read"), build, names.values())
    return {each: code[name] for each, name in names.items()}


def _add_reader(module: ir.Module, name: str, num_streams: int, ahead: int) -> None:
    """Every vector of the buffer goes into a sum, so that it must be loaded."""
    builder, (buffer, num_bytes, sums) = entry(module, name, 3)
    buffer, sums = builder.inttoptr(buffer, I32_P), builder.inttoptr(sums, I32_P)
    emit = WordEmitter(builder, MAX_LANES)
    words_a_round = _LINES_A_ROUND * MAX_LANES
    size = builder.sdiv(num_bytes, I64(WORD_BYTES * num_streams))
    starts = [emit.at(buffer, builder.mul(size, I64(stream))) for stream in range(num_streams)]
    places = [cgutils.alloca_once(builder, emit.words) for _ in range(num_streams * _LINES_A_ROUND)]
    for place in places:
        builder.store(emit.all_words(0), place)
    with cgutils.for_range(builder, builder.sdiv(size, I64(words_a_round)), intp=I64) as loop:
        offset = builder.mul(loop.index, I64(words_a_round))
        for index, place in enumerate(places):
            here = emit.at(emit.at(starts[index // _LINES_A_ROUND], offset), index % _LINES_A_ROUND * MAX_LANES)
            if ahead:
                emit.fetch(emit.at(here, ahead // WORD_BYTES))
            builder.store(builder.xor(builder.load(place), emit.load_words(here)), place)
    total = emit.all_words(0)
    for place in places:
        total = builder.xor(total, builder.load(place))
    builder.store(total, builder.bitcast(sums, emit.words.as_pointer()), align=WORD_BYTES)
    builder.ret_void()
