"""The KV budget on a card follows from bytes alone; what does not fit is refused by how much, with settings that do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.card_memory import CardBudget, CardUse, bound_use, budget_on_card
from pagefold.errors import BudgetTooSmallError, DoesNotFitError
from pagefold.kv import KVGeometry

GIB = 2**30
LLAMA_3_8B = KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2)
H100 = CardBudget(total_bytes=80 * GIB, free_bytes=79 * GIB, utilization=0.9)
USE = CardUse(weight_bytes=15 * GIB, activation_bytes=2 * GIB, other_bytes=GIB)


def budget(card=H100, use=USE, *, asked=None, min_len=8192, max_len=8192, geometry=LLAMA_3_8B):
    return budget_on_card(card, use, geometry.layout, kv_cache_memory_bytes=asked, min_len=min_len, max_len=max_len)


def test_it_is_a_share_of_the_whole_card_less_what_else_is_taken():
    assert budget() == 72 * GIB - 18 * GIB
    assert budget(CardBudget(80 * GIB, 79 * GIB, 0.5)) == 40 * GIB - 18 * GIB


def test_what_was_asked_for_is_what_is_taken():
    assert budget(asked=10 * GIB) == 10 * GIB
    assert budget(asked=61 * GIB) == 61 * GIB  # more than the share would give: vLLM does so too


def test_a_card_that_others_hold_is_refused():
    with pytest.raises(
        DoesNotFitError, match=r"0\.9 is 72\.00 GiB of the card's 80\.00 GiB, and only 50\.00 GiB"
    ) as refused:
        budget(CardBudget(80 * GIB, 50 * GIB, 0.9))
    assert refused.value.missing_bytes == 22 * GIB
    assert "gpu_memory_utilization from 0.24 to 0.62" in refused.value.remedy
    assert f"kv_cache_memory_bytes from {GIB} to {32 * GIB}" in refused.value.remedy


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(BudgetTooSmallError, match=r"weights of 141\.00 GiB") as refused:
        budget(use=CardUse(141 * GIB, 2 * GIB, GIB))
    assert refused.value.missing_bytes == 144 * GIB - 72 * GIB + GIB
    assert "device=cpu" in refused.value.remedy
    assert "max_model_len" not in refused.value.remedy


def test_a_budget_beyond_what_is_free_is_refused():
    with pytest.raises(DoesNotFitError, match=r"1\.00 GiB too few") as refused:
        budget(asked=62 * GIB)
    assert refused.value.missing_bytes == GIB


CARDS = st.builds(
    lambda total, free, share: CardBudget(total, int(total * free), share),
    st.integers(4 * GIB, 141 * GIB),
    st.floats(0.1, 1.0),
    st.floats(0.05, 1.0),
)
USES = st.builds(CardUse, st.integers(0, 100 * GIB), st.integers(0, 8 * GIB), st.integers(0, GIB))


@given(CARDS, USES, st.none() | st.integers(1, 140 * GIB), st.integers(2, 2**17))
def test_every_setting_that_a_refusal_names_works(card, use, asked, min_len):
    try:
        given_bytes = budget(card, use, asked=asked, min_len=min_len, max_len=2**17)
    except DoesNotFitError as refused:
        missing_bytes, remedy = refused.missing_bytes, refused.remedy
    else:
        assert LLAMA_3_8B.layout.num_blocks_for(min_len) * LLAMA_3_8B.bytes_per_block <= given_bytes
        assert given_bytes + use.num_bytes <= card.free_bytes
        return
    assert missing_bytes > 0
    shares = re.search(r"gpu_memory_utilization from ([\d.]+) to ([\d.]+)", remedy)
    for share in shares.groups() if shares else ():
        budget(CardBudget(card.total_bytes, card.free_bytes, float(share)), use, min_len=min_len)
    sizes = re.search(r"kv_cache_memory_bytes from (\d+) to (\d+)", remedy)
    for size in sizes.groups() if sizes else ():
        budget(card, use, asked=int(size), min_len=min_len)
    lengths = re.search(r"max_model_len up to (\d+) with kv_cache_memory_bytes=(\d+)", remedy)
    if lengths:
        budget(card, use, asked=int(lengths[2]), min_len=int(lengths[1]))


def test_the_bound_covers_what_a_step_of_an_8b_model_holds():
    use = bound_use(weight_bytes=GIB, vocab_size=128256, row_bytes=200_000, num_tokens=8192, num_seqs=256)
    assert 1.5 * GIB < use.activation_bytes < 4 * GIB
