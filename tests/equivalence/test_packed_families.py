"""Families that transformers computes with packed layers: the equality rule in float32 and in other formats.

In float32 outputs are those of transformers' own ``generate`` in float64: where the likeliest token leads by far more
than rounding. In every format they are those of each prompt alone, however requests share, are batched or preempted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from equivalence.alone import AloneOutputs
from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS
from equivalence.suite import Counts, Trial, Workload
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.namespace import namespace_of
from pagefold.engine.planning import hardware_of, plan_engine
from pagefold.errors import ConfigError
from pagefold.runner.attention.cpu import CpuAttention
from pagefold.runner.packed.linear import PackedLinear

pytestmark = pytest.mark.usefixtures("one_thread")

_PROMPTS = short_prompts(VOCAB_SIZE)
FEW = Workload([prompt for prompt in _PROMPTS if len(prompt) <= 80][:12], num_outputs=12)
FAMILIES = ("qwen3-moe", "mixtral", "gpt-oss", "gemma3n", "gpt-neox", "phi3")
BY_NAME = {setting.name: setting for setting in SETTINGS}
_CLEAR = 2e-3
"""A lead of the likeliest token that is far above the rounding of float32 in these models."""


@dataclass(frozen=True)
class Format:
    """Settings of an engine whose layers are packed in one."""

    dtype: str
    quantization: str | None = None

    def __str__(self):
        return f"{self.dtype}+{self.quantization}" if self.quantization else self.dtype


FLOATS, PAIRS, QUADS = Format("float32"), Format("bfloat16"), Format("bfloat16", "w8a8_int8")
FORMATS = (FLOATS, PAIRS, QUADS, Format("float32", "int8"))


def _trial(name, form, folder):
    how = {"dtype": form.dtype, "quantization": form.quantization, "attention_backend": "auto"}
    trial = Trial(replace(BY_NAME[name], **how, at_least=Counts()), FEW, folder)
    assert any(isinstance(one, PackedLinear) for one in trial.engine.runner.decoder.model.modules())
    trial.run()
    return trial


def _differ(trial, references):
    """Requests whose outputs part from the reference's at a token that leads clearly there."""
    parted = []
    for key, output in trial.outputs.items():
        prompt = FEW.prompts[key.index]
        expected, logits = references.generate(prompt, eos_token_ids=None)
        best = logits.topk(2).values
        leads = (best[:, 0] - best[:, 1]).tolist()
        at = next((at for at, pair in enumerate(zip(output, expected, strict=False)) if pair[0] != pair[1]), None)
        if at is not None and leads[at] > _CLEAR:
            parted.append((key, at, leads[at]))
    return parted


@pytest.mark.parametrize("family", ["qwen3-moe", *(pytest.param(one, marks=pytest.mark.long) for one in FAMILIES[1:])])
def test_outputs_are_those_of_generate(family, tiny_folder, tiny_references):
    trial = _trial("chunks of 17", FLOATS, tiny_folder(family))
    assert not _differ(trial, tiny_references(family, FEW.num_outputs))


_NAMES = "chunks of 17", "short of memory", "random order", "host tier"
_DEALT = [
    pytest.param(family, form, _NAMES[(place + number) % len(_NAMES)], marks=[pytest.mark.long] if place else [])
    for place, family in enumerate(FAMILIES)
    for number, form in enumerate(FORMATS)
    if not place or (place + number) % 2
]


@pytest.mark.parametrize(("family", "form", "name"), _DEALT, ids=str)
def test_outputs_are_those_alone(family, form, name, tiny_folder):
    how = {"dtype": form.dtype, "quantization": form.quantization, "threads": 1}
    alone = AloneOutputs(tiny_folder(family), FEW.num_outputs, **how)
    _trial(name, form, tiny_folder(family)).assert_exact(alone)


def _plan(folder, **settings):
    shape = {"kv_cache_memory_bytes": 2**21, "max_model_len": 128, "device": "cpu"}
    return plan_engine(EngineConfig(model=str(folder), **shape, **settings))


def test_every_format_has_a_namespace_of_its_own(tiny_folder):
    """And so has torch's own arithmetic."""
    folder = tiny_folder("qwen3-moe")
    plans = [_plan(folder, dtype=form.dtype, quantization=form.quantization) for form in FORMATS]
    plans.append(_plan(folder, dtype="float64"))
    assert len({namespace_of(plan).key() for plan in plans}) == len(plans)
    assert [plan.packs for plan in plans] == [True] * len(FORMATS) + [False]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_fits_is_reckoned_with_packed_weights(form, tiny_folder):
    plan = _plan(tiny_folder("mixtral"), dtype=form.dtype, quantization=form.quantization)
    decoder = build_engine(plan).runner.decoder
    modules = list(decoder.model.modules())
    panels = [one.panels for one in modules if isinstance(one, PackedLinear)]
    panels += [each for one in modules if hasattr(one, "_pagefold_packed") for each in one._pagefold_packed.panels]
    kept = sum(one.nbytes for one in decoder.model.parameters())
    assert plan.capacity.weight_bytes == kept + sum(one.nbytes for one in panels)
    assert isinstance(decoder._attention, CpuAttention)
    lines = hardware_of(plan).lines(plan)
    assert [line for line in lines if line.startswith(f"layers     packed in {form.quantization or form.dtype}, by ")]


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("qwen3-moe", {"dtype": "float64"}, r"do not go with dtype=float64 \(they are computed in float32 and"),
        ("qwen3-moe", {"dtype": "float16"}, "do not go with dtype=float16"),
        ("llama4", {"dtype": "float32"}, r"llama4_text\) has 4 matrices .* such as .*experts\.gate_up_proj"),
        ("qwen3-moe", {"dtype": "float32", "model_impl": "pagefold"}, "model_impl is pagefold"),
    ],
    ids=str,
)
def test_what_cannot_be_quantized_is_refused_before_weights_are_loaded(family, settings, why, tiny_folder):
    with pytest.raises(ConfigError, match=why):
        _plan(tiny_folder(family), quantization="int8", **settings)


def test_dtypes_that_are_not_packed_have_torch_s_layers(tiny_folder):
    decoder = build_engine(_plan(tiny_folder("qwen3-moe"), dtype="float16")).runner.decoder
    assert {type(one) for one in decoder.model.modules() if isinstance(one, torch.nn.Linear)} == {torch.nn.Linear}
    assert not any(isinstance(one, PackedLinear) for one in decoder.model.modules())
