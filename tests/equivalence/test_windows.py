"""Gemma 3 beyond its windows: two cache groups, of which one keeps a window, and gives blocks back while requests run.

Part 1 of the equality rule in every setting that does not stream. No prompt but the shortest fits into the windows of
24 tokens; the reference applies transformers' masks.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from store.memory_store import MemoryStore, always_load

from equivalence.prompts import full_prompts, short_prompts
from equivalence.settings import SETTINGS, long_but
from equivalence.suite import Counts, Setting, Trial, Workload, cached_blocks
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.engine.status import EngineStatus
from pagefold.errors import ConfigError, InvalidRequestError
from pagefold.kv import KEEP_ALL, TOKEN_BYTES, BlockState, KeepRule, audit
from pagefold.sampling import SamplingParams
from pagefold.store import FrameFormat

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 24
SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FULL = Workload(full_prompts(VOCAB_SIZE), num_outputs=40)
WITH_GROUPS = [setting for setting in SETTINGS if setting.knows_groups]
NAMES = {"chunks of 17", "chunks of 17, cache off", "blocks of 4", "warm", "everything at once", "host tier"}
FEW = [setting for setting in WITH_GROUPS if setting.name in NAMES]
SOME = [setting for number, setting in enumerate(WITH_GROUPS) if number % 6 == 0 or setting in FEW]


def expected_of_windows(setting: Setting, workload: Workload) -> Setting:
    """Return the setting with what must happen in it where layers have windows."""
    if setting.at_least is not None:  # windows take less memory, and what left them is found less often
        asked = {name: min(number, 1) for name, number in asdict(setting.at_least).items()}
        if setting.max_num_batched_tokens > 64:  # the room that windows need for a step's tokens holds whole prompts
            asked["num_preemptions"] = asked["num_recomputed_tokens"] = 0
        asked["num_fetched_blocks"] = 0  # prompts end before their outputs' windows, which alone are written
        if (
            workload is FULL and setting.damage_rate and setting.slow_policy is None
        ):  # of blocks that the host has kept, so few come back that perhaps none is damaged
            asked["num_loaded_blocks"] = asked["num_damaged_blocks"] = 0
        return replace(setting, at_least=Counts(**asked))
    return setting


def run(setting: Setting, workload: Workload, tiny_folder, tiny_references) -> Trial:
    trial = Trial(expected_of_windows(setting, workload), workload, tiny_folder("gemma3"))
    assert set(trial.engine.scheduler.core.rules) == {KeepRule(WINDOW), KEEP_ALL}
    trial.run()
    trial.assert_exact(tiny_references("gemma3", workload.num_outputs))
    return trial


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("setting", FEW, ids=lambda setting: setting.name)
def test_outputs_are_those_of_generate(setting, tiny_folder, tiny_references):
    run(setting, SHORT, tiny_folder, tiny_references)


@pytest.mark.long
@pytest.mark.parametrize("setting", WITH_GROUPS, ids=lambda setting: setting.name)
def test_outputs_are_those_of_generate_in_every_setting(setting, tiny_folder, tiny_references):
    run(setting, SHORT, tiny_folder, tiny_references)


@pytest.mark.long
@pytest.mark.parametrize("setting", SOME, ids=lambda setting: setting.name)
def test_outputs_are_those_of_generate_in_full(setting, tiny_folder, tiny_references):
    run(setting, FULL, tiny_folder, tiny_references)


HOW = {
    "fused": {"model_impl": "pagefold"},
    "cpu": {"model_impl": "transformers"},
    "reference": {"attention_backend": "reference"},
}
"""Who computes: the fused decoder, or transformers with our attention or its twin in it."""


@pytest.fixture
def engine_of(tiny_folder):
    """An engine of the tiny Gemma 3 in float32, by who is asked to compute."""

    def make(how: str, **settings):
        config = EngineConfig(
            model=str(tiny_folder("gemma3")),
            dtype="float32",
            **HOW[how],
            block_size=8,
            kv_cache_memory_bytes=2**20,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            **settings,
        )
        return build_engine(plan_engine(config))

    return make


def generate(engine, token_ids: list[int], num_outputs: int, watch=lambda: None) -> list[int]:
    engine.add("one", token_ids, SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True))
    outputs: list[int] = []
    while engine.has_requests:
        if not engine.has_work:
            engine.wait()
        for delta in engine.step():
            outputs += delta.token_ids
        watch()
    return outputs


@pytest.mark.parametrize("kv_cache_dtype", long_but(["auto"], ["auto", "k8v4", "kivi2"]))
@pytest.mark.parametrize(
    "backend", ["fused", *(pytest.param(one, marks=pytest.mark.long) for one in ("cpu", "reference"))]
)
def test_blocks_that_left_the_window_are_given_back_while_the_request_runs(engine_of, backend, kv_cache_dtype):
    engine = engine_of(backend, enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype)
    core = engine.scheduler.core
    most_held = most_used = 0

    def watch() -> None:
        nonlocal most_held, most_used
        audit(core)
        for cache in core.caches:
            windowed, full = cache.tables
            most_held = max(most_held, len(windowed.block_ids))
            assert full.num_trimmed == 0
            assert windowed.end == full.end
        most_used = max(most_used, core.num_active)

    generate(engine, [5 + at % 200 for at in range(150)], 100, watch)
    bound = KeepRule(WINDOW).num_blocks_for(250, 32, 8)
    assert most_held <= bound < 250 // 8
    assert most_used <= 250 // 8 + 1 + bound
    assert core.pool.num_free == core.pool.num_blocks


def test_all_implementations_generate_the_same(engine_of):
    prompt = [7 + at * at % 230 for at in range(120)]
    expected, *others = (generate(engine_of(how), prompt, 80) for how in HOW)
    assert all(other == expected for other in others)


@pytest.mark.long
def test_both_implementations_of_attention_seal_the_same(engine_of):
    """Up to codes that rounding decides. Of a prompt that is five windows long, in steps that end inside windows."""
    prompt = [7 + at * at % 230 for at in range(120)]
    stored = []
    for backend in ("reference", "cpu"):
        engine = engine_of(backend, kv_cache_dtype="kivi2")
        generate(engine, prompt, 2)
        stored.append(cached_blocks(engine, engine.runner.slab))
    expected, found = stored
    assert len(expected) == 2 * len(prompt) // 8
    assert expected.keys() == found.keys()
    num_other = sum(
        own != theirs for path, block in expected.items() for own, theirs in zip(block, found[path], strict=True)
    )
    assert num_other <= sum(map(len, expected.values())) / 50


def test_a_shared_prefix_is_found_where_its_window_is_still_cached(engine_of):
    engine = engine_of("fused")
    core = engine.scheduler.core
    prompt = [9 + at % 150 for at in range(100)]
    first = generate(engine, prompt, 40)
    found = core.match(engine.limits.namespace.key(), torch.tensor(prompt, dtype=torch.int32).numpy().tobytes(), 99)
    assert len(found.nodes) == 12
    assert generate(engine, prompt, 40) == first
    behind = [*prompt, *first]  # a conversation goes on
    assert generate(engine, behind, 20) == generate(engine_of("fused", enable_prefix_caching=False), behind, 20)


def test_what_was_left_behind_is_evicted_first(engine_of):
    engine = engine_of("cpu")
    core = engine.scheduler.core
    generate(engine, [9 + at % 150 for at in range(200)], 40)
    stale = [block for block in core.blocks.windows.all() if block.state == BlockState.CACHED]
    num_nodes = sum(1 for _ in core.tree.nodes())
    assert core.blocks.reclaim(10) == 10
    assert sum(1 for _ in core.tree.nodes()) == num_nodes
    assert all(block.state == BlockState.FREE for block in stale[:10])


def test_where_sequences_may_stream_the_window_is_named_as_the_limit_and_why(tiny_folder):
    """Before weights are loaded, in the lines of a start, and to who asks for more; who asks for less is not told."""
    config = EngineConfig(model=str(tiny_folder("gemma3")), kv_offloading_size=0.01, allow_streaming=True)
    why = "gemma3_text's sliding window is not computed while allow_streaming is set"
    said = f"max_model_len is 25, but beyond 24 tokens {why}. Give at most 24, or start without allow_streaming."
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan_engine(replace(config, max_model_len=25))
    for asked in (None, "auto", 24):
        plan = plan_engine(replace(config, max_model_len=asked))
        assert plan.capacity.context == (24, "gemma3_text's sliding window", "allow_streaming")
    assert plan_engine(replace(config, max_model_len=20)).capacity.context == (20, "", "")
    lines = []
    engine = build_engine(plan, say=lines.append)
    assert f"limit      24 of 4,096 tokens, beyond which {why}" in lines
    with pytest.raises(InvalidRequestError) as refused:
        engine.add("long", [5] * 24, SamplingParams())
    assert f"Beyond that, {why}. Send at most 23 tokens, or start without allow_streaming." in str(refused.value)
    without = replace(config, allow_streaming=False)
    assert plan_engine(replace(without, max_model_len=400)).capacity.context == (400, "", "")


def test_where_every_layer_slides_windows_are_computed_beside_a_host_tier(tiny_folder, tmp_path):
    folder = tmp_path / "all slide"
    shutil.copytree(tiny_folder("gemma3"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * len(config["layer_types"])
    (folder / "config.json").write_text(json.dumps(config))
    steps = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
    asked = {"dtype": "float32", "attention_backend": "reference", "kv_cache_memory_bytes": 2**20, "block_size": 8}
    shape = {"model": str(folder), **asked, **steps, "max_model_len": 400}
    prompt = [5 + at % 200 for at in range(100)]
    without = build_engine(plan_engine(EngineConfig(**shape)))
    assert list(without.scheduler.core.rules) == [KeepRule(WINDOW)]
    expected = generate(without, prompt, 8)
    for host in ({"kv_offloading_size": 0.001}, {"kv_disk_path": str(tmp_path / "disk")}):
        engine = build_engine(plan_engine(EngineConfig(**shape, **host)))
        assert list(engine.scheduler.core.rules) == [KeepRule(WINDOW)]
        assert generate(engine, prompt, 8) == expected
        engine.close()


def test_slots_without_a_token_are_those_of_all_groups(engine_of):
    engine = engine_of("reference")
    seen = []

    def watch() -> None:
        status = EngineStatus.of(engine.scheduler)
        seen.append((status.num_wasted_slots, status.kv_waste))

    generate(engine, [9 + at % 150 for at in range(17)], 2, watch)
    assert seen[0] == (2 * 7, 2 * 7 / (2 * 3 * 8))  # of either group 17 tokens in 3 blocks of 8


def test_a_budget_that_holds_no_window_beside_a_step_is_refused(tiny_folder):
    from pagefold.errors import BudgetTooSmallError

    settings = {"max_model_len": 400, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig(model=str(tiny_folder("gemma3")), kv_cache_memory_bytes=2**17, **settings)
    with pytest.raises(BudgetTooSmallError) as refused:
        plan_engine(config)
    smallest = int(str(refused.value.remedy).split("kv_cache_memory_bytes=")[1].split(";")[0].split(".")[0])
    config = EngineConfig(model=str(tiny_folder("gemma3")), kv_cache_memory_bytes=smallest, **settings)
    engine = build_engine(plan_engine(config))
    assert len(generate(engine, [3 + at % 200 for at in range(300)], 100)) == 100


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    "codec",
    [
        {"dtype": "float32"},
        {"kv_cache_dtype": "kivi2", "dtype": "float64", "attention_backend": "reference"},  # so that no code is another
    ],
    ids=["plain", "sealed"],
)
def test_a_conversation_goes_on_from_what_slow_tiers_have_of_it(codec, tiny_folder):
    """The path of a group that keeps all, and the window at its end: nothing else is written, nor brought."""
    shape = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8}
    config = EngineConfig(
        model=str(tiny_folder("gemma3")),
        kv_cache_memory_bytes=2**20,
        kv_offloading_size=2**20 / 2**30,
        kv_write_policy="write_through",
        **shape,
        **codec,
    )
    plan = plan_engine(config)
    store = MemoryStore(FrameFormat(bytes(32), plan.geometry.bytes_per_block, 8 * TOKEN_BYTES))
    prompt = [9 + at % 150 for at in range(100)]
    first = build_engine(plan, stores=[store])
    outputs = generate(first, prompt, 40)
    first.close(lambda: 5.0)
    again = build_engine(plan, stores=[store])
    always_load(again)
    behind = [*prompt, *outputs, 7, 8, 9]
    cold = build_engine(replace(plan, config=replace(config, kv_offloading_size=0.0, enable_prefix_caching=False)))
    assert generate(again, behind, 20) == generate(cold, behind, 20)
    core = again.scheduler.core
    audit(core)
    num_path, num_window = (len(prompt) + 39) // 8, WINDOW // 8
    assert core.slow.fetches.num_fetched == num_path + num_window
    assert core.host.num_loaded == num_path + num_window


@pytest.mark.long
def test_steps_that_fail_cost_no_window(tiny_folder, tiny_references):
    setting = Setting(
        name="failing",
        failure_rate=0.3,
        max_num_batched_tokens=17,
        max_num_seqs=8,
        block_size=4,
        num_rounds=2,
        at_least=Counts(num_failed_steps=20),
    )
    run(setting, Workload(SHORT.prompts[:8], SHORT.num_outputs), tiny_folder, tiny_references)
