"""inspect_model: what a folder holds, without loading weights; what would be computed wrongly is refused by name.

Every error is typed, says what was found, and has a remedy.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import asdict

import pytest
import torch
from model_folders import SIZES, save_config
from safetensors.torch import save

from pagefold.errors import ModelNotFoundError, UnsupportedModelError
from pagefold.runner.content import content_fingerprint
from pagefold.runner.models import inspect_model

WITHOUT_GROUPS = {name: value for name, value in SIZES.items() if name not in {"num_key_value_heads", "head_dim"}}

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}

# What is taken.


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ("LlamaConfig", SIZES, ("llama", 4, 2, 8)),
        ("LlamaConfig", SIZES | {"num_key_value_heads": 4}, ("llama", 4, 4, 8)),
        ("LlamaConfig", SIZES | {"num_key_value_heads": 1}, ("llama", 4, 1, 8)),
        ("LlamaConfig", WITHOUT_GROUPS, ("llama", 4, 4, 8)),
        ("LlamaConfig", SIZES | {"head_dim": 20}, ("llama", 4, 2, 20)),
        ("Qwen3Config", SIZES | {"head_dim": 16}, ("qwen3", 4, 2, 16)),
        ("MistralConfig", SIZES | {"sliding_window": None}, ("mistral", 4, 2, 8)),
        ("GPTNeoXConfig", WITHOUT_GROUPS, ("gpt_neox", 4, 4, 8)),
        ("Qwen2Config", SIZES, ("qwen2", 4, 2, 8)),
        ("Phi3Config", WITHOUT_GROUPS, ("phi3", 4, 4, 8)),
        ("Gemma2Config", SIZES | {"head_dim": 16}, ("gemma2", 4, 2, 16)),
        ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 64}, None),
    ],
)
def test_a_plain_decoder_is_taken_with_its_geometry(tmp_path, config, settings, expected):
    spec = inspect_model(save_config(tmp_path, config, settings))
    assert (spec.model_type, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (expected or ("gpt2", 4, 4, 8))
    assert (spec.folder, spec.num_layers, spec.max_positions, spec.vocab_size) == (tmp_path, 2, 128, 64)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_rope_that_does_not_depend_on_the_batch_is_taken(tmp_path, rope):
    folder = save_config(tmp_path, "LlamaConfig", SIZES, rope_parameters=rope | {"rope_theta": 1e4})
    assert inspect_model(folder).model_type == "llama"


@pytest.mark.parametrize(
    ("config", "settings", "max_exact_len", "limit"),
    [
        ("MistralConfig", {"sliding_window": 16}, 16, "mistral's sliding window"),
        ("MistralConfig", {"sliding_window": 2}, 2, "mistral's sliding window"),
        ("MistralConfig", {"sliding_window": 127}, 127, "mistral's sliding window"),
        ("MistralConfig", {"sliding_window": 128}, 128, ""),
        ("MistralConfig", {"sliding_window": 4096}, 128, ""),
        ("MistralConfig", {"sliding_window": None}, 128, ""),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 16, "qwen2's slid"),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, 128, ""),
        ("Qwen2Config", {"use_sliding_window": False, "sliding_window": 16}, 128, ""),
        ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, 16, "qwen3's slid"),
        ("Phi3Config", {"sliding_window": 16}, 16, "phi3's sliding window"),
        ("Gemma2Config", {"sliding_window": 16}, 16, "gemma2's sliding window"),
        ("Gemma2Config", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, 128, ""),
        ("Gemma2Config", {"attn_logit_softcapping": None}, 128, ""),
        ("Phi3Config", {"original_max_position_embeddings": 64}, 128, ""),
    ],
)
def test_a_window_limits_the_length(tmp_path, config, settings, max_exact_len, limit):
    spec = inspect_model(save_config(tmp_path, config, SIZES | settings))
    assert (spec.max_positions, spec.max_exact_len) == (128, max_exact_len)
    assert spec.limit.startswith(limit)
    assert bool(spec.limit) == bool(limit)


@pytest.mark.parametrize("written", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("window", "max_exact_len", "limit"),
    [(None, 64, "phi3's longrope"), (65, 64, "phi3's longrope"), (63, 63, "phi3's sliding window")],
)
def test_a_long_rope_limits_the_length_to_the_original_one(tmp_path, written, window, max_exact_len, limit):
    settings = SIZES | {"original_max_position_embeddings": 64, "sliding_window": window, "rope_parameters": None}
    kind = {"rope_scaling": {"type": "longrope"}, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}
    folder = save_config(tmp_path, "Phi3Config", settings)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    factors = {name: factor for name, factor in FACTORS.items() if name.endswith("factor")}
    file.write_text(json.dumps(config | {written: kind[written] | factors}))
    spec = inspect_model(folder)
    assert (spec.max_positions, spec.max_exact_len, spec.limit) == (128, max_exact_len, limit)


def test_parameters_are_counted_over_all_weight_files(tmp_path):
    folder = save_config(tmp_path, "LlamaConfig", SIZES)
    assert inspect_model(folder).num_parameters == 12 + 1 + 2
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    shutil.copy(folder / "model.safetensors", folder / "another.safetensors")
    assert inspect_model(folder).num_parameters == 15, "of another program"
    in_parts(folder)
    assert inspect_model(folder).num_parameters == 30


def in_parts(folder):
    """Make two parts with an index of a folder's one weight file: the same tensors twice, which nobody loads here."""
    shutil.copy(folder / "model.safetensors", folder / "part-1.safetensors")
    (folder / "model.safetensors").rename(folder / "part-2.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_pickled_weights_count_two_bytes_each(tmp_path):
    folder = save_config(tmp_path, "LlamaConfig", SIZES)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(bytes(64))
    assert inspect_model(folder).num_parameters == 32


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (None, None, ()),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"temperature": 0.5}, (2,)),
    ],
)
def test_generation_config_knows_better_which_tokens_end(tmp_path, in_config, in_generation_config, expected):
    folder = save_config(tmp_path, "LlamaConfig", SIZES, eos_token_id=in_config)
    if in_generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(in_generation_config))
    assert inspect_model(folder).eos_token_ids == expected


