"""Against the libraries that define the formats: compressed-tensors' own decompression, and transformers' own loading.

Both round a matrix to the dtype of its scales, or of the model; ours, rounded likewise, must be the same to the bit.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from quantized_folders import FORMATS, fp8, packed, save_quantized
from safetensors.torch import load_file

from pagefold.runner.fused.checkpoint import Checkpoint

COMPRESSED = [name for name in FORMATS if name.startswith(("W4", "W8")) or name in {"fp8 in channels", "fp8 in blocks"}]
WITHOUT_ORDER = [name for name in COMPRESSED if "order" not in name]  # the library reads order no more


@pytest.fixture
def _library():
    """compressed-tensors with all that it imports."""
    pytest.importorskip("compressed_tensors", reason="transformers needs it, and loguru, to read its format")


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("name", [*WITHOUT_ORDER, "fp8 by matrices"])
def test_compressed_tensors_decompresses_to_the_same(name, tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    found = save_quantized(tmp_path, *FORMATS[name]())
    config = json.loads((found.quantized / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(config)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    (scheme,) = config.config_groups.values()
    stored, checkpoint = load_file(found.quantized / "model.safetensors"), Checkpoint(found.quantized)
    for each in found.matrices:
        module = each.removesuffix("weight")
        parts = {part.removeprefix(module): one for part, one in stored.items() if part.startswith(module)}
        expected = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(checkpoint.tensor(each).to(expected.dtype), expected), each


def state_of_transformers(folder, **said):
    """The weights that transformers loads by itself, in float32."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= said
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.state_dict()


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("name", ["W4A16 with zero points", "W8A8", "fp8 in channels"])
def test_transformers_loads_the_same_from_compressed_tensors(name, tmp_path):
    found = save_quantized(tmp_path, *FORMATS[name]())
    checkpoint = Checkpoint(found.quantized)
    theirs = state_of_transformers(shutil.copytree(found.quantized, tmp_path / "copy"), dequantize=True)
    for each in found.matrices:
        assert torch.equal(theirs[each], checkpoint.tensor(each).bfloat16().float()), each
    for each in theirs.keys() - found.matrices.keys():
        assert torch.equal(theirs[each], checkpoint.tensor(each)), each


@pytest.mark.parametrize("how", [{}, {"scale": torch.bfloat16}])
def test_transformers_loads_the_same_from_fp8(how, tmp_path):
    """On a CPU it dequantizes, and takes blocks that divide a matrix."""
    found = save_quantized(tmp_path, *fp8((32, 32), **how))
    checkpoint = Checkpoint(found.quantized)
    theirs = state_of_transformers(shutil.copytree(found.quantized, tmp_path / "copy"))
    assert theirs.keys() >= found.matrices.keys()
    for each, one in theirs.items():
        assert torch.equal(one, checkpoint.tensor(each)), each


@pytest.mark.usefixtures("_library")
def test_what_llm_compressor_packs_is_read(tmp_path):
    """The library packs; nothing of it was written by hand here."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    fields, _ = packed(symmetric=False, scale=torch.float32)
    config = QuantizationConfig.model_validate(fields)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    (scheme,) = config.config_groups.values()
    generator = torch.Generator().manual_seed(0)

    class Compressed:
        def __init__(self, weights):
            self.weights = weights

    def make(_, shape):
        weight = torch.randn(shape, generator=generator)
        low, high = (one(weight.unflatten(1, (-1, 32)), 2) for one in (torch.amin, torch.amax))
        scale = (high - low) / 15
        zero = (-8 - low / scale).round().clamp(-8, 7).to(torch.int8)
        parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        parts = compressor.compress(parts, scheme)
        return Compressed(compressor.decompress(parts, scheme)["weight"].numpy()), parts

    found = save_quantized(tmp_path, fields, make)
    for each, one in found.matrices.items():
        assert torch.equal(Checkpoint(found.quantized).tensor(each), torch.from_numpy(one.weights)), each
