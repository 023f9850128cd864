"""Quantized folders that are damaged: what lacks, lies or contradicts itself is said before weights are loaded."""

from __future__ import annotations

import json

import pytest
import torch
from quantized_folders import FORMATS, save_quantized
from safetensors.torch import load_file, save_file

from pagefold.errors import PagefoldError, UnsupportedModelError
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.loader import load_model
from pagefold.runner.models import inspect_model

MODULE = "model.layers.1.mlp.down_proj"  # [64, 96]
NUMBERS = torch.zeros(3, 5)


@pytest.fixture
def damaged(tmp_path):
    def make(name, changes):
        folder = save_quantized(tmp_path, *FORMATS[name]()).quantized
        tensors = load_file(folder / "model.safetensors")
        for part, new in changes.items():
            old = tensors.pop(f"{MODULE}.{part}", None)
            written = new(old) if callable(new) else new
            if written is not None:
                tensors[f"{MODULE}.{part}"] = written.contiguous()
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def halved(tensor):
    return tensor[: len(tensor) // 2]


BY_HEADERS = {
    "no scales": ("gptq", {"scales": None}, r"down_proj\.scales is not there"),
    "no zero points": ("gptq", {"qzeros": None}, r"down_proj\.qzeros is not there"),
    "no order": ("gptq in order of activations", {"g_idx": None}, r"down_proj\.g_idx is not there"),
    "an order of fewer columns": ("gptq", {"g_idx": halved}, r"g_idx is of shape \[48\], where it must be of \[96\]"),
    "an order in floats": ("gptq", {"g_idx": lambda one: one.float()}, "g_idx is of F32"),
    "codes of half the columns": ("gptq", {"qweight": halved}, r"scales is of shape \[3, 64\].* \[2, 64\]"),
    "codes that are no words": ("gptq", {"qweight": lambda one: one.to(torch.int16)}, "qweight is of I16"),
    "codes that are no matrix": ("gptq", {"qweight": lambda one: one.flatten()}, "and no matrix"),
    "no codes": ("awq", {"qweight": lambda one: one[:0]}, "and no matrix"),
    "scales of half the groups": ("awq", {"scales": lambda one: one[:1]}, r"scales is of shape \[1, 64\]"),
    "scales in whole numbers": ("awq", {"scales": lambda one: one.to(torch.int32)}, "scales is of I32"),
    "zero points of half the rows": ("awq", {"qzeros": lambda one: one[:, :4]}, r"qzeros is of shape \[3, 4\]"),
    "groups that do not divide": ("awq in groups of 16", {"qweight": lambda one: one[:90]}, "of 16 do not divide"),
    "no packed scales": ("W4A16", {"weight_scale": None}, r"weight_scale is not there"),
    "packed scales of fewer groups": ("W4A16", {"weight_scale": lambda one: one[:, :2]}, "for 64 columns"),
    "packed scales that are no matrix": ("W4A16", {"weight_scale": lambda one: one.flatten()}, "for 0 columns"),
    "no packed zero points": ("W4A16 with zero points", {"weight_zero_point": None}, "weight_zero_point is not there"),
    "packed zero points of fewer rows": (
        "W4A16 with zero points", {"weight_zero_point": halved}, r"weight_zero_point is of shape \[4, 3\]",
    ),
    "no packed order": ("W4A16 in order of activations", {"weight_g_idx": None}, "weight_g_idx is not there"),
    "a shape of one number": ("W4A16", {"weight_shape": torch.tensor([64])}, "weight_shape is of shape"),
    "no scales of rows": ("W8A8", {"weight_scale": None}, "weight_scale is not there"),
    "scales of fewer rows": ("W8A8", {"weight_scale": halved}, r"weight_scale is of shape \[32, 1\]"),
    "codes of another type": ("W8A8", {"weight": lambda one: one.to(torch.float8_e4m3fn)}, "is of F8_E4M3"),
    "codes that nobody defines": ("W8A8", {"weight": lambda one: one.to(torch.uint8)}, "is of U8"),
    "no scales of blocks": ("native fp8", {"weight_scale_inv": None}, "weight_scale_inv is not there"),
    "scales of other blocks": (
        "native fp8 in small blocks", {"weight_scale_inv": lambda one: one[:, :2]}, r"weight_scale_inv is of shape",
    ),
    "e5m2": ("native fp8", {"weight": lambda one: one.to(torch.float8_e5m2)}, "is of F8_E5M2"),
    "scales of activations": ("awq", {"act.scales": NUMBERS}, r"with scales of activations .*down_proj\.act\.scales"),
}  # fmt: skip
BY_NUMBERS = {
    "a group that is not there": ("gptq", {"g_idx": lambda one: one + 1}, "has group 3, and there are 3"),
    "a group below all": ("gptq", {"g_idx": lambda one: one - 1}, "has group -1, and there are 3"),
    "another shape": ("W4A16", {"weight_shape": torch.tensor([64, 64])}, r"says \[64, 64\]"),
    "a shape of more rows": ("W4A16 in channels", {"weight_shape": torch.tensor([65, 96])}, r"says \[65, 96\]"),
    "a shape below nothing": ("W4A16 in channels", {"weight_shape": torch.tensor([-64, -96])}, r"says \[-64, -96\]"),
    "a shape within the last word": ("W4A16", {"weight_shape": torch.tensor([64, 95])}, "95"),
}


@pytest.mark.parametrize("kind", BY_HEADERS)
def test_it_is_said_from_headers(kind, damaged):
    name, changes, message = BY_HEADERS[kind]
    folder = damaged(name, changes)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        inspect_model(folder)
    assert error.value.remedy


@pytest.mark.parametrize("kind", BY_NUMBERS)
def test_it_is_said_when_it_is_read(kind, damaged):
    name, changes, message = BY_NUMBERS[kind]
    folder = damaged(name, changes)
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(folder).tensor(f"{MODULE}.weight")
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint(folder).stored(f"{MODULE}.weight")
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder, torch.float32)


