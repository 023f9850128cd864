"""Bits and thresholds: the share that was asked for is kept, within one token, and what is seen follows the rule."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pagefold.masks.mask import KeptRows, ScoredMask, keep_bits, threshold_for
from pagefold.masks.rule import CHUNK, sees
from pagefold.masks.scorer import Scorer
from pagefold.masks.watched_model import Entering

_SHARES = (0.0, 0.001, 0.1, 0.25, 0.5, 0.75, 0.999, 1.0)


def _seed() -> None:
    torch.manual_seed(random.randrange(2**31))


def _scorer(num_layers: int = 2, num_kv_heads: int = 3, num_features: int = 8) -> Scorer:
    _seed()
    weights, biases = torch.randn(num_layers, num_kv_heads, num_features), torch.randn(num_layers, num_kv_heads)
    hidden = torch.randn(20_000, num_features)
    scores = torch.cat([(hidden @ layer.T + bias).flatten() for layer, bias in zip(weights, biases, strict=True)])
    return Scorer(weights, biases, scores.sort().values[torch.linspace(0, len(scores) - 1, 4097).round().long()])


@pytest.mark.parametrize("keep", _SHARES)
def test_a_threshold_keeps_the_share_within_one_token(keep: float) -> None:
    _seed()
    scores = torch.randn(5, 3, 211)
    bits = keep_bits(scores, torch.full((5, 3), threshold_for(scores, keep)))
    assert abs(int(bits.sum()) - keep * scores.numel()) <= 1


def test_ties_are_kept_together() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0]])
    threshold = threshold_for(scores, 0.4)
    assert threshold == 2.0
    assert keep_bits(scores, torch.tensor([threshold])).tolist() == [[False, True, True, True, True]]


def test_heads_keep_unequal_shares_under_one_threshold() -> None:
    _seed()
    scores = torch.randn(1, 2, 1000) + torch.tensor([0.0, 2.0])[:, None]
    low, high = keep_bits(scores, torch.full((1, 2), threshold_for(scores, 0.5)))[0].double().mean(-1)
    assert low < 0.3
    assert high > 0.7


def test_nan_is_not_kept() -> None:
    assert not keep_bits(torch.tensor([[math.nan]]), torch.tensor([-math.inf])).any()


@pytest.mark.parametrize("keep", _SHARES)
def test_quantiles_give_thresholds_for_any_share(keep: float) -> None:
    scorer = _scorer()
    hidden = torch.randn(20_000, 8)
    thresholds = scorer.thresholds(keep)
    assert thresholds.shape == (2, 3)
    bits = torch.stack([keep_bits(scorer.scores(layer, hidden), thresholds[layer]) for layer in range(2)])
    assert float(bits.double().mean()) == pytest.approx(keep, abs=0.02)
    if keep in {0, 1}:
        assert bool(bits.all()) if keep else not bits.any()


def test_thresholds_fall_with_what_is_kept() -> None:
    found = [float(_thresholds[0, 0]) for _thresholds in map(_scorer().thresholds, _SHARES)]
    assert found == sorted(found, reverse=True)


def test_a_digest_tells_scorers_apart() -> None:
    scorer = _scorer()
    other = scorer._replace(biases=scorer.biases + 1e-3)
    assert scorer.digest == Scorer(*(one.clone() for one in scorer)).digest
    assert scorer.digest != other.digest


@pytest.mark.parametrize("first", [0, 1, 200, 2 * CHUNK, 3 * CHUNK - 5])
def test_rows_are_those_of_the_rule(first: int) -> None:
    _seed()
    last = first + 20
    kept = torch.rand(2, last + 30) < 0.3
    rows = KeptRows(kept)(first, last)
    assert rows.shape == (2, 20, last)
    found, bits = rows.tolist(), kept.tolist()
    for head in range(2):
        for position in range(first, last):
            for key in range(position + 1):
                expected = sees(position, key, is_kept=bits[head][key])
                assert found[head][position - first][key] == expected


def test_a_prompt_that_is_computed_densely_sees_all() -> None:
    scorer = _scorer()
    hidden, keys = torch.randn(4 * CHUNK, 8), torch.randn(3, 4 * CHUNK, 4)
    mask = ScoredMask(scorer, scorer.thresholds(0.0), num_dense=2 * CHUNK + 10)
    seen = mask.of_layer(Entering(1, hidden, keys))
    rows = seen(2 * CHUNK, 3 * CHUNK)
    assert rows[:, :10].all()
    assert not rows[:, 10:, 4:CHUNK].any()
    assert not mask.kept[1].any()
