"""Masks on logits: equal to plain Python, whatever else is asked of the rows; rows without one stay bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagefold.runner.logits import adjust
from pagefold.sampling import SamplingParams
from pagefold.steps import StepPlan

VOCAB_SIZE = 21
NEVER = float("-inf")


@st.composite
def rows(draw):
    allowed = draw(st.one_of(st.none(), st.frozensets(st.integers(0, VOCAB_SIZE - 1), min_size=1)))
    bias = draw(st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, 1.5, 100.0]), max_size=3))
    logits = draw(st.lists(st.integers(-80, 80), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE))
    return [number / 8 for number in logits], allowed, bias


def packed(allowed, num_bytes):
    mask = bytearray(num_bytes)
    for token_id in allowed:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(batch=st.lists(rows(), min_size=1, max_size=6), num_bytes=st.sampled_from([3, 4, 8]), is_cut=st.booleans())
def test_masked_rows_keep_the_tokens_of_their_masks(dtype, batch, num_bytes, is_cut):
    """``num_bytes`` may be more than the vocabulary: a tokenizer may have more tokens than the model. Or fewer."""
    plan = StepPlan(0)
    for place, (_, allowed, bias) in enumerate(batch):
        plan.sampling_rows.append(place)
        plan.sampling.append(SamplingParams(logit_bias=bias))
        plan.draws.append(0)
        if bias:
            plan.adjusted.append(place)
            plan.histories.append([])
            plan.banned.append(frozenset())
        if allowed is not None:
            plan.masked.append(place)
            mask = packed(allowed | {VOCAB_SIZE + 1}, num_bytes)
            plan.masks.append(packed(allowed, num_bytes).rstrip(b"\0") if is_cut and place % 2 else mask)
    before = torch.tensor([logits for logits, *_ in batch], dtype=dtype)
    kept = before.clone()
    after = adjust(before, plan)
    assert torch.equal(before, kept)
    for place, (logits, allowed, bias) in enumerate(batch):
        expected = [
            logit + bias.get(token_id, 0.0) if allowed is None or token_id in allowed else NEVER
            for token_id, logit in enumerate(logits)
        ]
        assert after[place].tolist() == expected
    if not plan.masked and not plan.adjusted:
        assert after is before
