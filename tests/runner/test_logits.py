"""Logits before sampling: bias, penalties and bans, equal to plain Python, and to transformers' own processors.

The slow twin goes token by token through lists of floats. Rows that ask for nothing stay as they are, bit by bit.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.runner.logits import adjust
from pagefold.runner.sampler import sample
from pagefold.sampling import SamplingParams
from pagefold.steps import StepPlan

NEVER = float("-inf")
VOCAB_SIZE = 12
TOKENS = st.integers(0, VOCAB_SIZE - 1)
LOGITS = st.lists(st.integers(-80, 80).map(lambda n: n / 8), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
HOW = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 10.0]),
    logit_bias=st.one_of(st.none(), st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=4)),
)
ROWS = st.lists(
    st.tuples(
        LOGITS,
        HOW,
        st.lists(TOKENS, min_size=1, max_size=6),  # prompt
        st.lists(TOKENS, max_size=8),  # output
        st.frozensets(TOKENS, max_size=4),  # banned
    ),
    min_size=1,
    max_size=5,
)


def plan_of(rows) -> StepPlan:
    """Make the columns that a scheduler makes of (logits, params, prompt, output, banned)."""
    plan = StepPlan(0)
    for place, (_, how, prompt, output, banned) in enumerate(rows):
        plan.sampling_rows.append(place)
        plan.sampling.append(how)
        plan.seeds.append(0)
        plan.draws.append(len(output))
        if not how.is_plain or banned:
            plan.adjusted.append(place)
            plan.histories.append(array("i", prompt + output if how.has_penalties else []))
            plan.banned.append(banned)
    return plan


def adjusted_by_twin(logits, how, prompt, output, banned) -> list[float]:
    logits = list(logits)
    for token, bias in (how.logit_bias or {}).items():
        logits[token] += bias
    for token in set(prompt + output):
        logits[token] = (
            logits[token] / how.repetition_penalty if logits[token] > 0 else (logits[token] * how.repetition_penalty)
        )
    for token, count in Counter(output).items():
        logits[token] -= how.frequency_penalty * count + how.presence_penalty
    return [NEVER if token in banned else logit for token, logit in enumerate(logits)]


@settings(max_examples=300)
@given(ROWS, st.sampled_from([torch.float32, torch.float64]))
def test_logits_are_what_the_twin_makes_of_them(rows, dtype):
    logits = torch.tensor([row[0] for row in rows], dtype=dtype)
    before = logits.clone()
    got = adjust(logits, plan_of(rows))
    expected = torch.tensor([adjusted_by_twin(*row) for row in rows], dtype=dtype)
    assert got.dtype == dtype
    assert torch.allclose(got, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-5)
    assert (logits == before).all(), "the raw logits are wanted for logprobs"


@given(ROWS)
def test_a_row_is_adjusted_alone_as_in_its_batch(rows):
    together = adjust(torch.tensor([row[0] for row in rows]), plan_of(rows))
    for place, row in enumerate(rows):
        assert (adjust(torch.tensor([row[0]]), plan_of([row]))[0] == together[place]).all()


def test_where_nobody_asks_nothing_is_done():
    rows = [([0.0] * VOCAB_SIZE, SamplingParams(temperature=0.7, top_p=0.5, min_p=0.1), [1], [2], frozenset())]
    logits = torch.tensor([rows[0][0]])
    assert adjust(logits, plan_of(rows)) is logits


def test_half_precision_is_widened_before_it_is_changed():
    rows = [([8.0] * VOCAB_SIZE, SamplingParams(frequency_penalty=0.01), [1], [2], frozenset())]
    got = adjust(torch.tensor([rows[0][0]], dtype=torch.bfloat16), plan_of(rows))
    assert got.dtype == torch.float32
    assert got[0, 2] == pytest.approx(7.99)


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_a_monstrous_penalty_leaves_numbers(penalty, temperature):
    logits = [-30.0, 0.0, 30.0, 1.0, *[0.0] * (VOCAB_SIZE - 4)]
    how = SamplingParams(repetition_penalty=penalty, temperature=temperature)
    rows = [(logits, how, [0, 1, 2], [1], frozenset({4}))]
    adjusted = adjust(torch.tensor([logits]), plan_of(rows))
    assert not adjusted.isnan().any()
    for draw in range(20):
        (token,) = sample(adjusted, [how], [0], [draw])
        assert token != 4
        assert token == (2 if penalty < 1 else 3) or temperature == 1.0
        assert 0 <= token < VOCAB_SIZE


def test_a_history_can_grow_while_its_tensors_live():
    history = array("i", [1, 2, 3])
    how = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    plan = StepPlan(0, sampling=[how], draws=[2], adjusted=[0], histories=[history], banned=[frozenset()])
    held = adjust(torch.zeros(1, VOCAB_SIZE), plan)
    history.append(4)
    assert held.shape == (1, VOCAB_SIZE)


def test_only_output_is_present_and_frequent_and_the_prompt_is_repeated_too():
    def changed(**penalty):
        rows = [([4.0] * VOCAB_SIZE, SamplingParams(**penalty), [1, 1, 2], [3, 3, 2], frozenset())]
        row = adjust(torch.tensor([rows[0][0]]), plan_of(rows))[0].tolist()
        return {token: logit for token, logit in enumerate(row) if logit != 4.0}

    assert changed(presence_penalty=1.0) == {2: 3.0, 3: 3.0}
    assert changed(frequency_penalty=1.0) == {2: 3.0, 3: 2.0}
    assert changed(repetition_penalty=2.0) == {1: 2.0, 2: 2.0, 3: 2.0}


# Against transformers' own processors and warpers.


def distribution_of_transformers(logits: list[float], how: SamplingParams, seen: list[int]) -> torch.Tensor:
    """Return probabilities ``[vocab]``: transformers' own, in our order."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if how.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(how.repetition_penalty))
    processors.append(TemperatureLogitsWarper(how.temperature))
    if how.min_p:
        processors.append(MinPLogitsWarper(how.min_p))
    if how.top_k:
        processors.append(TopKLogitsWarper(how.top_k))
    if how.top_p < 1.0:
        processors.append(TopPLogitsWarper(how.top_p))
    return processors(torch.tensor([seen]), torch.tensor([logits], dtype=torch.float64)).softmax(-1)[0]


