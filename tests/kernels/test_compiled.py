"""Kernels are compiled in a process of their own, and what runs was loaded."""

from __future__ import annotations

import importlib
import sys

import numba
import numpy as np
import pytest

from pagefold.kernels import KERNEL_CACHE
from pagefold.kernels.compiled import num_kernels_compiled, specialised

KERNEL = """
from numba import njit

@njit(cache=True)
def times(numbers, factor):
    for i in range(len(numbers)):
        numbers[i] *= factor
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel of a module of its own, with a cache of its own."""
    name = f"kernel_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(KERNEL, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path))  # the other process reads it
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels" / KERNEL_CACHE.name))
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
    for file in tmp_path.rglob("*.nb[ic]"):
        file.write_bytes(file.read_bytes()[:20])
    assert doubled(kernel) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert num_kernels_compiled() == before + 1
