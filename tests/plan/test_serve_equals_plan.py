"""What a server allocates is what the plan says, to the byte; and it runs as many requests at once as the plan says."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import hardware_of, plan_engine
from pagefold.errors import ConfigError
from pagefold.kernels.pairs import Pairs
from pagefold.kernels.quads import Quads
from pagefold.plan import Device, PlanSettings, Question, Workload, draw_lengths, find_device, find_model, make_plan
from pagefold.plan.memory import plan_memory
from pagefold.plan.report import formula
from pagefold.plan.this_machine import this_cpu
from pagefold.runner.fused.formats import natural_dtype
from pagefold.runner.fused.weights import pack_model, packed_bytes
from pagefold.runner.packed.linear import PackedLinear
from pagefold.sampling import SamplingParams
from pagefold.speculation import SpeculativeParams

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
from tiny_models import FAMILIES, WINDOW, save_tiny_model

if TYPE_CHECKING:
    from pagefold.memory.capacity import Capacity

GIB = 2**30


def cpu(free_bytes: int) -> Device:
    """This machine, with so much free memory."""
    multiplies_bfloat16 = natural_dtype() == "bfloat16"
    return Device(name="cpu", memory_bytes=free_bytes, is_cpu=True, multiplies_bfloat16=multiplies_bfloat16)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Both see so much free memory: what is free changes by itself from moment to moment."""
    monkeypatch.setattr("pagefold.engine.on_cpu.available_memory_bytes", lambda: 3 * GIB)
    return 3 * GIB


@pytest.fixture
def _no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """They change no number of bytes, and to measure the built-in model's by transformers' forward takes minutes."""
    monkeypatch.setattr("pagefold.engine.build._constants", lambda blueprint, say: None)


def assert_same_but_for_panels(planned: Capacity, served: Capacity) -> None:
    """Layers lie in whole panels, which are a little more than what they have; all else is as planned."""
    assert planned.weight_bytes <= served.weight_bytes < 1.3 * planned.weight_bytes
    assert replace(planned, weight_bytes=served.weight_bytes) == served


SETTINGS = [
    {},
    {"kv_cache_memory_bytes": 10_000_000, "max_model_len": 200},
    {"kv_cache_memory_bytes": 3_000_000, "max_model_len": "auto", "block_size": 32},
    {"max_model_len": 100, "max_num_seqs": 4, "dtype": "bfloat16"},
    {"kv_cache_memory_bytes": 10_000_000, "max_model_len": 200, "max_num_seqs": 4, "kv_cache_dtype": "kivi2"},
]


