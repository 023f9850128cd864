"""Outputs as prefixes: the next turn of a conversation leans on blocks that decoding filled, and stays exact."""

from __future__ import annotations

import pytest

from equivalence.prompts import short_prompts
from equivalence.suite import Key, Setting, Trial, Workload
from equivalence.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_OUTPUTS = 24


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_next_turn_finds_the_last_ones_output(block_size, tiny_folder, tiny_references):
    references = tiny_references("qwen3", NUM_OUTPUTS)
    setting = Setting(name="conversation", block_size=block_size, max_num_batched_tokens=70)
    prompts = short_prompts(VOCAB_SIZE)
    longest = max(prompts, key=len)
    first = Trial(setting, Workload([*prompts, longest * 2], NUM_OUTPUTS), tiny_folder("qwen3"))
    first.run()
    first.engine.runner = first.engine.runner.inner
    turns = [prompt + references.of(prompt) + [9, 8, 11] for prompt in prompts]
    second = Trial(setting, Workload(turns, NUM_OUTPUTS), tiny_folder("qwen3"), lambda *_: first.engine)
    second.run()
    second.assert_exact(references)
    for index, prompt in enumerate(prompts):
        computed = len(prompt) + NUM_OUTPUTS - 1  # the KV of the last output was never computed
        assert second.num_cached_tokens[Key(0, index)] >= computed // block_size * block_size
