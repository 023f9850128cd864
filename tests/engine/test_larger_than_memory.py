"""Requests larger than the KV budget through a whole engine: as with memory for it, or refused."""

from __future__ import annotations

import pytest

from pagefold import LLM, SamplingParams
from pagefold.config import EngineConfig
from pagefold.engine.planning import plan_engine
from pagefold.errors import BudgetTooSmallError, ConfigError, InvalidRequestError

SMALL = {"max_num_seqs": 4, "block_size": 16, "max_model_len": 256}


@pytest.fixture(scope="module")
def block_bytes(tiny_chat_model):
    return plan_engine(EngineConfig(model=str(tiny_chat_model), **SMALL)).geometry.bytes_per_block


def test_a_prompt_beyond_the_budget_is_answered_as_with_memory_for_it(tiny_chat_model, block_bytes):
    plain = LLM(model=str(tiny_chat_model), **SMALL)
    streaming = LLM(
        model=str(tiny_chat_model),
        kv_cache_memory_bytes=8 * block_bytes,
        kv_offloading_size=20 * block_bytes / 2**30,
        allow_streaming=True,
        **SMALL,
    )
    asked = [{"prompt_token_ids": [1000 + 7 * index + position % 40 for position in range(200)]} for index in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = plain.generate(asked, greedy, use_tqdm=False)
    for _ in range(2):
        results = streaming.generate(asked, greedy, use_tqdm=False)
        assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in expected]
    assert not streaming.engine.scheduler.core.num_active


def test_several_samples_of_what_streams_are_refused(tiny_chat_model, block_bytes):
    llm = LLM(
        model=str(tiny_chat_model),
        kv_cache_memory_bytes=8 * block_bytes,
        kv_offloading_size=20 * block_bytes / 2**30,
        allow_streaming=True,
        **SMALL,
    )
    with pytest.raises(InvalidRequestError, match="one sample is made"):
        llm.generate([{"prompt_token_ids": [1] * 200}], SamplingParams(n=2, max_tokens=4), use_tqdm=False)
    (result,) = llm.generate([{"prompt_token_ids": [1] * 100}], SamplingParams(n=2, max_tokens=100, ignore_eos=True))
    assert [len(output.token_ids) for output in result.outputs] == [100, 100]  # each outgrows the device by itself


def test_what_cannot_be_is_refused_before_anything_is_loaded(tiny_chat_model, block_bytes):
    model = str(tiny_chat_model)
    with pytest.raises(ConfigError, match="allow_streaming is set, but kv_offloading_size is 0"):
        LLM(model=model, allow_streaming=True)
    with pytest.raises(BudgetTooSmallError, match="one request of max_model_len = 256 tokens needs 16"):
        LLM(
            model=model,
            kv_cache_memory_bytes=8 * block_bytes,
            kv_offloading_size=11 * block_bytes / 2**30,
            allow_streaming=True,
            **SMALL,
        )
