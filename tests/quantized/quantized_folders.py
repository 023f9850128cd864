"""Quantized folders as the tools write them, of tiny models, beside plain ones with the same weights.

Writers follow each format's documentation, code by code; what they pack is drawn first, so that the weights are known.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from runner.model_folders import save_model
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MATRICES = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


class Coded(NamedTuple):
    """A matrix: weight[n, k] = (codes[n, k] - zeros[n, groups[k]]) * scales[n, groups[k]]."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        weights = np.empty(self.codes.shape, np.float32)
        for column, group in enumerate(self.groups):
            difference = self.codes[:, column].astype(np.float64) - self.zeros[:, group]
            weights[:, column] = difference * self.scales[:, group].astype(np.float64)
        return weights


class Folders(NamedTuple):
    quantized: Path
    plain: Path
    matrices: dict[str, Coded]


def draw(random, shape, *, bits, size, zero=None, scale=np.float16, ordered=False, signed=False) -> Coded:
    """Draw a matrix with codes of so many bits in groups of ``size`` columns, with random zero points if not given."""
    num_rows, num_columns = shape
    num_groups = -(-num_columns // size)
    least = -(1 << bits - 1) if signed else 0
    codes = random.integers(least, least + (1 << bits), shape)
    zeros = random.integers(least, least + (1 << bits), (num_rows, num_groups))
    if zero is not None:
        zeros[:] = zero
    scales = (random.random((num_rows, num_groups)) * 0.05 * 2.0 ** (4 - bits) + 0.001).astype(np.float32)
    scales = (
        torch.from_numpy(scales).to(scale).float().numpy() if isinstance(scale, torch.dtype) else scales.astype(scale)
    )
    groups = np.arange(num_columns) // size
    return Coded(codes, zeros, scales, random.permutation(groups) if ordered else groups)


def words(codes: np.ndarray, bits: int, order=None) -> np.ndarray:
    """Pack rows of codes into int32: the first of a word in its lowest bits, or those that ``order`` names."""
    in_a_word = 32 // bits
    num_words = -(-codes.shape[1] // in_a_word)
    packed = np.zeros((codes.shape[0], num_words), np.uint32)
    for word in range(num_words):
        for place in range(in_a_word):
            column = word * in_a_word + (order[place] if order else place)
            if column < codes.shape[1]:
                packed[:, word] |= (codes[:, column] & (1 << bits) - 1).astype(np.uint32) << np.uint32(bits * place)
    return packed.view(np.int32)


def tensor(array: np.ndarray, dtype=None) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made if dtype is None else made.to(dtype)


def save_quantized(
    folder: Path,
    quantization: dict[str, Any],
    make: Callable[[str, tuple[int, int]], tuple[Coded, dict[str, torch.Tensor]]],
    *,
    family: str = "LlamaConfig",
    sizes: dict[str, Any] | None = None,
    is_right: Callable[[str], bool] = lambda module: module.rpartition(".")[2] in MATRICES,
) -> Folders:
    """Write a tiny model twice: with its matrices quantized by ``make``, and plainly in float32."""
    plain = save_model(folder / "plain", family, SIZES | (sizes or {}))
    tensors = {name: one.float() for name, one in load_file(plain / "model.safetensors").items()}
    stored, matrices = {}, {}
    for name, one in sorted(tensors.items()):
        module = name.removesuffix(".weight")
        if one.dim() == 2 and is_right(module):
            coded, parts = make(module, tuple(one.shape))
            matrices[name] = coded
            tensors[name] = tensor(coded.weights)
            stored |= {f"{module}.{part}": each for part, each in parts.items()}
        else:
            stored[name] = tensors[name] = one.half().float()
            stored[name] = one.half()
    save_file(tensors, plain / "model.safetensors")
    quantized = folder / "quantized"
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    (quantized / "config.json").write_text(
        json.dumps(config | {"dtype": "float16", "quantization_config": quantization})
    )
    return Folders(quantized, plain, matrices)


def gptq(bits=4, size=32, *, form="gptq", ordered=False, zero=None, seed=0, **draws):
    """Return a config of GPTQ, and what writes a matrix of it."""
    random = np.random.default_rng(seed)

    def make(_, shape):
        coded = draw(
            random, shape, bits=bits, size=shape[1] if size == -1 else size, ordered=ordered, zero=zero, **draws
        )
        stored_zeros = coded.zeros - (form == "gptq")
        return coded, {
            "qweight": tensor(words(coded.codes, bits).T),
            "qzeros": tensor(words(stored_zeros.T, bits)),
            "scales": tensor(coded.scales.T),
            "g_idx": tensor(coded.groups.astype(np.int32)),
        }

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered, "sym": zero is not None}
    return config | ({} if form == "gptq" else {"checkpoint_format": form}), make


def awq(size=32, *, seed=0, **draws):
    random = np.random.default_rng(seed)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def make(_, shape):
        coded = draw(random, shape, bits=4, size=shape[1] if size == -1 else size, **draws)
        return coded, {
            "qweight": tensor(words(coded.codes.T, 4, order)),
            "qzeros": tensor(words(coded.zeros.T, 4, order)),
            "scales": tensor(coded.scales.T),
        }

    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}, make