def test_weights_of_another_shape_than_the_configs(damaged):
    folder = damaged("gptq", {"qweight": lambda one: one[:, :56], "scales": lambda one: one[:, :56],
                              "qzeros": lambda one: one[:, :7]})  # fmt: skip
    assert inspect_model(folder)
    with pytest.raises(UnsupportedModelError, match=r"of shape \[56, 96\], where its config asks for \[64, 96\]"):
        Checkpoint(folder).check({f"{MODULE}.weight": (64, 96)})


def test_a_bias_that_the_model_has_not(damaged):
    """AutoGPTQ writes biases of zeros for every model; one that is not zero would be left out without a word."""
    folder = damaged("gptq", {"bias": torch.zeros(64)})
    Checkpoint(folder).check({f"{MODULE}.weight": (64, 96)})
    assert load_model(folder, torch.float32)


def test_a_bias_that_is_not_zero_is_refused(damaged):
    folder = damaged("gptq", {"bias": torch.ones(64)})
    with pytest.raises(UnsupportedModelError, match=r"has .*down_proj\.bias, a bias that is not zero"):
        Checkpoint(folder).check({f"{MODULE}.weight": (64, 96)})
    Checkpoint(folder).check({f"{MODULE}.weight": (64, 96), f"{MODULE}.bias": (64,)})
    with pytest.raises(UnsupportedModelError, match=r"has .*down_proj\.bias, a bias that is not zero"):
        load_model(folder, torch.float32)


def test_quantized_weights_that_the_config_ignores(damaged):
    folder = damaged("W4A16", {})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = [MODULE]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="down_proj has quantized weights, and the config's ignore has it"):
        inspect_model(folder)
    config["quantization_config"] |= {"ignore": []}
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="has quantized weights, and no group of the config is for it"):
        inspect_model(folder)


def test_pickled_quantized_weights_are_refused(damaged):
    folder = damaged("gptq", {})
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"quantized weights in pytorch_model\.bin") as error:
        inspect_model(folder)
    assert "safetensors" in error.value.remedy


@pytest.mark.parametrize("shape", ["[-1, 2]", "null", '["a"]', "[1.5, 2]"])
def test_headers_that_lie_about_shapes(shape, tmp_path):
    from runner.model_folders import SIZES, save_config

    folder = save_config(tmp_path, "LlamaConfig", SIZES, quantization_config={"quant_method": "gptq", "bits": 4})
    header = b'{"a.qweight": {"dtype": "I32", "shape": %s, "data_offsets": [0, 8]}}' % shape.encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(PagefoldError, match=r"says that a\.qweight is of shape"):
        inspect_model(folder)
