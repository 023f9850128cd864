"""Models whose matrices are computed with as they are stored, beside a twin that rounds rows and nothing else."""

from __future__ import annotations

from random import Random
from statistics import median
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from equivalence.test_fused import _engine
from equivalence.test_number_formats import Nearness, _forced
from pagefold.config import EngineConfig
from pagefold.engine.planning import plan_engine
from pagefold.runner.fused.formats import EMBEDDING, HEAD

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.runner.torch_runner import TorchRunner

GROUP = 32


class RoundedRows(torch.nn.Module):
    """A linear layer whose rows are rounded to 8 bit in groups of 32, by the largest of each."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, GROUP))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        codes = (groups / scales.clamp_min(torch.finfo(torch.float32).tiny)).round()
        rounded = (codes * scales).flatten(-2).double()
        return torch.nn.functional.linear(rounded, self.weight, self.bias)


def twin_of(folder: Path, *, is_stored=lambda _name: True):
    """The model in float64, rows rounded before the products of matrices that are stored quantized."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and is_stored(f"{name}.weight"):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, RoundedRows(module))
    return model.eval()


def stored_names(folder: Path) -> set[str]:
    """The tensors that are computed with as they are stored: no others are."""
    blueprint = plan_engine(EngineConfig(model=str(folder), kv_cache_memory_bytes=2**24, dtype="float32"))
    assert blueprint.is_fused
    names = {
        tensor.name
        for matrix in _matrices(blueprint)
        for part in matrix.parts
        for tensor in part.tensors
        if tensor.name in blueprint.formats.stored and part.form == blueprint.formats.stored[tensor.name]
    }
    return names | ({HEAD} if blueprint.spec.fused.is_tied and EMBEDDING in names else set())


def _matrices(blueprint):
    from pagefold.runner.fused.matrices import layers_of, vocabulary_of

    name = EMBEDDING if blueprint.spec.fused.is_tied else HEAD
    head, _ = vocabulary_of(blueprint.spec.fused, blueprint.formats, head=name, embedding=None)
    return [*(matrix for layer in layers_of(blueprint.spec.fused, blueprint.formats) for matrix in layer), head]


def assert_near_the_twin(folder: Path, reference: Path) -> None:
    """What is said of a folder is the model of ``reference``, but that rows are rounded."""
    stored = stored_names(folder)
    assert stored
    exact = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64).eval()
    assert_near(_engine(folder).runner, twin_of(reference, is_stored=stored.__contains__), exact)


def assert_near(runner: TorchRunner, twin: torch.nn.Module, exact: torch.nn.Module) -> None:
    """Most prompts come out as the twin has them.

    Now and then a number lies so near the middle of two codes that float32 takes the other one: then that prompt is as
    far from the twin as rounding is from the exact model, and a long one meets such a number soon.
    """
    random, ratios = Random(5), []
    for length in range(2, 26):
        ids = [random.randrange(exact.config.vocab_size) for _ in range(length)]
        with torch.inference_mode():
            expected, rounded = (model(torch.tensor([ids])).logits[0] for model in (exact, twin))
        ours = _forced(runner, ids)
        ratios.append(Nearness.of(ours, rounded).square / Nearness.of(ours, expected).square)
    assert median(ratios) < 1e-4, "rows are rounded, and nothing else is"
    assert max(ratios) < 4
