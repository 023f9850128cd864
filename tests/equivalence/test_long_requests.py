"""A request larger than the KV budget, against transformers' ``generate``: exact, and within memory in every step."""

from __future__ import annotations

import pytest
import torch

from equivalence.references import References
from equivalence.tiny_models import FAMILIES, VOCAB_SIZE
from pagefold import SamplingParams
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.kv import audit

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16


@pytest.fixture
def long_model(tmp_path):
    """A tiny model with positions for 20,000 tokens."""
    from transformers import AutoModelForCausalLM

    config = FAMILIES["llama"]()
    config.vocab_size = VOCAB_SIZE
    config.max_position_embeddings = 20_000
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(tmp_path)
    return tmp_path


def engine_of(folder, num_blocks, num_held, max_model_len):
    ask = {"model": str(folder), "dtype": "float64", "block_size": BLOCK_SIZE, "max_num_seqs": 4}
    block_bytes = plan_engine(EngineConfig(**ask, max_model_len=64)).geometry.bytes_per_block
    return build_engine(
        plan_engine(
            EngineConfig(
                **ask,
                kv_cache_memory_bytes=num_blocks * block_bytes,
                kv_offloading_size=num_held * block_bytes / 2**30,
                allow_streaming=True,
                max_model_len=max_model_len,
            )
        )
    )


def generate(engine, prompt, num_outputs):
    """Return the output; at every step the device holds no more than it may, and all invariants hold."""
    engine.add("r", prompt, SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True))
    output = []
    core = engine.scheduler.core
    while engine.has_work:
        for delta in engine.step():
            output += delta.token_ids
        assert core.num_active <= core.pool.num_blocks
        audit(core)
    return output


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "num_held"),
    [(2_000, 32, 128), pytest.param(16_000, 256, 1000, marks=pytest.mark.long)],
)
def test_four_times_the_budget_is_exact(long_model, num_tokens, num_blocks, num_held):
    """16,000 tokens in a budget of 4,096, and the same in small."""
    prompt = torch.randint(100, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = engine_of(long_model, num_blocks, num_held, num_tokens + 64)
    for _ in range(2):  # the second finds what the first has left in the host's memory
        output = generate(engine, prompt, 12)
        assert output == References(long_model, 12).of(prompt)
    assert engine.scheduler.core.host.num_stored <= num_held
