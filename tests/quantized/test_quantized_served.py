"""Quantized folders are served: outputs by the equality rule, what fits as it is planned, and what a start says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from equivalence.alone import AloneOutputs
from equivalence.prompts import short_prompts
from equivalence.references import References
from equivalence.rounded_rows import assert_near_the_twin
from equivalence.suite import Setting, Trial, Workload
from quantized_folders import FORMATS, save_quantized

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.plan import Device, PlanSettings, find_device, find_model
from pagefold.plan.memory import plan_memory
from pagefold.runner.fused.formats import natural_dtype
from pagefold.runner.fused.weights import pack_model

if TYPE_CHECKING:
    from quantized_folders import Folders

WORKLOAD = Workload(short_prompts(64), num_outputs=12).up_to(60)
WARM = Setting(name="warm", num_rounds=2)
GIB = 2**30
AS_STORED = "computed with as they are stored; activations are rounded to int8 with a scale for 32 numbers"
ROUNDED = "dequantized when they are read; activations are not rounded"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, Folders] = {}

    def make(name):
        if name not in made:
            made[name] = save_quantized(tmp_path_factory.mktemp("model"), *FORMATS[name]())
        return made[name]

    return make


@pytest.mark.parametrize("name", ["gptq in order of activations", "awq", "W8A8", "native fp8"])
def test_the_fused_decoder_says_what_it_says_of_a_plain_folder(name, folders):
    """Where codes are dequantized: what is computed with as it is stored has rows of 8 bit."""
    quantized, plain, _ = folders(name)
    setting = replace(WARM, dtype="float32", attention_backend="auto", quantization="none")
    trial = Trial(setting, WORKLOAD, quantized)
    assert trial.engine.runner.decoder.__class__.__name__ == "FusedDecoder"
    trial.run()
    trial.assert_exact(AloneOutputs(plain, WORKLOAD.num_outputs, model_impl="pagefold", threads=1))


@pytest.mark.parametrize("name", ["gptq", "awq", "W8A8"])
def test_stored_codes_say_in_company_what_they_say_alone(name, folders):
    quantized = folders(name).quantized
    trial = Trial(replace(WARM, dtype="float32", attention_backend="auto"), WORKLOAD, quantized)
    assert trial.engine.runner.decoder.__class__.__name__ == "FusedDecoder"
    trial.run()
    trial.assert_exact(AloneOutputs(quantized, WORKLOAD.num_outputs, model_impl="pagefold", threads=1))


@pytest.mark.parametrize("name", ["gptq", "awq", "W8A8"])
def test_with_stored_codes_only_rows_are_rounded(name, folders):
    """A twin in float64 rounds rows before the products of those matrices, and nothing else."""
    quantized, plain, _ = folders(name)
    assert_near_the_twin(quantized, plain)


def test_transformers_path_says_what_generate_says(folders):
    quantized, plain, _ = folders("W4A16 with zero points")
    trial = Trial(WARM, WORKLOAD, quantized)
    assert trial.engine.runner.decoder.__class__.__name__ == "TransformersDecoder"
    trial.run()
    trial.assert_exact(References(plain, WORKLOAD.num_outputs))


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Both see so much free memory: what is free changes by itself from moment to moment."""
    monkeypatch.setattr("pagefold.engine.on_cpu.available_memory_bytes", lambda: 3 * GIB)
    return 3 * GIB


@pytest.mark.parametrize("name", ["gptq", "awq", "W8A8", "native fp8"])
@pytest.mark.parametrize("model_impl", ["pagefold", "transformers"])
def test_what_fits_is_what_is_planned(model_impl, name, folders, free_bytes):
    folder = folders(name).quantized
    cpu = Device(name="cpu", memory_bytes=free_bytes, is_cpu=True, multiplies_bfloat16=natural_dtype() == "bfloat16")
    shape = find_model(str(folder))
    assert shape.not_served == ""
    shape = shape if model_impl == "pagefold" else replace(shape, is_fused=False)
    planned = plan_memory(shape, cpu, PlanSettings(max_num_seqs=16, dtype="float32")).devices[0].capacity
    asked = {"max_num_seqs": 16, "dtype": "float32", "model_impl": model_impl}
    asked |= {"quantization": "none"} if model_impl == "pagefold" else {}
    blueprint = plan_engine(EngineConfig(model=str(folder), **asked))
    assert blueprint.capacity == planned
    if model_impl == "pagefold":
        packed = pack_model(blueprint.spec.fused, folder, planned.max_model_len, blueprint.formats)
        assert packed.num_bytes == planned.weight_bytes
        return
    from pagefold.runner.loader import load_model

    model = load_model(folder, blueprint.dtype)
    assert sum(parameter.nbytes for parameter in model.parameters()) == planned.weight_bytes


@pytest.mark.parametrize("name", ["gptq", "awq", "W8A8"])
def test_stored_codes_take_what_was_counted_and_less_than_what_is_planned(name, folders, free_bytes):
    """To the planner, which reads no scales, they are dequantized."""
    folder = folders(name).quantized
    cpu = Device(name="cpu", memory_bytes=free_bytes, is_cpu=True)
    asked = PlanSettings(max_num_seqs=16, dtype="float32")
    planned = plan_memory(find_model(str(folder)), cpu, asked).devices[0].capacity
    blueprint = plan_engine(EngineConfig(model=str(folder), max_num_seqs=16, dtype="float32"))
    packed = pack_model(blueprint.spec.fused, folder, planned.max_model_len, blueprint.formats)
    assert packed.num_bytes == blueprint.capacity.weight_bytes < planned.weight_bytes


def test_on_cards_codes_take_what_they_take_in_the_file(folders):
    """For engines that compute with them, as vLLM: 4 bit and a scale for each group; dequantized for ours."""
    shape = find_model(str(folders("gptq").quantized))
    weights = plan_memory(shape, find_device("L4"), PlanSettings()).devices[0].shard.weight_bytes
    assert weights < 2 * shape.num_parameters


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("gptq", {}, "quantized  GPTQ, 4 bit in groups of 32: computed with as they are stored"),
        ("gptq", {"quantization": "none"}, "quantized  GPTQ, 4 bit in groups of 32: dequantized when they are read"),
        (
            "W8A8",
            {},
            f"quantized  compressed-tensors, 8 bit in channels: {AS_STORED} (the config: int8, dynamic per token)",
        ),
        (
            "W8A8",
            {"quantization": "int8"},
            f"quantized  compressed-tensors, 8 bit in channels: {ROUNDED} (the config: int8, dynamic per token)",
        ),
        (
            "native fp8 by matrices",
            {"model_impl": "transformers"},
            f"quantized  fp8, 8 bit (e4m3) in whole matrices: {ROUNDED} (the config: fp8, static)",
        ),
    ],
)
def test_a_start_says_what_is_computed(name, settings, said, folders):
    lines = []
    config = EngineConfig(
        model=str(folders(name).quantized), dtype="float32", kv_cache_memory_bytes=2**22, max_num_seqs=4, **settings
    )
    build_engine(plan_engine(config), say=lines.append)
    assert said in lines
    lines.clear()
    build_engine(plan_engine(replace(config, model=str(folders(name).plain))), say=lines.append)
    assert not any(line.startswith("quantized") for line in lines)
