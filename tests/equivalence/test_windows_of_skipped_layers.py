"""Gemma 3 beyond its windows, with layers that stay in 16 bit among those that have codes.

Part 3 of the equality rule, wherever the skipped layers are: what a request gets in company is what it gets alone, in
one chunk, with nothing cached. Blocks of all cache groups have the bytes of the largest group's, in every tier.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivalence.alone import AloneOutputs
from equivalence.coded_cases import constants_for
from equivalence.settings import deal_one_each
from equivalence.test_windows import HOW, SHORT, WITH_GROUPS, generate, run
from equivalence.test_windows_of_codes import CODES, coded
from pagefold.config import EngineConfig
from pagefold.engine import build
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.kv import audit

pytestmark = pytest.mark.usefixtures("one_thread")

SKIPPED = {"a sliding layer": (0,), "a full layer": (3,), "one of each": (1, 2), "all full layers": (1, 3)}
"""Layers 0 and 2 have windows, 1 and 3 keep all."""

QUICK = {
    "host tier": ("k8v4", "one of each"),
}
"""The settings that are not long, and what they have; every third one has one of all pairs in turn."""

PAIRS = [(CODES[number % len(CODES)], where) for number in range(4) for where in SKIPPED]
DEALT = deal_one_each([one for one in WITH_GROUPS if one.name in QUICK], QUICK, PAIRS)
DEALT += deal_one_each(WITH_GROUPS[::3], QUICK, PAIRS)


@pytest.fixture(scope="module")
def alone(tiny_folder):
    made = {}

    def make(name, where):
        if (name, where) not in made:
            how = {"dtype": "float64", "attention_backend": "reference", "block_size": 32, "max_model_len": 2048}
            how |= {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": SKIPPED[where]}
            made[name, where] = AloneOutputs(tiny_folder("gemma3"), SHORT.num_outputs, **how)
        return made[name, where]

    return make


@pytest.mark.long
@pytest.mark.parametrize(("setting", "pair"), DEALT)
def test_outputs_are_those_alone(setting, pair, tiny_folder, alone, monkeypatch):
    monkeypatch.setattr(build, "_constants", constants_for)
    name, where = pair
    setting = replace(coded(setting, name), kv_cache_dtype_skip_layers=SKIPPED[where])
    run(setting, SHORT, tiny_folder, lambda _family, _num_outputs: alone(name, where))


@pytest.fixture
def plan_of(tiny_folder):
    def make(**settings):
        shape = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8}
        where = {"model": str(tiny_folder("gemma3")), "dtype": "float32", "kv_cache_memory_bytes": 2**20}
        return plan_engine(EngineConfig(**where, **shape, **settings))

    return make


@pytest.mark.long
@pytest.mark.parametrize("where", SKIPPED)
def test_all_implementations_generate_the_same(plan_of, where):
    prompt = [7 + at * at % 230 for at in range(120)]
    said = []
    for who in HOW.values():
        how = {"kv_cache_dtype": "int8_per_token_head", "kv_cache_dtype_skip_layers": SKIPPED[where]}
        engine = build_engine(plan_of(**who, **how))
        said.append(generate(engine, prompt, 60, lambda engine=engine: audit(engine.scheduler.core)))
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("where", SKIPPED)
def test_the_bytes_of_blocks_are_counted_with_their_padding(plan_of, where):
    """Of heads of 16 a token takes 64 bytes in 16 bit and 36 in codes of 8 with a scale for K and for V."""
    skipped = SKIPPED[where]
    plan = plan_of(kv_cache_dtype="int8_per_token_head", kv_cache_dtype_skip_layers=skipped, kv_offloading_size=0.001)
    geometry, capacity = plan.geometry, plan.capacity
    used = [sum(2 * 8 * (64 if layer in skipped else 36) for layer in group.layers) for group in geometry.groups]
    assert geometry.bytes_per_block == max(used)
    assert capacity.block_bytes == capacity.num_blocks * max(used) <= 2**20 < capacity.block_bytes + max(used)
    assert capacity.host_bytes == capacity.num_host_blocks * max(used)
    assert capacity.num_blocks_per_request == geometry.layout.num_blocks_for(512, 32)


@pytest.mark.long
@pytest.mark.parametrize("where", SKIPPED)
def test_an_engine_takes_the_bytes_that_were_counted(plan_of, where):
    how = {"kv_cache_dtype": "int8_per_token_head", "kv_cache_dtype_skip_layers": SKIPPED[where]}
    plan = plan_of(**how, kv_offloading_size=0.001)
    runner = build_engine(plan).runner
    assert runner.slab.num_bytes == plan.capacity.block_bytes
    assert runner.arena.blocks.nbytes == plan.capacity.host_bytes
