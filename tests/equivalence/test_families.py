"""Families beyond their windows: in all layers or in some, in chunks, with sinks, with layers that share K and V.

Part 1 of the equality rule in every setting that does not stream. Prompts are up to 16 windows long; the reference
applies transformers' masks.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from store.memory_store import always_load

from equivalence.prompts import full_prompts, short_prompts
from equivalence.settings import SETTINGS, deal, long_but
from equivalence.suite import Counts, Setting, Trial, Workload
from equivalence.tiny_models import BEYOND_WINDOWS, VOCAB_SIZE, WINDOW
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.errors import ConfigError, UnsupportedModelError
from pagefold.kv import KEEP_ALL, KeepRule, audit
from pagefold.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

SLIDES = KeepRule(WINDOW)
RULES = {"llama4": {KeepRule(WINDOW, is_chunked=True), KEEP_ALL}}
RULES |= {family: {SLIDES} for family in ("mistral-window", "phi3-window", "mixtral-window")}
THROUGHOUT = [family for family in BEYOND_WINDOWS if KEEP_ALL not in RULES.get(family, {KEEP_ALL})]
SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FULL = Workload(full_prompts(VOCAB_SIZE), num_outputs=40)
WITH_GROUPS = [setting for setting in SETTINGS if setting.knows_groups]
QUICK = [setting for setting in WITH_GROUPS if setting.name in {"chunks of 17", "warm", "host tier"}]
CASES = deal(BEYOND_WINDOWS, WITH_GROUPS[::2], every=4)
IN_FULL = CASES[::7]


def run(family: str, setting: Setting, workload: Workload, tiny_folder, tiny_references) -> Trial:
    if setting.at_least is not None:  # windows take less memory, and what left them is found less often
        asked = dict.fromkeys(asdict(setting.at_least), 0)
        asked["num_hit_tokens"] = min(setting.at_least.num_hit_tokens, 1)
        asked["num_failed_steps"] = min(setting.at_least.num_failed_steps, 1)
        setting = replace(setting, at_least=Counts(**asked))
    trial = Trial(setting, workload, tiny_folder(family))
    assert set(trial.engine.scheduler.core.rules) == RULES.get(family, {SLIDES, KEEP_ALL})
    trial.run()
    trial.assert_exact(tiny_references(family, workload.num_outputs))
    return trial


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    ("family", "setting"),
    [
        pytest.param(family, setting, id=f"{family}-{setting.name}")
        for place, family in enumerate(BEYOND_WINDOWS)
        for number, setting in enumerate(QUICK)
        if (place + number) % 3 == 0 or (family == "mistral-window" and setting.num_host_blocks)
    ],
)
def test_outputs_are_those_of_generate(family, setting, tiny_folder, tiny_references):
    run(family, setting, SHORT, tiny_folder, tiny_references)


@pytest.mark.long
@pytest.mark.parametrize(("family", "setting"), CASES)
def test_outputs_are_those_of_generate_in_every_setting(family, setting, tiny_folder, tiny_references):
    run(family, setting, SHORT, tiny_folder, tiny_references)


@pytest.mark.long
@pytest.mark.parametrize(("family", "setting"), IN_FULL)
def test_outputs_are_those_of_generate_in_full(family, setting, tiny_folder, tiny_references):
    run(family, setting, FULL, tiny_folder, tiny_references)


class Forked(Trial):
    """A trial in which every prompt is sampled three times, all of them greedily: each sample goes on by itself."""

    def sampling(self, key):
        return replace(super().sampling(key), n=3, temperature=1.0, top_k=1)


@pytest.mark.long
@pytest.mark.parametrize("family", long_but(["mistral-window"], BEYOND_WINDOWS))
def test_forks_are_those_of_generate(family, tiny_folder, tiny_references):
    setting = Setting(name="forked", block_size=4, max_num_batched_tokens=48, max_num_seqs=12, spare_blocks=40)
    trial = Forked(setting, SHORT.up_to(140), tiny_folder(family))
    trial.run()
    assert {key.sample for key in trial.outputs} == {0, 1, 2}
    trial.assert_exact(tiny_references(family, SHORT.num_outputs))


@pytest.fixture
def engine_of(tiny_folder):
    """An engine of a family in float32, by transformers and the attention that is asked for."""

    def make(family: str, backend: str, **settings):
        shape = {"block_size": 8, "kv_cache_memory_bytes": 2**21, "max_model_len": 512}
        steps = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "model_impl": "transformers"}
        asked = {"dtype": "float32", "attention_backend": backend, **shape, **steps, **settings}
        return build_engine(plan_engine(EngineConfig(model=str(tiny_folder(family)), **asked)))

    return make


def generate(engine, token_ids: list[int], num_outputs: int, watch=lambda: None) -> list[int]:
    how = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    engine.add("one", token_ids, how)
    outputs: list[int] = []
    while engine.has_requests:
        for delta in engine.step():
            outputs += delta.token_ids
        watch()
    return outputs


PROMPT = [7 + at * at % 230 for at in range(150)]


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("family", BEYOND_WINDOWS)
def test_both_implementations_of_attention_generate_the_same(family, engine_of):
    """In float32, and with blocks held for no longer than windows ask."""
    engine, bound = engine_of(family, "cpu", enable_prefix_caching=False), SLIDES.num_blocks_for(250, 32, 8)

    def watch() -> None:
        core = engine.scheduler.core
        audit(core)
        for cache in core.caches:
            for table, rule in zip(cache.tables, core.rules, strict=True):
                assert not rule.trims or len(table.block_ids) <= bound

    assert generate(engine, PROMPT, 60, watch) == generate(engine_of(family, "reference"), PROMPT, 60)
    assert engine.scheduler.core.pool.num_free == engine.scheduler.core.pool.num_blocks


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "kivi2"])
@pytest.mark.parametrize("family", long_but(["mistral-window"], BEYOND_WINDOWS))
def test_codes_do_not_tell_how_a_prompt_was_cut(family, kv_cache_dtype, engine_of):
    """Also of layers that read what others have encoded."""
    settings = {"kv_cache_dtype": kv_cache_dtype, "dtype": "float64", "enable_prefix_caching": False}
    one, other = (engine_of(family, "reference", **settings, max_num_batched_tokens=num) for num in (17, 512))
    assert generate(one, PROMPT, 30) == generate(other, PROMPT, 30)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("family", THROUGHOUT)
@pytest.mark.parametrize("behind", ["host", "disk"])
def test_where_all_layers_have_windows_these_come_back_from_tiers(family, behind, engine_of, tmp_path):
    """Where the path ended nothing is left but the window, and that is far: it is brought, and leads to the same."""
    tiers = {"kv_offloading_size": 0.002} | ({"kv_disk_path": str(tmp_path / "disk")} if behind == "disk" else {})
    alone = engine_of(family, "cpu", enable_prefix_caching=False)
    said = PROMPT + generate(alone, PROMPT, 30)
    goes_on = said + PROMPT[:25]
    expected = generate(alone, goes_on, 20)
    engine = engine_of(family, "cpu", **tiers)
    assert generate(engine, PROMPT, 30) == said[150:]
    if behind == "disk":
        engine.close(lambda: 10.0)
        engine = engine_of(family, "cpu", **tiers)
        always_load(engine)
    core = engine.scheduler.core
    core.arbiter.compute_s_per_token = 1.0  # a tiny model is computed sooner than anything is loaded
    core.blocks.reclaim(core.pool.num_cached)  # its stores are the next step's
    assert core.pool.num_cached == 0
    begun: set[int] = set()

    def watch() -> None:
        audit(core)
        begun.update(cache.num_begun for cache in core.caches)

    assert generate(engine, goes_on, 20, watch) == expected
    num_found = (len(said) - 1) // 8
    assert begun == {num_found}
    assert core.host.num_loaded == len(core.rules) * len(SLIDES.places(num_found, 8)) < num_found


def logits_of(model, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt]), use_cache=False).logits[0, -1]


@pytest.fixture
def model_of(tiny_folder):
    """A model of transformers, with changes of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(family: str, **changes):
        config = AutoConfig.from_pretrained(tiny_folder(family))
        for name, value in changes.items():
            setattr(config, name, value)
        how = {"dtype": torch.float64, "experts_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(tiny_folder(family), config=config, **how)

    return make


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", BEYOND_WINDOWS)
def test_windows_matter(family, model_of):
    """Without them the tiny models say something else: so what is held above, is held of windows."""
    without = {"attention_chunk_size": 4096} if family == "llama4" else {"sliding_window": 4096}
    with_windows, other = model_of(family), model_of(family, **without)
    torch.testing.assert_close(*(logits_of(model, PROMPT[:WINDOW]) for model in (with_windows, other)))
    one, two = logits_of(with_windows, PROMPT), logits_of(other, PROMPT)
    assert (one - two).abs().max() > 0.05
    assert one.argmax() != two.argmax() or (one - two).abs().max() > 0.5


def test_sinks_matter(model_of):
    model = model_of("gpt-oss")
    before = logits_of(model, PROMPT)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    assert (logits_of(model, PROMPT) - before).abs().max() > 0.5


def test_whose_k_and_v_are_read_matters(model_of):
    model = model_of("gemma3n")
    before = logits_of(model, PROMPT)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    assert (first.store_full_length_kv, second.store_full_length_kv) == (False, True)
    first.store_full_length_kv, second.store_full_length_kv = True, False
    assert (logits_of(model, PROMPT) - before).abs().max() > 0.5


def test_the_temperature_matters_that_rises_with_the_position(model_of):
    other = model_of("llama4", attn_temperature_tuning=False)
    assert (logits_of(model_of("llama4"), PROMPT) - logits_of(other, PROMPT)).abs().max() > 0.5


def test_layers_that_read_what_another_one_keeps_take_no_bytes(engine_of):
    engine = engine_of("gemma3n", "reference")
    geometry = engine.runner.geometry
    assert geometry.sources == (0, 1, 2, 1, 2, 1)
    assert (geometry.num_own_layers, len(geometry.layer_begins)) == (3, 3)
    assert geometry.bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert [geometry.group_of_layer[layer] for layer in (3, 4, 5)] == [geometry.group_of_layer[at] for at in (1, 2, 1)]
    assert geometry.cell(5, 1) == geometry.cell(1, 1)


def test_a_layer_that_reads_another_than_the_config_says_is_found_out(engine_of):
    engine = engine_of("gemma3n", "reference")
    engine.runner.geometry = replace(engine.runner.geometry, sources=(0, 1, 2, 0, 2, 1))
    with pytest.raises(UnsupportedModelError, match="where the config says it reads those of layer 0"):
        engine.runner.warm_up()


def test_what_is_not_finite_of_a_token_is_told_by_the_last_layer_that_has_its_own(engine_of):
    """Behind it nobody reads what is computed of another token."""
    engine = engine_of("gemma3n", "reference")
    decoder = engine.runner.decoder
    attention = decoder._attention

    def broken_in(at):
        def broken(query, key, value, slab, inputs, layer, *scoring):  # noqa: PLR0917 - the op's own signature
            out = attention(query, key, value, slab, inputs, layer, *scoring)
            out[3] = float("nan") if layer == at else out[3]
            return out

        return broken

    for at, tells in ((1, True), (3, False)):
        decoder._attention = broken_in(at)
        engine.runner._dummy(6, 1)
        assert decoder.states()[3].isfinite().all() != tells
        assert decoder.states()[2].isfinite().all()


@pytest.mark.parametrize("family", THROUGHOUT)
def test_where_all_layers_have_windows_what_streams_ends_at_the_window(family, tiny_folder):
    """Before weights are loaded, by the name of the setting."""
    host = {"kv_offloading_size": 0.001, "allow_streaming": True}
    shape = {"model": str(tiny_folder(family)), "model_impl": "transformers", "dtype": "float32", **host}
    name = family.removesuffix("-window")
    why = f"beyond {WINDOW} tokens {name}'s sliding window is not computed while allow_streaming is set"
    with pytest.raises(ConfigError, match=why):
        plan_engine(EngineConfig(**shape, kv_cache_memory_bytes=2**21, max_model_len=400))
    plan = plan_engine(EngineConfig(**shape, kv_cache_memory_bytes=2**21, max_model_len=WINDOW))
    assert not plan.geometry.keeps


def test_a_window_of_one_token_is_taken_where_it_is_computed(tiny_folder, tmp_path):
    """Each token sees itself alone. The reference has no cache: transformers' keeps all where it should keep none."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "one"
    shutil.copytree(tiny_folder("mistral-window"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 1}))
    shape = {"model": str(folder), "kv_cache_memory_bytes": 2**21, "block_size": 8}
    streams = {"kv_offloading_size": 2**-10, "allow_streaming": True}
    with pytest.raises(
        ConfigError,
        match="No request fits: beyond 1 token mistral's sliding window is not computed while allow_streaming is set",
    ):
        plan_engine(EngineConfig(**shape, **streams, dtype="float32"))
    engine = build_engine(plan_engine(EngineConfig(**shape, dtype="float64", attention_backend="reference")))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    expected, tokens = [], list(PROMPT)
    for _ in range(20):
        expected.append(int(logits_of(model, tokens).argmax()))
        tokens.append(expected[-1])
    assert generate(engine, PROMPT, 20) == expected
