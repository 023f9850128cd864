"""KIVI at 2 bit beyond windows: a sequence seals the same block in both cache groups at once, and has one residual.

Part 3 of the equality rule, of Gemma 3 in transformers' path: outputs and blocks are those of each prompt alone, in one
chunk, with nothing cached, in every setting that does not stream.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivalence.alone import AloneOutputs
from equivalence.coded_cases import constants_for
from equivalence.overlapped_loop import build_overlapped
from equivalence.suite import Trial, cached_blocks
from equivalence.test_kivi2 import ALL_SETTINGS, hold_samples
from equivalence.test_windows import SHORT, WINDOW, run
from equivalence.test_windows_of_codes import coded
from pagefold.config import EngineConfig
from pagefold.engine import build
from pagefold.kv import KEEP_ALL, KeepRule

pytestmark = pytest.mark.usefixtures("one_thread", "_with_constants")

DEALT = [
    pytest.param(setting, id=setting.name)
    for number, setting in enumerate(ALL_SETTINGS)
    if number % 3 == 2 or setting.name == "host tier"
]
EXACT = {"kv_cache_dtype": "kivi2", "dtype": "float64", "attention_backend": "reference"}
"""So that rounding decides no code."""


@pytest.fixture
def _with_constants(monkeypatch):
    """Each layer's centres are others."""
    monkeypatch.setattr(build, "_constants", constants_for)


@pytest.fixture(scope="module")
def alone(tiny_folder):
    made = {}

    def make(block_size):
        if block_size not in made:
            how = {"block_size": block_size, "max_model_len": 2048, **EXACT}
            made[block_size] = AloneOutputs(tiny_folder("gemma3"), SHORT.num_outputs, **how)
        return made[block_size]

    return make


@pytest.mark.long
@pytest.mark.parametrize("setting", DEALT)
def test_outputs_are_those_alone(setting, tiny_folder, alone):
    run(coded(setting, "kivi2"), SHORT, tiny_folder, lambda _family, _num_outputs: alone(setting.block_size))


@pytest.mark.long
@pytest.mark.parametrize("is_late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cached", "not cached"])
def test_outputs_of_the_overlapped_loop_are_those_alone(enable_prefix_caching, is_late, tiny_folder, alone):
    """What a residual held is lost where a step fails behind which the next block was begun: its windows are there."""
    (failing,) = (setting for setting in ALL_SETTINGS if setting.name == "failed steps, chunks of 17, warm")
    setting = replace(failing, enable_prefix_caching=enable_prefix_caching, at_least=None)
    trial = Trial(setting, SHORT, tiny_folder("gemma3"), build_overlapped, is_late=is_late)
    assert tuple(trial.engine.scheduler.core.rules) == (KeepRule(WINDOW), KEEP_ALL)
    trial.run()
    trial.assert_exact(alone(setting.block_size))
    assert trial.counts.num_failed_steps > 10
    assert trial.engine.num_ahead


@pytest.mark.long
@pytest.mark.parametrize(
    ("failures", "enable_prefix_caching"),
    [
        ("of copies", False),
        pytest.param(0.4, True, marks=pytest.mark.long),
        pytest.param(0.4, False, marks=pytest.mark.long),
    ],
)
def test_samples_of_one_prompt_are_each_what_it_is_alone(failures, enable_prefix_caching, tiny_folder):
    """A fork whose copy is lost computes its block again, and sees the windows of that block's first token."""
    prompts = [prompt for prompt in SHORT.prompts if len(prompt) in {45, 77}]  # 13 tokens behind a block
    config = EngineConfig(
        model=str(tiny_folder("gemma3")),
        kv_cache_memory_bytes=2**22,
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        enable_prefix_caching=enable_prefix_caching,
        **EXACT,
    )
    hold_samples(config, prompts, failures)


@pytest.mark.long
def test_what_is_stored_does_not_depend_on_how_it_came_about(tiny_folder):
    """Chunks of 512 or of 17, cold, warm, after failed steps: every block of both groups is equal in bits."""
    stored = []
    for name in ("batched, chunks of 512", "failed steps, chunks of 17, warm"):
        (setting,) = (setting for setting in ALL_SETTINGS if setting.name == name)
        trial = Trial(replace(setting, max_num_seqs=16, at_least=None), SHORT, tiny_folder("gemma3"))
        trial.run()
        stored.append(cached_blocks(trial.engine, trial.engine.runner.inner.slab))
    one, other = stored
    shared = one.keys() & other.keys()
    assert {group for group, _ in shared} == {0, 1}
    assert len(shared) > 60
    assert all(one[path] == other[path] for path in shared)
