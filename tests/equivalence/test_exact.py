"""Part 1 of the equality rule: in float64, greedy tokens are exactly those of transformers' ``generate``, always.

The short form (21 prompts, 24 outputs) runs every third setting on Llama, a few on Qwen3 and on Mistral, and four on
each of the other families; half of the former, and one of the latter each, are quick. The full form (36 prompts of 1 to
3,000 tokens, 40 outputs) runs another third on Llama and a twelfth of those on each other family: a setting tries the
cache, a family tries the model's code, and what is wrong in either shows without every pair.
"""

from __future__ import annotations

import pytest

from equivalence.prompts import full_prompts, short_prompts
from equivalence.settings import SETTINGS, deal, pairs_but
from equivalence.suite import Counts, Setting, Trial, Workload
from equivalence.tiny_models import BEYOND_WINDOWS, FAMILIES, MAX_POSITIONS, VOCAB_SIZE
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FEW_SETTINGS = [
    setting
    for setting in SETTINGS
    if setting.name in {"chunks of 16", "blocks of 4", "short of memory", "failed steps"}
]
WINDOWED = {"gemma2-window-64", "gemma3", "mistral-window-40", "qwen2-window-24", *BEYOND_WINDOWS}  # tests of their own
MORE_FAMILIES = ["llama3", "qwen2", "phi3-longrope", "gemma2", "gpt-neox", "mixtral", "qwen3-moe"]
ONE_EACH = {family: [FEW_SETTINGS[place % len(FEW_SETTINGS)].name] for place, family in enumerate(MORE_FAMILIES)}
UNBOUNDED = [family for family in FAMILIES if family not in WINDOWED]
FULL = Workload(full_prompts(VOCAB_SIZE), num_outputs=40)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(("family", "setting"), deal(["llama", "qwen3", "mistral"], SETTINGS[::3], every=6))
def test_outputs_are_those_of_generate(family, setting, tiny_folder, tiny_references):
    trial = Trial(setting, SHORT, tiny_folder(family))
    trial.run()
    trial.assert_exact(tiny_references(family, SHORT.num_outputs))


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS[2::3], ids=lambda setting: setting.name)
def test_outputs_are_those_of_generate_in_other_settings(setting, tiny_folder, tiny_references):
    trial = Trial(setting, SHORT, tiny_folder("llama"))
    trial.run()
    trial.assert_exact(tiny_references("llama", SHORT.num_outputs))


@pytest.mark.quick(every=9)
@pytest.mark.parametrize(("family", "setting"), pairs_but(ONE_EACH, MORE_FAMILIES, FEW_SETTINGS))
def test_outputs_of_more_families_are_those_of_generate(family, setting, tiny_folder, tiny_references):
    trial = Trial(setting, SHORT, tiny_folder(family))
    trial.run()
    trial.assert_exact(tiny_references(family, SHORT.num_outputs))


@pytest.mark.long
@pytest.mark.parametrize(("family", "setting"), deal(UNBOUNDED, SETTINGS[1::3], every=12))
def test_outputs_are_those_of_generate_in_full(family, setting, tiny_folder, tiny_references):
    trial = Trial(setting, FULL, tiny_folder(family))
    trial.run()
    trial.assert_exact(tiny_references(family, FULL.num_outputs))
    print(setting.name, trial.counts)


WITHIN_WINDOW = Setting(
    name="within the window", num_rounds=2, max_num_batched_tokens=64, at_least=Counts(num_hit_tokens=100)
)


def test_a_sequence_as_long_as_the_window_is_exact(tiny_folder, tiny_references):
    """Outputs end at token 64 of a Gemma 2 with windows of 64: all lies in one cache group."""
    num_outputs = 24
    workload = Workload([prompt[: 64 - num_outputs] for prompt in SHORT.prompts], num_outputs)
    trial = Trial(WITHIN_WINDOW, workload, tiny_folder("gemma2-window-64"))
    assert trial.engine.capacity.max_model_len == 64
    assert not trial.engine.scheduler.core.trims
    trial.run()
    trial.assert_exact(tiny_references("gemma2-window-64", num_outputs))


def test_a_length_beyond_the_window_is_computed_and_the_window_is_one_then(tiny_folder):
    """A window that no sequence passes is none."""
    folder = str(tiny_folder("gemma2-window-64"))
    for asked, num_groups in ((64, 1), (65, 2), (None, 2)):
        blueprint = plan_engine(EngineConfig(model=folder, max_model_len=asked))
        assert blueprint.capacity.max_model_len == (asked or MAX_POSITIONS)
        assert len(blueprint.geometry.groups) == num_groups


@pytest.mark.parametrize(
    ("family", "limit"),
    [
        ("gemma2-window-64", []),
        ("phi3-longrope", ["limit      3,584 of 4,096 tokens, beyond which phi3's longrope is not computed yet"]),
        ("gemma2", []),
    ],
)
def test_a_start_says_what_limits_the_length(family, limit, tiny_folder):
    said = []
    config = EngineConfig(model=str(tiny_folder(family)), dtype="float64", max_model_len=32)
    build_engine(plan_engine(config), say=said.append)
    assert [line for line in said if line.startswith("limit")] == limit


def test_beyond_the_window_the_reference_sees_less(tiny_folder, tiny_references):
    """The window of the reference is there: without it, outputs after 65 tokens and more are others."""
    prompt = SHORT.prompts[-1]
    windowed = tiny_references("gemma2-window-64", SHORT.num_outputs)
    full = tiny_references("gemma2", SHORT.num_outputs)
    assert windowed.of(prompt[:40]) == full.of(prompt[:40])
    assert windowed.of(prompt) != full.of(prompt)
