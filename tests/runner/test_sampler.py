"""Sampler: greedy is the first maximum; a draw inverts the distribution that plain Python says, row by row.

The slow twin sorts, cuts and sums in lists of Python floats. It knows in which order the tokens lie on [0, 1): by id
where nothing is cut, likeliest first where top_k or top_p cuts. What a row draws depends on that row alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.request import SamplingParams
from pagefold.runner.sampler import _invert, sample, uniform

EPS = 1e-5  # float32 decides either way within this of an edge
NEVER = float("-inf")


def kept_by_twin(logits: list[float], how: SamplingParams) -> list[tuple[int, float]]:
    """Return what may be drawn: (token, probability), as they lie on [0, 1)."""
    top = max(logits)
    weights = [math.exp((logit - top) / how.temperature) for logit in logits]
    total = sum(weights)
    tokens = [(token, weight / total) for token, weight in enumerate(weights)]
    likeliest = max(weight for _, weight in tokens)
    tokens = normalized([(token, weight if weight >= how.min_p * likeliest else 0.0) for token, weight in tokens])
    cuts_k = 0 < how.top_k < len(logits)
    if cuts_k or how.top_p < 1.0:
        tokens.sort(key=lambda item: -item[1])
    if cuts_k:
        tokens = normalized(tokens[: how.top_k])
    if how.top_p < 1.0:
        kept, mass = [], 0.0
        for token, probability in tokens:
            if mass >= how.top_p:
                break
            kept.append((token, probability))
            mass += probability
        tokens = normalized(kept)
    return tokens


def normalized(tokens: list[tuple[int, float]]) -> list[tuple[int, float]]:
    total = sum(probability for _, probability in tokens)
    return [(token, probability / total) for token, probability in tokens]


def drawn_by_twin(logits: list[float], how: SamplingParams, number: float) -> set[int]:
    """Return the token at ``number``, and its neighbour if number, top_p or min_p is too close to an edge to tell."""
    drawn = set()
    near_p = {how.top_p, max(how.top_p - EPS, 1e-9), min(how.top_p + EPS, 1.0 - 1e-9) if how.top_p < 1 else 1.0}
    near_min_p = {how.min_p, max(how.min_p * (1 - EPS), 0.0), min(how.min_p * (1 + EPS), 1.0)}
    for top_p, min_p in product(near_p, near_min_p):
        near = replace(how, top_p=top_p, min_p=min_p)
        at = 0.0
        for token, probability in kept_by_twin(logits, near):
            if at - EPS <= number < at + probability + EPS and probability > 0:
                drawn.add(token)
            at += probability
    return drawn


def draw(logits: list[float], how: SamplingParams, seed: int, index: int) -> int:
    return sample(torch.tensor([logits]), [how], [seed], [index])[0]


LOGITS = st.lists(st.integers(-60, 60), min_size=1, max_size=40, unique=True).map(lambda many: [n / 8 for n in many])
HOW = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-5, 0.01, 0.3, 0.7, 1.0, 1.3, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 10, 40, 41, 10**6]),
    top_p=st.sampled_from([1e-9, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.1, 0.5, 1.0]),
)
SEEDS = st.integers(-(2**63), 2**63)
DRAWS = st.integers(0, 10**6)

# Greedy.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30))
def test_greedy_takes_the_lowest_id_of_the_largest_logits(dtype, logits):
    (token,) = sample(torch.tensor([logits], dtype=dtype), [SamplingParams(temperature=0.0)], [0], [0])
    assert token == logits.index(max(logits))


def test_greedy_compares_in_the_dtype_of_the_logits():
    logits = torch.tensor([[1.0, 1.0 + 1e-12, 0.0]], dtype=torch.float64)
    assert sample(logits, [SamplingParams(temperature=0.0)], [0], [0]) == [1]


def test_no_rows_draw_nothing():
    assert sample(torch.empty(0, 7), [], [], []) == []


# Draws, one by one, against the twin.


@settings(max_examples=400)
@given(LOGITS, HOW, SEEDS, DRAWS)
def test_a_draw_is_what_the_twin_draws(logits, how, seed, index):
    assert draw(logits, how, seed, index) in drawn_by_twin(logits, how, uniform(seed, index))


@settings(max_examples=200)
@given(LOGITS, st.sets(st.integers(0, 39)), HOW, SEEDS, DRAWS)
def test_a_token_of_no_weight_is_never_drawn(logits, banned, how, seed, index):
    logits = [NEVER if token in banned else logit for token, logit in enumerate(logits)]
    if all(logit == NEVER for logit in logits):
        logits[0] = 0.0
    token = draw(logits, how, seed, index)
    assert logits[token] > NEVER
    assert token in drawn_by_twin(logits, how, uniform(seed, index))


@pytest.mark.parametrize("sharpness", [0.01, 0.5, 6.0])
@pytest.mark.parametrize("top_k", [0, 1, 1000, 1024, 1025, 2500, 2999, 3000])
@pytest.mark.parametrize("top_p", [1e-6, 0.4, 0.95, 1.0])
def test_a_large_vocabulary_is_cut_where_the_twin_cuts_it(sharpness, top_k, top_p):
    """3000 tokens, flat and sharp: what is kept lies within, at and beyond the first 1024."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randperm(3000, generator=generator) / 3000 * 10 * sharpness).tolist()
    how = SamplingParams(top_k=top_k, top_p=top_p)
    for index in range(3):
        assert draw(logits, how, 5, index) in drawn_by_twin(logits, how, uniform(5, index))


