"""A model of transformers whose layers are of two cache groups: a tiny Gemma 3, beyond its windows, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from model_folders import SIZES, save_model

from pagefold.errors import UnsupportedModelError
from pagefold.kv import CODECS, KEEP_ALL, KeepRule, KVGeometry
from pagefold.runner.attention import AttentionInputs, GroupInputs, reference_attention
from pagefold.runner.codec_slab import CodecSlab
from pagefold.runner.codecs.constants import CodecConstants
from pagefold.runner.inputs import StepInputs
from pagefold.runner.loader import load_model
from pagefold.runner.slab import Slab
from pagefold.runner.transformers_decoder import TransformersDecoder

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from pagefold.runner.slab import AnySlab

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


PLACES = np.array([[[0, 1], [0, 1], [2, 3], [2, 3]]], np.int32)


def inputs_of(  # noqa: PLR0917 - the columns of a step
    start: int,
    end: int,
    tables: list[list[int]],
    firsts: list[int],
    rules: tuple[KeepRule, ...],
    cells: NDArray[np.int32] = PLACES,
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
    return StepInputs(
        token_ids=torch.tensor([PROMPT[start:end]]),
        positions=torch.arange(start, end)[None],
        logit_rows=torch.arange(end - start),
        samples=None,
        attention=AttentionInputs(np.array([0, end - start], np.int32), groups, (0, 1, 0, 1), cells),
    )


def run(
    decoder: TransformersDecoder, slab: AnySlab, chunks: list[int], cells: NDArray[np.int32]
) -> tuple[torch.Tensor, list[int]]:
    """Return the logits of the prompt, and which entries tables begin with at the end. What nobody sees is NaN."""
    free = list(range(NUM_BLOCKS))
    tables: list[list[int]] = [[], []]
    firsts, found, start = [0, 0], [], 0
    for num_tokens in chunks:
        end = start + num_tokens
        for group, rule in enumerate(RULES):
            while firsts[group] + BLOCK_SIZE <= rule.first_seen(start):
                slab.as_bytes()[tables[group].pop(0)] = 0xFF
                firsts[group] += BLOCK_SIZE
            while firsts[group] + len(tables[group]) * BLOCK_SIZE < end:
                tables[group].append(free.pop(0))
        found.append(decoder.logits(inputs_of(start, end, tables, firsts, RULES, cells)))
        start = end
    return torch.cat(found), firsts


@pytest.mark.parametrize("chunks", [[22], [7, 6, 1, 1, 1, 6], [1] * 22], ids=["whole", "chunks", "token by token"])
def test_logits_are_those_of_transformers(folder: Path, chunks: list[int]):
    """With blocks given back as soon as nobody sees them any more, and NaN in them from then on."""
    from transformers import AutoModelForCausalLM

    decoder, slab = make_decoder(folder)
    found, firsts = run(decoder, slab, chunks, PLACES)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    with torch.inference_mode():
        expected = plain(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (len(chunks) == 1) == (firsts[0] == 0), "blocks have left the window"


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head", "k8v4"])
def test_codes_of_a_layer_lie_in_blocks_of_its_group_and_have_its_constants(folder: Path, name: str):
    """Logits are those of blocks that hold all layers, of which none is ever given back, to the bit."""
    codec, num_cells = CODECS[name], 8
    generator = torch.Generator().manual_seed(3)
    centres = (torch.randn(num_cells, num, 8, generator=generator) for num in (1 + 2, 2))
    constants = CodecConstants(*centres, torch.linalg.qr(torch.randn(num_cells, 8, 8, generator=generator))[0])
    model, found = load_model(folder, torch.float64), {}
    keeps = RULES * 2
    for kept in ((), keeps):
        geometry = KVGeometry(4, 2, 8, 8, BLOCK_SIZE, codec, keeps=kept)
        slab = CodecSlab.allocate(geometry, NUM_BLOCKS, constants)
        slab.data.fill_(0xFF)
        decoder = TransformersDecoder(model, slab, reference_attention, max_model_len=64)
        cells = np.array([[[geometry.cell(layer, head) for head in range(2)] for layer in range(4)]], np.int32)
        if kept:
            found[kept], firsts = run(decoder, slab, [7, 6, 1, 1, 1, 6], cells)
            assert firsts[0] > 0
        else:
            whole = [*range(-(-len(PROMPT) // BLOCK_SIZE))]
            parts, start = [], 0
            for end in (7, 13, 14, 15, 16, 22):
                parts.append(decoder.logits(inputs_of(start, end, [whole, whole], [0, 0], RULES, cells)))
                start = end
            found[kept] = torch.cat(parts)
    assert not found[()].isnan().any()
    assert torch.equal(found[()], found[keeps])


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
