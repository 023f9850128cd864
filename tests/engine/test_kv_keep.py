"""``kv_keep`` in an engine: what it refuses before weights are loaded, what it says, and whose blocks it shares."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random

import pytest
import torch
from equivalence.packing_house import keep_random_scorer
from equivalence.settings import long_but
from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model
from store.memory_store import always_load
from store.real_servers import NO_REDIS, REDIS_SERVER, redis_server

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.masking import kinds_of, packing_keeps
from pagefold.engine.namespace import namespace_of
from pagefold.engine.planning import plan_engine
from pagefold.errors import ConfigError, InvalidRequestError
from pagefold.kv import audit
from pagefold.llm import LLM
from pagefold.request import Caller
from pagefold.runner.models import inspect_model
from pagefold.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), dtype=torch.float32)


@pytest.fixture
def calibrated(folder, tmp_path, monkeypatch):
    """Return the config of a model whose scorer is kept."""
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path))
    keep_random_scorer(folder)
    return EngineConfig(
        model=str(folder), dtype="float32", kv_keep=(0.5,), kv_cache_memory_bytes=2**26, max_model_len=2048
    )


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ConfigError, match="above 0, and 1 for all"):
        EngineConfig(model="m", kv_keep=(0.5, share))


def test_one_share_of_any_number_is_a_share_and_a_text_is_none():
    with pytest.raises(ConfigError, match="keeps all, as without it"):
        LLM("m", kv_keep=1)
    with pytest.raises(ConfigError) as caught:
        LLM("m", kv_keep="0.5")
    assert caught.value.remedy == "It must be a tuple, as a sequence of which each is a number."


@pytest.mark.parametrize(("shares", "why"), [((1,), "keeps all"), ((0.5, 1, 0.5), "a share twice"), (0.5, "sequence")])
def test_shares_that_say_nothing_are_refused(shares, why):
    with pytest.raises(ConfigError, match=why):
        EngineConfig(model="m", kv_keep=shares)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"streaming_llm": 1024}, "streaming_llm"),
        ({"allow_streaming": True, "kv_offloading_size": 1.0}, "allow_streaming"),
        ({"kv_cache_dtype": "kivi2"}, "kv_cache_dtype=kivi2"),
        (
            {"kv_cache_dtype": "int8", "kv_remote_url": "redis://127.0.0.1:1", "kv_transport_codec": "lossy6"},
            "kv_transport_codec=lossy6",
        ),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (0,)}, "kv_cache_dtype_skip_layers"),
        ({"quantization": "int8"}, "quantization"),
        ({"speculative_config": "ngram"}, "speculative_config"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(other, name):
    if "speculative_config" in other:
        from pagefold.speculation import SpeculativeParams

        other = {"speculative_config": SpeculativeParams(method="ngram", num_speculative_tokens=3)}
    with pytest.raises(ConfigError, match=f"kv_keep and {name} are set"):
        EngineConfig(model="m", kv_keep=(0.5,), **other)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_impl": "transformers"}, "takes the fused decoder"),
        ({"block_size": 12}, "block_size is 12"),
        ({"max_model_len": 512}, "are kept anyway: all of 512"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_loaded(calibrated, change, why):
    with pytest.raises(ConfigError, match=why):
        plan_engine(replace(calibrated, **change))


def test_a_model_whose_layers_all_have_windows_is_refused(calibrated, tmp_path):
    windowed = save_tiny_model("mistral-window", tmp_path / "windowed", dtype=torch.float32)
    with pytest.raises(ConfigError, match="have windows, all of them"):
        plan_engine(replace(calibrated, model=str(windowed)))


def test_windows_that_nothing_passes_are_none(calibrated, tmp_path):
    folder = save_tiny_model("gemma2", tmp_path / "gemma2", dtype=torch.float32)
    spec = inspect_model(folder)
    assert spec.full_layers == tuple(range(spec.num_layers))
    assert all(keep.packs for keep in packing_keeps(spec))


@pytest.fixture
def beside_windows(calibrated, tmp_path):
    """The config of an engine whose model has layers that attend to all tokens, and others with windows."""
    folder = save_tiny_model("gemma3", tmp_path / "gemma3", dtype=torch.float32)
    keep_random_scorer(folder)
    return replace(calibrated, model=str(folder))


def test_codecs_beside_windows_are_refused(beside_windows):
    with pytest.raises(ConfigError, match="kv_keep is set with a kv_cache_dtype"):
        plan_engine(replace(beside_windows, kv_cache_dtype="int8"))


@pytest.mark.long
def test_layers_with_windows_keep_them(beside_windows):
    """Warm and cold are the same, and exact requests beside them those of an engine that packs nothing."""
    random = Random(2)
    prompts = [{"prompt_token_ids": random.choices(range(5, VOCAB_SIZE), k=length)} for length in (1300, 700)]
    names = "model", "dtype", "kv_cache_memory_bytes", "max_model_len"
    settings = {name: getattr(beside_windows, name) for name in names}
    llm, cold = LLM(**settings, kv_keep=(1, 0.5)), LLM(**settings, kv_keep=(0.5,), enable_prefix_caching=False)
    kept = [one.outputs[0] for one in cold.generate(prompts, GREEDY)]
    exact = [one.outputs[0] for one in LLM(**settings).generate(prompts, GREEDY)]
    for _ in range(2):
        for share, expected in ((0.5, kept), (1, exact)):
            found = llm.generate(prompts, GREEDY, kv_keep=share)
            assert [one.outputs[0].token_ids for one in found] == [one.token_ids for one in expected]
    assert found[0].num_cached_tokens > 1000
    assert 0.3 < kept[0].kept_share < 0.75


def test_a_model_that_nobody_has_calibrated(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="it is not known which tokens") as caught:
        plan_engine(EngineConfig(model=str(folder), dtype="float32", kv_keep=(0.5,)))
    assert f"pagefold calibrate {folder}" in caught.value.remedy


def test_blocks_are_shared_with_nobody_who_keeps_others(calibrated):
    coded = replace(calibrated, kv_cache_dtype="int8")
    blueprints = [plan_engine(replace(one, kv_keep=(1, 0.5, 0.3))) for one in (calibrated, coded)]
    exact = [plan_engine(replace(one, kv_keep=())) for one in (calibrated, coded)]
    namespaces = [namespace_of(blueprint) for blueprint in exact]
    namespaces += [kind.namespace for blueprint in blueprints for kind in kinds_of(blueprint)]
    assert len({namespace.key() for namespace in namespaces}) == 8
    assert [(kind.name, kind.mask) for kind in kinds_of(blueprints[0])] == [
        ("exact", -1),
        ("keep 0.5", 0),
        ("keep 0.3", 1),
    ]


def test_a_start_says_that_outputs_are_not_the_models(calibrated):
    said = []
    build_engine(plan_engine(calibrated), say=said.append)
    (line,) = [line for line in said if line.startswith("keeps")]
    assert "50% of what is older" in line
    assert "outputs are not the model's" in line


@pytest.mark.parametrize("kv_cache_dtype", long_but(["auto"], ["auto", "int8"]))
def test_outputs_are_the_same_warm_and_cold_and_beams_are_refused(calibrated, kv_cache_dtype):
    random = Random(0)
    drawn = (random.choices(range(5, VOCAB_SIZE), k=length) for length in (1500, 700, 100))
    prompts = [{"prompt_token_ids": tokens} for tokens in drawn]
    settings = {name: getattr(calibrated, name) for name in ("model", "dtype", "kv_cache_memory_bytes")}
    llm = LLM(**settings, kv_keep=0.5, max_model_len=2048, kv_cache_dtype=kv_cache_dtype)
    assert llm.config.kv_keep == (0.5,)
    cold, warm = (llm.generate(prompts, GREEDY) for _ in range(2))
    assert [one.outputs[0].token_ids for one in cold] == [one.outputs[0].token_ids for one in warm]
    shares = [[one.outputs[0].kept_share for one in outputs] for outputs in (cold, warm)]
    assert shares[0] == shares[1]
    assert shares[0][2] is None  # none of it is old enough
    assert all(0.4 < share < 0.75 for share in shares[0][:2])
    with pytest.raises(InvalidRequestError, match=r"a share of 0\.5 is kept") as caught:
        llm.generate(prompts[2], SamplingParams(use_beam_search=True, n=2, temperature=0.0, max_tokens=4))
    assert caught.value.remedy == "Leave it out, or start with kv_keep 1 among others."


def test_requests_ask_for_what_is_kept_and_exact_ones_are_those_of_a_server_without_lossy_ones(calibrated):
    """Side by side in the same steps, of the same prompts."""
    random = Random(1)
    prompts = [
        {"prompt_token_ids": random.choices(range(5, VOCAB_SIZE), k=length)} for length in (1500, 900, 700, 1200)
    ]
    settings = {
        name: getattr(calibrated, name) for name in ("model", "dtype", "kv_cache_memory_bytes", "max_model_len")
    }
    exact = [one.outputs[0] for one in LLM(**settings).generate(prompts, GREEDY)]
    alone = {share: LLM(**settings, kv_keep=(share,)).generate(prompts, GREEDY) for share in (0.5, 0.25)}
    llm = LLM(**settings, kv_keep=(1, 0.5, 0.25))
    for at, prompt in enumerate(prompts):  # all of them at once
        for share in (None, 0.5, 0.25):
            llm.engine.add(f"{at} {share}", prompt["prompt_token_ids"], GREEDY, Caller(kv_keep=share))
    outputs = {f"{at} {share}": [] for at in range(len(prompts)) for share in (None, 0.5, 0.25)}
    while llm.engine.has_requests:
        for delta in llm.engine.step():
            outputs[delta.request_id] += delta.token_ids
    for at, own in enumerate(exact):
        assert outputs[f"{at} None"] == own.token_ids
        for share, found in alone.items():
            assert outputs[f"{at} {share}"] == found[at].outputs[0].token_ids
    warm = llm.generate(prompts, GREEDY)
    assert [one.outputs[0].token_ids for one in warm] == [own.token_ids for own in exact]
    assert all(one.outputs[0].kept_share is None for one in warm)
    assert warm[0].num_cached_tokens > 1400
    for caller in (Caller(kv_keep=0.3), Caller(kv_quality="best"), Caller(kv_keep=0.5, kv_quality="exact")):
        with pytest.raises(InvalidRequestError, match=r"this server offers 'exact' \(kv_keep 1.0\) or 'keep 0.5'"):
            llm.engine.check([5], GREEDY, caller)


def test_a_server_that_keeps_all_is_asked_for_exact_blocks_only(folder):
    engine = build_engine(plan_engine(EngineConfig(model=str(folder), dtype="float32", kv_cache_memory_bytes=2**24)))
    engine.check([5], GREEDY, Caller(kv_quality="exact"))
    engine.check([5], GREEDY, Caller(kv_keep=1.0))
    with pytest.raises(InvalidRequestError, match=r"kv_keep is 0\.5, and this server offers 'exact'"):
        engine.check([5], GREEDY, Caller(kv_keep=0.5))


@pytest.mark.parametrize("codec", long_but(["auto"], ["auto", "int8"]))
def test_what_the_host_has_kept_comes_back_the_same(calibrated, codec):
    """The device holds one prompt or two at a time; who comes back finds its chunks and its window on the host."""
    random = Random(7)
    prompts = [{"prompt_token_ids": random.choices(range(5, VOCAB_SIZE), k=1300)} for _ in range(5)]
    names = "model", "dtype", "max_model_len", "kv_keep"
    settings = {name: getattr(calibrated, name) for name in names} | {"kv_cache_dtype": codec}
    cold = LLM(**settings, kv_cache_memory_bytes=2**26, enable_prefix_caching=False)
    expected = [one.outputs[0].token_ids for one in cold.generate(prompts, GREEDY)]
    num_blocks = cold.engine.scheduler.core.pool.num_blocks
    block_bytes = 2**26 // num_blocks
    llm = LLM(**settings, kv_cache_memory_bytes=180 * block_bytes, kv_offloading_size=0.1)
    core = llm.engine.scheduler.core
    for comes_back in (False, True):
        for prompt, tokens in zip(prompts, expected, strict=True):
            (found,) = llm.generate([prompt], GREEDY)
            assert found.outputs[0].token_ids == tokens
            assert (found.num_cached_tokens > 1000) == comes_back
    assert core.host.num_loaded > 5 * 16
    assert any(held.chunk is not None for held in core.host.blocks.found())


@pytest.fixture
def tiers(tmp_path):
    """Return settings of engines with a disk, and with a pool, whatever computing takes."""
    with contextlib.ExitStack() as opened:
        found = {"disk": {"kv_disk_path": str(tmp_path / "disk"), "kv_disk_size": 0.2}}
        if REDIS_SERVER is not None:
            server = opened.enter_context(redis_server(tmp_path))
            found["remote"] = {"kv_remote_url": f"redis://127.0.0.1:{server.port}"}
        yield found


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("codec", long_but(["auto"], ["auto", "int8"]))
@pytest.mark.parametrize(
    "tier", ["disk", pytest.param("remote", marks=pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS))]
)
def test_after_a_restart_what_a_tier_has_comes_back_the_same(calibrated, tiers, tier, codec):
    """Of all kinds, each to who asks for it; what is computed and what comes back have the same bits."""
    random = Random(11)
    prompts = [{"prompt_token_ids": random.choices(range(5, VOCAB_SIZE), k=1300)} for _ in range(2)]
    names = "model", "dtype", "max_model_len", "kv_cache_memory_bytes"
    settings = {name: getattr(calibrated, name) for name in names} | {"kv_cache_dtype": codec, "kv_keep": (1, 0.5)}
    settings |= {"kv_offloading_size": 0.1, "kv_write_policy": "write_through", **tiers[tier]}
    if tier == "remote" and codec == "int8":
        settings["kv_transport_codec"] = "lossless"
    said = {}
    for comes_back in (False, True):
        llm = LLM(**settings)
        always_load(llm.engine)
        for share in (1, 0.5):
            for at, prompt in enumerate(prompts):
                (found,) = llm.generate([prompt], GREEDY, kv_keep=share)
                assert (found.num_cached_tokens >= 1280) == comes_back
                assert said.setdefault((share, at), found.outputs[0].token_ids) == found.outputs[0].token_ids
                assert (found.outputs[0].kept_share is not None) == (share < 1)
        audit(llm.engine.scheduler.core)
        if comes_back:
            assert llm.engine.tiering._slow.fetches.num_fetched > 2 * 80
        llm.close()
    assert said[1, 0] != said[0.5, 0]
