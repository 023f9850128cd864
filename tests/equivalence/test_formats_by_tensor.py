"""Tensors of one model in several formats, as quantized files have them: near the model of the same rounded numbers.

And the same to the bit in any company, also where some matrices are multiplied with rows in a format of their own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from equivalence.test_fused import LOGITS_BOUND, _engine, _plan, _round_to_int8
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.kernels.floats import Floats, Int8Weights
from pagefold.kernels.formats import PANEL_WIDTH
from pagefold.kernels.pairs import bfloat16_pairs
from pagefold.kernels.quads import int8_quads
from pagefold.runner.fused import formats as fused_formats
from pagefold.runner.fused.formats import EMBEDDING, HEAD, DecoderFormats
from pagefold.runner.fused.matrices import SCORERS, Room, layers_of, vocabulary_of
from pagefold.runner.models import inspect_model

if TYPE_CHECKING:
    from pagefold.runner.fused.families import FusedConfig

PRODUCTS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


def names_of(config: FusedConfig) -> list[str]:
    return [
        tensor.name
        for layer in layers_of(config, DecoderFormats(Floats(), Floats()))
        for matrix in layer
        for part in matrix.parts
        for tensor in part.tensors
    ]


def served(monkeypatch, folder, stored, **settings):
    """A runner of an engine some of whose tensors are in formats of their own."""
    formats = DecoderFormats(Floats(), Floats(), stored)
    monkeypatch.setattr(fused_formats, "decoder_formats", lambda *_asked: formats)
    return _engine(folder, **settings).runner


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_near_those_of_a_model_some_of_whose_weights_are_rounded(monkeypatch, family, every, tiny_folder):
    folder = tiny_folder(family)
    config = inspect_model(folder).fused
    stored = {name: Int8Weights() for name in [*names_of(config)[::every], HEAD]}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.clone()
    for name, module in model.named_modules():
        if f"{name}.weight" in stored:
            module.weight = torch.nn.Parameter(_round_to_int8(module.weight.data), requires_grad=False)
    if not config.is_tied:
        assert torch.equal(model.get_input_embeddings().weight, embedding)
    model = model.double().eval()
    runner = served(monkeypatch, folder, stored)
    random = Random(11)
    sequences = [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 15, 33, 300)]
    blocks = [range(50 * at, 50 * at + 50) for at in range(len(sequences))]
    told = runner.logits(_plan([(ids, 0, own) for ids, own in zip(sequences, blocks, strict=True)]))
    for at, ids in enumerate(sequences):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0, -1]
        assert (told[at].double() - expected).abs().max() < LOGITS_BOUND


@pytest.mark.parametrize("first", range(3))
def test_logits_are_the_same_to_the_bit_in_any_company(monkeypatch, first, tiny_folder):
    """Rows are floats for one matrix, pairs or quads for the next, in another order in each layer."""
    folder = tiny_folder("llama")
    order = [Floats(), bfloat16_pairs(), int8_quads()]
    config = inspect_model(folder).fused
    stored = {}
    for layer, matrices in enumerate(layers_of(config, DecoderFormats(Floats(), Floats()))):
        forms = cycle(order[(first + layer) % 3 :] + order[: (first + layer) % 3])
        matrices_of_form = [[matrices.qkv], [matrices.out], [matrices.gate, matrices.up], [matrices.down]]
        for together, form in zip(matrices_of_form, forms, strict=False):
            stored |= {one.name: form for matrix in together for part in matrix.parts for one in part.tensors}
    stored[HEAD] = order[first]
    random = Random(5)
    sequences = [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 20, 100, 300)]
    own = [range(30 * at, 30 * at + 30) for at in range(len(sequences))]
    told = []
    for threads in (1, 2):
        runner = served(monkeypatch, folder, stored, threads=threads)
        told.append([runner.logits(_plan([(ids, 0, range(30))]))[0].clone() for ids in sequences])
        together = _plan([(ids, 0, blocks) for ids, blocks in zip(sequences, own, strict=True)])
        told.append(list(runner.logits(together).clone()))
    for each in zip(*told, strict=True):
        assert all(torch.equal(each[0], one) for one in each)
    plain = served(monkeypatch, folder, {}).logits(_plan([(sequences[1], 0, range(30))]))[0]
    assert not torch.equal(plain, told[0][1]), "other formats, other bits"
    assert (plain - told[0][1]).abs().max() < plain.abs().max(), "and nothing else"


@pytest.fixture
def config(tiny_folder) -> FusedConfig:
    """One layer of a model with two panels of q, and one of k and v each."""
    found = inspect_model(tiny_folder("llama")).fused
    assert found is not None
    return replace(found, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=PANEL_WIDTH, hidden_size=64)


def forms_of(matrix) -> list[tuple[str, int]]:
    return [(part.form.name, sum(one.num_rows for one in part.tensors)) for part in matrix.parts]


def stored_as(config, **forms) -> DecoderFormats:
    """Formats of the first layer's tensors, by the last part of their names."""
    names = names_of(config)[: len(PRODUCTS)]
    return DecoderFormats(
        Floats(), Floats(), {name: forms[one] for one, name in zip(PRODUCTS, names, strict=True) if one in forms}
    )


