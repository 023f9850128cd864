"""Weights out of a folder's files, as transformers would find them; what is not there or not whole is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers
from model_folders import SIZES, save_model
from safetensors.torch import load_file, save_file

from pagefold.errors import UnsupportedModelError
from pagefold.kernels.floats import Floats
from pagefold.kernels.formats import pack as packed
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.fused.formats import decoder_formats
from pagefold.runner.fused.weights import PackedModel, pack_model
from pagefold.runner.models import inspect_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "LlamaConfig", SIZES)


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def pack(folder: Path):
    config = inspect_model(folder).fused
    assert config is not None
    return pack_model(config, folder, 32, decoder_formats("float32", None))


def numbers_of(packed: PackedModel) -> list[np.ndarray]:
    """All that was packed: what is no matrix, and panels."""
    numbers = [one for one in packed.weights if isinstance(one, np.ndarray) and one.dtype == np.float32]
    panels = [part for layer in packed.layers for matrix in layer for part in matrix]
    return numbers + panels + packed.head + packed.embedding


def packs_alike(folder: Path, other: Path) -> bool:
    pairs = zip(numbers_of(pack(folder)), numbers_of(pack(other)), strict=True)
    return all(np.array_equal(one, two) for one, two in pairs)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_tensors_are_float32_whatever_was_saved(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    expected = tensors_of(folder)[name]
    assert expected.dtype == torch.float64
    assert torch.equal(Checkpoint(folder).tensor(name), expected.float())
    rewrite(folder, {one: tensor.bfloat16() for one, tensor in tensors_of(folder).items()})
    assert torch.equal(Checkpoint(folder).tensor(name), expected.bfloat16().float())


def test_parts_are_put_together(saved, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert packs_alike(saved, tmp_path)


def test_pickled_weights_are_read(saved, folder):
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert packs_alike(saved, folder)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert packs_alike(saved, folder)


def test_pickled_parts_are_put_together(saved, folder):
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    parts: dict[str, dict[str, torch.Tensor]] = {"pytorch_model-1.bin": {}, "pytorch_model-2.bin": {}}
    for at, name in enumerate(sorted(tensors)):
        parts[f"pytorch_model-{at % 2 + 1}.bin"][name] = tensors[name]
    for file, part in parts.items():
        torch.save(part, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert packs_alike(saved, folder)


def test_what_else_lies_there_is_left_alone(saved, folder):
    rewrite(folder, tensors_of(folder) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    (folder / "consolidated.safetensors").write_bytes(b"of another program")
    config = inspect_model(saved).fused
    assert config is not None
    found = pack_model(config, folder, 32, decoder_formats("float32", None))
    assert np.array_equal(found.layers[0].qkv[0], pack(saved).layers[0].qkv[0])


def tied(folder: Path) -> Path:
    """Say in the config that embedding and head are one matrix."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


def test_a_model_saved_without_its_head_has_shorter_names(folder, tmp_path):
    tensors = {name: one for name, one in tensors_of(tied(folder)).items() if name != "lm_head.weight"}
    rewrite(folder, tensors)
    short = shutil.copytree(folder, tmp_path / "short")
    rewrite(short, {name.removeprefix("model."): one for name, one in tensors.items()})
    assert packs_alike(folder, short)


@pytest.mark.parametrize("which", ["head", "embedding", "both", "two"])
def test_a_tied_head_is_found_wherever_it_is(folder, which):
    """Against transformers: with two different matrices the files are right, not the config."""
    tensors = tensors_of(tied(folder))
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if which == "both":
        tensors[head] = tensors[embedding]
    if which in ("head", "embedding"):
        del tensors[embedding if which == "head" else head]
    rewrite(folder, tensors)
    found = pack(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (found.embedding is found.head) == (which != "two")
    assert np.array_equal(found.head[0], packed(Floats(), model.lm_head.weight.detach().numpy()))
    assert np.array_equal(found.embedding[0], packed(Floats(), model.model.embed_tokens.weight.detach().numpy()))


def refusal(folder: Path) -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as refused:
        pack(folder)
    assert refused.value.remedy
    assert str(folder) in refused.value.message
    return refused.value


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"num_hidden_layers": 3}, "lacks 9 of the tensors that its config asks for, such as model.layers.2"),
        ({"intermediate_size": 56}, "has model.layers.0.mlp.down_proj.weight of shape [32, 48], where"),
        ({"vocab_size": 80}, "has lm_head.weight of shape [64, 32], where its config asks for [80, 32]"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "lacks 4 of the tensors"),
    ],
    ids=str,
)
def test_weights_that_are_not_the_configs_are_refused(folder, field, says):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | field))
    assert says in refusal(folder).message


def test_without_any_of_a_tied_matrix_both_lack(folder):
    tensors = tensors_of(tied(folder))
    rewrite(folder, {name: one for name, one in tensors.items() if "embed" not in name and "lm_head" not in name})
    assert "lacks 2 of the tensors" in refusal(folder).message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"<html>404</html>", b"\x80\x02."])
def test_a_pickle_that_is_none_is_refused(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin cannot be read" in refusal(folder).message


class Program:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_pickle_that_is_a_program_is_not_run(folder, capsys):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Program()}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin cannot be read" in refusal(folder).message
    assert capsys.readouterr().out == ""