def test_the_fingerprint_changes_with_config_and_weights_and_nothing_else(tmp_path):
    folder = save_config(tmp_path, "LlamaConfig", SIZES)
    first = inspect_model(folder)
    (folder / "README.md").write_text("hello")
    assert asdict(inspect_model(folder)) == asdict(first)
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    second = inspect_model(folder)
    in_parts(folder)
    assert len({first.fingerprint, second.fingerprint, inspect_model(folder).fingerprint}) == 3


def test_the_fingerprint_sees_a_change_of_names_that_size_and_time_do_not_show(tmp_path):
    weights = save_config(tmp_path, "LlamaConfig", SIZES) / "model.safetensors"
    before, times = inspect_model(tmp_path).fingerprint, weights.stat()
    weights.write_bytes(weights.read_bytes().replace(b'"c"', b'"d"'))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert inspect_model(tmp_path).fingerprint != before


# What is refused.

REFUSED = {
    "a window in a family that says so in its own words": (
        "Starcoder2Config",
        SIZES | {"sliding_window": 16},
        {},
        "starcoder2 .* a sliding window of 16 tokens",
    ),
    "layers with a window and none said": (
        "Qwen3Config",
        SIZES | {"layer_types": ["full_attention", "sliding_attention"]},
        {},
        "qwen3 .* layers of sliding_attention",
    ),
    "chunks in a family with windows": (
        "Gemma2Config",
        SIZES | {"layer_types": ["sliding_attention", "chunked_attention"]},
        {},
        "gemma2 .* layers of chunked_attention",
    ),
    "chunks in a family whose windows are computed": (
        "Gemma3TextConfig",
        SIZES | {"layer_types": ["chunked_attention", "full_attention"]},
        {},
        "gemma3_text .* layers of chunked_attention",
    ),
    "a dynamic rope in layers with windows": (
        "Gemma3TextConfig",
        SIZES
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
        },
        {},
        "gemma3_text .* rope of type dynamic",
    ),
    "soft-capping in another family": (
        "VaultGemmaConfig",
        SIZES | {"layer_types": ["full_attention"] * 2},
        {},
        "vaultgemma .* soft-capping",
    ),
    "MLA": ("DeepseekV3Config", {}, {}, r"deepseek_v3 .* latent attention \(MLA\)"),
    "shared KV in another family": (
        "Gemma2Config",
        SIZES,
        {"num_kv_shared_layers": 1},
        "gemma2 .* KV shared across layers",
    ),
    "chunks in another family": (
        "LlamaConfig",
        SIZES,
        {"attention_chunk_size": 16},
        "llama .* chunked attention",
    ),
    "state": ("MambaConfig", {}, {}, "mamba .* layers of linear_attention"),
    "state in some layers": ("JambaConfig", {}, {}, "jamba .* layers of linear_attention"),
    "encoder and decoder": ("BartConfig", {}, {}, "bart .* an encoder"),
    "no decoder": ("T5Config", {}, {}, "t5 is not a decoder"),
    "images": ("Gemma3Config", {}, {}, "gemma3 .* more than text"),
    "ALiBi": ("FalconConfig", {"alibi": True}, {}, "falcon .* ALiBi"),
    "own attention": ("GPTJConfig", {}, {}, "gptj .* an attention of its own"),
    "dynamic rope": (
        "LlamaConfig",
        SIZES,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "llama .* rope of type dynamic",
    ),
    "dynamic rope, as it was written once": (
        "LlamaConfig",
        SIZES,
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "llama .* rope of type dynamic",
    ),
    "long rope in another family": (
        "LlamaConfig",
        SIZES,
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}},
        "llama .* rope of type longrope",
    ),
    "quantized": (
        "LlamaConfig",
        SIZES,
        {"quantization_config": {"quant_method": "gptq", "bits": 3}},
        "llama .* weights quantized in the checkpoint by gptq with bits 3",
    ),
    "heads that do not divide": ("LlamaConfig", SIZES, {"num_key_value_heads": 3}, "4 attention heads for 3 KV heads"),
    "a value of another type": (
        "LlamaConfig",
        SIZES,
        {"num_attention_heads": "four"},
        r"\(llama\).*num_attention_heads",
    ),
    "a value that is missing": ("LlamaConfig", SIZES, {"num_hidden_layers": None}, r"\(llama\).*num_hidden_layers"),
    "no heads": ("LlamaConfig", SIZES, {"num_attention_heads": 0}, r"cannot read the config of .* \(llama\)"),
    "no such dtype": ("LlamaConfig", SIZES, {"dtype": "float7"}, r"\(llama\).*float7"),
    "an unknown family": ("LlamaConfig", SIZES, {"model_type": "nobody-9000"}, r"\(nobody-9000\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path, kind):
    config, settings, written, message = REFUSED[kind]
    folder = save_config(tmp_path, config, settings, **written)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        inspect_model(folder)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("quantized", "Use a copy of it whose weights are in 16 bit"),
        ("images", "Use a model that is of text alone"),
        ("dynamic rope", "Use another model"),
    ],
)
def test_a_refusal_says_what_would_be_taken(tmp_path, kind, remedy):
    config, settings, written, _ = REFUSED[kind]
    with pytest.raises(UnsupportedModelError) as refused:
        inspect_model(save_config(tmp_path, config, settings, **written))
    assert refused.value.remedy.startswith(remedy)


