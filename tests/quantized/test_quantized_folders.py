"""Quantized folders are the models that they stand for: to the bit those of a plain folder with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantized_folders import FORMATS, MATRICES, gptq, packed, save_quantized, whole

from pagefold.plan.weights import count_parameters
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.fused.formats import decoder_formats
from pagefold.runner.fused.weights import pack_model
from pagefold.runner.loader import load_model
from pagefold.runner.models import inspect_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = save_quantized(tmp_path_factory.mktemp("model"), *FORMATS[name]())
        return made[name]

    return make


def pack(folder, dtype="float32", quantization=None):
    config = inspect_model(folder).fused
    assert config is not None
    return pack_model(config, folder, 32, decoder_formats(dtype, quantization))


def numbers_of(packed):
    """All that was packed: what is no matrix, and panels."""
    numbers = [one for one in packed.weights if isinstance(one, np.ndarray) and one.dtype == np.float32]
    panels = [part for layer in packed.layers for matrix in layer for part in matrix]
    return numbers + panels + packed.head + packed.embedding


def packs_alike(folder, other, *formats):
    pairs = zip(*(numbers_of(pack(each, *formats)) for each in (folder, other)), strict=True)
    return all(np.array_equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_those_of_the_format(name, folders):
    found = folders(name)
    checkpoint = Checkpoint(found.quantized)
    assert len(found.matrices) == 2 * len(MATRICES)
    for each, coded in found.matrices.items():
        assert each in checkpoint
        assert np.array_equal(checkpoint.tensor(each).numpy(), coded.weights), each
        assert (coded.weights != 0).mean() > 0.9


@pytest.mark.parametrize("name", ["gptq", "awq", "W4A16 in channels", "fp8 in blocks"])
def test_the_fused_decoder_has_the_model_of_a_plain_folder(name, folders):
    quantized, plain, _ = folders(name)
    assert packs_alike(quantized, plain)


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_has_as_many_parameters_as_a_plain_one(name, folders):
    quantized, plain, _ = folders(name)
    found, expected = inspect_model(quantized), inspect_model(plain)
    assert found.num_parameters == expected.num_parameters == count_parameters(quantized)
    assert found.fused == expected.fused
    assert found.fingerprint != expected.fingerprint


@pytest.mark.parametrize("formats", [("bfloat16",), ("float32", "int8")])
def test_so_it_has_in_every_number_format(formats, folders):
    quantized, plain, _ = folders("gptq")
    assert packs_alike(quantized, plain, *formats)


@pytest.mark.parametrize("name", ["gptq in order of activations", "awq", "W4A16 with zero points", "native fp8"])
def test_transformers_gets_the_model_of_a_plain_folder(name, folders):
    quantized, plain, _ = folders(name)
    ours, theirs = (load_model(folder, torch.float32).state_dict() for folder in (quantized, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[each], theirs[each]) for each in ours)


def test_experts_are_dequantized_one_by_one(tmp_path):
    """Folders have a matrix for each expert, which transformers puts together."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    quantized, plain, matrices = save_quantized(tmp_path, *gptq(), family="Qwen3MoeConfig", sizes=sizes)
    assert sum(".experts." in name for name in matrices) == 2 * 4 * 3
    ours, theirs = (load_model(folder, torch.float32).state_dict() for folder in (quantized, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[each], theirs[each]) for each in ours)


@pytest.mark.parametrize(
    ("family", "method"), [("Qwen2Config", gptq), ("Qwen3Config", packed), ("MistralConfig", whole)]
)
def test_families_with_biases_and_head_norms(family, method, tmp_path):
    quantized, plain, _ = save_quantized(tmp_path, *method(), family=family)
    assert packs_alike(quantized, plain)


def test_a_quantized_head_and_embedding(tmp_path):
    config, make = packed()
    config["ignore"] = []
    config["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    found = save_quantized(tmp_path, config, make, is_right=lambda _: True)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= found.matrices.keys()
    assert packs_alike(found.quantized, found.plain)


def test_a_model_saved_without_its_head_has_shorter_names(tmp_path):
    from safetensors.torch import load_file, save_file

    quantized, plain, _ = save_quantized(tmp_path, *gptq(), sizes={"tie_word_embeddings": True})
    tensors = load_file(quantized / "model.safetensors")
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, quantized / "model.safetensors")
    assert packs_alike(quantized, plain)


def test_modules_that_are_left_as_they_are(tmp_path):
    def is_right(module):
        return module.rpartition(".")[2] in MATRICES and ".0." in module

    quantized, plain, matrices = save_quantized(tmp_path, *gptq(), is_right=is_right)
    assert len(matrices) == len(MATRICES)
    assert packs_alike(quantized, plain)


def test_schemes_are_found_by_name_then_expression_then_class(tmp_path):
    from quantized_folders import scheme

    makers = {"q": packed(8, 32, seed=1), "k": packed(4, 16, seed=2), "others": packed(4, 32, seed=3)}
    groups = {key: one[0]["config_groups"]["group_0"] for key, one in makers.items()}
    groups["others"]["targets"] = ["Linear"]
    groups["q"]["targets"] = ["re:.*q_proj$"]
    groups["k"]["targets"] = ["model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.q_proj"]
    config = scheme(format="pack-quantized") | {"config_groups": {key: groups[key] for key in ("others", "q", "k")}}

    def make(module, shape):
        is_q = module.endswith("q_proj") and ".0." in module
        key = "q" if is_q else "k" if module in groups["k"]["targets"] else "others"
        return makers[key][1](module, shape)

    found = save_quantized(tmp_path, config, make)
    assert packs_alike(found.quantized, found.plain)


def test_a_last_word_that_is_not_full(tmp_path):
    """36 columns of 4 bit are four and a half words."""
    quantized, plain, _ = save_quantized(tmp_path, *packed(size=-1), sizes={"intermediate_size": 36})
    assert packs_alike(quantized, plain)


def test_rows_are_unpacked_some_at_a_time(folders, monkeypatch):
    for name in ("gptq in order of activations", "awq", "W4A16 with zero points", "native fp8 in small blocks"):
        found = folders(name)
        whole_ = {each: Checkpoint(found.quantized).tensor(each) for each in found.matrices}
        with monkeypatch.context() as few:
            few.setattr("pagefold.quantized.codes._ELEMENTS_AT_ONCE", 1)  # 32 rows
            checkpoint = Checkpoint(found.quantized)
            assert all(torch.equal(checkpoint.tensor(each), one) for each, one in whole_.items())


def test_zero_points_are_counted_within_their_bits(tmp_path):
    """v1 stores 0 as 15: less 1, in 4 bit."""
    config, make = gptq(zero=0)
    found = save_quantized(tmp_path, config, make)
    assert Checkpoint(found.quantized)._read("model.layers.0.self_attn.q_proj.qzeros").unique().tolist() == [-1]
    assert packs_alike(found.quantized, found.plain)
