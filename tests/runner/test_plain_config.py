"""A config that is read without transformers comes to what transformers makes of it; any other is left to it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_folders import SIZES, save_config

from pagefold.errors import PagefoldError
from pagefold.runner import models
from pagefold.runner.models import inspect_model
from pagefold.runner.plain_config import read_plain_config

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
from tiny_models import FAMILIES, save_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN = {"llama", "llama-mha", "llama-mqa", "llama3", "mistral", "mistral-window", "mistral-window-40", "qwen3"}
CLASSES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": None},
    "Qwen2Config": {"use_sliding_window": False},
    "Qwen3Config": {"use_sliding_window": False},
}


def answer(folder: Path) -> object:
    """What inspect_model says of a folder: a spec, or how it refuses it."""
    try:
        return inspect_model(folder)
    except PagefoldError as error:
        return type(error), error.message, error.remedy


def both_answers(folder: Path) -> tuple[object, object]:
    """The answer as it is, and that of transformers alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "read_plain_config", lambda _: None)
        expected = answer(folder)
    return answer(folder), expected


def is_plain(folder: Path) -> bool:
    return read_plain_config(json.loads((folder / "config.json").read_text())) is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_are_read_alike(family, tmp_path):
    save_tiny_model(family, tmp_path)
    told, expected = both_answers(tmp_path)
    assert told == expected
    assert is_plain(tmp_path) == (family in PLAIN)  # qwen2's has a window


def test_the_built_in_model_is_read_alike(smollm2):
    told, expected = both_answers(smollm2)
    assert told == expected
    assert is_plain(smollm2)


def rewrite(folder: Path, change: dict[str, Any]) -> None:
    """Change values of ``config.json``; an ellipsis takes one away."""
    file = folder / "config.json"
    written = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in written.items() if value is not ...}))


def save(folder: Path, config: str) -> Path:
    """Write a config as a model of that class is saved."""
    architecture = config.replace("Config", "ForCausalLM")
    return save_config(folder, config, SIZES | CLASSES[config], architectures=[architecture])


OLD_SPELLING = {"rope_parameters": ..., "dtype": ..., "torch_dtype": "bfloat16", "rope_theta": 500000.0}
STAYS_PLAIN = {
    "as it was saved": {},
    "the older spelling": OLD_SPELLING | {"rope_scaling": None},
    "a whole number as theta": OLD_SPELLING | {"rope_theta": 1000000},
    "llama3 in the older spelling": OLD_SPELLING | {"rope_scaling": LLAMA3},
    "llama3 in an odd spelling": OLD_SPELLING | {"rope_scaling": LLAMA3 | {"type": "llama3"}},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    "theta in both places": {"rope_theta": 5.0},
    "several ends": {"eos_token_id": [2, 7]},
    "no ends": {"eos_token_id": None},
    "tied": {"tie_word_embeddings": True},
    "what changes nothing": {"initializer_range": 0.1, "use_cache": False, "transformers_version": "4.40.1"},
}


@pytest.mark.parametrize("config", CLASSES)
@pytest.mark.parametrize("kind", STAYS_PLAIN)
def test_plain_variants_are_read_alike(tmp_path, config, kind):
    save(tmp_path, config)
    rewrite(tmp_path, STAYS_PLAIN[kind])
    told, expected = both_answers(tmp_path)
    assert told == expected
    assert is_plain(tmp_path)


@pytest.mark.parametrize("config", ["LlamaConfig", "MistralConfig", "Qwen2Config"])
def test_heads_may_say_their_size_by_saying_nothing(tmp_path, config):
    save(tmp_path, config)
    rewrite(tmp_path, {"head_dim": ...})
    told, expected = both_answers(tmp_path)
    assert told == expected
    assert is_plain(tmp_path)


