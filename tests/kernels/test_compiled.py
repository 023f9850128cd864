"""Kernels are compiled in a process of their own, and what runs was loaded."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from pagefold.kernels import compiled
from pagefold.kernels.compiled import num_kernels_compiled, specialised

KERNEL = """
from typing import NamedTuple

import numpy as np
from numba import prange

from pagefold.kernels.compiled import part
from pagefold.kernels.kept import kernel

TABLE = np.array([3.0, 5.0, 7.0])

@part()
def looked_up(index):
    return TABLE[index]

@part()
def summed(numbers):
    squares = numbers * numbers
    total = looked_up(len(numbers) % 3)
    for i in range(len(squares)):
        total += squares[i] * looked_up(i % 3)
    return total

@kernel(parallel=True)
def deep(rows, offset, out):
    for i in prange(len(rows)):
        out[i] = summed(rows[i]) + looked_up(offset)

@kernel()
def times(numbers, factor):
    for i in range(len(numbers)):
        numbers[i] *= factor

class Record(NamedTuple):
    numbers: object
    factor: float

@kernel()
def times_of(record):
    for i in range(len(record.numbers)):
        record.numbers[i] *= record.factor
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel of a module of its own, with a cache of its own."""
    name = f"kernel_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(KERNEL, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(compiled, "_LOADED", {})
    yield importlib.import_module(name).times
    del sys.modules[name]


def doubled(kernel):
    numbers = np.arange(5.0)
    specialised(kernel, (numbers, 2.0))(numbers, 2.0)
    return numbers.tolist()


def test_what_runs_was_compiled_apart_and_loaded(kernel):
    before = num_kernels_compiled()
    assert doubled(kernel) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert num_kernels_compiled() == before + 1
    assert not kernel.overloads  # nothing was compiled here
    assert doubled(kernel) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert num_kernels_compiled() == before + 1


def test_types_of_the_kernels_own_module_are_kept_where_this_process_looks(kernel):
    """Who reads them declares the kernel: it has to be told before where code is kept."""
    module = sys.modules[kernel.py_func.__module__]
    numbers = np.arange(5.0)
    record = module.Record(numbers, 3.0)
    specialised(module.times_of, (record,))(record)
    assert numbers.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert not module.times_of.overloads  # nothing was compiled here


def test_a_kernel_is_loaded_once_in_a_process(kernel, monkeypatch):
    """An engine after another would take memory for ever."""
    first = specialised(kernel, (np.arange(5.0), 2.0))
    monkeypatch.setattr(compiled, "_load", None)
    assert specialised(kernel, (np.arange(7.0), 3.0)) is first


def test_parts_of_parts_are_linked_into_what_is_kept(kernel):
    """They are optimised nowhere else: what they read and take from the heap goes with them."""
    deep = sys.modules[kernel.py_func.__module__].deep
    rows, out = np.arange(12.0).reshape(4, 3), np.zeros(4)
    specialised(deep, (rows, 1, out))(rows, 1, out)
    assert out.tolist() == [5.0 + 3.0 + sum(row * row * [3.0, 5.0, 7.0]) for row in rows]


def test_where_no_process_can_be_had_it_is_compiled_here_and_said(kernel, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert doubled(kernel) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert kernel.overloads
    assert "/nowhere/python" in caplog.text
    assert "its last bits may be others" in caplog.text


def test_a_damaged_cache_is_compiled_again(kernel, monkeypatch, tmp_path):
    monkeypatch.setattr("pagefold.kernels.compiled.KERNEL_CACHE", tmp_path)
    assert doubled(kernel) == [0.0, 2.0, 4.0, 6.0, 8.0]
    before = num_kernels_compiled()
    compiled._LOADED.clear()  # another start
    for file in tmp_path.rglob("*.nb[ic]"):
        file.write_bytes(file.read_bytes()[:20])
    assert doubled(kernel) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert num_kernels_compiled() == before + 1


def test_of_two_who_need_a_kernel_at_once_one_compiles(kernel):
    before = num_kernels_compiled()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(doubled, [kernel, kernel])) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2
    assert num_kernels_compiled() == before + 1


def test_code_belongs_to_what_it_was_compiled_from_wherever_that_lies(kernel, tmp_path, monkeypatch):
    doubled(kernel)
    before = num_kernels_compiled()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{kernel.py_func.__module__}.py").write_text(KERNEL, encoding="utf-8")
    monkeypatch.syspath_prepend(elsewhere)
    del sys.modules[kernel.py_func.__module__]
    same = importlib.import_module(kernel.py_func.__module__).times
    assert same.py_func.__code__.co_filename.startswith(str(elsewhere))
    assert doubled(same) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert num_kernels_compiled() == before
