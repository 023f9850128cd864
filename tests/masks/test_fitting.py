"""Ridge regression from sums, against least squares on the rows themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pagefold.masks.fitting import _PENALTIES, NormalEquations, fit_ridge

_LAYERS, _FEATURES, _OUTPUTS = 2, 7, 3


def _rows(rng: np.random.Generator, num: int, noise: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Return features that are correlated and far from 0, and outputs that follow from them in part."""
    mixing = np.random.default_rng(5).normal(size=(_FEATURES, _FEATURES))
    maps = np.random.default_rng(6).normal(size=(_LAYERS, _FEATURES, _OUTPUTS))
    features = rng.normal(size=(_LAYERS, num, _FEATURES)) @ mixing + 3
    return features, features @ maps + noise * rng.normal(size=(_LAYERS, num, _OUTPUTS)) - 7


def _sums(features: np.ndarray, outputs: np.ndarray) -> NormalEquations:
    """Add rows in three lots of unequal sizes."""
    sums = NormalEquations(_LAYERS, _FEATURES, _OUTPUTS)
    for layer in range(_LAYERS):
        for lot in (slice(0, 11), slice(11, 12), slice(12, None)):
            sums.add(layer, torch.from_numpy(features[layer, lot]), torch.from_numpy(outputs[layer, lot]))
    return sums


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(random.randrange(2**31))


def test_without_penalty_it_is_least_squares(rng: np.random.Generator) -> None:
    features, outputs = _rows(rng, 60)
    fit = _sums(features, outputs).solve(0.0)
    for layer in range(_LAYERS):
        whole = np.column_stack([features[layer], np.ones(60)])
        twin = np.linalg.lstsq(whole, outputs[layer], rcond=None)[0]
        np.testing.assert_allclose(fit.weights[layer].numpy().T, twin[:-1], atol=1e-8)
        np.testing.assert_allclose(fit.biases[layer].numpy(), twin[-1], atol=1e-8)


def test_a_penalty_is_rows_that_ask_for_small_weights(rng: np.random.Generator) -> None:
    features, outputs = _rows(rng, 60)
    fit = _sums(features, outputs).solve(0.2)
    for layer in range(_LAYERS):
        centred = features[layer] - features[layer].mean(0)
        strength = (60 * 0.2 * centred.var(0).mean()) ** 0.5
        rows = np.vstack([centred, strength * np.eye(_FEATURES)])
        asked = np.vstack([outputs[layer] - outputs[layer].mean(0), np.zeros((_FEATURES, _OUTPUTS))])
        twin = np.linalg.lstsq(rows, asked, rcond=None)[0]
        np.testing.assert_allclose(fit.weights[layer].numpy().T, twin, atol=1e-8)
        bias = outputs[layer].mean(0) - features[layer].mean(0) @ twin
        np.testing.assert_allclose(fit.biases[layer].numpy(), bias, atol=1e-8)


def test_what_is_explained_is_told_without_the_rows(rng: np.random.Generator) -> None:
    fit = _sums(*_rows(rng, 60)).solve(0.01)
    features, outputs = _rows(rng, 40, noise=3.0)
    found = _sums(features, outputs).explained_by(fit)
    for layer in range(_LAYERS):
        errors = outputs[layer] - features[layer] @ fit.weights[layer].numpy().T - fit.biases[layer].numpy()
        twin = 1 - (errors**2).sum(0) / ((outputs[layer] - outputs[layer].mean(0)) ** 2).sum(0)
        np.testing.assert_allclose(found[layer].numpy(), twin, atol=1e-8)


def test_the_penalty_is_the_best_for_rows_held_out_and_all_rows_are_used(rng: np.random.Generator) -> None:
    mine, held = _rows(rng, 30), _rows(rng, 30)
    tried = {penalty: _sums(*mine).solve(penalty) for penalty in _PENALTIES}
    explained = {penalty: float(_sums(*held).explained_by(fit).mean()) for penalty, fit in tried.items()}
    found = fit_ridge(_sums(*mine), _sums(*held))
    assert found.explained is not None
    assert explained[found.penalty] == max(explained.values())
    assert float(found.explained.mean()) == pytest.approx(explained[found.penalty])
    both = _sums(*(np.concatenate(parts, 1) for parts in zip(mine, held, strict=True))).solve(found.penalty)
    torch.testing.assert_close(found.weights, both.weights)


def test_outputs_that_never_change_are_not_explained(rng: np.random.Generator) -> None:
    features, _ = _rows(rng, 60)
    sums = _sums(features, np.zeros((_LAYERS, 60, _OUTPUTS)))
    assert not sums.explained_by(sums.solve(0.1)).any()
