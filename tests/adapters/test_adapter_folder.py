"""What is read of an adapter's folder, and what is refused before anything is loaded."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from equivalence.tiny_models import save_tiny_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapters.written import modules_of, scale_of, write_adapter
from pagefold.adapters import AdapterWeights, BaseShapes, base_shapes, read_adapter_folder
from pagefold.adapters.modules import Place, place_of
from pagefold.errors import AdapterError, AdapterNotFoundError
from pagefold.runner.fused.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("base"), dtype=torch.float32)


@pytest.fixture
def shapes(base):
    return base_shapes(base.name, Checkpoint(base).shapes())


def _config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_shapes_are_those_of_the_models_files(base, shapes):
    assert shapes.name == base.name
    assert {place.name: shape for place, shape in shapes.shapes.items()} == {
        path.removeprefix("model."): shape for path, shape in modules_of(base).items()
    }


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_parts_have_the_ranks_scales_and_numbers_of_the_files(dtype, base, shapes, tmp_path):
    ranks, alphas = {"q_proj": 2, "layers.1.mlp.up_proj": 7}, {"v_proj": 3, r"layers\.0\.mlp\.gate_proj": 5}
    folder = write_adapter(tmp_path / "a", base, dtype=dtype, ranks=ranks, alpha_pattern=alphas)
    adapter = read_adapter_folder(folder, shapes, 8)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["alpha_pattern"] = {end.replace("\\", ""): alpha for end, alpha in alphas.items()}
    tensors = load_file(folder / "adapter_model.safetensors")
    assert adapter.dtype == dtype
    assert max(part.rank for part in adapter.parts) == 7
    assert len(adapter.parts) == len(modules_of(base))
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    weights = AdapterWeights(adapter)
    for part in adapter.parts:
        name = f"base_model.model.model.{part.place.name}"
        down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        assert part.rank == len(down)
        assert part.scale == scale_of(config, f"model.{part.place.name}", len(down))
        for matrix, tensor in ((weights.matrix(part.down), down), (weights.matrix(part.up), up)):
            bits = tensor.view(torch.int16).numpy() if dtype == "BF16" else tensor.numpy()
            assert np.array_equal(np.asarray(matrix).view(bits.dtype), bits)


def test_rank_stabilized_scales(base, shapes, tmp_path):
    adapter = read_adapter_folder(write_adapter(tmp_path / "a", base, rank=4, use_rslora=True), shapes, 8)
    assert {part.scale for part in adapter.parts} == {8 / math.sqrt(4)}


def test_fingerprints_tell_weights_and_scales_apart(base, shapes, tmp_path):
    def fingerprint(name, **how):
        return AdapterWeights(read_adapter_folder(write_adapter(tmp_path / name, base, **how), shapes, 8)).fingerprint

    first = fingerprint("a")
    assert fingerprint("elsewhere") == first
    assert fingerprint("named", base_model_name_or_path="somebody/else") == first
    assert len({first, fingerprint("b", seed=1), fingerprint("c", alpha=9), fingerprint("d", dtype="BF16")}) == 4


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": None}, "None"),
        ({"bias": "all"}, "bias 'all'"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "tokens of its own"),
        ({"layer_replication": [[0, 2]]}, "layers more than once"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa"),
        ({"r": 0}, "rank 0"),
        ({"r": 5}, "its config says 5"),
        ({"r": "many"}, "r 'many'"),
        ({"lora_alpha": None}, "lora_alpha 'None'"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"alpha_pattern": {"(q|k)_proj": 3}}, "pattern"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "pattern"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head'"),
        ({"target_modules": [{"q": 1}]}, "target_modules"),
    ],
)
def test_configs_that_are_refused(fields, what, base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base)
    _config(folder, **fields)
    with pytest.raises(AdapterError, match=r"(?s).*" + what.replace("(", r"\(")) as refused:
        read_adapter_folder(folder, shapes, 8)
    assert refused.value.remedy
    assert str(folder) in refused.value.message


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight".format


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensors: tensors.pop(A("A")), "lora_B of layers.0.self_attn.q_proj alone"),
        (lambda tensors: [tensors.pop(A(half)) for half in "AB"], "no weights of layers.0.self_attn.q_proj"),
        (lambda tensors: tensors.update({A("A"): torch.zeros(4, 9)}), "goes from 9 numbers"),
        (lambda tensors: tensors.update({A("B"): torch.zeros(9, 4)}), "to 9 in layers.0.self_attn.q_proj"),
        (lambda tensors: tensors.update({A("B"): torch.zeros(64, 3)}), "rank 4 and lora_B of rank 3"),
        (lambda tensors: tensors.update({A("A"): torch.zeros(4)}), "two dimensions"),
        (lambda tensors: tensors.update({A("A"): torch.zeros(4, 64, dtype=torch.int32)}), "weights in F32, I32"),
        (lambda tensors: tensors.update({A("magnitude_vector"): torch.zeros(4)}), "no matrix A or B"),
        (lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 4)}), "lm_head"),
        (lambda tensors: tensors.update({A("A").replace("layers.0", "layers.9"): torch.zeros(4, 64)}), "alone"),
    ],
)
def test_tensors_that_are_refused(change, what, base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base)
    _tensors(folder, change)
    with pytest.raises(AdapterError, match=what) as refused:
        read_adapter_folder(folder, shapes, 8)
    assert refused.value.remedy


def test_adapters_of_another_base_are_refused(base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base)
    wider = BaseShapes("wider", {place: (2 * num_out, num_in) for place, (num_out, num_in) in shapes.shapes.items()})
    with pytest.raises(AdapterError, match="and wider from"):
        read_adapter_folder(folder, wider, 8)
    shorter = BaseShapes("shorter", {place: shape for place, shape in shapes.shapes.items() if place.layer == 0})
    with pytest.raises(AdapterError, match="shorter has no such module"):
        read_adapter_folder(folder, shorter, 8)
    longer = BaseShapes("longer", {**shapes.shapes, Place(2, "q_proj"): (64, 64)})
    with pytest.raises(AdapterError, match=r"no weights of layers.2.self_attn.q_proj"):
        read_adapter_folder(folder, longer, 8)


def test_ranks_above_the_limit_are_refused(base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base, rank=8)
    assert read_adapter_folder(folder, shapes, 8).parts[0].rank == 8
    with pytest.raises(AdapterError, match=r"rank 8 .* max_lora_rank is 7") as refused:
        read_adapter_folder(folder, shapes, 7)
    assert "--max-lora-rank 8" in refused.value.remedy


def test_empty_matrices_are_refused(base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base, rank=0)
    _config(folder, r=1)
    with pytest.raises(AdapterError, match="rank 0"):
        read_adapter_folder(folder, shapes, 8)


def test_folders_without_an_adapter(base, shapes, tmp_path):
    with pytest.raises(AdapterNotFoundError, match="no adapter_config"):
        read_adapter_folder(tmp_path / "nowhere", shapes, 8)
    folder = write_adapter(tmp_path / "a", base)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterNotFoundError, match="no adapter_model"):
        read_adapter_folder(folder, shapes, 8)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_configs_that_are_damaged(content, base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base)
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterError, match="no JSON object"):
        read_adapter_folder(folder, shapes, 8)


def _header(tensors, *, length=None):
    raw = json.dumps(tensors).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 2**63) + b"{}",
        _header({}),
        _header({"a": 1}),
        _header([1]),
        _header({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}),
        _header({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 15]}}) + bytes(15),
        _header({"a": {"dtype": "F32", "shape": [2, -2], "data_offsets": [0, 16]}}) + bytes(16),
        _header({"a": {"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]}}) + bytes(16),
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}}) + bytes(32),
        _header({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in "ab"}) + bytes(16),
        _header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**82]}}),
        _header({"a": {"dtype": 5, "shape": [4], "data_offsets": [0, 16]}}) + bytes(16),
        _header({"a": {"dtype": None, "shape": [4], "data_offsets": [0, 16]}}) + bytes(16),
    ],
)
def test_files_that_are_damaged(content, base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base)
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterError, match="damaged"):
        read_adapter_folder(folder, shapes, 8)


def test_a_name_that_no_file_can_have(shapes):
    with pytest.raises(AdapterNotFoundError, match="cannot be read: File name too long"):
        read_adapter_folder(Path("a" * 5000), shapes, 8)


def test_files_that_are_cut(base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base)
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for length in (5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(AdapterError, match="damaged"):
            read_adapter_folder(folder, shapes, 8)


@given(st.binary(max_size=200), st.integers(0, 4000))
def test_whatever_the_header_says_is_read_or_refused(noise, at):
    """Bytes of a good file are overwritten: what comes out is an adapter, or an AdapterError."""
    folder, shapes, whole = _for_noise()
    (folder / "adapter_model.safetensors").write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    with contextlib.suppress(AdapterError):
        AdapterWeights(read_adapter_folder(folder, shapes, 8))


_noise = {}


def _for_noise():
    return _noise["folder"], _noise["shapes"], _noise["whole"]


@pytest.fixture(autouse=True)
def _make_noise(base, shapes, tmp_path_factory):
    if not _noise:
        folder = write_adapter(tmp_path_factory.mktemp("noise"), base)
        _noise.update(folder=folder, shapes=shapes, whole=(folder / "adapter_model.safetensors").read_bytes())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_weights_that_are_no_numbers_are_refused(number, dtype, base, shapes, tmp_path):
    folder = write_adapter(tmp_path / "a", base, dtype=dtype)
    _tensors(
        folder,
        lambda tensors: tensors[A("B")].index_put_(
            (torch.tensor(3), torch.tensor(1)), torch.tensor(number, dtype=tensors[A("B")].dtype)
        ),
    )
    with pytest.raises(AdapterError, match=r"NaN or infinity in lora_B of layers\.0\.self_attn\.q_proj"):
        AdapterWeights(read_adapter_folder(folder, shapes, 8))


def test_a_file_that_changes_between_is_not_taken(base, shapes, tmp_path):
    adapter = read_adapter_folder(write_adapter(tmp_path / "a", base), shapes, 8)
    write_adapter(tmp_path / "a", base, rank=2)
    with pytest.raises(AdapterError, match="changed while it was read"):
        AdapterWeights(adapter)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="cannot be read"):
        AdapterWeights(adapter)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.self_attn.q_proj", Place(3, "q_proj")),
        ("layers.12.mlp.down_proj", Place(12, "down_proj")),
        ("language_model.model.layers.0.mlp.up_proj", Place(0, "up_proj")),
        ("model.layers.0.mlp.q_proj", None),
        ("model.layers.0.mlp.experts.3.up_proj", None),
        ("model.vision.layers.0.self_attn.q_proj", None),
        ("model.layers.-1.self_attn.q_proj", None),
        ("lm_head", None),
    ],
)
def test_places_of_names(name, place):
    assert place_of(name) == place
