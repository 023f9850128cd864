"""Finite: whether rows of logits are numbers, whatever they sum up to."""

from __future__ import annotations

import pytest
import torch

from pagefold.runner.finite import are_finite, broken_rows
from pagefold.runner.logprobs import token_logprobs

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NOT_NUMBERS = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", NOT_NUMBERS)
@pytest.mark.parametrize("place", [0, 500, 998])
def test_one_logit_that_is_no_number_is_found(dtype, number, place):
    logits = torch.randn(5, 1024, dtype=torch.float64).to(dtype)[:, :999]  # rows as a decoder pads them
    assert broken_rows(logits) == []
    logits[1, place] = logits[4, place] = number
    assert broken_rows(logits) == [1, 4]
    assert are_finite(logits).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_whose_sum_is_none_are_numbers(dtype):
    """Beside rows of which one is not, and infinities that would cancel each other."""
    logits = torch.full((3, 99), torch.finfo(dtype).max, dtype=dtype)
    logits[1, 7] = float("nan")
    logits[2, :2] = torch.tensor([float("inf"), float("-inf")])
    assert broken_rows(logits) == [1, 2]
    assert are_finite(logits).tolist() == [True, False, False]


def test_no_rows_are_all_numbers():
    assert broken_rows(torch.empty(0, 99)) == []


def test_logprobs_of_numbers_are_numbers():
    logits = torch.zeros(1, 9)
    logits[0, :2] = torch.tensor([3e38, -3e38])
    (told,) = token_logprobs(logits, [1], [9])
    assert told.logprob == -9999.0
    assert told.rank == 9
    assert {logprob for _, logprob in told.top} == {0.0, -9999.0}
