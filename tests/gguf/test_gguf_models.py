"""Files of every architecture, written by GGUF's own library, against the same model as transformers has it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import gguf
import gguf_models
import numpy as np
import pytest
import torch
import transformers
from equivalence.prompts import short_prompts
from equivalence.references import References
from equivalence.settings import SETTINGS
from equivalence.suite import Trial, Workload
from gguf_models import FAMILIES, GgufPair

from pagefold.errors import ModelNotFoundError
from pagefold.gguf.header import GgufFormatError
from pagefold.hub.catalog import resolve
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.fused.formats import decoder_formats
from pagefold.runner.fused.weights import pack_model
from pagefold.runner.loader import load_model
from pagefold.runner.models import inspect_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Q = gguf.GGMLQuantizationType
QUICK = {"llama3", "phi3-longrope"}
SHORT = Workload(short_prompts(307)[::3], num_outputs=24)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufPair]:
    return cache(lambda family: gguf_models.write_pair(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def folder(pair: Callable[[str], GgufPair], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    cache_dir = tmp_path_factory.mktemp("cache")
    return cache(lambda family: resolve(str(pair(family).path), cache_dir))


@pytest.fixture(scope="module")
def k_pair(tmp_path_factory: pytest.TempPathFactory) -> GgufPair:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=False)
    return gguf_models.write_model("llama", config, tmp_path_factory.mktemp("k"), k_kinds=True)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def assert_same_tensors(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint.names()) == set(expected)
    wrong = [name for name, tensor in expected.items() if not torch.equal(checkpoint.tensor(name), tensor)]
    assert wrong == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_the_librarys_to_the_bit(family: str, pair: Any, folder: Any) -> None:
    checkpoint, expected = Checkpoint(folder(family)), state_of(pair(family).folder)
    checkpoint.check({name: tuple(tensor.shape) for name, tensor in expected.items()})
    assert_same_tensors(checkpoint, expected)


def assert_stored_as_they_lie(path: Path, checkpoint: Checkpoint) -> set[str]:
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kinds = set()
    for name in checkpoint.names():
        stored = checkpoint.stored(name)
        if stored is None:
            continue
        kinds.add(stored.kind)
        expanded = gguf.dequantize(np.asarray(stored.blocks), Q[stored.kind])
        assert expanded.shape == stored.shape
        rows = expanded if stored.row_order is None else expanded[stored.row_order]
        assert rows.tobytes() == checkpoint.tensor(name).numpy().tobytes(), name
        assert any(stored.blocks.tobytes() == one.data.tobytes() for one in raw.values()), name
        assert not stored.blocks.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            stored.blocks[0, 0] = 1
    return kinds


def test_quantized_matrices_are_given_as_they_lie(pair: Any, folder: Any) -> None:
    kinds = assert_stored_as_they_lie(pair("llama").path, Checkpoint(folder("llama")))
    assert kinds == {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}


def test_only_rows_of_llamas_q_and_k_are_in_another_order(folder: Any) -> None:
    for family in ("llama", "qwen3"):
        checkpoint = Checkpoint(folder(family))
        ordered = {
            name for name in checkpoint.names() if (one := checkpoint.stored(name)) and one.row_order is not None
        }
        assert all("q_proj" in name or "k_proj" in name for name in ordered)
        assert bool(ordered) is (family == "llama")


def test_k_kinds(k_pair: GgufPair, tmp_path: Path) -> None:
    checkpoint = Checkpoint(resolve(str(k_pair.path), tmp_path))
    assert assert_stored_as_they_lie(k_pair.path, checkpoint) == {"Q4_K", "Q5_K", "Q6_K"}
    assert_same_tensors(checkpoint, state_of(k_pair.folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_alike(family: str, pair: Any, folder: Any) -> None:
    ours = transformers.AutoConfig.from_pretrained(folder(family)).to_dict()
    theirs = transformers.AutoConfig.from_pretrained(pair(family).folder).to_dict()
    harmless = {"dtype", "transformers_version", "_name_or_path", "initializer_range", "max_window_layers", "use_cache"}
    told = {"rope_theta", "rope_local_base_freq", "rope_scaling"}  # in rope_parameters as well
    keys = (ours.keys() | theirs.keys()) - harmless - told
    differ = {key for key in keys if (ours.get(key) or None) != (theirs.get(key) or None)}
    assert {key: (ours.get(key), theirs.get(key)) for key in differ} == {}


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("phi3")])
def test_the_fused_decoder_packs_the_same(family: str, pair: Any, folder: Any) -> None:
    def numbers_of(folder: Path) -> list[np.ndarray]:
        config = inspect_model(folder).fused
        assert config is not None
        packed = pack_model(config, folder, 64, decoder_formats("float32", None))
        numbers = [one for one in packed.weights if isinstance(one, np.ndarray) and one.dtype == np.float32]
        panels = [part for layer in packed.layers for matrix in layer for part in matrix]
        return numbers + panels + packed.head + packed.embedding

    for one, two in zip(numbers_of(folder(family)), numbers_of(pair(family).folder), strict=True):
        assert np.array_equal(one, two)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_transformers_gets_the_same_model(family: str, pair: Any, folder: Any) -> None:
    ours = load_model(folder(family), torch.float32).state_dict()
    theirs = load_model(pair(family).folder, torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "family",
    [family if family in QUICK else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES],
)
def test_outputs_are_those_of_generate(family: str, pair: Any, folder: Any) -> None:
    """Part 1 of the equality rule, in float64, against transformers on the library's numbers."""
    (setting,) = [setting for setting in SETTINGS if setting.name == "chunks of 16"]
    trial = Trial(replace(setting, at_least=None), SHORT, folder(family))  # so few prompts have little in common
    trial.run()
    trial.assert_exact(References(pair(family).folder, SHORT.num_outputs))


def test_what_a_model_needs_is_said_of_its_file(k_pair: GgufPair, tmp_path: Path) -> None:
    folder = resolve(str(k_pair.path), tmp_path)
    spec, expected = inspect_model(folder), inspect_model(k_pair.folder)
    assert spec.num_parameters == expected.num_parameters
    assert (spec.eos_token_ids, spec.fused) == (expected.eos_token_ids, expected.fused)
    assert spec.fingerprint != expected.fingerprint
    assert spec.fingerprint == inspect_model(folder).fingerprint


def test_a_file_that_was_cut_later_says_so(tmp_path: Path) -> None:
    pair = gguf_models.write_pair("llama", tmp_path)
    folder = resolve(str(pair.path), tmp_path / "cache")
    pair.path.write_bytes(pair.path.read_bytes()[:-100])
    with pytest.raises(GgufFormatError, match="damaged: it ends at byte"):
        Checkpoint(folder)
    with pytest.raises(ModelNotFoundError, match="damaged: it ends at byte"):
        inspect_model(folder)
