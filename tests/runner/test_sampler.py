"""Sampler: greedy is the first maximum; a draw is won by the token that plain Python says, row by row.

The slow twin sorts, cuts and sums in lists of Python floats, and lets what is left race with noise made of Python
integers. What a row draws depends on that row alone, and hardly on how its logits are rounded.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.runner.sampler import sample
from pagefold.runner.sampler.cpu import race
from pagefold.runner.sampler.draws import make_draws, noise_key
from pagefold.runner.sampler.reference import draw_tokens, exponential_noise
from pagefold.sampling import SamplingParams

EPS = 1e-8  # where top_p or min_p lies on an edge, rounding may decide either way
WORD = 2**64
NEVER = float("-inf")


def kept_by_twin(logits: list[float], how: SamplingParams) -> list[tuple[int, float]]:
    """Return what may be drawn: (token, probability)."""
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


def noise_by_twin(seed: int, index: int, token: int) -> float:
    """Return the exponential number of a token: number ``token`` of a SplitMix64 stream."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    z = (int.from_bytes(digest, "little") + (token + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    z ^= z >> 31
    return -math.log1p(-((z >> 12) + 0.5) / 2**52)


def drawn_by_twin(logits: list[float], how: SamplingParams, seed: int, index: int) -> set[int]:
    """Return the token that wins, and who wins where top_p or min_p is just beside what it is."""
    drawn = set()
    near_p = {how.top_p, max(how.top_p * (1 - EPS), 1e-300), min(how.top_p * (1 + EPS), 1.0)}
    near_min_p = {how.min_p, max(how.min_p * (1 - EPS), 0.0), min(how.min_p * (1 + EPS), 1.0)}
    for top_p, min_p in product(near_p, near_min_p):
        kept = kept_by_twin(logits, replace(how, top_p=top_p, min_p=min_p))
        _, winner = min((noise_by_twin(seed, index, token) / p, token) for token, p in kept if p > 0)
        drawn.add(winner)
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
    assert draw(logits, how, seed, index) in drawn_by_twin(logits, how, seed, index)


@settings(max_examples=200)
@given(LOGITS, st.sets(st.integers(0, 39)), HOW, SEEDS, DRAWS)
def test_a_token_of_no_weight_is_never_drawn(logits, banned, how, seed, index):
    logits = [NEVER if token in banned else logit for token, logit in enumerate(logits)]
    if all(logit == NEVER for logit in logits):
        logits[0] = 0.0
    token = draw(logits, how, seed, index)
    assert logits[token] > NEVER
    assert token in drawn_by_twin(logits, how, seed, index)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("sharpness", [0.01, 0.5, 6.0])
