"""Blocks of GGML's kinds are exactly the matrices that they are made of, as the reference library reads them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from quantized_folders import FORMATS, awq, gptq, packed, save_quantized, whole

from pagefold.runner.fused.checkpoint import Checkpoint

KINDS = {
    "gptq": "Q5_0",
    "gptq of 8 bit": None,
    "gptq in channels": "Q5_0",
    "gptq v2": "Q5_0",
    "gptq without zero points": "Q4_0",
    "gptq of 8 bit without zero points": "Q8_0",
    "gptq in order of activations": None,
    "gptq in groups that do not divide": None,
    "awq": "Q5_0",
    "awq in groups of 16": None,
    "W4A16": "Q4_0",
    "W4A16 with zero points": "Q5_0",
    "W4A16 in channels": "Q4_0",
    "W4A16 in order of activations": None,
    "W4A16 in float32": None,
    "W8A16": "Q8_0",
    "W8A16 with zero points": None,
    "W8A16 in channels": "Q8_0",
    "W8A8": "Q8_0",
    "W8A8 by matrices": None,
    "W8A8 in groups": "Q8_0",
    "W4A8": "Q8_0",
    "fp8 in channels": None,
    "native fp8": None,
}
"""None: groups that are no multiples of 32 columns, scales that are no float16, more than 8 bit, order, or e4m3."""


def hold(stored, coded):
    quant = gguf.GGMLQuantizationType[stored.kind]
    assert stored.shape == coded.weights.shape
    assert stored.row_order is None
    assert stored.blocks.dtype == np.uint8
    assert stored.blocks.shape == gguf.quants.quant_shape_to_byte_shape(stored.shape, quant)
    assert np.array_equal(gguf.quants.dequantize(stored.blocks, quant), coded.weights)


@pytest.mark.parametrize("name", KINDS)
def test_each_format_has_the_smallest_kind_that_is_exact(name, tmp_path):
    found = save_quantized(tmp_path, *FORMATS[name]())
    checkpoint = Checkpoint(found.quantized)
    kinds = set()
    for each, coded in found.matrices.items():
        stored = checkpoint.stored(each)
        kinds.add(checkpoint.kind(each))
        assert checkpoint.kind(each) == (None if stored is None else stored.kind)
        if stored is not None:
            hold(stored, coded)
    assert kinds == {KINDS[name]}
    assert checkpoint.stored("model.norm.weight") is None
    assert checkpoint.stored("lm_head.weight") is None


@pytest.mark.parametrize("size", [32, 64, 128])
def test_a_group_is_blocks_with_the_same_scale(size, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    found = save_quantized(tmp_path, *gptq(4, size, zero=8), sizes=sizes)
    for each, coded in found.matrices.items():
        stored = Checkpoint(found.quantized).stored(each)
        hold(stored, coded)
        scales = stored.blocks.reshape(len(stored.blocks), -1, 18)[:, :, :2]
        assert np.array_equal(scales, np.repeat(scales[:, :: size // 32], size // 32, axis=1)[:, : scales.shape[1]])


def test_zero_points_that_are_powers_of_two_have_exact_minima(tmp_path):
    """Times a float16, each is one: Q4_1 takes half a bit less than Q5_0."""
    random = np.random.default_rng(0)
    config, _ = awq()

    def with_powers(module, shape):
        from quantized_folders import draw, tensor, words

        coded = draw(random, shape, bits=4, size=32)
        coded = coded._replace(zeros=random.choice([0, 1, 2, 4, 8], coded.zeros.shape))
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return coded, {
            "qweight": tensor(words(coded.codes.T, 4, order)),
            "qzeros": tensor(words(coded.zeros.T, 4, order)),
            "scales": tensor(coded.scales.T),
        }

    found = save_quantized(tmp_path, config, with_powers)
    for each, coded in found.matrices.items():
        stored = Checkpoint(found.quantized).stored(each)
        assert stored.kind == "Q4_1"
        hold(stored, coded)


def test_an_order_that_keeps_groups_whole_needs_none(tmp_path):
    config, make = gptq(4, 32, zero=8)
    found = save_quantized(tmp_path, config | {"desc_act": True}, make)
    for each, coded in found.matrices.items():
        hold(Checkpoint(found.quantized).stored(each), coded)


@pytest.mark.parametrize("scale", [1e-7, 1e5, float("inf")])
def test_scales_that_are_no_float16_are_not_taken(scale, tmp_path):
    config, make = packed()

    def scaled(module, shape):
        coded, parts = make(module, shape)
        scales = torch.full_like(parts["weight_scale"], scale)
        return coded, parts | {"weight_scale": scales}

    found = save_quantized(tmp_path, config, scaled)
    assert all(Checkpoint(found.quantized).stored(each) is None for each in found.matrices)


def test_columns_that_blocks_do_not_divide(tmp_path):
    found = save_quantized(tmp_path, *whole(), sizes={"intermediate_size": 48})
    checkpoint = Checkpoint(found.quantized)
    kinds = {each: checkpoint.stored(each) for each in found.matrices}
    assert {each.split(".")[-2] for each, one in kinds.items() if one is None} == {"down_proj"}


def test_zero_points_that_no_kind_holds(tmp_path):
    """A matrix with one zero point has it in a number of its own, which may be far from its codes."""
    from quantized_folders import draw, scheme, tensor, words

    random = np.random.default_rng(0)
    config = scheme(format="pack-quantized", num_bits=4, symmetric=False, strategy="tensor")

    def make(_, shape):
        coded = draw(random, shape, bits=4, size=shape[1], zero=125, scale=torch.float16, signed=True)
        coded = coded._replace(scales=np.full_like(coded.scales, 0.01234).astype(np.float16).astype(np.float32))
        return coded, {
            "weight_packed": tensor(words(coded.codes + 8, 4)),
            "weight_scale": tensor(coded.scales[:1, 0], torch.float16),
            "weight_zero_point": tensor(coded.zeros[:1, 0].astype(np.int8)),
            "weight_shape": torch.tensor(shape),
        }

    found = save_quantized(tmp_path, config, make)
    checkpoint = Checkpoint(found.quantized)
    for each, coded in found.matrices.items():
        assert checkpoint.kind(each) is checkpoint.stored(each) is None
        assert np.array_equal(checkpoint.tensor(each).numpy(), coded.weights)
