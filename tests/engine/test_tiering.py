"""An engine with slow tiers: what they hold is found and answered alike, and whatever goes wrong is computed."""

from __future__ import annotations

import threading

import pytest
from store.memory_store import MemoryStore, always_load

from pagefold import LLM, SamplingParams
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.engine.status import EngineStatus
from pagefold.errors import ConfigError
from pagefold.kv import audit
from pagefold.observe.metrics import Metrics
from pagefold.store import FrameFormat

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 16}


def prompts(num=12):
    return [{"prompt_token_ids": [1000 + 7 * index + position % 40 for position in range(100)]} for index in range(num)]


def _block_bytes(model):
    probe = LLM(model=model, kv_cache_memory_bytes=2**20, **SMALL).engine
    return probe.capacity.kv_budget_bytes // probe.capacity.num_blocks


class TieredLLM(LLM):
    """An LLM with a slow tier of the test's own, memory for one request, and a host that holds six."""

    def __init__(self, model, *, store=None, policy="write_back", num_host=48, **faults):
        block_bytes = _block_bytes(model)
        self.config = EngineConfig(
            model=model,
            kv_cache_memory_bytes=8 * block_bytes,
            kv_offloading_size=num_host * block_bytes / 2**30,
            kv_write_policy=policy,
            **SMALL,
        )
        blueprint = plan_engine(self.config)
        self.events = []
        self.store = store
        if store is None:
            frames = FrameFormat(bytes(32), block_bytes, 64)
            self.store = MemoryStore(frames, **faults)
        self.said = []
        self.engine = build_engine(blueprint, emit=self.events.append, say=self.said.append, stores=[self.store])
        always_load(self.engine)
        self._busy = threading.Lock()
        self._num_requests = 0


@pytest.fixture(scope="module")
def expected(tiny_chat_model):
    plain = LLM(model=str(tiny_chat_model), kv_cache_memory_bytes=2**22, **SMALL)
    return [result.outputs[0].token_ids for result in plain.generate(prompts(), GREEDY, use_tqdm=False)]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("policy", ["write_back", "write_through", "write_through_selective"])
def test_what_the_host_had_to_give_up_comes_back(tiny_chat_model, expected, policy):
    llm = TieredLLM(str(tiny_chat_model), policy=policy)
    for _ in range(3):
        results = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in results] == expected
        audit(llm.engine.scheduler.core)
    assert sum(result.num_cached_tokens for result in results) > 3 * 96
    assert llm.engine.tiering._slow.fetches.num_fetched > 20


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("seed", range(3))
def test_a_tier_that_goes_wrong_costs_nothing_but_time(tiny_chat_model, expected, seed):
    llm = TieredLLM(str(tiny_chat_model), fault_rate=0.2, seed=seed)
    for _ in range(4):
        results = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in results] == expected
        audit(llm.engine.scheduler.core)
    assert llm.store.num_faults
    assert llm.engine.tiering._slow.fetches.num_lost


def test_what_is_cached_at_the_end_is_found_by_the_next(tiny_chat_model, expected):
    llm = TieredLLM(str(tiny_chat_model))
    llm.generate(prompts(3), GREEDY, use_tqdm=False)
    llm.close()
    assert llm.store.is_closed
    again = TieredLLM(str(tiny_chat_model), store=llm.store)
    results = again.generate(prompts(3), GREEDY, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results] == expected[:3]
    assert [result.num_cached_tokens for result in results] == [96] * 3


class SlowAtFirst(MemoryStore):
    """Is measured when the machine is busy with something else."""

    def self_test(self):
        return super().self_test()._replace(read_bytes_per_s=1.0)


@pytest.mark.long
def test_a_tier_that_was_slow_at_the_start_is_told_kept_and_tried_in_time(tiny_chat_model, expected):
    store = SlowAtFirst(FrameFormat(bytes(32), _block_bytes(str(tiny_chat_model)), 64))
    llm = TieredLLM(str(tiny_chat_model), store=store, policy="write_through")
    assert not store.is_closed
    assert any("too slow now" in line for line in llm.said)
    slow = llm.engine.tiering._slow
    assert EngineStatus.of(llm.engine.scheduler).tiers_fast == {"disk": False}
    for _ in range(40):
        results = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in results] == expected
        if slow.fetches.num_fetched:
            break
    assert slow.fetches.num_fetched
    assert EngineStatus.of(llm.engine.scheduler).tiers_fast == {"disk": True}
    metrics = Metrics("m")
    metrics.watch(lambda: EngineStatus.of(llm.engine.scheduler))
    assert b'pagefold:tier_fast{engine="0",model_name="m",tier="disk"} 1.0' in metrics.render()
    llm.close()


def test_a_tier_that_stalls_is_not_waited_for(tiny_chat_model, expected):
    llm = TieredLLM(str(tiny_chat_model))
    for _ in range(2):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    llm.store.delay_s = 0.5
    llm.engine.tiering._slow.arbiter.compute_s_per_token = 1e-3  # 0.1 s a prompt
    results = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results] == expected
    assert llm.engine.tiering._slow.arbiter.num_late
    llm.store.delay_s = 0.0
    llm.close()
    audit(llm.engine.scheduler.core)


def test_a_reset_reaches_slow_tiers(tiny_chat_model):
    llm = TieredLLM(str(tiny_chat_model))
    for _ in range(2):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert llm.store.kept
    llm.engine.reset_prefix_cache()
    assert not llm.store.kept
    assert [result.num_cached_tokens for result in llm.generate(prompts(1), GREEDY, use_tqdm=False)] == [0]


def test_blocks_of_other_arithmetic_are_other_blocks(tiny_chat_model, tmp_path):
    """int8 weights, or another decoder, give other bytes: a folder that all use gives none what another computed."""
    outputs, cached = {}, {}
    for turn in range(2):
        for how in ({"quantization": "int8"}, {}, {"model_impl": "transformers"}):
            config = {"kv_disk_path": str(tmp_path), "kv_disk_size": 0.1, **how, **SMALL}
            llm = LLM(str(tiny_chat_model), kv_cache_memory_bytes=2**22, **config)
            always_load(llm.engine)
            results = llm.generate(prompts(3), GREEDY, use_tqdm=False)
            cached[turn, str(how)] = sum(result.num_cached_tokens for result in results)
            told = [result.outputs[0].token_ids for result in results]
            assert outputs.setdefault(str(how), told) == told
            llm.close()
    assert [cached[0, how] for how in outputs] == [0, 0, 0]
    assert [cached[1, how] for how in outputs] == [3 * 96] * 3


def test_a_start_that_fails_lets_go_of_the_folder(tiny_chat_model, tmp_path):
    config = {"kv_disk_path": str(tmp_path), "kv_disk_size": 0.1, "kv_cache_memory_bytes": 2**22, **SMALL}
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"):
            LLM(str(tiny_chat_model), kv_remote_url="redis://127.0.0.1:1", kv_remote_required=True, **config)
    LLM(str(tiny_chat_model), **config).close()