IS_NOT_PLAIN: dict[str, dict[str, Any]] = {
    **{f"{name} {value!r}": {name: value} for name in ("hidden_size", "vocab_size") for value in ("32", 32.0, None, 0)},
    **{f"without {name}": {name: ...} for name in ("num_key_value_heads", "eos_token_id", "hidden_act", "vocab_size")},
    **{f"{name} {value!r}": {name: value} for name in ("attention_bias", "mlp_bias") for value in (True, None, "no")},
    "an unknown key": {"clip_qkv": None},
    "an unknown dtype": {"dtype": "float7"},
    "another class": {"architectures": ["LlamaForSequenceClassification"]},
    "no class": {"architectures": ...},
    "another family": {"model_type": "mixtral"},
    "a family that is no name": {"model_type": ["llama"]},
    "another activation": {"hidden_act": "gelu"},
    "more ranks": {"pretraining_tp": 2},
    "true for one": {"pretraining_tp": True},
    "a window": {"sliding_window": 16},
    "soft-capping": {"attn_logit_softcapping": 30.0},
    "quantized weights": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "heads that do not divide": {"num_attention_heads": 5},
    "an odd head": {"head_dim": 7},
    "an epsilon of another type": {"rms_norm_eps": 1},
    "an epsilon as text": {"rms_norm_eps": "1e-6"},
    "an end that is no token": {"eos_token_id": "</s>"},
    "ends that are no tokens": {"eos_token_id": [2, None, "x"]},
    "theta as text": {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
    "no theta": {"rope_parameters": {"rope_type": "default"}},
    "two ropes": {"rope_scaling": LLAMA3},
    "a linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "a yarn rope": {"rope_parameters": LLAMA3 | {"rope_type": "yarn", "rope_theta": 1e4}},
    "a dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "a part of the head": {"rope_parameters": LLAMA3 | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "factors the wrong way round": {"rope_parameters": LLAMA3 | {"rope_theta": 1e4, "low_freq_factor": 5.0}},
    "a rope with more in it": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4]}},
    "layers of several kinds": {"layer_types": ["full_attention", "sliding_attention"]},
    "layers too many": {"layer_types": ["full_attention"] * 3},
}


@pytest.mark.parametrize("kind", IS_NOT_PLAIN)
def test_whatever_else_is_left_to_transformers(tmp_path, kind):
    save(tmp_path, "LlamaConfig")
    assert is_plain(tmp_path)
    rewrite(tmp_path, IS_NOT_PLAIN[kind])
    assert not is_plain(tmp_path)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ("MistralConfig", {"sliding_window": ...}),
        ("MistralConfig", {"sliding_window": 1}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("Qwen3Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        ("Qwen3Config", {"head_dim": ...}),
        ("Qwen3Config", {"attention_bias": True}),
    ],
)
def test_what_a_familys_defaults_decide_is_left_to_transformers(tmp_path, config, change):
    save(tmp_path, config)
    assert is_plain(tmp_path)
    rewrite(tmp_path, change)
    told, expected = both_answers(tmp_path)
    assert told == expected
    assert not is_plain(tmp_path)


@pytest.mark.parametrize("window", [2, 16, 128, 4096])
def test_a_window_of_every_layer_is_plain(tmp_path, window):
    save(tmp_path, "MistralConfig")
    rewrite(tmp_path, {"sliding_window": window})
    told, expected = both_answers(tmp_path)
    assert told == expected
    assert told.keeps
    assert is_plain(tmp_path)


JSON = st.sampled_from([None, True, False, 0, 1, -1, 2, 3, 8, 16, 0.5, 1.0, 1e4, "", "silu", "default", [], [2], {}])


@given(data=st.data())
def test_any_change_of_a_value_is_answered_alike(tmp_path_factory, data):
    config = data.draw(st.sampled_from(sorted(CLASSES)))
    folder = save(tmp_path_factory.mktemp("config"), config)
    written = json.loads((folder / "config.json").read_text())
    names = st.sampled_from([*sorted(written), "rope_theta", "rope_scaling", "sliding_window", "layer_types", "x"])
    changed = data.draw(st.dictionaries(names, JSON | st.just(...), min_size=1, max_size=2))
    rewrite(folder, changed)
    if is_plain(folder):  # otherwise transformers answers, as before
        told, expected = both_answers(folder)
        assert told == expected