@pytest.mark.parametrize(
    "how",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.6, top_k=9),
        SamplingParams(temperature=1.3, repetition_penalty=1.4, top_p=0.8),
        SamplingParams(temperature=1.5, repetition_penalty=1.4, min_p=0.05, top_k=15, top_p=0.9),
    ],
    ids=str,
)
def test_draws_follow_transformers_distribution(how):
    """Chi-square of 20,000 fixed draws."""
    num, size, seen = 20_000, 24, [3, 3, 7, 1, 20]
    logits = [math.sin(token * 1.7) * 1.5 for token in range(size)]
    plan = StepPlan(0, sampling=[how], draws=[2], adjusted=[0], histories=[array("i", seen)], banned=[frozenset()])
    adjusted = adjust(torch.tensor([logits]), plan)
    tokens = sample(adjusted.expand(num, -1), [how] * num, [5] * num, list(range(num)))
    expected = distribution_of_transformers(logits, how, seen)
    kept = [token for token in range(size) if expected[token] > 0]
    assert set(tokens) <= set(kept)
    counts = Counter(tokens)
    statistic = sum((counts[token] - num * expected[token]) ** 2 / (num * expected[token]) for token in kept)
    freedom = len(kept) - 1
    assert (statistic - freedom) / math.sqrt(2 * freedom) < 4
    plain = distribution_of_transformers(logits, replace(how, repetition_penalty=1.0, min_p=0.0, temperature=1.0), seen)
    assert (plain - expected).abs().max() > 0.005, "such a distribution would tell nothing"