def scheme(**weights):
    """Return a ``quantization_config`` of compressed-tensors with one scheme."""
    rounding, form = weights.pop("input_activations", None), weights.pop("format")
    weights = {"type": "int", "symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rounding, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed(bits=4, size=32, *, symmetric=True, ordered=False, scale=torch.bfloat16, seed=0):
    """W4A16 and W8A16 of compressed-tensors."""
    random = np.random.default_rng(seed)
    half = 1 << bits - 1

    def make(_, shape):
        zero = 0 if symmetric else None
        columns = shape[1] if size == -1 else size
        coded = draw(random, shape, bits=bits, size=columns, zero=zero, scale=scale, ordered=ordered, signed=True)
        parts = {
            "weight_packed": tensor(words(coded.codes + half, bits)),
            "weight_scale": tensor(coded.scales, scale),
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = tensor(words((coded.zeros + half).T, bits).T)
        if ordered:
            parts["weight_g_idx"] = tensor(coded.groups.astype(np.int32))
        return coded, parts

    group = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    more = {"actorder": "group"} if ordered else {}
    return scheme(format="pack-quantized", num_bits=bits, symmetric=symmetric, **group, **more), make


def whole(strategy="channel", *, bits=8, symmetric=True, scale=torch.bfloat16, size=0, seed=0):
    """W8A8 of compressed-tensors, in int8."""
    random = np.random.default_rng(seed)

    def make(_, shape):
        zero = 0 if symmetric else None
        columns = size or shape[1]
        coded = draw(random, shape, bits=bits, size=columns, zero=zero, scale=scale, signed=True)
        if strategy == "tensor":
            coded = coded._replace(
                scales=np.repeat(coded.scales[:1], shape[0], 0), zeros=np.repeat(coded.zeros[:1], shape[0], 0)
            )
        rows = 1 if strategy == "tensor" else shape[0]
        parts = {
            "weight": tensor(coded.codes.astype(np.int8)),
            "weight_scale": tensor(coded.scales[:rows], scale),
        }
        if not symmetric:
            parts["weight_zero_point"] = tensor(coded.zeros[:rows].astype(np.int8))
        if strategy == "tensor":
            parts = {name: one.reshape(-1) if name != "weight" else one for name, one in parts.items()}
        return coded, parts

    rounding = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"group_size": size} if size else {}
    config = scheme(
        format="int-quantized",
        num_bits=bits,
        symmetric=symmetric,
        strategy=strategy,
        input_activations=rounding,
        **group,
    )
    return config, make


class Eighths(NamedTuple):
    """A matrix of e4m3 with scales of rectangles."""

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int
    columns: int

    @property
    def weights(self) -> np.ndarray:
        codes, scales = self.codes.float().numpy(), self.scales.float().numpy()
        weights = np.empty(codes.shape, np.float32)
        for row in range(codes.shape[0]):
            for column in range(0, codes.shape[1], self.columns):
                some = slice(column, column + self.columns)
                weights[row, some] = codes[row, some] * scales[row // self.rows, column // self.columns]
        return weights


def eighths(config, name, *, rows=0, columns=0, scale=torch.float32, stored=None, seed=0, more=()):
    """Return a config, and what writes e4m3 with scales of ``rows`` x ``columns``; 0 for all."""
    generator = torch.Generator().manual_seed(seed)

    def make(_, shape):
        codes = torch.randn(shape, generator=generator).mul_(8).to(torch.float8_e4m3fn)
        num_rows, num_columns = rows or shape[0], columns or shape[1]
        grid = -(-shape[0] // num_rows), -(-shape[1] // num_columns)
        scales = (torch.rand(grid, generator=generator) * 0.01 + 0.001).to(scale)
        parts = {"weight": codes, name: scales.reshape(stored) if stored is not None else scales}
        return Eighths(codes, scales, num_rows, num_columns), parts | {each: torch.ones(1) for each in more}

    return config, make


def fp8(block=(128, 128), *, name="weight_scale_inv", activations="dynamic", **how):
    config = {"quant_method": "fp8", "activation_scheme": activations, "fmt": "e4m3"}
    config |= {"weight_block_size": list(block)} if block else {}
    rows, columns = block or (0, 0)
    return eighths(config, name, rows=rows, columns=columns, **how)


def float_scheme(strategy, **how):
    """W8A8 of compressed-tensors, in fp8."""
    rounding = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    more = {"block_structure": [32, 32]} if strategy == "block" else {}
    config = scheme(
        format="float-quantized", num_bits=8, type="float", strategy=strategy, input_activations=rounding, **more
    )
    rows, columns = {"tensor": (0, 0), "channel": (1, 0), "block": (32, 32)}[strategy]
    return eighths(config, "weight_scale", rows=rows, columns=columns, **{"scale": torch.bfloat16} | how)


FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Any]]] = {
    "gptq": gptq,
    "gptq of 8 bit": lambda: gptq(8, 32),
    "gptq in channels": lambda: gptq(4, -1),
    "gptq v2": lambda: gptq(4, 64, form="gptq_v2"),
    "gptq v2 of 8 bit": lambda: gptq(8, 16, form="gptq_v2"),
    "gptq without zero points": lambda: gptq(4, 32, zero=8),
    "gptq of 8 bit without zero points": lambda: gptq(8, 32, zero=128),
    "gptq in order of activations": lambda: gptq(4, 32, ordered=True),
    "gptq of 8 bit in order of activations": lambda: gptq(8, 16, ordered=True, form="gptq_v2"),
    "gptq in groups that do not divide": lambda: gptq(4, 40),
    "awq": awq,
    "awq in groups of 16": lambda: awq(16),
    "awq in channels": lambda: awq(-1),
    "W4A16": packed,
    "W4A16 with zero points": lambda: packed(symmetric=False),
    "W4A16 in channels": lambda: packed(size=-1),
    "W4A16 in channels with zero points": lambda: packed(size=-1, symmetric=False),
    "W4A16 in order of activations": lambda: packed(ordered=True),
    "W4A16 in float16": lambda: packed(scale=torch.float16, size=16),
    "W4A16 in float32": lambda: packed(scale=torch.float32),
    "W8A16": lambda: packed(8),
    "W8A16 with zero points": lambda: packed(8, symmetric=False),
    "W8A16 in channels": lambda: packed(8, -1),
    "W8A8": whole,
    "W8A8 with zero points": lambda: whole(symmetric=False),
    "W8A8 by matrices": lambda: whole("tensor", scale=torch.float32),
    "W8A8 in groups": lambda: whole("group", size=32),
    "W4A8": lambda: whole(bits=4),
    "fp8 by matrices": lambda: float_scheme("tensor", stored=(1,)),
    "fp8 in channels": lambda: float_scheme("channel"),
    "fp8 in blocks": lambda: float_scheme("block"),
    "native fp8": fp8,
    "native fp8 in small blocks": lambda: fp8((16, 40), scale=torch.bfloat16),
    "native fp8 with exponents": lambda: fp8((32, 32), scale=torch.float8_e8m0fnu),
    "native fp8 by matrices": lambda: fp8(
        None, name="weight_scale", stored=(), activations="static", more=["input_scale"]
    ),
    "FBGEMM's fp8": lambda: eighths({"quant_method": "fbgemm_fp8"}, "weight_scale", rows=1, more=["input_scale_ub"]),
}