@pytest.mark.parametrize("name", ["rope_parameters", "quantization_config", "sliding_window"])
def test_what_is_refused_when_it_is_there_is_taken_when_it_is_null(tmp_path, name):
    settings = SIZES | {"sliding_window": None}
    assert inspect_model(save_config(tmp_path, "MistralConfig", settings, **{name: None})).model_type == "mistral"


@pytest.mark.parametrize(
    "text", ["", "{", '{"model_type": "llama",', "[1, 2]", '"llama"', "{}", "\x00", '{"architectures": ["NobodyLM"]}']
)
def test_a_config_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="cannot read the config") as refused:
        inspect_model(tmp_path)
    assert str(tmp_path) in refused.value.message
    assert refused.value.remedy
    assert ("NobodyLM" in refused.value.message) == ("NobodyLM" in text)


def test_a_folder_without_config_is_no_model(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelNotFoundError, match=r"has no config\.json") as refused:
            inspect_model(folder)
        assert refused.value.remedy


def test_a_config_without_weights_is_no_model(tmp_path):
    folder = save_config(tmp_path, "LlamaConfig", SIZES)
    (folder / "model.safetensors").rename(folder / "optimizer.pt")
    with pytest.raises(ModelNotFoundError, match="no weights") as refused:
        inspect_model(folder)
    assert refused.value.remedy


