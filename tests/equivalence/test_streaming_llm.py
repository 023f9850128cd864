"""``streaming_llm``: engines that keep sink tokens and a window say what the paper's way of computing it says.

In every setting, as for models with windows of their own; and it is a cache of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS
from equivalence.streaming_twin import StreamingTwin
from equivalence.suite import Trial, Workload
from equivalence.test_windows import expected_of_windows
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.kv import KeepRule

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, NUM_SINKS = 20, 5
SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FAMILIES = {
    "llama": KeepRule(WINDOW, num_sinks=NUM_SINKS),
}


@pytest.fixture(scope="module")
def twin(tiny_folder):
    made = {}

    def make(family):
        if family not in made:
            made[family] = StreamingTwin(tiny_folder(family), SHORT.num_outputs, WINDOW, NUM_SINKS)
        return made[family]

    return make


def streaming(setting):
    return replace(
        expected_of_windows(setting, SHORT),
        streaming_llm=max(WINDOW, setting.block_size),
        streaming_llm_sinks=NUM_SINKS,
    )


ALONE = replace(SETTINGS[1], streaming_llm=WINDOW, streaming_llm_sinks=NUM_SINKS)


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "cohere2", "llama4", "qwen3", "gpt-oss"])
def test_families_alone(family, tiny_folder, twin):
    trial = Trial(ALONE, SHORT, tiny_folder(family))
    trial.run()
    trial.assert_exact(twin(family))
