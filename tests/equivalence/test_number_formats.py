"""Formats of numbers: outputs are the same to the bit in every setting, and near those of transformers.

Near means: teacher-forced, no further from float64 than transformers' own bfloat16 is, in its mean square and in how
often it agrees on the likeliest token.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from equivalence.prompts import full_prompts, short_prompts
from equivalence.real_model import real_prompts
from equivalence.suite import Trial, Workload
from equivalence.test_fused import ALL_SETTINGS, _engine, _plan
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.kernels import pairs, quads
from pagefold.runner.attention import tiles
from pagefold.runner.fused import formats
from pagefold.steps import PromptPart
from pagefold.tokenizer import Tokenizer

SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FULL = Workload(full_prompts(VOCAB_SIZE), num_outputs=40)


@dataclass(frozen=True)
class Format:
    """Settings of an engine that computes in one."""

    dtype: str
    quantization: str | None = None

    @property
    def settings(self):
        return {"dtype": self.dtype, "quantization": self.quantization}

    def __str__(self):
        return f"{self.dtype}+{self.quantization}" if self.quantization else self.dtype


BFLOAT16 = Format("bfloat16")
INT8 = Format("bfloat16", "w8a8_int8")
FORMATS = (BFLOAT16, INT8, Format("float32", "w8a8_int8"), Format("bfloat16", "int8"), Format("float32", "int8"))
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2")


def _hold(setting, workload, form, folder, alone):
    trial = Trial(replace(setting, **form.settings), workload, folder)
    trial.run()
    trial.assert_exact(alone)


_SHORT_SETTINGS = [one for one in ALL_SETTINGS if one.name in {"batched, chunks of 512", "chunks of 17", "host tier"}]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("setting", _SHORT_SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("form", [BFLOAT16, INT8], ids=str)
def test_outputs_are_those_alone(form, setting, tiny_folder, alone_in):
    _hold(setting, SHORT, form, tiny_folder("llama"), alone_in("llama", form, SHORT.num_outputs))


def _dealt():
    """bfloat16 and int8 in half of the settings, the other formats in a sixth; each family with each of them."""
    pairs_of = [
        (form, setting)
        for place, form in enumerate(FORMATS)
        for number, setting in enumerate(ALL_SETTINGS)
        if (place + number) % (2 if form in {BFLOAT16, INT8} else 6) == 0
    ]
    families = [FAMILIES[at % len(FAMILIES)] for at in range(len(pairs_of))]
    return [(family, *pair) for family, pair in zip(families, pairs_of, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize(("family", "form", "setting"), _dealt(), ids=str)
def test_outputs_are_those_alone_in_full(family, form, setting, tiny_folder, alone_in):
    _hold(setting, FULL, form, tiny_folder(family), alone_in(family, form, FULL.num_outputs))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_logits_are_the_same_to_the_bit_in_any_company(form, tiny_folder):
    """Alone or among others, in one chunk or many, over shared blocks or its own, with one thread or two."""
    random = Random(3)
    prefix = [random.randrange(VOCAB_SIZE) for _ in range(512)]
    tails = [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 17, 40, 199)]
    told = []
    for threads in (1, 2):
        runner = _engine(tiny_folder("llama"), threads=threads, **form.settings).runner
        own = [range(64 * at, 64 * at + 64) for at in range(len(tails))]
        alone = [runner.logits(_plan([(prefix + tail, 0, own[at])]))[0].clone() for at, tail in enumerate(tails)]
        runner.slab.data.fill_(float("nan"))  # a slot that was never written may hold anything
        runner.logits(_plan([(prefix[:101], 0, own[0])]))
        runner.logits(_plan([(prefix[101:], 101, own[0])]))
        shared = [[*own[0][:32], *own[at][32:]] for at in range(len(tails))]
        rows = [(tail, 512, shared[at]) for at, tail in enumerate(tails)]
        together = list(runner.logits(_plan(rows)).clone())
        for at, tail in enumerate(tails):  # the last token again: a decode row over what the others share
            rows[at] = ([tail[-1]], 512 + len(tail) - 1, shared[at])
        again = list(runner.logits(_plan(rows)).clone())
        told.append([alone, together, again])
    for results in zip(*told[0], *told[1], strict=True):
        assert not results[0].isnan().any()
        assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("form", [BFLOAT16, INT8], ids=str)
def test_a_processor_without_the_instructions_says_the_same_to_the_bit(form, tiny_folder, monkeypatch):
    ids = [Random(9).randrange(VOCAB_SIZE) for _ in range(333)]
    told = []
    for is_native in (pairs.bfloat16_pairs().is_native, False):
        for module in (formats, tiles):
            monkeypatch.setattr(module, "bfloat16_pairs", lambda is_native=is_native: pairs.Pairs(is_native=is_native))
        monkeypatch.setattr(formats, "int8_quads", lambda is_native=is_native: quads.Quads(is_native=is_native))
        tiles._tiles_of.cache_clear()
        runner = _engine(tiny_folder("qwen3"), **form.settings).runner
        told.append(runner.logits(_plan([(ids, 0, range(30)), (ids[:80], 0, range(30, 60))])).clone())
    tiles._tiles_of.cache_clear()
    assert torch.equal(*told)


def _forced(runner, ids):
    """Return the logits at all positions of a prompt, computed in one step."""
    plan = _plan([(ids, 0, range(-(-len(ids) // 16)))], len(runner.geometry.groups))
    plan.prompt_parts = [PromptPart(0, 0, array("i", ids), 0)]
    return runner._forward(plan, None)[1].clone()


@dataclass
class Nearness:
    """How far logits are from what they should be: mean square, and how often the likeliest token is another."""

    square: float
    share_other: float

    @classmethod
    def of(cls, logits, expected):
        centred = (logits.double() - expected) - (logits.double() - expected).mean(-1, keepdim=True)
        return cls(float(centred.square().mean()), float((logits.argmax(-1) != expected.argmax(-1)).double().mean()))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2-window-64", "gemma3"])
def test_bfloat16_is_no_further_from_float64_than_torch_s_own(family, tiny_folder, tiny_references):
    random = Random(5)
    exact = tiny_references(family, SHORT.num_outputs).model
    own = AutoModelForCausalLM.from_pretrained(tiny_folder(family), dtype=torch.bfloat16)
    ids = [random.randrange(VOCAB_SIZE) for _ in range(200)]
    with torch.inference_mode():
        expected, theirs = (model(torch.tensor([ids])).logits[0] for model in (exact, own))
    ours = _forced(_engine(tiny_folder(family), **BFLOAT16.settings).runner, ids)
    _hold_near(ours, theirs, expected)


@pytest.mark.long
@pytest.mark.parametrize("form", [BFLOAT16, Format("bfloat16", "int8"), INT8], ids=str)
def test_so_it_is_on_a_real_model(form, smollm2):
    """int8 is further off: a twentieth of its likeliest tokens may be others."""
    exact, own = (
        AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    runner = _engine(smollm2, max_model_len=1024, **form.settings).runner
    ours, theirs, expected = [], [], []
    for ids in real_prompts(Tokenizer(smollm2), 12, 600):
        ours.append(_forced(runner, ids))
        with torch.inference_mode():
            theirs.append(own(torch.tensor([ids])).logits[0])
            expected.append(exact(torch.tensor([ids])).logits[0])
    ours, theirs, expected = (torch.cat(logits) for logits in (ours, theirs, expected))
    if form is BFLOAT16:
        _hold_near(ours, theirs, expected)
    else:
        assert Nearness.of(ours, expected).share_other <= 0.1


def _hold_near(ours, theirs, expected):
    near, limit = Nearness.of(ours, expected), Nearness.of(theirs, expected)
    assert near.square <= limit.square
    assert near.share_other <= limit.share_other
