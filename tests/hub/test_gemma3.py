"""Gemma 3: a small file of random weights, converted and served; the real model too where somebody has fetched it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tiny_gemma
from safetensors.numpy import load_file

from pagefold import LLM, SamplingParams
from pagefold.errors import UnsupportedModelError
from pagefold.gguf.header import GgufFormatError
from pagefold.hub.convert import convert

if TYPE_CHECKING:
    from pathlib import Path

HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def hf_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{HF_NAMES[parts[2]]}.weight"
    return f"{HF_NAMES[parts[0]]}.weight"


@pytest.fixture(scope="module")
def folder(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gemma")
    return convert(tiny_gemma.write(tools, place / "tiny.gguf"), place / "model")


def test_every_weight_equals_the_slow_twin_in_bits(tools: Any, folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    stored = tiny_gemma.tensors(tools)
    assert set(found) == {hf_name(name) for name in stored}
    for name, tensor in stored.items():
        expected = np.array(tools.slow_numbers(tensor), np.float32).reshape(tensor.shape)
        if "norm" in name:
            expected = np.array([number - np.float32(1) for number in expected], np.float32)
        weight = found[hf_name(name)]
        np.testing.assert_array_equal(weight.view(np.uint32), expected.view(np.uint32), err_msg=name)


def test_every_weight_equals_that_of_transformers_own_reader(tools: Any, folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf", reason="transformers needs it, and accelerate, to read GGUF")
    pytest.importorskip("accelerate", reason="transformers needs it, and gguf, to read GGUF")
    gguf = tiny_gemma.write(tools, tmp_path / "tiny.gguf", header={"general.name": "tiny"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf.name)
    theirs = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    del theirs["lm_head.weight"]  # tied
    ours = load_file(folder / "model.safetensors")
    assert set(ours) == set(theirs)
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    config = transformers.AutoConfig.from_pretrained(folder)
    # (No query_pre_attn_scalar: a file has none, and theirs is 256 whatever the heads' length.)
    for name in ("layer_types", "sliding_window", "rope_parameters", "head_dim", "vocab_size", "eos_token_id"):
        assert getattr(config, name) == getattr(model.config, name), name


def test_what_is_held_at_once_changes_nothing(
    tools: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagefold.hub.convert._NUMBERS_AT_ONCE", 100)
    other = convert(tiny_gemma.write(tools, tmp_path / "tiny.gguf"), tmp_path / "model")
    assert (other / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_config_is_gemmas(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert expected.items() <= config.items()
    generation = json.loads((folder / "generation_config.json").read_bytes())
    assert generation == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


def test_a_model_that_chats_ends_its_turns_too(tools: Any, tmp_path: Path) -> None:
    header = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}"}
    folder = convert(tiny_gemma.write(tools, tmp_path / "chat.gguf", header=header), tmp_path / "model")
    generation = json.loads((folder / "generation_config.json").read_bytes())
    assert generation["eos_token_id"] == [1, 5]
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    assert settings["chat_template"] == header["tokenizer.chat_template"]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"general.architecture": "gemma4"}, "architecture is 'gemma4', which is none of llama, qwen2"),
        ({"gemma3.rope.scaling.type": "longrope"}, "scales its positions"),
        ({"gemma3.final_logit_softcapping": 30.0}, r"header has gemma3\.final_logit_softcapping"),
        ({"gemma3.attention.sliding_window_pattern": 0}, "a full layer after each 0"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        ({"tokenizer.ggml.pre": "tekken"}, "family 'tekken'"),
        ({"tokenizer.ggml.token_type": [1] * len(tiny_gemma.pieces())}, "a token for each byte"),
    ],
)
def test_models_that_would_be_converted_wrongly_are_refused(
    tools: Any, tmp_path: Path, header: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        convert(tiny_gemma.write(tools, tmp_path / "odd.gguf", header=header), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"tokenizer.ggml.scores": [0.5]}, "1 scores"),
        ({"tokenizer.ggml.unknown_token_id": None}, "no unknown token"),
        ({"tokenizer.ggml.bos_token_id": None}, "does not name"),
        ({"gemma3.attention.sliding_window": None}, "sliding_window"),
    ],
)
def test_files_that_lack_something_are_refused(tools: Any, tmp_path: Path, header: dict[str, Any], said: str) -> None:
    with pytest.raises(GgufFormatError, match=said):
        convert(tiny_gemma.write(tools, tmp_path / "odd.gguf", header=header), tmp_path / "model")


def test_an_output_matrix_of_its_own_is_refused(tools: Any, tmp_path: Path) -> None:
    output = tools.Stored.random(np.random.default_rng(4), (len(tiny_gemma.pieces()), tiny_gemma.HIDDEN), tools.F32)
    with pytest.raises(UnsupportedModelError, match="output matrix"):
        convert(tiny_gemma.write(tools, tmp_path / "odd.gguf", other={"output.weight": output}), tmp_path / "model")


PROMPTS = ["there and then", "the  end\n\nand <b>here</b>", "日本 é ü", "an " * 20]


def generated_by_transformers(folder: Path, prompts: list[str], num_tokens: int, dtype: str) -> list[list[int]]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        found.append(output[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("settings", [{"dtype": "float64", "attention_backend": "reference"}, {"dtype": "float32"}])
def test_served_tokens_equal_those_of_transformers(folder: Path, settings: dict[str, str]) -> None:
    """Far beyond the window, and beyond the prompt's end."""
    llm = LLM(model=str(folder), max_model_len=128, kv_cache_memory_bytes=2**22, **settings)
    results = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, min_tokens=24), use_tqdm=False)
    expected = generated_by_transformers(folder, PROMPTS, 24, settings["dtype"])
    assert [result.outputs[0].token_ids for result in results] == expected


def test_the_real_model_goes_on_with_a_story(real_gemma: Path) -> None:
    story = "Once upon a time, in a small village by the sea,"
    llm = LLM(model=str(real_gemma), dtype="float32", max_model_len=256)
    (result,) = llm.generate(story, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    expected = (
        " there lived a man named John. He was a kind and gentle man, who loved his family and friends very much."
    )
    assert result.outputs[0].text.startswith(expected[:80])
    assert [result.outputs[0].token_ids] == generated_by_transformers(real_gemma, [story], 24, "float32")
