"""How much attention keys get, against transformers' own weights of one long sequence."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model

from pagefold.masks.attention_got import RECITED_AT_ONCE, attention_got, num_positions_for, recitals
from pagefold.masks.rule import CHUNK, NUM_SINKS, concerned_from
from pagefold.masks.watched_model import WatchedModel
from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH = 3 * CHUNK + 70


def _weights(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return all weights, ``[L, H, T, T]``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.cat(model(torch.tensor([token_ids]), output_attentions=True, use_cache=False).attentions)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-mqa"])
def test_it_is_the_largest_weight_of_those_who_count(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path / "model", seed=1)
    model = WatchedModel(folder, torch.float64)
    token_ids, *recited = (random.choices(range(100, VOCAB_SIZE), k=num) for num in (_LENGTH, 90, 300))
    got = attention_got(model, token_ids, recited)
    num_kv_heads = model.spec.num_kv_heads

    def by_kv_head(weights: torch.Tensor) -> torch.Tensor:
        return weights.unflatten(1, (num_kv_heads, -1)).amax(2)

    behind = [by_kv_head(_weights(folder, token_ids + own))[:, :, _LENGTH:, :_LENGTH].amax(2) for own in recited]
    torch.testing.assert_close(got.recited.double(), torch.maximum(*behind), atol=1e-6, rtol=1e-4)
    whole = by_kv_head(_weights(folder, token_ids))
    for key in range(NUM_SINKS, _LENGTH):
        queries = whole[:, :, concerned_from(key) :, key]
        twin = queries.amax(2) if queries.shape[2] else torch.zeros(queries.shape[:2], dtype=torch.float64)
        torch.testing.assert_close(got.natural[:, :, key].double(), twin, atol=1e-6, rtol=1e-4)
    assert torch.equal(got.largest, torch.maximum(got.natural, got.recited))
    assert [hidden.shape for hidden in got.hidden] == [(_LENGTH, 64)] * 2


def test_recitals_ask_for_all_of_a_context_and_fit(tiny_chat_model: Path) -> None:
    tokenizer = Tokenizer(tiny_chat_model)
    token_ids = tokenizer.encode_rendered("The ship went over the sea, and nobody saw it again. " * 200)[:1300]
    found = recitals(token_ids, tokenizer)
    lengths = [RECITED_AT_ONCE, RECITED_AT_ONCE, 1300 - 2 * RECITED_AT_ONCE]
    assert [own[-num:] for own, num in zip(found, lengths, strict=True)] == [
        token_ids[:512], token_ids[512:1024], token_ids[1024:],
    ]  # fmt: skip
    assert "Repeat the previous context" in tokenizer.decode(found[0])
    leading = tokenizer.decode(token_ids[504:512])
    assert repr(leading) in tokenizer.decode(found[1])
    assert all(1300 + len(own) <= num_positions_for(1300) for own in found)
