"""The fused decoder where older chunks are packed: a model under its mask, and the same bits whatever is beside it.

The twin is transformers' own model, which meets all keys and hides those that the mask hides, in float64.
"""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch

from equivalence.packed_kernel import TOKEN_CODECS
from equivalence.packing_house import PackingHouse, fit_thresholds, random_scorer, twin_logits
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.masks.rule import CHUNK, NUM_SINKS
from pagefold.masks.watched_model import WatchedModel
from pagefold.runner.keeping import Keeping

LOGITS_BOUND = 2e-4  # as in ``test_fused.py``
NUM_OUTPUTS = 12


def text(seed: int, length: int) -> list[int]:
    return Random(seed).choices(range(5, VOCAB_SIZE), k=length)


BASE = text(0, 1400)
PROMPTS = [BASE[:700], text(1, 513), BASE[:1030], text(2, 300), text(3, 767), BASE[:900] + text(4, 150)]


@pytest.fixture(scope="module")
def masked(tiny_folder):
    """Return, for a family and a share, the folder, by what is kept, and what the twin says of a text."""

    @cache
    def make(family: str, keep: float):
        folder = tiny_folder(family)
        model, scorer = WatchedModel(folder, torch.float64), random_scorer(folder)
        thresholds = fit_thresholds(model, scorer, PROMPTS, keep)
        keeping = Keeping(scorer.weights, (thresholds - scorer.biases)[None], NUM_SINKS)
        return folder, keeping, lambda tokens: twin_logits(model, scorer, thresholds, tokens)

    return make


def hold(house, request, twin):
    """Hold what a request sampled from to the twin."""
    expected = twin(list(request.token_ids)).float()
    for num_tokens, logits in house.logits[request.request_id].items():
        assert (logits - expected[num_tokens - 1]).abs().max() < LOGITS_BOUND


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_it_is_the_model_under_its_mask(masked, family, keep):
    folder, keeping, twin = masked(family, keep)
    house = PackingHouse(folder, keeping)
    for request in house.outputs(PROMPTS, NUM_OUTPUTS):
        assert len(house.logits[request.request_id]) == NUM_OUTPUTS
        hold(house, request, twin)


def bits(house, requests):
    """Return the logits that requests sampled from."""
    return [torch.stack([*house.logits[request.request_id].values()]) for request in requests]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma3", "float32")])
def test_bits_are_the_same_in_any_chunks_any_batch_and_warm_or_cold(masked, family, dtype):
    folder, keeping, _ = masked(family, 0.5)
    alone = []
    for prompt in PROMPTS:
        house = PackingHouse(folder, keeping, num_threads=1, caches_prefixes=False, dtype=dtype)
        alone += bits(house, house.outputs([prompt], NUM_OUTPUTS))
    for budget in (17, 300, 4096):
        house = PackingHouse(folder, keeping, max_num_batched_tokens=budget, dtype=dtype)
        for _ in range(2):  # cold, and then warm
            requests = house.outputs(PROMPTS, NUM_OUTPUTS)
            for own, expected in zip(bits(house, requests), alone, strict=True):
                assert torch.equal(own, expected)
        hits = [house.num_hit_tokens[request.request_id] for request in requests]
        assert [hit > 2 * CHUNK for hit in hits] == [len(prompt) > 2 * CHUNK + 16 for prompt in PROMPTS]


@pytest.mark.long  # the decoder is compiled for codes
@pytest.mark.parametrize("codec", TOKEN_CODECS)
def test_bits_of_codes_are_the_same_in_any_chunks_and_warm_or_cold(masked, codec):
    folder, keeping, _ = masked("llama", 0.5)
    alone = []
    for prompt in PROMPTS[:3]:
        house = PackingHouse(folder, keeping, num_threads=1, caches_prefixes=False, codec=codec)
        alone += bits(house, house.outputs([prompt], NUM_OUTPUTS))
    for budget in (90, 4096):
        house = PackingHouse(folder, keeping, max_num_batched_tokens=budget, codec=codec)
        for _ in range(2):  # cold, and then warm
            for own, expected in zip(bits(house, house.outputs(PROMPTS[:3], NUM_OUTPUTS)), alone, strict=True):
                assert torch.equal(own, expected)


def test_who_is_preempted_goes_on_with_what_was_packed(masked):
    folder, keeping, _ = masked("llama", 0.5)
    house = PackingHouse(folder, keeping, caches_prefixes=False)
    expected = bits(house, house.outputs(PROMPTS, 40))
    tight = PackingHouse(folder, keeping, num_blocks=150, max_num_batched_tokens=200)
    requests = tight.outputs(PROMPTS, 40)
    for request, own in zip(requests, expected, strict=True):
        assert torch.equal(torch.stack([*tight.logits[request.request_id].values()]), own)


def test_memory_is_given_back(masked):
    """A long sequence holds its two chunks whole, and of older ones about the share that is kept."""
    folder, keeping, _ = masked("llama", 0.5)
    house = PackingHouse(folder, keeping)
    request = house.add(BASE, 3)
    house.step()
    cache = request.cache
    num_chunks = len(BASE) // CHUNK - 1
    assert len(cache.chunks) == num_chunks
    kept = sum(int(chunk.counts.sum()) for chunk in cache.chunks)
    whole = num_chunks * CHUNK * house.geometry.num_cells
    assert 0.4 < kept / whole < 0.6
    assert cache.num_packed_blocks < 0.65 * num_chunks * CHUNK / 16
    assert len(cache.only_table.block_ids) <= 2 * CHUNK // 16 + 2
