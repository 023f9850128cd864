"""A model of transformers whose layers are of two cache groups: a tiny Gemma 3, beyond its windows, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from model_folders import SIZES, save_model

from pagefold.errors import UnsupportedModelError
from pagefold.kv import KEEP_ALL, KeepRule, KVGeometry
from pagefold.runner.attention import AttentionInputs, GroupInputs, reference_attention
from pagefold.runner.inputs import StepInputs
from pagefold.runner.loader import load_model
from pagefold.runner.slab import Slab
from pagefold.runner.transformers_decoder import TransformersDecoder

if TYPE_CHECKING:
    from pathlib import Path

WINDOW, BLOCK_SIZE, NUM_BLOCKS = 5, 4, 30
LAYERS = ["sliding_attention", "full_attention"] * 2
PROMPT = [5, 9, 11, 23, 40, 3, 17, 8, 61, 33, 2, 7, 12, 50, 44, 30, 1, 19, 28, 54, 6, 21]
RULES = KeepRule(WINDOW), KEEP_ALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = SIZES | {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": LAYERS}
    return save_model(tmp_path_factory.mktemp("gemma3"), "Gemma3TextConfig", sizes)


def make_decoder(folder: Path) -> tuple[TransformersDecoder, Slab]:
    slab = Slab.allocate(KVGeometry(2, 2, 8, 8, BLOCK_SIZE), NUM_BLOCKS, torch.float64)
    slab.data.fill_(float("nan"))
    return TransformersDecoder(load_model(folder, torch.float64), slab, reference_attention, max_model_len=64), slab


def inputs_of(
    start: int, end: int, tables: list[list[int]], firsts: list[int], rules: tuple[KeepRule, ...]
) -> StepInputs:
    """Return a step that computes ``PROMPT[start:end]``, and wants the logits of all of it."""
    groups = tuple(
        GroupInputs(
            np.broadcast_to(np.array(table, np.int32), (1, 2, len(table))),
            np.full((1, 2), end, np.int32),
            np.array([first], np.int32),
            rule,
        )
        for table, first, rule in zip(tables, firsts, rules, strict=True)
    )
    cells = np.array([[[0, 1], [0, 1], [2, 3], [2, 3]]], np.int32)
    return StepInputs(
        token_ids=torch.tensor([PROMPT[start:end]]),
        positions=torch.arange(start, end)[None],
        logit_rows=torch.arange(end - start),
        samples=None,
        attention=AttentionInputs(np.array([0, end - start], np.int32), groups, (0, 1, 0, 1), cells),
    )


@pytest.mark.parametrize("chunks", [[22], [7, 6, 1, 1, 1, 6], [1] * 22], ids=["whole", "chunks", "token by token"])
def test_logits_are_those_of_transformers(folder: Path, chunks: list[int]):
    """With blocks given back as soon as nobody sees them any more, and NaN in them from then on."""
    from transformers import AutoModelForCausalLM

    decoder, slab = make_decoder(folder)
    free = list(range(NUM_BLOCKS))
    tables: list[list[int]] = [[], []]
    firsts, found, start = [0, 0], [], 0
    for num_tokens in chunks:
        end = start + num_tokens
        for group, rule in enumerate(RULES):
            while firsts[group] + BLOCK_SIZE <= rule.first_seen(start):
                slab.data[tables[group].pop(0)] = float("nan")
                firsts[group] += BLOCK_SIZE
            while firsts[group] + len(tables[group]) * BLOCK_SIZE < end:
                tables[group].append(free.pop(0))
        found.append(decoder.logits(inputs_of(start, end, tables, firsts, RULES)))
        start = end
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    with torch.inference_mode():
        expected = plain(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-9, atol=1e-9)
    assert (len(chunks) == 1) == (firsts[0] == 0), "blocks have left the window"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((KeepRule(WINDOW + 1), KEEP_ALL), "asks for sliding_window=5, where the cache keeps a window of 6"),
        ((KeepRule(WINDOW), KeepRule(7)), "asks for sliding_window=None, where the cache keeps a window of 7"),
        ((KEEP_ALL, KEEP_ALL), "asks for sliding_window=5, where the cache keeps all of up to 64 tokens"),
    ],
    ids=str,
)
def test_a_layer_that_sees_what_its_group_does_not_keep_is_refused(
    folder: Path, rules: tuple[KeepRule, ...], message: str
):
    decoder, _ = make_decoder(folder)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        decoder.logits(inputs_of(0, 3, [[0], [1]], [0, 0], rules))
    assert refused.value.remedy
