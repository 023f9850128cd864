"""The choice of how K and V are stored: what is refused, and that blocks of one codec never serve another."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from equivalence.tiny_models import save_tiny_model
from store.memory_store import always_load
from transformers import AutoModelForCausalLM

from pagefold import LLM, SamplingParams
from pagefold.config import EngineConfig
from pagefold.engine.calibration import _TEXT, find_constants
from pagefold.engine.planning import hardware_of, plan_engine
from pagefold.errors import ConfigError
from pagefold.memory.limit import Limit
from pagefold.runner.codecs.constants import RANGE
from pagefold.runner.cuda_decoder import CudaDecoder
from pagefold.runner.loader import load_model
from pagefold.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 16, "kv_cache_memory_bytes": 2**22}


def prompts(num=3):
    return [{"prompt_token_ids": [1000 + 7 * index + position % 40 for position in range(100)]} for index in range(num)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache_dtype": "int5"}, "int8_per_token_head"),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (30,)}, "between 0 and 29"),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (-1,)}, "between 0 and 29"),
        ({"kv_cache_dtype_skip_layers": (0,)}, "no layer's KV is encoded"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_loaded(smollm2, settings, said):
    with pytest.raises(ConfigError) as caught:
        plan_engine(EngineConfig(model=str(smollm2), **settings))
    assert said in f"{caught.value} {caught.value.remedy}"


def test_auto_is_what_it_was(smollm2):
    for dtype, element_bytes in (("float32", 4), ("bfloat16", 2)):
        plain = plan_engine(EngineConfig(model=str(smollm2), dtype=dtype))
        assert plain.geometry.codec is None
        assert plain.geometry.bytes_per_token == 30 * 3 * 64 * 2 * element_bytes
    same = plan_engine(EngineConfig(model=str(smollm2), dtype="bfloat16", kv_cache_dtype="bfloat16"))
    assert same.geometry.codec is None  # as it is computed


def test_the_first_and_last_layers_can_stay_in_16_bit(smollm2):
    plan = plan_engine(EngineConfig(model=str(smollm2), kv_cache_dtype="int4", kv_cache_dtype_skip_layers=(29, 0)))
    assert plan.geometry.skip_layers == (0, 29)
    assert plan.geometry.bytes_per_token == 3 * (28 * (40 + 34) + 2 * 2 * 128)
    assert plan.is_fused


@pytest.mark.long
def test_blocks_of_one_codec_are_not_those_of_another(tiny_chat_model, tmp_path):
    """A disk that several servers use in turn gives each only what its own codec wrote, and what that says."""
    outputs, cached = {}, {}
    kinds = ({}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}, {"kv_cache_dtype": "int4_plain"})
    kinds += ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (0,)},)
    for turn in range(2):
        for how in kinds:
            llm = LLM(str(tiny_chat_model), kv_disk_path=str(tmp_path), kv_disk_size=0.1, **how, **SMALL)
            always_load(llm.engine)
            results = llm.generate(prompts(), GREEDY, use_tqdm=False)
            cached[turn, str(how)] = sum(result.num_cached_tokens for result in results)
            told = [result.outputs[0].token_ids for result in results]
            assert outputs.setdefault(str(how), told) == told
            llm.close()
    assert [cached[0, how] for how in outputs] == [0] * len(kinds)
    assert [cached[1, how] for how in outputs] == [3 * 96] * len(kinds)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("is_fused", [True, False])
def test_constants_are_found_once_and_kept(tiny_chat_model, tmp_path, monkeypatch, is_fused):
    """They follow from the model alone; a damaged file is measured again."""
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path))
    said = []
    settings = SMALL | {"kv_cache_dtype": "int4", "model_impl": "pagefold" if is_fused else "transformers"}
    llm = LLM(str(tiny_chat_model), **settings)
    first = llm.engine.runner.slab.constants
    assert all(one.abs().max() > 0 for one in first)
    (file,) = (tmp_path / "calibration").iterdir()
    whole = file.read_bytes()
    kept = np.frombuffer(whole[:-32], np.float32)  # its digest is behind it
    np.testing.assert_array_equal(kept, np.concatenate([one.flatten() for one in first]))
    blueprint = plan_engine(EngineConfig(model=str(tiny_chat_model), **settings))
    found = find_constants(blueprint, _never, said.append)
    assert all(map(torch.equal, found, first))
    assert not said
    for damage in (whole[:10], bytes(len(whole)), whole[:999] + bytes([whole[999] ^ 1]) + whole[1000:]):
        file.write_bytes(damage)
        again = LLM(str(tiny_chat_model), **settings).engine.runner.slab.constants
        assert all(map(torch.equal, again, first))
        assert file.read_bytes() == whole


def test_servers_of_one_model_with_other_limits_keep_constants_of_their_own(tiny_chat_model, tmp_path, monkeypatch):
    """Keys have a centre for each range of positions: one server's file is of no use to the other."""
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr("pagefold.engine.calibration._NUM_TOKENS", 64)
    settings = SMALL | {"kv_cache_dtype": "int4", "attention_backend": "reference"}
    blueprint = plan_engine(EngineConfig(model=str(tiny_chat_model), **settings))
    said, length = [], blueprint.limit.length
    for limit in (length, length - RANGE) * 2:
        spec = replace(blueprint.spec, max_exact_len=limit, windowed_limit=Limit(limit))
        find_constants(replace(blueprint, spec=spec), hardware_of(blueprint).decoder, said.append)
    assert len(said) == len([*(tmp_path / "calibration").iterdir()]) == 2