@pytest.mark.usefixtures("_no_constants")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, settings, id=f"{family}-{settings}", marks=[] if is_quick else [pytest.mark.long])
        for place, family in enumerate(("llama", "smollm2", "qwen3", "gemma3"))
        for number, settings in enumerate(SETTINGS)
        for is_quick in [place == number]
    ],
)
def test_a_slab_is_what_was_planned(family, settings, smollm2, tiny_folder, free_bytes):
    folder = smollm2 if family == "smollm2" else tiny_folder(family)
    asked = {"max_num_seqs": 128, "dtype": "float32"} | settings
    by_transformers = replace(find_model(str(folder)), is_fused=False)
    planned = plan_memory(by_transformers, cpu(free_bytes), PlanSettings(**asked)).devices[0].capacity
    backend = "reference" if settings.get("dtype") == "bfloat16" else "auto"
    config = EngineConfig(model=str(folder), attention_backend=backend, model_impl="transformers", **asked)
    blueprint = plan_engine(config)
    assert_same_but_for_panels(planned, blueprint.capacity)
    if family == "smollm2" and settings.get("kv_cache_memory_bytes") is None:
        return  # its weights are loaded once below; here the blueprint is what is built
    engine = build_engine(blueprint)
    assert engine.runner.slab.num_bytes == planned.kv_budget_bytes
    assert engine.runner.slab.data.shape[0] == planned.num_blocks == engine.scheduler.core.pool.num_blocks
    model = engine.runner.decoder.model
    panels = sum(layer.panels.nbytes for layer in model.modules() if isinstance(layer, PackedLinear))
    assert sum(one.nbytes for one in model.parameters()) + panels == blueprint.capacity.weight_bytes


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"kv_cache_memory_bytes": 10_000_000, "max_model_len": 200},
        {"kv_cache_memory_bytes": 9_000_000, "max_model_len": "auto", "block_size": 32},
        {"max_model_len": 100, "max_num_seqs": 4, "kv_cache_dtype": "int8_per_token_head"},
    ],
)
@pytest.mark.parametrize(
    "given", [{"method": "tree"}, {"model": "qwen3"}, {"model": "qwen3", "kv_cache_memory_bytes": 4_200_000}]
)
def test_drafts_are_planned_as_they_are_served(given, asked, tiny_folder, free_bytes):
    if "model" in given:
        given = given | {"model": str(tiny_folder(given["model"]))}
    params = SpeculativeParams.of(given).over(None)
    asked = {"max_num_seqs": 128, "dtype": "float32", "speculative_config": params} | asked
    folder = str(tiny_folder("llama"))
    shape = replace(find_model(folder), is_fused=False)
    device = plan_memory(shape, cpu(free_bytes), PlanSettings(**asked)).devices[0]
    blueprint = plan_engine(EngineConfig(model=folder, device="cpu", model_impl="transformers", **asked))
    assert_same_but_for_panels(device.capacity, blueprint.capacity)
    assert device.drafts.logit_bytes == 4 * 128 * 307 * (3 if "model" in given else 2)
    if blueprint.draft is not None:
        draft = blueprint.draft
        packed = packed_bytes(draft.spec.fused, draft.config.max_model_len, draft.formats)
        assert 0.8 * packed < device.drafts.weight_bytes <= packed


def test_a_draft_model_that_would_not_fit_alone_is_planned_as_it_is_served(tiny_folder, monkeypatch):
    """It need not hold a request in half of what is free, and lies beside the model with the least that it needs."""
    free_bytes = 8_500_000
    monkeypatch.setattr("pagefold.engine.on_cpu.available_memory_bytes", lambda: free_bytes)
    params = SpeculativeParams(model=str(tiny_folder("llama-mha")), kv_cache_memory_bytes=1_500_000)
    asked = {"max_num_seqs": 128, "dtype": "float32", "speculative_config": params, "max_model_len": 1000}
    folder = str(tiny_folder("llama"))
    shape = replace(find_model(folder), is_fused=False)
    planned = plan_memory(shape, cpu(free_bytes), PlanSettings(**asked)).devices[0].capacity
    served = plan_engine(EngineConfig(model=folder, device="cpu", model_impl="transformers", **asked)).capacity
    assert abs(planned.num_blocks - served.num_blocks) <= 1  # panels of the draft model's weights have some padding


def test_drafts_that_are_not_planned_are_refused(tiny_folder, free_bytes):
    shape, params = find_model(str(tiny_folder("llama"))), SpeculativeParams(model=str(tiny_folder("qwen3")))
    with pytest.raises(ConfigError, match="planned for our own server on a CPU only"):
        plan_memory(shape, find_device("H100-80GB"), PlanSettings(speculative_config=params))
    longer = replace(shape, max_positions=30_000)
    with pytest.raises(ConfigError, match=r"goes up to 30000 tokens, and .*, the draft model, has "):
        plan_memory(longer, cpu(free_bytes), PlanSettings(speculative_config=params))


