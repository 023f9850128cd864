"""Converting: weights equal in bits, a folder that transformers takes without a word, and all refusals."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pagefold.errors import PagefoldError, UnsupportedModelError
from pagefold.gguf.file import GgufFile
from pagefold.gguf.header import GgufFormatError
from pagefold.hub.catalog import CONVERTER_VERSION
from pagefold.hub.convert import convert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "pagefold.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{HF_NAMES[parts[2]]}.weight"
    return f"{HF_NAMES[parts[0]]}.weight"


def slow_rows(name: str, rows: list[list[float]], num_heads: dict[str, int]) -> list[list[float]]:
    """Slow twin of the order of rows: row (2i + j) of a head in the file is row (j * half + i) of the model."""
    kind = name.split(".")[-2]
    if kind not in num_heads:
        return rows
    head_dim = len(rows) // num_heads[kind]
    ordered: list[list[float]] = [[]] * len(rows)
    for head in range(num_heads[kind]):
        for i in range(head_dim // 2):
            for j in range(2):
                ordered[head * head_dim + j * head_dim // 2 + i] = rows[head * head_dim + 2 * i + j]
    return ordered


def test_every_weight_equals_the_slow_twin_in_bits(tools: Any, tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    found = load_file(convert(tiny_gguf(), tmp_path / "model") / "model.safetensors")
    stored = tools.tiny_tensors()
    assert set(found) == {hf_name(name) for name in stored}
    for name, tensor in stored.items():
        numbers = tools.slow_numbers(tensor)
        width = tensor.shape[-1]
        rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        expected = np.array(slow_rows(name, rows, {"attn_q": 4, "attn_k": 2}), np.float32).reshape(tensor.shape)
        weight = found[hf_name(name)]
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight.view(np.uint32), expected.view(np.uint32), err_msg=name)


def test_the_file_says_what_the_config_says(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    folder = convert(tiny_gguf(), tmp_path / "deep" / "model")
    assert {path.name for path in folder.iterdir()} == MODEL_FILES
    config = json.loads((folder / "config.json").read_bytes())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 265,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,  # not 9.999999747378752e-06, which is how float32 stores it
        "rope_theta": 100000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert expected.items() <= config.items()
    generation = json.loads((folder / "generation_config.json").read_bytes())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    sizes = json.loads((folder / "pagefold.json").read_bytes())["files"]
    assert sizes == {name: (folder / name).stat().st_size for name in MODEL_FILES - {"pagefold.json"}}


def test_an_output_matrix_of_its_own_is_kept(tools: Any, tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    output = tools.Stored.random(np.random.default_rng(4), (265, 64), tools.F32)
    folder = convert(tiny_gguf(tensors={"output.weight": output}), tmp_path / "model")
    assert json.loads((folder / "config.json").read_bytes())["tie_word_embeddings"] is False
    assert load_file(folder / "model.safetensors")["lm_head.weight"].tobytes() == output.data


def test_progress_goes_from_nothing_to_everything(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    convert(tiny_gguf(), tmp_path / "model", progress=lambda *call: calls.append(call))
    assert calls == [("converting tiny.gguf", done, 20) for done in range(21)]


def test_what_is_written_changes_only_with_the_converters_version(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """Folders are found by the version: if this fails, raise CONVERTER_VERSION and write the new digest here."""
    folder = convert(tiny_gguf(), tmp_path / "model")
    content = b"".join((folder / name).read_bytes() for name in sorted(MODEL_FILES))
    assert (CONVERTER_VERSION, hashlib.sha256(content).hexdigest()[:16]) == (2, "7392b7cb25a66f34")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "falcon"}, "architecture is 'falcon', which is none of llama, qwen2, qwen3, gemma2"),
        ({"llama.rope.scaling.type": "dynamic"}, "scales its positions by 'dynamic'"),
        ({"llama.attention.clamp_kqv": 8.0}, r"header has llama\.attention\.clamp_kqv"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.attention.causal": False}, "later tokens"),
        ({"llama.tensor_data_layout": "other"}, "'other'"),
        ({"llama.feed_forward_length": [96, 64]}, "layers differ in llama.feed_forward_length"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.rope.dimension_count": 8}, "rotates a part"),
        ({"llama.attention.value_length": 8}, "differ in length"),
        ({"tokenizer.ggml.model": "llama"}, "kind 'llama'"),
        ({"tokenizer.ggml.model": "t5"}, "kind 't5'"),
        ({"tokenizer.ggml.pre": "viking"}, "family 'viking'.*smollm, gpt-2, llama-bpe"),
        ({"tokenizer.ggml.pre": None}, "family 'none'"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
    ],
)
def test_models_that_would_be_converted_wrongly_are_refused(
    tiny_gguf: Callable[..., Path], tmp_path: Path, metadata: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        convert(tiny_gguf(metadata=metadata), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": None}, "general.architecture"),
        ({"llama.block_count": 3}, r"blk\.2\.attn_norm\.weight .* is missing"),
        ({"llama.block_count": 1 << 30}, "contradict"),
        ({"llama.block_count": 0}, "contradict"),
        ({"llama.attention.head_count_kv": 3}, "contradict"),
        ({"llama.attention.key_length": 15}, "contradict"),
        ({"llama.attention.head_count": 0}, "contradict"),
        ({"llama.attention.head_count": -4}, "contradict"),
        ({"llama.feed_forward_length": 64}, "ffn_gate.weight of shape"),
        ({"tokenizer.ggml.eos_token_id": 265}, "eos_token_id is 265"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
        ({"tokenizer.ggml.merges": None}, "merges"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tiny_gguf: Callable[..., Path], tmp_path: Path, metadata: dict[str, Any], said: str
) -> None:
    with pytest.raises(GgufFormatError, match=said):
        convert(tiny_gguf(metadata=metadata), tmp_path / "model")


def test_tensors_too_few_or_too_many_are_refused(tools: Any, tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(GgufFormatError, match=r"output_norm\.weight .* is missing"):
        convert(tiny_gguf(tensors={"output_norm.weight": None}), tmp_path / "model")
    with pytest.raises(GgufFormatError, match=r"token_embd\.weight is missing"):
        convert(tiny_gguf(tensors={"token_embd.weight": None}), tmp_path / "model")
    bias = tools.Stored((64,), tools.F32, bytes(256))
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.bias"):
        convert(tiny_gguf(tensors={"blk.0.attn_q.bias": bias}), tmp_path / "model")


def test_a_missing_source_is_not_blamed_on_the_target(tmp_path: Path) -> None:
    with pytest.raises(PagefoldError, match=r"absent\.gguf cannot be read"):
        convert(tmp_path / "absent.gguf", tmp_path / "model")


@pytest.fixture
def no_warnings() -> Iterator[None]:
    """Fail if transformers warns, by its logger or by Python's warnings."""
    transformers = pytest.importorskip("transformers")
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    transformers.logging.add_handler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    transformers.logging.remove_handler(handler)
    assert records == []