# Weight files that are not whole.


def header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize("num_bytes_kept", [0, 4, 8, 50, -60, -1])
def test_a_weight_file_cut_anywhere_is_found_out(tmp_path, num_bytes_kept):
    folder = save_config(tmp_path, "LlamaConfig", SIZES)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes_kept])
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors is not a whole safetensors file") as refused:
        inspect_model(folder)
    assert refused.value.remedy


@pytest.mark.parametrize(
    "content",
    [
        b"<html>404</html>",
        struct.pack("<Q", 2**63) + b"{}",
        header("no json"),
        header("[1]"),
        header('"a"'),
        header('{"a": 1}'),
        header('{"a": {}}'),
        header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}') + bytes(8),
        header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}}') + bytes(8),
        header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}') + bytes(9),
    ],
)
def test_a_weight_file_of_something_else_is_found_out(tmp_path, content):
    folder = save_config(tmp_path, "LlamaConfig", SIZES)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelNotFoundError, match="not a whole safetensors file"):
        inspect_model(folder)


def test_one_broken_file_of_several_is_named(tmp_path):
    folder = save_config(tmp_path, "LlamaConfig", SIZES)
    in_parts(folder)
    (folder / "part-2.safetensors").write_bytes((folder / "part-1.safetensors").read_bytes()[:-1])
    with pytest.raises(ModelNotFoundError, match="part-2"):
        inspect_model(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not a JSON object"),
        ('{"eos_token_id": "x"}', "eos_token_id 'x'"),
        ('{"eos_token_id": [1, null]}', "eos"),
    ],
)
def test_a_broken_generation_config_is_refused(tmp_path, content, says):
    folder = save_config(tmp_path, "LlamaConfig", SIZES)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=says) as refused:
        inspect_model(folder)
    assert refused.value.remedy


def test_what_files_hold_is_known_by_their_bytes_alone(tmp_path):
    """Equal where the same bytes came at other times; another one where a bit differs that no header shows."""
    digests = []
    for number in range(3):
        folder, cache = tmp_path / f"model{number}", tmp_path / f"cache{number}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        weights = bytearray(save({"w": torch.zeros(8)}))
        weights[-1] ^= number == 2
        (folder / "model.safetensors").write_bytes(bytes(weights))
        os.utime(folder / "model.safetensors", (number * 1000, number * 1000))
        digests.append(content_fingerprint(folder, cache))
        assert content_fingerprint(folder, cache) == digests[-1], "from the note"
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "model0" / "model.safetensors").write_bytes(bytes(weights))
    assert content_fingerprint(tmp_path / "model0", tmp_path / "cache0") == digests[2]
