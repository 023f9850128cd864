"""What the planner says of memory that is nearly enough, and of what lies beside weights in it."""

from __future__ import annotations

import pytest

from pagefold.errors import ConfigError, DoesNotFitError
from pagefold.plan import PlanSettings, find_device, find_model
from pagefold.plan.kept import KEEPS_NOTHING, kept_of
from pagefold.plan.memory import plan_memory
from pagefold.plan.ropes import rope_elements

GIB = 2**30
LLAMA = find_model("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("engine", ["vllm==0.19", "vllm==0.21"])
@pytest.mark.parametrize("is_eager", [True, False])
def test_kv_that_is_given_fits_beside_graphs(engine, is_eager):
    """Of 79 GiB, 15 are weights and 10 KV; of 26, graphs and activations have no room."""
    settings = PlanSettings(
        engine=engine, kv_cache_memory_bytes=10 * GIB, max_model_len=8192, max_num_seqs=64, enforce_eager=is_eager
    )
    assert plan_memory(LLAMA, find_device("H100"), settings).fits
    try:
        assert not plan_memory(LLAMA, find_device("H100").with_memory(round(26.3 * GIB)), settings).fits
    except DoesNotFitError:
        assert engine == "vllm==0.21", "graphs are inside of the budget there"


def test_residuals_are_needed_too():
    """Whatever the memory is: what is said to fit has room for a request and for what is not sealed yet."""
    settings = PlanSettings(engine="pagefold", kv_cache_dtype="kivi2", max_model_len=8192, gpu_memory_utilization=0.95)
    said = []
    for tenths in range(160, 190):
        device = find_device("L4").with_memory(tenths * GIB // 10)
        try:
            memory = plan_memory(LLAMA, device, settings)
        except DoesNotFitError:
            said.append("no")
            continue
        part = memory.tightest
        needed = part.shard.layout.num_blocks_for(8192, memory.num_new) * part.shard.layout.bytes_per_block
        left = part.usable_bytes - part.weights.high - part.reserve.activations.high - part.reserve.outside.high
        assert part.capacity.residual_bytes > 0
        assert not memory.fits or left >= needed + part.capacity.residual_bytes
        assert not memory.fits or memory.concurrency_ends[0] >= 1
        said.append("yes" if memory.fits else "perhaps")
    assert set(said) == {"no", "perhaps", "yes"}
    assert said == sorted(said, key=["no", "perhaps", "yes"].index)


def test_no_more_sequences_run_by_default_than_a_step_has_tokens():
    few = PlanSettings(engine="vllm==0.19", max_num_batched_tokens=256, max_model_len=8192)
    assert plan_memory(LLAMA, find_device("H100"), few).max_num_seqs == 256
    assert plan_memory(LLAMA, find_device("H100"), PlanSettings(engine="vllm==0.19")).max_num_seqs == 1024


def test_images_are_computed_on_the_first_stage():
    shape = find_model("google/gemma-3-27b-it")
    settings = PlanSettings(engine="vllm==0.19", pipeline_parallel_size=2, max_model_len=8192)
    first = plan_memory(shape, find_device("H100"), settings).devices[0]
    assert shape.vision is not None
    assert first.activation_bytes > 32 * shape.vision.pixels * 2


@pytest.mark.parametrize(
    ("rope", "num_ropes", "positions"),
    [
        ({}, 1, 1000),
        ({}, 2, 2000),
        ({"rope_type": "linear", "factor": 8.0}, 1, 8000),
        ({"rope_type": "linear", "factor": 8.0}, 2, 9000),
        ({"type": "dynamic", "factor": 2.0}, 1, 2000),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 250}, 1, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 300}, 1, 1200),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 300}, 1, 1000),
        ({"rope_type": "longrope", "original_max_position_embeddings": 300}, 1, 1300),
        ({"rope_type": "linear", "factor": float("nan")}, 1, 1000),
    ],
)
def test_tables_of_ropes_are_as_long_as_vllm_makes_them(rope, num_ropes, positions):
    config = {"max_position_embeddings": 1000, "rope_scaling": rope}
    assert rope_elements(config, "llama", 64, num_ropes) == positions * 64


def test_each_kind_of_layer_has_its_own_rope():
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    config = {"max_position_embeddings": 131_072, "rope_parameters": ropes}
    assert rope_elements(config, "gemma3_text", 256, 2) == 9 * 131_072 * 256
    shape = find_model("google/gemma-3-4b-it")
    assert shape.rope_elements == 9 * 131_072 * 256


@pytest.mark.parametrize(
    "found", [{"ignore": True}, {"ignored_layers": 5}, {"modules_in_block_to_quantize": 3}, {"ignore": [5, None]}]
)
def test_lists_that_are_none_name_nothing(found):
    assert kept_of({"quantization_config": found}, "x") == KEEPS_NOTHING


@pytest.mark.parametrize("field", ["ignore", "modules_to_not_convert", "llm_int8_skip_modules", "exclude_modules"])
def test_what_tools_leave_as_it_is_stays_in_16_bit(field):
    kept = kept_of({"quantization_config": {field: ["model.layers.3.mlp"]}}, "x")
    assert kept.keeps(["model.layers.3.mlp.up_proj"])
    assert not kept.keeps(["model.layers.4.mlp.up_proj"])


@pytest.mark.parametrize("pattern", ["re:(", "re:a{99999999999999}"])
def test_an_expression_that_is_none_is_refused(pattern):
    with pytest.raises(ConfigError, match="which is no expression"):
        kept_of({"quantization_config": {"ignore": [pattern]}}, "x")
