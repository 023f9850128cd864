"""Estimates and divergences against slow twins; exact zeros where nothing differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagefold.quality.divergence import compare_rows
from pagefold.quality.statistics import bins_of, estimate


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def _mean(means: np.ndarray) -> np.ndarray:
    return means[..., 0]


def test_a_standard_error_is_that_of_the_mean(rng: np.random.Generator) -> None:
    values = rng.normal(3.0, 2.0, size=(40, 1))
    found = estimate(values, _mean)
    assert found.value == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(values.std(ddof=1) / 40**0.5, rel=0.1)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_one_context_has_no_error_and_equal_ones_have_none(rng: np.random.Generator) -> None:
    assert estimate(rng.normal(size=(1, 1)), _mean).standard_error is None
    assert estimate(np.full((5, 1), 0.25), _mean).standard_error == 0.0


def test_bins_are_a_partition(rng: np.random.Generator) -> None:
    for _ in range(50):
        num_positions, num_bins = (int(number) for number in rng.integers(1, 60, size=2))
        bins = bins_of(num_positions, num_bins)
        assert [at for part in bins for at in range(num_positions)[part]] == list(range(num_positions))
        assert len(bins) == min(num_positions, num_bins)
        assert max(part.stop - part.start for part in bins) - min(part.stop - part.start for part in bins) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_compared_as_torch_does_it(rng: np.random.Generator, dtype: torch.dtype) -> None:
    num_rows, vocab = int(rng.integers(1, 200)), int(rng.integers(2, 90))
    exact, other = (torch.from_numpy(rng.normal(0, 3, size=(num_rows, vocab))).to(dtype) for _ in range(2))
    next_ids = rng.integers(0, vocab, size=num_rows).tolist()
    same, found = compare_rows([exact, other], next_ids)
    twin, twin_exact = other.double().log_softmax(-1), exact.double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(twin, twin_exact, log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(found.kl, kl.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.surprise, -twin[range(num_rows), next_ids].numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.same_top, (exact.argmax(-1) == other.argmax(-1)).numpy())
    assert not same.kl.any()
    assert same.same_top.all()


def test_equal_logits_differ_by_nothing_at_all(rng: np.random.Generator) -> None:
    logits = torch.from_numpy(rng.normal(size=(70, 50)).astype(np.float32))
    logits[:, 7] = float("-inf")  # a token that the model can never say
    exact, other = compare_rows([logits, logits.clone()], [0] * 70)
    assert (other.kl == 0).all()
    assert (other.surprise == exact.surprise).all()


def test_a_token_that_became_impossible_costs_without_end() -> None:
    exact = torch.zeros(1, 3)
    other = torch.tensor([[0.0, float("-inf"), 0.0]])
    (_, found) = compare_rows([exact, other], [0])
    assert found.kl[0] == float("inf")
