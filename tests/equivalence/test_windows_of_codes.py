"""Gemma 3 beyond its windows with codecs: codes of both cache groups, each layer's with constants of its own.

Part 3 of the equality rule: what a request gets in company is what it gets alone, in one chunk, with nothing cached.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivalence.alone import AloneOutputs
from equivalence.coded_cases import constants_for
from equivalence.settings import SETTINGS, deal_one_each
from equivalence.test_windows import SHORT, run
from pagefold.config import EngineConfig
from pagefold.engine import build
from pagefold.engine.planning import plan_engine

pytestmark = pytest.mark.usefixtures("one_thread")

CODES = ("int8_per_token_head", "int4_per_token_head", "k8v4", "fp8_e4m3")
ON_DEVICE = [setting for setting in SETTINGS if not setting.num_host_blocks and setting.streamed_share is None]
DEALT = deal_one_each(ON_DEVICE[1::3], {}, CODES)
"""Every third setting has one of the codecs in turn. The short form has one, with layers that stay in 16 bit."""


def coded(setting, name):
    """Return the setting with that codec. Who is preempted hangs on what the model says, where ends are heard."""
    at_least = setting.at_least
    if at_least is not None and not setting.ignore_eos:
        at_least = replace(at_least, num_preemptions=0)
    return replace(setting, kv_cache_dtype=name, at_least=at_least)


@pytest.fixture(scope="module")
def alone(tiny_folder):
    made = {}

    def make(name):
        if name not in made:
            how = {"dtype": "float64", "attention_backend": "reference", "block_size": 32, "max_model_len": 2048}
            made[name] = AloneOutputs(tiny_folder("gemma3"), SHORT.num_outputs, kv_cache_dtype=name, **how)
        return made[name]

    return make


@pytest.mark.parametrize(("setting", "name"), DEALT)
def test_outputs_are_those_alone(setting, name, tiny_folder, alone, monkeypatch):
    monkeypatch.setattr(build, "_constants", constants_for)
    run(coded(setting, name), SHORT, tiny_folder, lambda _family, _num_outputs: alone(name))


def test_codes_go_beyond_windows(tiny_folder):
    folder = str(tiny_folder("gemma3"))
    for name in ("fp8", "kivi2", *CODES):
        planned = plan_engine(EngineConfig(model=folder, kv_cache_dtype=name, max_model_len=400))
        assert planned.capacity.max_model_len == 400
        assert len(planned.geometry.groups) == 2
