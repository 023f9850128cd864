"""Part 1 of the equality rule: in float64, greedy tokens are exactly those of transformers' ``generate``, always.

The short form (21 prompts, 24 outputs) runs every setting on Llama, Qwen3 and Mistral; the full form (60 prompts of 1
to 3,000 tokens, 64 outputs) also on Llama with multi-head and multi-query attention.
"""

from __future__ import annotations

import pytest

from equivalence.prompts import full_prompts, short_prompts
from equivalence.settings import SETTINGS
from equivalence.suite import Trial, Workload
from equivalence.tiny_models import FAMILIES, VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FULL = Workload(full_prompts(VOCAB_SIZE), num_outputs=64)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_outputs_are_those_of_generate(family, setting, tiny_folder, tiny_references):
    trial = Trial(setting, SHORT, tiny_folder(family))
    trial.run()
    trial.assert_exact(tiny_references(family, SHORT.num_outputs))


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_generate_in_full(family, setting, tiny_folder, tiny_references):
    trial = Trial(setting, FULL, tiny_folder(family))
    trial.run()
    trial.assert_exact(tiny_references(family, FULL.num_outputs))
    print(setting.name, trial.counts)