def test_who_measures_at_the_same_time_takes_what_the_first_has_kept(tiny_chat_model, tmp_path, monkeypatch):
    """Else the blocks of one of two servers would have names that neither knows after its next start."""
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path))
    settings = SMALL | {"kv_cache_dtype": "int4", "attention_backend": "reference"}  # nothing is compiled
    blueprint = plan_engine(EngineConfig(model=str(tiny_chat_model), **settings))
    own = find_constants(blueprint, hardware_of(blueprint).decoder, str)
    (file,) = (tmp_path / "calibration").iterdir()
    numbers = (np.frombuffer(file.read_bytes()[:-32], np.float32) * 2).tobytes()
    file.unlink()

    def other_is_sooner(*args):
        file.write_bytes(numbers + hashlib.sha256(numbers).digest())
        return hardware_of(blueprint).decoder(*args)

    found = find_constants(blueprint, other_is_sooner, str)
    assert all(torch.equal(one, 2 * ours) for one, ours in zip(found, own, strict=True))


def test_a_cards_decoder_finds_the_same(tiny_chat_model, tmp_path, monkeypatch):
    """Inputs in one copy, the reference attention, told of queries: what a card computes a calibration with."""
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path))
    settings = SMALL | {"kv_cache_dtype": "int4", "attention_backend": "reference"}
    blueprint = plan_engine(EngineConfig(model=str(tiny_chat_model), **settings))
    own = find_constants(blueprint, hardware_of(blueprint).decoder, str)
    (file,) = (tmp_path / "calibration").iterdir()
    file.unlink()

    def as_on_a_card(blueprint, slab, on_queries=None):
        model = load_model(blueprint.spec.folder, blueprint.dtype)
        return CudaDecoder(model, slab, None, max_model_len=blueprint.capacity.max_model_len, on_queries=on_queries)

    assert all(map(torch.equal, find_constants(blueprint, as_on_a_card, str), own))


def test_constants_of_a_model_with_windows_are_those_of_all_its_tokens(smollm2, tmp_path, monkeypatch):
    """K and V are as transformers computes them beyond every window, though the cache need not keep them."""
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / "cache"))
    folder = save_tiny_model("gemma3", tmp_path / "gemma3", dtype=torch.float32, vocab_size=49152)
    for file in smollm2.glob("*token*"):
        shutil.copy(file, folder)
    settings = SMALL | {"max_model_len": 256, "kv_cache_dtype": "int4", "attention_backend": "reference"}
    blueprint = plan_engine(EngineConfig(model=str(folder), dtype="float32", **settings))
    assert len(blueprint.geometry.groups) == 2
    found = find_constants(blueprint, hardware_of(blueprint).decoder, str)
    token_ids = Tokenizer(folder).encode(_TEXT.read_text())[:2048]
    assert len(token_ids) == 2048
    model, seen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), {}
    for name, module in model.named_modules():
        if name.endswith(("k_norm", "v_proj")):
            module.register_forward_hook(lambda _module, _given, out, name=name: seen.update({name: out[0]}))
    with torch.inference_mode():
        model(torch.tensor([token_ids]), use_cache=False)
    for layer in range(4):
        of_layer = f"model.layers.{layer}.self_attn"
        cells = slice(2 * layer, 2 * layer + 2)
        values = seen[f"{of_layer}.v_proj"].view(2048, 2, 16).transpose(0, 1)
        expected = torch.stack((values[:, 0], values[:, 1:].mean(1)), 1)
        torch.testing.assert_close(found.value_centres[cells], expected, rtol=1e-4, atol=1e-4)
        first_keys = seen[f"{of_layer}.k_norm"].view(2, 2048, 16)[:, 0]  # which rope leaves as they are
        torch.testing.assert_close(found.key_centres[cells, 0], first_keys, rtol=1e-4, atol=1e-4)


def _never(blueprint, slab, on_queries=None):
    pytest.fail(f"weights are loaded again: {blueprint}, {slab}, {on_queries}")