@pytest.mark.parametrize("max_model_len", [None, "auto", 200, 50_000])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-window", "llama4", "gemma3n"])
def test_windows_with_sinks_are_planned_as_they_are_served(family, max_model_len, tiny_folder, free_bytes):
    """Windows of the model that are smaller stay; a number may be beyond the model's positions, ``auto`` is not."""
    folder = str(tiny_folder(family))
    asked = {"dtype": "float32", "max_num_seqs": 128, "streaming_llm": 64, "streaming_llm_sinks": 20}
    asked |= {"max_model_len": max_model_len, "kv_cache_memory_bytes": 2**24}
    shape = replace(find_model(folder), is_fused=False)
    planned = plan_memory(shape, cpu(free_bytes), PlanSettings(**asked)).devices[0].capacity
    blueprint = plan_engine(EngineConfig(model=folder, device="cpu", model_impl="transformers", **asked))
    assert_same_but_for_panels(planned, blueprint.capacity)
    assert blueprint.capacity.max_model_len == max_model_len or isinstance(max_model_len, str | None)


@pytest.mark.parametrize("quantization", [None, "int8", "w8a8_int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_weights_of_the_fused_decoder_are_planned_to_the_byte(family, dtype, quantization, tiny_folder):
    """A start counts whole panels and scales; the planner bits a parameter, so less by no more than what fills them."""
    folder = tiny_folder(family)
    config = EngineConfig(model=str(folder), device="cpu", dtype=dtype, quantization=quantization, max_model_len=64)
    blueprint = plan_engine(config)
    assert blueprint.is_fused
    packed = pack_model(blueprint.spec.fused, blueprint.spec.folder, 64, blueprint.formats)
    counted = packed_bytes(blueprint.spec.fused, 64, blueprint.formats)
    assert packed.num_bytes == blueprint.capacity.weight_bytes == counted
    asked = PlanSettings(dtype=dtype, weight_dtype=quantization or "auto", max_model_len=64, max_num_seqs=128)
    planned = plan_memory(find_model(str(folder)), cpu(3 * GIB), asked).devices[0].capacity.weight_bytes
    assert planned <= packed.num_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "num_ropes"), [("llama", 1), ("llama3", 1), ("qwen3", 1), ("gemma2", 1), ("gemma3", 2)]
)
def test_tables_of_ropes_are_planned_as_they_are_served(family, num_ropes, dtype, tiny_folder, free_bytes):
    """They are of the positions that may be served: all that the model has, unless fewer are asked for."""
    folder = str(tiny_folder(family))
    served, planned = [], []
    for length in (100, 300, "auto", None):
        asked = {"dtype": dtype, "max_model_len": length, "kv_cache_memory_bytes": 2**24}
        served.append(plan_engine(EngineConfig(model=folder, device="cpu", **asked)))
        memory = plan_memory(find_model(folder), cpu(free_bytes), PlanSettings(max_num_seqs=128, **asked))
        planned.append(memory.devices[0].capacity.weight_bytes)
    per_position = num_ropes * 2 * served[0].spec.head_dim * 4
    for num_bytes in (planned, [blueprint.capacity.weight_bytes for blueprint in served]):
        more = [one - num_bytes[0] for one in num_bytes]
        longest = served[0].spec.max_positions - 100
        assert more == [per_position * num_positions for num_positions in (0, 200, longest, longest)]
    of_parameters = find_model(folder).num_parameters * served[0].dtype.itemsize
    assert planned[0] == of_parameters + per_position * 100


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dtype": "float32"}, "computes   float32, by multiply-adds"),
        ({}, f"computes   {natural_dtype()}, by "),
        (
            {"model_impl": "transformers", "dtype": "bfloat16", "attention_backend": "reference"},
            "computes   bfloat16, by transformers; ours does not go with attention_backend=reference",
        ),
        ({"dtype": "bfloat16", "attention_backend": "cpu"}, "computes   bfloat16, by "),
        ({"quantization": "int8"}, "computes   int8, by "),
        ({"quantization": "w8a8_int8", "dtype": "bfloat16"}, "computes   w8a8_int8, by "),
        ({"model_impl": "transformers", "quantization": "int8"}, "layers     packed in int8, by "),
        ({"attention_backend": "reference", "quantization": "w8a8_int8"}, "layers     packed in w8a8_int8, by "),
    ],
    ids=str,
)
def test_a_start_says_in_what_it_computes(settings, line, tiny_folder):
    blueprint = plan_engine(EngineConfig(model=str(tiny_folder("llama")), device="cpu", max_model_len=64, **settings))
    assert [said for said in hardware_of(blueprint).lines(blueprint) if said.startswith(line)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dtype": "float16"}, "with dtype=float16"),
        ({"dtype": "float64", "model_impl": "transformers"}, "with dtype=float64"),
    ],
    ids=str,
)
def test_a_format_that_cannot_be_had_is_refused_before_weights_are_loaded(settings, why, tiny_folder):
    with pytest.raises(ConfigError, match=rf"quantization takes packed layers .* do not go {why}"):
        plan_engine(EngineConfig(model=str(tiny_folder("llama")), device="cpu", quantization="w8a8_int8", **settings))


