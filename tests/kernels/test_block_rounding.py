"""Weights of float32 rounded to blocks: plain as llama.cpp's reference, and with scales that are searched."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from held_to_twins import random_numbers

from pagefold.kernels.block_rounding import ROUNDING_METHODS, round_to_blocks, squared_loss
from pagefold.kernels.blocks import blocks_of
from pagefold.kernels.formats import PANEL_WIDTH, column, pack

KINDS = ("Q8_0", "Q4_0", "Q4_1")


def numbers_of(kind, blocks):
    return dequantize(blocks, gguf.GGMLQuantizationType[kind])


def matrices():
    """Weights as models have them, and such as none should have."""
    plain = random_numbers(1, 70, 128) * np.float32(0.02)
    spread = random_numbers(2, 70, 128, spread=10)
    spread[0], spread[1, :32], spread[2, 32:64] = 0, 0.25, -0.25
    spread[3, :32], spread[4, 5] = np.linspace(3, 4, 32), -1e4
    return plain, spread


@pytest.mark.parametrize("kind", KINDS)
def test_plain_rounding_is_the_library_s(kind):
    for matrix in matrices():
        with np.errstate(all="ignore"):
            expected = quantize(matrix, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(round_to_blocks(kind, matrix), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_is_the_rounded_one(kind):
    matrix = random_numbers(3, 17 * PANEL_WIDTH + 3, 64)  # in several pieces
    panels = pack(blocks_of(kind), matrix)
    expected = numbers_of(kind, round_to_blocks(kind, matrix))
    for index in (0, PANEL_WIDTH, 16 * PANEL_WIDTH + 1, len(matrix) - 1):
        assert np.array_equal(column(blocks_of(kind), panels, index, 64), expected[index])


def group_errors(kind, matrix, method, importance=None):
    off = numbers_of(kind, round_to_blocks(kind, matrix, method, importance)).astype(np.float64) - matrix
    weights = 1 if importance is None else importance
    return (weights * off**2).reshape(len(matrix), -1, 32).sum(2)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_search_makes_no_group_worse_and_most_better(kind):
    for matrix in matrices():
        plain, searched = (group_errors(kind, matrix, method) for method in ROUNDING_METHODS)
        assert (searched <= plain * (1 + 1e-5)).all()
        assert (searched < plain * 0.99).mean() > 0.5
        assert searched.sum() < 0.95 * plain.sum()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_columns_that_matter_more_are_rounded_better(kind):
    matrix, _ = matrices()
    importance = np.where(np.arange(128) % 8 == 0, np.float32(100), np.float32(1))
    alike, weighted = (group_errors(kind, matrix, "search", one) for one in (None, importance))
    assert weighted.sum() < (group_errors_of(kind, matrix, importance)).sum()
    assert alike.sum() < (numbers_off(kind, matrix, importance) ** 2).sum()


def numbers_off(kind, matrix, importance):
    return numbers_of(kind, round_to_blocks(kind, matrix, "search", importance)).astype(np.float64) - matrix


def group_errors_of(kind, matrix, importance):
    """Weighted errors of a search that knew of no weights."""
    return importance * numbers_off(kind, matrix, None) ** 2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_a_half_cannot_scale_become_zeros(kind):
    matrix = np.full((2, 32), 1e-42, np.float32)
    for method in ROUNDING_METHODS:
        assert not numbers_of(kind, round_to_blocks(kind, matrix, method)).any()


def test_a_loss_is_a_share_of_squares():
    matrix = np.float32([[3, 4]])
    assert squared_loss(matrix, np.float32([[3, 3]])) == 1 / 25
    assert squared_loss(matrix, np.float32([[3, 3]]), np.float32([1, 2])) == 2 / 41
    assert squared_loss(np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)) == 0
