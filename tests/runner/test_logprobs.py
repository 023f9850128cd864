"""Logprobs: plain Python's logarithm of a softmax, its order, and ranks that count who is more likely."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.runner.logprobs import token_logprobs


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 150))
def test_logprobs_are_those_of_the_twin(seed, num_rows):
    """Up to more rows than are normalized together."""
    random = Random(seed)
    logits = [[random.uniform(-9, 9) for _ in range(30)] for _ in range(num_rows)]
    token_ids = [random.randrange(30) for _ in range(num_rows)]
    num_tops = [random.randrange(21) for _ in range(num_rows)]
    found = token_logprobs(torch.tensor(logits, dtype=torch.float64), token_ids, num_tops)
    assert len(found) == num_rows
    for row, token_id, num_top, told in zip(logits, token_ids, num_tops, found, strict=True):
        whole = math.log(sum(math.exp(logit) for logit in row))
        assert told.logprob == pytest.approx(row[token_id] - whole, abs=1e-12)
        assert told.rank == 1 + sum(logit > row[token_id] for logit in row)
        best = sorted(range(30), key=lambda token: -row[token])[:num_top]
        assert [token for token, _ in told.top] == best
        assert [value for _, value in told.top] == pytest.approx([row[token] - whole for token in best], abs=1e-12)


def test_the_first_of_equal_tokens_has_rank_1_like_the_others():
    found = token_logprobs(torch.tensor([[1.0, 2.0, 2.0]] * 3), [0, 1, 2], [0, 0, 0])
    assert [told.rank for told in found] == [3, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_normalized_in_float32(dtype):
    logits = torch.tensor([[0.5, 1.5, -3.0]], dtype=dtype)
    (told,) = token_logprobs(logits, [0], [2])
    expected = logits.float().log_softmax(-1)[0].tolist()
    assert (told.logprob, told.top) == (expected[0], ((1, expected[1]), (0, expected[0])))


def test_a_vocabulary_smaller_than_what_is_asked_is_told_whole():
    (told,) = token_logprobs(torch.tensor([[0.0, 1.0]]), [0], [20])
    assert [token for token, _ in told.top] == [1, 0]


def test_which_of_equal_tokens_are_told_does_not_depend_on_the_batch():
    logits = torch.zeros(1, 3000)
    alone = token_logprobs(logits, [7], [5])[0]
    for num_top in (0, 5, 20):
        assert token_logprobs(logits.expand(3, -1), [1, 7, 2], [num_top, 5, num_top])[1] == alone