def test_int4_of_columns_that_are_no_whole_groups_is_refused_before_weights_are_loaded(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 48, "intermediate_size": 64}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=96)).save_pretrained(tmp_path)
    odd = r"7 matrices with columns that are no multiples of 32, such as model.layers.0.self_attn.q_proj.weight of 48"
    with pytest.raises(ConfigError, match=odd):
        plan_engine(EngineConfig(model=str(tmp_path), device="cpu", quantization="int4", kv_quality_floor=0))


def test_a_processor_without_the_instruction_says_so():
    for form, name in ((Pairs(is_native=False), "vdpbf16ps"), (Quads(is_native=False), "vpdpbusd")):
        assert f"{name}, which this processor lacks, and slower" in form.means


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_read_alike(family, tiny_folder, free_bytes):
    """The planner reads config.json by itself, the server mostly through transformers: both come to the same."""
    folder = tiny_folder(family)
    blueprint = plan_engine(EngineConfig(model=str(folder), kv_cache_memory_bytes=2**24, dtype="float32"))
    shape = find_model(str(folder))
    settings = PlanSettings(kv_cache_memory_bytes=2**24, max_num_seqs=128, dtype="float32")
    memory = plan_memory(shape, cpu(free_bytes), settings)
    planned, served = memory.devices[0].capacity, blueprint.capacity
    assert_same_but_for_panels(planned, served)
    assert memory.layout.bytes_per_block == blueprint.geometry.bytes_per_block
    assert shape.counted_parameters == blueprint.spec.num_parameters
    assert (shape.served_limit or shape.max_positions) == blueprint.limit.length


