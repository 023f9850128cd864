"""An engine with a host tier: what it says, what it refuses, and that it answers as without one."""

from __future__ import annotations

import pytest

from pagefold import LLM, SamplingParams
from pagefold.errors import ConfigError, DoesNotFitError
from pagefold.kv import audit

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "block_size": 16}


@pytest.fixture(scope="module")
def block_bytes(tiny_chat_model):
    engine = LLM(model=str(tiny_chat_model), kv_cache_memory_bytes=2**20, **SMALL).engine
    return engine.capacity.kv_budget_bytes // engine.capacity.num_blocks


def prompts():
    return [{"prompt_token_ids": [1000 + 7 * index + position % 40 for position in range(100)]} for index in range(6)]


def test_returning_prompts_are_found_and_answered_alike(tiny_chat_model, block_bytes):
    """Memory for one request at a time; the host holds all that was said."""
    plain = LLM(model=str(tiny_chat_model), kv_cache_memory_bytes=8 * block_bytes, **SMALL)
    tiered = LLM(
        model=str(tiny_chat_model),
        kv_cache_memory_bytes=8 * block_bytes,
        kv_offloading_size=200 * block_bytes / 2**30,
        **SMALL,
    )
    for _ in range(3):
        expected = plain.generate(prompts(), GREEDY, use_tqdm=False)
        results = tiered.generate(prompts(), GREEDY, use_tqdm=False)
        assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in expected]
    assert [result.num_cached_tokens for result in results] == [96] * 6
    core = tiered.engine.scheduler.core
    audit(core)
    assert core.host.num_loaded >= 12 * 4
    assert not core.num_active


def test_a_start_says_what_the_host_holds(tiny_chat_model, block_bytes):
    llm = LLM(
        model=str(tiny_chat_model), kv_cache_memory_bytes=2**20, kv_offloading_size=10 * block_bytes / 2**30, **SMALL
    )
    assert llm.engine.capacity.num_host_blocks == 10
    assert llm.engine.capacity.lines()[-1].endswith("for 160 tokens that were evicted")


def test_a_reset_reaches_the_host(tiny_chat_model, block_bytes):
    llm = LLM(
        model=str(tiny_chat_model),
        kv_cache_memory_bytes=8 * block_bytes,
        kv_offloading_size=100 * block_bytes / 2**30,
        **SMALL,
    )
    for _ in range(2):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
        llm.engine.reset_prefix_cache()
    assert llm.engine.scheduler.core.host.blocks.num_held == 0
    (first, *_) = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert first.num_cached_tokens == 0


def test_what_cannot_be_is_refused_before_anything_is_loaded(tiny_chat_model):
    model = str(tiny_chat_model)
    with pytest.raises(ConfigError, match="without prefix caching nothing is ever kept"):
        LLM(model=model, kv_offloading_size=1.0, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="one block takes"):
        LLM(model=model, kv_offloading_size=1e-9, **SMALL)
    with pytest.raises(ConfigError, match="kv_offloading_size is -1"):
        LLM(model=model, kv_offloading_size=-1.0)
    with pytest.raises(DoesNotFitError, match=r"kv_offloading_size is .* of memory are free") as refused:
        LLM(model=model, kv_offloading_size=2.0**20, **SMALL)
    assert refused.value.missing_bytes > 0