@pytest.mark.parametrize("top_k", [0, 1, 1000, 1024, 1025, 2500, 2999, 3000])
@pytest.mark.parametrize("top_p", [1e-6, 0.4, 0.95, 1.0])
def test_a_large_vocabulary_is_cut_where_the_twin_cuts_it(sharpness, top_k, top_p):
    """3000 tokens, flat and sharp: what is kept lies within, at and beyond the first 1024."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randperm(3000, generator=generator) / 3000 * 10 * sharpness).tolist()
    how = SamplingParams(top_k=top_k, top_p=top_p)
    for index in range(3):
        assert draw(logits, how, 5, index) in drawn_by_twin(logits, how, 5, index)


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


def test_of_equal_tokens_the_first_are_kept():
    def drawn(**cut):
        return {draw([1.0, 2.0, 1.0, 1.0, 1.0], SamplingParams(**cut), 0, index) for index in range(200)}

    assert drawn(top_k=3) == {0, 1, 2}
    assert drawn(top_p=0.55) == {0, 1}  # .405, then .149 each
    assert drawn(min_p=0.36) == {0, 1, 2, 3, 4}
    assert drawn(min_p=0.37) == {1}


def test_half_of_ten_equal_tokens_is_five():
    how = SamplingParams(top_p=0.5)
    assert {draw([0.0, -0.0] * 5, how, 0, index) for index in range(200)} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [1e-3, 1.0])
def test_large_logits_and_small_temperatures_overflow_nothing(temperature):
    logits = torch.full((1, 50), -1e4)
    logits[0, [7, 9]] = torch.tensor([1e4, 1e4 - 0.001 * temperature])
    how = SamplingParams(temperature=temperature)
    assert set(sample(logits.expand(100, -1), [how] * 100, [1] * 100, list(range(100)))) == {7, 9}
    logits[0, 7] = 3e38
    assert sample(logits, [how], [1], [0]) == [7]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("how", [SamplingParams(), SamplingParams(top_k=2, top_p=0.9, min_p=0.1)], ids=["free", "cut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("logits", "token"),
    [([1.0, 5.0, NAN, 2.0], 2), ([NAN] * 4, 0), ([NEVER] * 4, 0), ([0.0, INF, INF, 2.0], 1), ([0.0, NAN, INF, 2.0], 1)],
    ids=str,
)
def test_a_row_without_a_distribution_gets_the_greedy_token(logits, token, dtype, how):
    rows = torch.tensor([logits, [0.0, NEVER, NEVER, NEVER]], dtype=dtype)
    assert sample(rows, [how] * 2, [1, 2], [0, 0]) == [token, 0]
    assert draw_tokens(rows, make_draws([0, 1], [how] * 2, [1, 2], [0, 0])).tolist() == [-1, 0]


# The kernel against plain torch.


ANY_LOGITS = st.one_of(
    st.floats(-40, 40, width=32), st.sampled_from([0.0, -0.0, 1.0, NEVER, -1e4, 1e4, 1e-30]), st.integers(-3, 3)
)


@settings(max_examples=300)
@given(
    st.integers(1, 12).flatmap(
        lambda width: st.lists(st.lists(ANY_LOGITS, min_size=width, max_size=width), min_size=1, max_size=6)
    ),
    st.lists(HOW, min_size=6, max_size=6),
    st.integers(0, 2**40),
)
def test_the_kernel_draws_what_plain_torch_draws(logits, params, seed):
    rows = torch.tensor(logits, dtype=torch.float32)
    params, seeds = params[: len(rows)], [seed] * len(rows)
    draws = make_draws(range(len(rows)), params, seeds, list(range(len(rows))))
    assert race(rows.numpy(), draws).tolist() == draw_tokens(rows, draws).tolist()


@settings(max_examples=60)
@given(st.lists(HOW, min_size=8, max_size=8), st.integers(0, 2**40), st.sampled_from([0.0, 0.2, 2.0, 6.0, 20.0]))
def test_the_kernel_draws_what_plain_torch_draws_of_many_tokens(params, seed, spread):
    """3000 tokens: several of the kernel's blocks, and not a whole number of them. Rows apart, some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(9, 3100, generator=generator)[:, :3000] * spread
    rows[3:5] = rows[3:5].round()  # many are equal
    rows[5, torch.rand(3000, generator=generator) < 0.99] = NEVER
    places = [0, 1, 3, 4, 5, 5, 8, 8]
    asked = dict(zip(places, params, strict=True))
    columns = [asked.get(place, params[0]) for place in range(9)]
    draws = make_draws(places, columns, [seed] * 9, list(range(9)))
    assert race(rows.numpy(), draws).tolist() == draw_tokens(rows, draws).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_drawn_from_as_float32(dtype):
    rows = torch.randn(20, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    how, seeds, draws = [SamplingParams(top_p=0.9)] * 20, list(range(20)), [1] * 20
    assert sample(rows, how, seeds, draws) == sample(rows.float(), how, seeds, draws)
    assert sample(rows.T.contiguous().T, how, seeds, draws) == sample(rows, how, seeds, draws)


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


SHAPES = {
    "peaked": [math.log(p) for p in (0.9985, 1e-3, *[1e-4] * 5)],
    "flat": [0.0] * 500,
    "long-tailed": [-1.2 * math.log(rank) for rank in range(1, 1001)],
    "far apart": [0.0, -2.0, -4.0, -6.0, -8.0, -10.0, -50.0, -800.0, NEVER],
}


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("many", ["draws", "seeds"])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_draws_follow_peaked_and_flat_and_long_tailed_distributions(shape, many):
    """Chi-square of 200,000 draws. Tokens that are too rare to count are counted together."""
    num, logits = 200_000, torch.tensor([SHAPES[shape]])
    seeds = [7] * num if many == "draws" else list(range(num))
    index = list(range(num)) if many == "draws" else [5] * num
    tokens = np.array(sample(logits.expand(num, -1), [SamplingParams()] * num, seeds, index))
    expected = logits[0].double().softmax(-1).numpy() * num
    counts = np.bincount(tokens, minlength=len(expected))
    rare = expected < 10
    counts, expected = (np.append(all_[~rare], all_[rare].sum()).tolist() for all_ in (counts, expected))
    if expected[-1] < 5:
        assert counts.pop() <= 30
        expected.pop()
    assert abs(chi_square(counts, expected)) < 4


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


# Rounding.


@pytest.mark.long
def test_rounding_hardly_ever_changes_a_draw():
    """20,000 draws of 49,152 tokens, all of them about as likely, each from logits with and without noise of 1e-5.

    The best token of a race is ahead of the next by an exponential number of mean 1, whatever the probabilities are. So
    noise that moves the two by ``x`` against each other changes a draw with a probability of ``|x| / 2``: about one of
    200,000 draws. In the cumulative distribution it moves every edge a little, beside tokens of 1/49,152.
    """
    num, num_rounds, how = 1000, 20, SamplingParams(temperature=1.5)
    random = np.random.default_rng(0)
    changed = changed_in_cumulative = 0
    expected = 0.0
    for round_ in range(num_rounds):
        logits = (5 + random.standard_normal(49_152)).astype(np.float32)
        drift = np.sin(np.arange(49_152) / 9000 + round_)  # rounding is no white noise: neighbours share some of it
        noisy = (logits * (1 + 1e-5 * (drift + random.uniform(-1, 1, 49_152)) / 2)).astype(np.float32)
        seeds, index = [round_] * num, list(range(num))
        before, after = (
            sample(torch.from_numpy(row[None]).expand(num, -1), [how] * num, seeds, index) for row in (logits, noisy)
        )
        changed += sum(one != other for one, other in zip(before, after, strict=True))
        first, second = random.permutation(49_152), random.permutation(49_152)
        moved = (noisy.astype(float) - logits) / 1.5
        expected += num * np.abs(moved[first] - moved[second]).mean() / 2
        numbers = random.random(num)
        changed_in_cumulative += (looked_up(logits, numbers) != looked_up(noisy, numbers)).sum()
    assert expected < 0.5
    assert changed <= 8, "of a Poisson distribution with that mean: once in 10^8"
    assert changed_in_cumulative > 100


def looked_up(logits, numbers):
    weights = np.exp((logits - logits.max()).astype(float) / 1.5).cumsum()
    return np.searchsorted(weights, numbers * weights[-1], side="right")


# The noise.


@given(SEEDS, DRAWS)
def test_noise_is_positive_and_always_the_same(seed, index):
    keys = torch.tensor([noise_key(seed, index)], dtype=torch.uint64).view(torch.int64)
    noise = exponential_noise(keys, 50)[0].tolist()
    assert noise == pytest.approx([noise_by_twin(seed, index, token) for token in range(50)], rel=1e-14, abs=0)
    assert all(number > 0 for number in noise)
    assert exponential_noise(keys, 20)[0].tolist() == pytest.approx(noise[:20], rel=1e-14), "of any number of tokens"


def test_other_seeds_and_other_draws_have_other_noise():
    pairs = [(seed, index) for seed in range(-60, 60) for index in range(120)]
    assert len({noise_key(seed, index) for seed, index in pairs}) == len(pairs)
    assert noise_key(1, 23) != noise_key(12, 3), "seed and draw do not run into each other"


def noise_of(pairs) -> np.ndarray:
    """Noise of 1024 tokens for each (seed, draw), as uniform numbers: ``[pairs, 1024]``."""
    keys = np.array([noise_key(seed, index) for seed, index in pairs], np.uint64).view(np.int64)
    return -np.expm1(-exponential_noise(torch.from_numpy(keys), 1024).numpy())


@pytest.mark.parametrize("apart", [1, 2, 64])
@pytest.mark.parametrize("axis", ["seeds", "draws", "tokens", "draws and tokens"])
def test_noise_is_uniform_and_neighbours_are_independent(axis, apart):
    """Chi-square of 400,000 pairs on a square of 16 by 16, and their correlation."""
    first = [(seed, index) for seed in range(20) for index in range(20)]
    one = noise_of(first)
    if axis == "tokens":
        one, other = one[:, :-apart], one[:, apart:]
    elif axis == "seeds":
        other = noise_of([(seed + apart, index) for seed, index in first])
    else:
        other = noise_of([(seed, index + apart) for seed, index in first])
        if axis == "draws and tokens":
            one, other = one[:, :-1], other[:, 1:]
    cells = (one * 16).astype(int) * 16 + (other * 16).astype(int)
    counts = np.bincount(cells.ravel(), minlength=256).tolist()
    assert abs(chi_square(counts, [cells.size / 256] * 256)) < 4
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(cells.size)


def test_consecutive_seeds_draw_independently():
    num, tokens = 40_000, 8
    drawn = sample(torch.zeros(1, tokens).expand(num, -1), [SamplingParams()] * num, list(range(num)), [0] * num)
    counts = [0] * tokens**2
    for one, other in zip(drawn[::2], drawn[1::2], strict=True):
        counts[one * tokens + other] += 1
    assert abs(chi_square(counts, [num / 2 / tokens**2] * tokens**2)) < 4


def test_small_noise_is_as_frequent_as_it_must_be():
    """The winners' noise: how often it is below 1/2, 1/4, ... 1/2^18, among 5 million. A token of 1e-7 wins by such."""
    keys = np.array([noise_key(3, index) for index in range(5000)], np.uint64).view(np.int64)
    noise = exponential_noise(torch.from_numpy(keys), 1024).numpy().ravel()
    powers = np.minimum(np.floor(-np.log2(-np.expm1(-noise))), 18).astype(int)
    expected = [noise.size / 2 ** (power + 1) for power in range(18)] + [noise.size / 2**18]
    assert abs(chi_square(np.bincount(powers, minlength=19).tolist(), expected)) < 4
    assert noise.min() < 5e-6
    assert len(np.unique(noise)) == noise.size, "no two of them: all have 52 bits"