@pytest.mark.parametrize("asked", [{"max_model_len": 300}, {"max_model_len": WINDOW}, {"block_size": 8}], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head", "kivi2"])
@pytest.mark.parametrize("family", ["gemma3n", "gpt-oss", "phi3-window"])
def test_windows_and_shared_layers_are_planned_as_they_are_served(
    family, kv_cache_dtype, asked, tiny_folder, free_bytes
):
    """A window that no sequence passes is none; layers that read what others keep take no bytes."""
    folder = tiny_folder(family)
    asked = asked | {"kv_cache_memory_bytes": 2**22, "max_num_seqs": 32, "dtype": "float32"}
    asked["kv_cache_dtype"] = kv_cache_dtype
    blueprint = plan_engine(EngineConfig(model=str(folder), **asked))
    memory = plan_memory(find_model(str(folder)), cpu(free_bytes), PlanSettings(**asked))
    assert_same_but_for_panels(memory.devices[0].capacity, blueprint.capacity)
    assert memory.layout.groups == blueprint.geometry.groups
    assert memory.layout.bytes_per_token == blueprint.geometry.bytes_per_token
    assert memory.layout.residual_bytes == blueprint.geometry.residual_bytes
    assert len(blueprint.geometry.groups) == 1 or asked.get("max_model_len") != WINDOW
    if family == "gemma3n" and kv_cache_dtype == "auto":
        assert memory.layout.bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_a_layer_without_k_and_v_of_its_own_cannot_be_skipped(tiny_folder, free_bytes):
    asked = {"dtype": "float32", "kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": (4,), "max_model_len": 300}
    folder = str(tiny_folder("gemma3n"))
    with pytest.raises(ConfigError, match="has 4, which reads the K and V of layer 2"):
        plan_engine(EngineConfig(model=folder, **asked))
    with pytest.raises(ConfigError, match="has 4, which keeps no K and V of its own"):
        plan_memory(find_model(folder), cpu(free_bytes), PlanSettings(**asked))


@pytest.mark.parametrize("skipped", [(0,), (1,), (0, 1), (1, 3), (3, 2, 0)])
@pytest.mark.parametrize(("family", "asked"), [("gemma3", {"max_model_len": 512}), ("gemma3", {"block_size": 32})])
def test_layers_in_16_bit_are_planned_as_they_are_served(family, asked, skipped, tiny_folder, free_bytes):
    """Also among layers with windows, where blocks of all groups grow with the largest."""
    folder = tiny_folder(family)
    asked |= {"kv_cache_memory_bytes": 2**22, "max_num_seqs": 128, "dtype": "float32"}
    asked |= {"kv_cache_dtype": "int8_per_token_head", "kv_cache_dtype_skip_layers": skipped}
    blueprint = plan_engine(EngineConfig(model=str(folder), **asked))
    memory = plan_memory(find_model(str(folder)), cpu(free_bytes), PlanSettings(**asked))
    planned, served = memory.devices[0].capacity, blueprint.capacity
    assert replace(planned, weight_bytes=served.weight_bytes) == served  # the fused decoder's panels are filled up
    assert memory.layout.bytes_per_block == blueprint.geometry.bytes_per_block
    assert memory.layout.groups == blueprint.geometry.groups
    assert memory.layout.bytes_per_token == blueprint.geometry.bytes_per_token


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": (4,)}, "has 4, and .* has 4 layers"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": (0, -1)}, "has -1"),
        ({"kv_cache_dtype": "kivi2", "kv_cache_dtype_skip_layers": (0,)}, "seals blocks in all layers"),
        ({"kv_cache_dtype_skip_layers": (0,)}, "no layer's KV is encoded"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": 3}, "kv_cache_dtype_skip_layers is 3"),
    ],
)
def test_layers_that_cannot_be_skipped_are_refused(asked, said, tiny_folder):
    with pytest.raises(ConfigError, match=said):
        plan_memory(find_model(str(tiny_folder("gemma3"))), cpu(GIB), PlanSettings(**asked))


def test_the_formula_tells_layers_in_16_bit_apart(tiny_folder):
    settings = PlanSettings(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=(1,), dtype="float32")
    first, *_ = formula(plan_memory(find_model(str(tiny_folder("gemma3"))), cpu(GIB), settings).layout)
    assert "2 (K and V) x 1 layers x 2 KV heads x 32 B (head_dim 16) [float16]" in first
    assert first.endswith(f"= {2 * 2 * (3 * 16 + 32)}")


