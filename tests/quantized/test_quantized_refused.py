"""What of quantized folders is not computed is refused by name, from the config, before any weight is read."""

from __future__ import annotations

import pytest
from quantized_folders import scheme
from runner.model_folders import SIZES, save_config

from pagefold.errors import UnsupportedModelError
from pagefold.quantized import METHODS, read_quantization
from pagefold.runner.models import inspect_model

GPTQ, AWQ, FP8 = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}
W4 = {"format": "pack-quantized", "num_bits": 4, "strategy": "group", "group_size": 32}

REFUSED = {
    "a method that nobody knows": ({"quant_method": "magic"}, "by magic"),
    "no method": ({"bits": 4}, "by a method that it does not name"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by bitsandbytes"),
    "marlin": ({"quant_method": "marlin"}, "by marlin"),
    "mxfp4": ({"quant_method": "mxfp4"}, "by mxfp4"),
    "gptq of 3 bit": (GPTQ | {"bits": 3}, "by gptq with bits 3"),
    "gptq of no bits": (GPTQ | {"bits": "4"}, "by gptq with bits '4'"),
    "gptq for marlin": (GPTQ | {"checkpoint_format": "marlin"}, "by gptq in the format marlin"),
    "gptq for marlin, as it was said": (GPTQ | {"is_marlin_format": True}, "by gptq in the format marlin"),
    "gptq in other words": (GPTQ | {"pack_dtype": "int64"}, "by gptq in words of int64"),
    "gptq of some modules in other bits": (
        GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}},
        r"of its own for \+:\.\*down",
    ),
    "gptq of what is rotated": (GPTQ | {"rotation": "hadamard"}, "by gptq with rotated activations"),
    "gptq in planes": (GPTQ | {"format": "gptq_p"}, "by gptq in the format gptq_p"),
    "awq of 8 bit": (AWQ | {"bits": 8}, "by awq with bits 8"),
    "awq of 3 bit, as it was said": ({"quant_method": "awq", "w_bit": 3}, "by awq with w_bit 3"),
    "awq in another packing": (AWQ | {"version": "gemv"}, "by awq in the packing gemv"),
    "awq of another tool": (AWQ | {"backend": "llm-awq"}, "by awq in the packing llm-awq"),
    "awq without zero points": (AWQ | {"zero_point": False}, "by awq without zero points"),
    "fp8 of another kind": (FP8 | {"fmt": "e5m2"}, "by fp8 in e5m2"),
    "fp8 with odd scales": (FP8 | {"scale_fmt": "int"}, "by fp8 with scales in int"),
    "fp8 with experts in 4 bit": (FP8 | {"expert_dtype": "fp4"}, "by fp8 with experts in fp4"),
    "no groups": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "without config_groups"),
    "a sparse format": (
        scheme(**W4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "in the sparse format sparse-24-bitmask",
    ),
    "transforms": (scheme(**W4) | {"transform_config": {"config_groups": {}}}, "with transforms of activations"),
    "marlin of 24": (scheme(**W4 | {"format": "marlin-24"}), "in the format marlin-24"),
    "not compressed": (scheme(**W4 | {"format": "dense"}), "in the format dense"),
    "nvfp4": (scheme(**W4 | {"format": "nvfp4-pack-quantized"}), "in the format nvfp4-pack-quantized"),
    "2 bit": (scheme(**W4 | {"num_bits": 2}), "with num_bits 2"),
    "floats with zero points": (
        scheme(format="float-quantized", num_bits=8, type="float", strategy="channel", symmetric=False),
        "with zero points of floats",
    ),
    "a group of nothing": (
        scheme(**W4) | {"config_groups": {"group_0": {"targets": ["Linear"]}}},
        "with no scheme of weights in group_0",
    ),
    "floats of 4 bit": (scheme(**W4 | {"type": "float"}), "with num_bits 4"),
    "numbers of another type": (scheme(**W4 | {"type": "posit"}), "with numbers of type posit"),
    "scales by something else": (scheme(**W4 | {"strategy": "tensor_group"}), "with scales by tensor_group"),
}
WRONG = {
    "no object": ("gptq", "quantization_config = 'gptq'"),
    "a group of no columns": (GPTQ | {"group_size": 0}, "group_size = 0"),
    "a group of a word": (AWQ | {"group_size": "128"}, "group_size = '128'"),
    "a group of no columns, packed": (scheme(**W4 | {"group_size": 0}), "group_size = 0"),
    "a group without its size": (scheme(**W4 | {"group_size": None}), "group_size = None"),
    "a flag that is none": (GPTQ | {"desc_act": "yes"}, "desc_act = 'yes'"),
    "a block of no rows": (FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size = \[0, 128\]"),
    "a block of one number": (FP8 | {"weight_block_size": [128]}, r"weight_block_size = \[128\]"),
    "a block that is none": (
        scheme(format="float-quantized", num_bits=8, type="float", strategy="block", block_structure="128"),
        "block_structure = '128'",
    ),
    "targets that are none": (scheme(**W4) | {"ignore": "lm_head"}, "ignore = 'lm_head'"),
    "an expression that is none": (scheme(**W4) | {"ignore": ["re:("]}, r"'re:\(' in ignore, which is no expression"),
    "an expression that takes for ever": (scheme(**W4) | {"ignore": ["re:(.+)+$"]}, "that may take too long"),
    "an expression that repeats too much": (scheme(**W4) | {"ignore": ["re:" + ".*" * 30]}, "that may take too long"),
    "an expression that repeats more than names bear": (scheme(**W4) | {"ignore": ["re:.*.*.*.*x"]}, "take too long"),
    "an expression without end": (scheme(**W4) | {"ignore": ["re:" + "a" * 600]}, "an expression of 603 characters"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_by_name(kind, tmp_path):
    quantization, message = REFUSED[kind]
    folder = save_config(tmp_path, "LlamaConfig", SIZES, quantization_config=quantization)
    with pytest.raises(
        UnsupportedModelError, match=rf"llama .*weights quantized in the checkpoint .*{message}"
    ) as error:
        inspect_model(folder)
    assert error.value.remedy.startswith("Use a copy of it whose weights are in 16 bit")


@pytest.mark.parametrize("kind", WRONG)
def test_a_config_that_contradicts_itself_is_refused(kind):
    quantization, message = WRONG[kind]
    with pytest.raises(UnsupportedModelError, match=message) as error:
        read_quantization({"quantization_config": quantization})
    assert error.value.remedy


def test_who_names_an_unknown_method_is_told_all_that_are_known():
    with pytest.raises(UnsupportedModelError) as error:
        read_quantization({"quantization_config": {"quant_method": "magic"}})
    assert all(method in error.value.remedy for method in METHODS)


def test_a_group_that_rounds_attention_alone_is_left_out():
    config = scheme(**W4)
    config["config_groups"]["group_1"] = {"targets": ["re:.*self_attn$"], "input_activations": {"num_bits": 8}}
    assert read_quantization({"quantization_config": config}).name == "compressed-tensors, 4 bit in groups of 32"
    del config["config_groups"]["group_0"]
    with pytest.raises(UnsupportedModelError, match="without config_groups of weights"):
        read_quantization({"quantization_config": config})


@pytest.mark.parametrize("nothing", [None, {}])
def test_nothing_is_no_quantization(nothing):
    assert read_quantization({"quantization_config": nothing}) is None
    assert read_quantization({}) is None


@pytest.mark.parametrize(
    ("quantization", "name", "activations"),
    [
        (GPTQ | {"group_size": 128}, "GPTQ, 4 bit in groups of 128", ""),
        (GPTQ | {"bits": 8, "group_size": -1}, "GPTQ, 8 bit in channels", ""),
        (GPTQ | {"desc_act": True}, "GPTQ, 4 bit in groups of 128, in order of activations", ""),
        (AWQ, "AWQ, 4 bit in groups of 128", ""),
        (FP8 | {"weight_block_size": [128, 128]}, "fp8, 8 bit (e4m3) in blocks of 128 x 128", "fp8, dynamic"),
        (FP8 | {"activation_scheme": "static"}, "fp8, 8 bit (e4m3) in whole matrices", "fp8, static"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8, 8 bit (e4m3) in channels", "fp8, dynamic per token"),
        (scheme(**W4), "compressed-tensors, 4 bit in groups of 32", ""),
        (
            scheme(
                format="int-quantized",
                strategy="channel",
                input_activations={"num_bits": 8, "strategy": "token", "dynamic": True},
            ),
            "compressed-tensors, 8 bit in channels",
            "int8, dynamic per token",
        ),
        (GPTQ | {"dynamic": {"-:.*down": {}}, "group_size": 64}, "GPTQ, 4 bit in groups of 64", ""),
    ],
)  # fmt: skip
def test_a_start_says_what_is_stored(quantization, name, activations):
    found = read_quantization({"quantization_config": quantization})
    assert (found.name, found.activations) == (name, activations)