@given(LOGITS, SEEDS, DRAWS)
def test_top_k_of_one_and_a_tiny_top_p_and_a_tiny_temperature_are_greedy(logits, seed, index):
    best = logits.index(max(logits))
    assert draw(logits, SamplingParams(top_k=1, temperature=2.0), seed, index) == best
    assert draw(logits, SamplingParams(top_p=1e-12, temperature=2.0), seed, index) == best
    assert draw(logits, SamplingParams(temperature=1e-5), seed, index) == best


@given(LOGITS, SEEDS, DRAWS)
def test_a_top_k_beyond_the_vocabulary_keeps_all(logits, seed, index):
    free = draw(logits, SamplingParams(), seed, index)
    for top_k in (-1, len(logits), len(logits) + 1, 10**9):
        assert draw(logits, SamplingParams(top_k=top_k), seed, index) == free


def test_top_p_counts_what_top_k_has_left():
    """Of four tokens of .4, .3, .2, .1, the best two have .57 and .43 between them: .5 keeps one, .6 keeps both."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]

    def drawn(top_p):
        return {draw(logits, SamplingParams(top_k=2, top_p=top_p), 0, index) for index in range(50)}

    assert drawn(0.5) == {0}
    assert drawn(0.6) == {0, 1}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.25 - 2**-53, 1), (0.25, 3), (0.5, 4), (1 - 2**-53, 4)])
def test_a_number_on_an_edge_belongs_to_the_token_that_begins_there(number, token):
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 1.0, 0.0]])
    assert _invert(weights, torch.tensor([number], dtype=torch.float64)).tolist() == [token]


# Draws, many together: the distribution.


def chi_square(counts: list[int], expected: list[float]) -> float:
    """Return by how many standard deviations the statistic lies above its mean."""
    statistic = sum((count - want) ** 2 / want for count, want in zip(counts, expected, strict=True))
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("many", ["draws", "seeds"])
@pytest.mark.parametrize(
    "how",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=1.4, top_k=12, top_p=0.9),
        SamplingParams(temperature=1.4, top_k=12, top_p=0.9, min_p=0.2),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(how, many):
    """Chi-square of 20,000 fixed draws: of one seed one after another, and of as many seeds' third draw."""
    num, logits = 20_000, [math.sin(token * 1.7) * 1.5 for token in range(24)]
    seeds = [11] * num if many == "draws" else list(range(num))
    draws = list(range(num)) if many == "draws" else [3] * num
    tokens = sample(torch.tensor([logits]).expand(num, -1), [how] * num, seeds, draws)
    kept = [(token, probability) for token, probability in kept_by_twin(logits, how) if probability]
    counts = [tokens.count(token) for token, _ in kept]
    assert sum(counts) == num, "something was drawn that is cut"
    assert chi_square(counts, [probability * num for _, probability in kept]) < 4


# A row alone.


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 7), HOW, SEEDS, DRAWS), min_size=1, max_size=8), st.randoms())
def test_what_a_row_draws_does_not_depend_on_the_batch_or_its_order(rows, random):
    """Logits are integers, so that many are equal and their order is open; flat rows need the whole vocabulary."""
    logits = torch.stack([equal_logits(which) for which, *_ in rows])
    alone = [sample(logits[at : at + 1], [how], [seed], [index])[0] for at, (_, how, seed, index) in enumerate(rows)]
    order = list(range(len(rows)))
    random.shuffle(order)
    _, params, seeds, draws = zip(*(rows[at] for at in order), strict=True)
    assert sample(logits[order], list(params), list(seeds), list(draws)) == [alone[at] for at in order]


def equal_logits(which: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(which)
    return (torch.randn(3000, generator=generator) * which).round()


def test_a_row_that_needs_the_whole_vocabulary_leaves_the_others_alone():
    sharp, flat = equal_logits(2), equal_logits(0)
    cut, wide = SamplingParams(top_p=0.5), SamplingParams(top_p=0.99)
    for index in range(50):
        (alone,) = sample(sharp[None], [cut], [1], [index])
        assert sample(torch.stack([flat, sharp]), [wide, cut], [2, 1], [index, index])[1] == alone


def test_greedy_rows_stay_greedy_among_random_ones():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, 5.0], [0.0, 0.0, 9.0]])
    greedy, free = SamplingParams(temperature=0.0), SamplingParams(temperature=2.0)
    for seed in range(20):
        first, _, last = sample(logits, [greedy, free, greedy], [seed] * 3, [0] * 3)
        assert (first, last) == (1, 2)


# The numbers.


@given(SEEDS, DRAWS)
def test_a_number_is_in_0_to_1_and_always_the_same(seed, index):
    number = uniform(seed, index)
    assert 0.0 <= number < 1.0
    uniform(seed + 1, index)
    assert uniform(seed, index) == number


def test_other_seeds_and_other_draws_have_other_numbers():
    pairs = [(seed, index) for seed in range(-60, 60) for index in range(120)]
    assert len({uniform(seed, index) for seed, index in pairs}) == len(pairs)


def test_seed_and_draw_do_not_run_into_each_other():
    assert uniform(1, 23) != uniform(12, 3)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_numbers_are_near_uniform_and_neighbours_independent(seed):
    numbers = [uniform(seed, index) for index in range(16_001)]
    counts = [0] * 64
    for one, next_one in pairwise(numbers):
        counts[int(one * 8) * 8 + int(next_one * 8)] += 1
    assert abs(chi_square(counts, [16_000 / 64] * 64)) < 4