@pytest.mark.parametrize(
    ("family", "input_len", "output_len", "num_blocks"),
    [
        pytest.param("llama", "40", "24", 120, id="fixed", marks=pytest.mark.long),
        pytest.param("llama", "30-90", "8-40", 150, id="drawn"),
        pytest.param("gemma3", "100-200", "8-40", 500, id="windows", marks=pytest.mark.long),
    ],
)
def test_as_many_requests_run_at_once_as_planned(family, input_len, output_len, num_blocks, tiny_folder):
    """The real engine with a real model, with requests always waiting; the mean over steps, as the plan means it."""
    folder = tiny_folder(family)
    workload = Workload(name="", lengths=draw_lengths(input_len, output_len))
    shape = find_model(str(folder))
    settings = {"max_num_seqs": 128, "max_num_batched_tokens": 256, "max_model_len": 256, "dtype": "float32"}
    budget = num_blocks * 2 * 2 * 2 * 16 * 4 * 16  # layers, KV heads, K and V, head_dim, bytes, tokens
    plan = make_plan(
        Question(
            shape=shape,
            device=cpu(GIB),
            settings=PlanSettings(kv_cache_memory_bytes=budget, **settings),
            workload=workload,
        )
    )
    assert plan.memory.tightest.capacity.num_blocks == num_blocks
    config = EngineConfig(model=str(folder), kv_cache_memory_bytes=budget, **settings)
    engine = build_engine(plan_engine(config))
    running: list[int] = []
    num_sent = 0
    lifetimes = 6 * max(workload.mean_output, 20)
    while len(running) < lifetimes:
        while len(engine.scheduler.waiting) < 4:
            lengths = workload.lengths[(num_sent * 7) % len(workload.lengths)]
            prompt = [(num_sent * 131 + slot * 17) % 300 for slot in range(lengths.prompt)]
            prompt[:3] = num_sent % 307, num_sent // 307 % 307, 5  # no two begin alike
            how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=lengths.output)
            engine.add(f"r{num_sent}", prompt, how)
            num_sent += 1
        engine.step()
        running.append(len(engine.scheduler.running))
    steady = running[len(running) // 3 :]
    assert sum(steady) / len(steady) == pytest.approx(plan.load.reached.mean, rel=0.02)


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_auto_is_the_same_dtype_on_both_sides(family, tiny_folder, free_bytes):
    folder = tiny_folder(family)
    served = plan_engine(EngineConfig(model=str(folder), kv_cache_memory_bytes=2**24))
    for multiplies in (True, False):
        device = replace(cpu(free_bytes), multiplies_bfloat16=multiplies)
        planned = plan_memory(find_model(str(folder)), device, PlanSettings(kv_cache_memory_bytes=2**24))
        assert planned.dtype == ("bfloat16" if served.is_fused and multiplies else "float32")
    planned = plan_memory(find_model(str(folder)), cpu(free_bytes), PlanSettings(kv_cache_memory_bytes=2**24))
    assert str(served.dtype) == f"torch.{planned.dtype}"
    assert this_cpu().multiplies_bfloat16 == cpu(free_bytes).multiplies_bfloat16


@pytest.mark.parametrize(
    ("family", "change", "is_fused"),
    [
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, True),
        ("llama", {"hidden_act": "gelu"}, False),
        ("gemma2", {"hidden_activation": "silu"}, True),
        ("gemma2", {"hidden_activation": "gelu", "hidden_act": "silu"}, False),
        ("gemma2", {"use_bidirectional_attention": True}, False),
        ("gemma3", {"attention_bias": True}, False),
        ("gemma3", {"rope_parameters": None, "rope_theta": 1e5, "rope_local_base_freq": 1e4}, True),
    ],
    ids=str,
)
def test_what_the_fused_decoder_computes_is_the_same_on_both_sides(family, change, is_fused, tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(family), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    served = plan_engine(EngineConfig(model=str(folder), kv_cache_memory_bytes=2**24))
    assert served.is_fused == find_model(str(folder)).is_fused == is_fused


def test_weights_that_lie_there_twice_are_counted_once(tiny_folder, tmp_path, free_bytes):
    """Mistral's folders hold them a second time, as ``consolidated.safetensors``; nobody loads both."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    spec = plan_engine(EngineConfig(model=str(folder), kv_cache_memory_bytes=2**24)).spec
    once = find_model(str(tiny_folder("llama"))).exact_parameters
    assert spec.num_parameters == find_model(str(folder)).exact_parameters == once


def test_what_ends_a_length_is_called_the_same_on_both_sides(tiny_folder, free_bytes):
    folder = str(tiny_folder("phi3-longrope"))
    with pytest.raises(ConfigError) as served:
        plan_engine(EngineConfig(model=folder, max_model_len=4000))
    with pytest.raises(ConfigError) as planned:
        plan_memory(find_model(folder), cpu(free_bytes), PlanSettings(max_model_len=4000))
    assert served.value.message == planned.value.message
    assert "phi3's longrope" in planned.value.message