def test_parts_side_by_side_have_whole_panels_of_their_own(config):
    assert [name.split(".")[-2] for name in names_of(config)] == list(PRODUCTS)
    first, second = layers_of(replace(config, num_layers=2), stored_as(config, v_proj=Int8Weights()))
    assert forms_of(first.qkv) == [("float32", 3 * PANEL_WIDTH), ("int8", PANEL_WIDTH)]
    assert forms_of(second.qkv) == [("float32", 4 * PANEL_WIDTH)]
    assert first.qkv.num_panels == second.qkv.num_panels == 4
    assert first.qkv.num_bytes < second.qkv.num_bytes


def test_what_would_share_a_panel_is_computed_in_the_models_format(config):
    (layer,) = layers_of(replace(config, head_dim=PANEL_WIDTH // 2), stored_as(config, v_proj=Int8Weights()))
    assert forms_of(layer.qkv) == [("float32", 2 * PANEL_WIDTH)]


def test_what_is_multiplied_with_other_rows_is_computed_in_the_models_format(config):
    (layer,) = layers_of(config, stored_as(config, v_proj=int8_quads()))
    assert forms_of(layer.qkv) == [("float32", 4 * PANEL_WIDTH)]
    (layer,) = layers_of(config, stored_as(config, **dict.fromkeys(PRODUCTS[:3], int8_quads())))
    assert forms_of(layer.qkv) == [("w8a8_int8", 4 * PANEL_WIDTH)]


def test_gate_and_up_share_rows(config):
    (layer,) = layers_of(config, stored_as(config, gate_proj=int8_quads()))
    assert {part.form.name for matrix in (layer.gate, layer.up) for part in matrix.parts} == {"float32"}
    (layer,) = layers_of(config, stored_as(config, gate_proj=Int8Weights()))
    assert [forms_of(one)[0][0] for one in (layer.gate, layer.up)] == ["int8", "float32"]


def test_scorers_are_in_the_models_format_behind_whole_panels(config):
    forms = dict.fromkeys(PRODUCTS, Int8Weights())
    (layer,) = layers_of(config, stored_as(config, **forms), num_scores=2)
    assert forms_of(layer.qkv) == [("int8", 4 * PANEL_WIDTH), ("float32", 2)]
    assert layer.qkv.parts[-1].tensors[0].name == SCORERS


def test_a_room_has_place_for_each_matrix_and_no_two_share_a_cache_line(config):
    matrices = [matrix for layer in layers_of(config, DecoderFormats(Floats(), Floats())) for matrix in layer]
    head, embedding = vocabulary_of(config, DecoderFormats(Int8Weights(), Floats()), head=HEAD, embedding=EMBEDDING)
    room = Room([*matrices, head, embedding])
    taken = [part for matrix in (*matrices, head, embedding) for part in room.take(matrix)]
    places = sorted((part.ctypes.data, part.nbytes) for part in taken)
    assert all(start % 64 == 0 for start, _ in places)
    assert all(start + num_bytes <= behind for (start, num_bytes), (behind, _) in pairwise(places))
    assert all(part.shape[0] * part.shape[1] == part.nbytes and not part.any() for part in taken)