@pytest.mark.usefixtures("no_warnings")
def test_transformers_loads_the_tiny_folder_without_a_warning(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = convert(tiny_gguf(), tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("hello 12", return_tensors="pt")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids[0]) == ["hello", "Ġ", "1", "2"]
    assert model(ids).logits.isfinite().all()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "user: x"


@pytest.mark.usefixtures("no_warnings")
def test_the_real_model_answers(real_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(real_folder)
    assert model.num_parameters() == 134_515_008
    assert (model.config.rope_parameters["rope_theta"], model.config.rms_norm_eps) == (100000.0, 1e-5)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.long
def test_all_weights_equal_those_of_transformers_own_reader(real_folder: Path, real_gguf: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf", reason="transformers needs it, and accelerate, to read GGUF")
    pytest.importorskip("accelerate", reason="transformers needs it, and gguf, to read GGUF")
    model = transformers.AutoModelForCausalLM.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)
    theirs = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    del theirs["lm_head.weight"]  # tied
    ours = load_file(real_folder / "model.safetensors")
    assert len(ours) == 272
    assert set(ours) == set(theirs)
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []


def test_the_real_folder_holds_every_tensor_of_the_file(real_folder: Path, real_gguf: Path) -> None:
    ours = load_file(real_folder / "model.safetensors")
    with GgufFile(real_gguf) as gguf:
        assert len(gguf.tensors) == len(ours) == 272
        for name in gguf.tensors:
            expected, weight = gguf.read(name), ours[hf_name(name)]
            if "attn_q" in name or "attn_k" in name:
                # The forward order, as the file's writer applies it: the inverse of what the converter does.
                pairs = weight.reshape(expected.shape[0] // 64, 2, 32, 576).swapaxes(1, 2)
                weight = pairs.reshape(expected.shape)
            assert weight.tobytes() == expected.tobytes(), name
