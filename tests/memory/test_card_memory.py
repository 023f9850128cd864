"""The KV budget on a card follows from bytes alone; what does not fit is refused by how much, with settings that do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.errors import BudgetTooSmallError, DoesNotFitError
from pagefold.kv import CODECS, KVGeometry
from pagefold.memory.card import CardBudget, CardUse, bound_use, budget_on_card

GIB = 2**30
LLAMA_3_8B = KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2)
SEALED = KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2, codec=CODECS["kivi2"])
H100 = CardBudget(total_bytes=80 * GIB, free_bytes=79 * GIB, utilization=0.9)
USE = CardUse(weight_bytes=15 * GIB, activation_bytes=2 * GIB, other_bytes=GIB)


def budget(card=H100, use=USE, *, asked=None, num_seqs=256, min_len=8192, max_len=8192, geometry=LLAMA_3_8B):
    lengths = {"min_len": min_len, "max_len": max_len, "max_num_batched_tokens": 2048}
    return budget_on_card(card, use, geometry.layout, kv_cache_memory_bytes=asked, max_num_seqs=num_seqs, **lengths)


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
    assert "max_model_len" not in refused.value.remedy  # no length makes it fit


def test_residuals_are_needed_beside_the_blocks():
    residual_bytes = 256 * SEALED.residual_bytes
    block_bytes = SEALED.num_blocks_for(8192) * SEALED.bytes_per_block
    assert budget(asked=residual_bytes + block_bytes, geometry=SEALED) == residual_bytes + block_bytes
    with pytest.raises(BudgetTooSmallError, match=r"512\.00 MiB for unsealed blocks of max_num_seqs = 256") as refused:
        budget(asked=residual_bytes + block_bytes - 1, geometry=SEALED)
    assert refused.value.missing_bytes == 1
    assert "max_model_len up to 8176; max_num_seqs up to 255; gpu_memory_utilization" in refused.value.remedy
    with pytest.raises(BudgetTooSmallError) as refused:
        budget(asked=residual_bytes, geometry=SEALED)
    assert "max_model_len" not in refused.value.remedy  # there is no room for a block of it


CARDS = st.builds(
    lambda total, free, share: CardBudget(total, int(total * free), share),
    st.integers(4 * GIB, 141 * GIB),
    st.floats(0.1, 1.0),
    st.floats(0.05, 1.0),
)
USES = st.builds(CardUse, st.integers(0, 100 * GIB), st.integers(0, 8 * GIB), st.integers(0, GIB))


CASES = st.fixed_dictionaries(
    {
        "asked": st.none() | st.integers(1, 140 * GIB) | st.integers(1, GIB),
        "num_seqs": st.integers(1, 2**14),
        "min_len": st.integers(2, 2**17),
        "max_len": st.just(2**17),
        "geometry": st.sampled_from([LLAMA_3_8B, SEALED]),
    }
)


@given(CARDS, USES, CASES)
def test_every_setting_that_a_refusal_names_works(card, use, case):
    try:
        given_bytes = budget(card, use, **case)
    except DoesNotFitError as refused:
        missing_bytes, remedy = refused.missing_bytes, refused.remedy
    else:
        geometry = case["geometry"]
        needed = geometry.num_blocks_for(case["min_len"]) * geometry.bytes_per_block
        needed += case["num_seqs"] * geometry.residual_bytes
        assert needed <= given_bytes
        assert given_bytes + use.num_bytes <= card.free_bytes
        return
    assert missing_bytes > 0
    shares = re.search(r"gpu_memory_utilization from ([\d.]+) to ([\d.]+)( without kv_cache_memory_bytes)?", remedy)
    assert not shares or (shares[3] is None) == (case["asked"] is None)
    for share in shares.groups()[:2] if shares else ():
        budget(CardBudget(card.total_bytes, card.free_bytes, float(share)), use, **case | {"asked": None})
    sizes = re.search(r"kv_cache_memory_bytes from (\d+) to (\d+)", remedy)
    for size in sizes.groups() if sizes else ():
        budget(card, use, **case | {"asked": int(size)})
    lengths = re.search(r"max_model_len up to (\d+)(?: with kv_cache_memory_bytes=(\d+))?", remedy)
    if lengths:
        size = int(lengths[2]) if lengths[2] else case["asked"]
        budget(card, use, **case | {"asked": size, "min_len": int(lengths[1])})
    seqs = re.search(r"max_num_seqs up to (\d+)", remedy)
    if seqs:
        budget(card, use, **case | {"num_seqs": int(seqs[1])})


def test_the_bound_covers_what_a_step_of_an_8b_model_holds():
    use = bound_use(weight_bytes=GIB, vocab_size=128256, row_bytes=200_000, num_tokens=8192, num_seqs=256)
    assert 1.5 * GIB < use.activation_bytes < 4 * GIB
