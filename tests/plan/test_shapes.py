"""Shapes of models from their configs: the table against transformers itself, and every kind of layer."""

from __future__ import annotations

import json
import math
from importlib.resources import files

import pytest

from pagefold.errors import ConfigError, ModelNotFoundError, PagefoldError, UnsupportedModelError
from pagefold.kv import CODECS, LayerKV
from pagefold.plan import PlanSettings, device_names, find_device, find_model, model_names
from pagefold.plan.config_json import shape_of
from pagefold.plan.memory import plan_memory
from pagefold.plan.recurrent import state_elements
from pagefold.plan.weights import count_parameters

ROWS = json.loads((files("pagefold.plan") / "data" / "models.json").read_text())
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def kinds(**changes: object) -> list[int | None]:
    """Return the window of each layer of a Llama with that changed."""
    shape = shape_of(LLAMA | {"num_hidden_layers": 8} | changes, name="x", source="")
    return [layer.kv.keeps.window if layer.kv is not None else -1 for layer in shape.layers]


# The table.


def test_the_table_has_the_families_that_people_ask_for():
    assert len(ROWS) >= 25
    families = {row["config"]["model_type"] for row in ROWS}
    assert families >= {
        "llama", "llama4_text", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text",
        "gemma3n_text", "phi3", "deepseek_v2", "deepseek_v3", "gpt_oss", "jamba",
    }  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_every_row_says_where_it_was_read(row: dict):
    assert row["sources"]
    assert all(source.startswith("https://") for source in row["sources"])
    for name in (row["name"], *row["aliases"], row["name"].upper()):
        assert find_model(name).name == row["name"]
    assert not find_model(row["name"]).is_estimate


def test_no_name_is_of_two_rows():
    rows_of: dict[str, set[str]] = {}
    for row in ROWS:
        for name in (row["name"], *row["aliases"]):
            rows_of.setdefault(name.lower().rsplit("/", 1)[-1], set()).add(row["name"])
    assert all(len(rows) == 1 for rows in rows_of.values())
    assert len(set(model_names())) == len(ROWS)


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_parameters_are_what_transformers_builds(row: dict):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    ours = {"model_type", "quantization_config", "torch_dtype"}
    config = CONFIG_MAPPING[row["config"]["model_type"]](**{k: v for k, v in row["config"].items() if k not in ours})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert find_model(row["name"]).counted_parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-8B", 8.03),
        ("deepseek-ai/DeepSeek-V3", 37.6),
        ("mistralai/Mixtral-8x7B-v0.1", 12.9),
        ("openai/gpt-oss-120b", 5.7),
        ("Qwen/Qwen3-30B-A3B", 3.4),
    ],
)
def test_parameters_that_a_token_meets(name: str, billions: float):
    """As the models' authors name them, within what they count as such (embeddings or not)."""
    shape = find_model(name)
    assert shape.num_active_parameters + shape.output_parameters == pytest.approx(billions * 1e9, rel=0.12)


def test_every_device_says_where_it_was_read():
    assert {name.split("-")[0] for name in device_names()} == {
        "A10",
        "L4",
        "L40S",
        "A100",
        "H100",
        "H200",
        "B200",
        "MI300X",
    }
    for name in device_names(with_aliases=True):
        device = find_device(name.lower())
        assert "https://" in device.source or "http://" in device.source
        assert device.memory_bytes > 2e10
        assert device.bandwidth > 2e11
        assert device.flops_16 > 1e14
        assert device.host_link > 3e10


# What layers keep.


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "phi3", "llama4_text"]
)
def test_bytes_are_those_of_transformers_cache(family: str):
    """A tiny model of the family computes a short prompt; its cache is as large as the formula says."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    row = next(row for row in ROWS if row["config"]["model_type"] == family)
    small = {
        "num_hidden_layers": 10, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 48, "max_position_embeddings": 256,
        "num_local_experts": 2, "num_experts_per_tok": 1, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "vocab_size_per_layer_input": 64, "sliding_window": 64, "attention_chunk_size": 64,
    }  # fmt: skip
    own = {"model_type", "quantization_config", "torch_dtype", "tie_word_embeddings"}
    raw = {name: small.get(name, value) for name, value in row["config"].items() if name not in own}
    if family == "gemma3n_text":
        raw["activation_sparsity_pattern"] = [0.0] * 10
    config = CONFIG_MAPPING[family](**raw, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_tokens = 24
    with torch.no_grad():
        cache = model(torch.arange(1, num_tokens + 1)[None], use_cache=True).past_key_values
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values) if t is not None and t.numel())
    shape = shape_of(raw | {"model_type": family}, name=family, source="")
    layout = shape.layout(CODECS["float32"], block_size=16, max_len=256)
    assert layout.num_bytes_for(num_tokens) == held


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [None] * 8),
        ({"sliding_window": 64}, [None] * 8),  # llama does not look at it
        ({"model_type": "mistral", "sliding_window": 64}, [64] * 8),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 8),
        (  # then transformers takes it for a Ministral
            {"model_type": "mistral", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4},
            [64, None] * 4,
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, [64, None] * 4),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, [None] * 8),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6},
            [None] * 6 + [64] * 2,
        ),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 4}, [64, 64, 64, None] * 2),
        ({"layer_types": ["full_attention", "sliding_attention"] * 4, "sliding_window": 32}, [None, 32] * 4),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, [64, 64, 64, None] * 2),
        (
            {"model_type": "qwen3_moe", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6},
            [64] * 8,
        ),
        ({"model_type": "qwen3_moe", "sliding_window": 64}, [None] * 8),
        ({"num_kv_shared_layers": 3}, [None] * 5 + [-1] * 3),
        ({"use_cla": True, "cla_share_factor": 2}, [None, -1] * 4),
    ],
)
def test_which_layers_keep_what(changes: dict, windows: list):
    assert kinds(**changes) == windows


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, ""),
        ({"model_type": "mixtral", "sliding_window": 64}, ""),
        ({"model_type": "gpt_oss", "sliding_window": 64}, ""),
        ({"model_type": "starcoder2", "sliding_window": 64}, "sliding windows of this family"),
        ({"model_type": "cohere2", "layer_types": ["sliding_attention"] * 8, "sliding_window": 64}, ""),
        ({"model_type": "cohere2", "sliding_window_pattern": 4, "sliding_window": 64}, ""),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, ""),
        ({"attention_chunk_size": 64}, "layers of chunked_attention"),
        ({"num_kv_shared_layers": 3}, "KV shared across layers"),
    ],
)
def test_what_our_own_server_runs(changes: dict, why: str):
    shape = shape_of(LLAMA | {"num_hidden_layers": 8} | changes, name="x", source="")
    assert shape.not_served == why


def test_a_latent_vector_is_one_head_without_values():
    shape = find_model("deepseek-ai/DeepSeek-V3")
    assert shape.kv_layers == (LayerKV(1, 576, 0),) * 61
    assert shape.not_served == "latent attention"


def test_a_hybrid_has_a_few_layers_of_blocks_and_a_state():
    shape = find_model("ai21labs/Jamba-v0.1")
    assert len(shape.kv_layers) == 4
    assert shape.state_elements == 28 * 8192 * (16 + 3)
    layout = shape.layout(CODECS["bfloat16"], block_size=16, max_len=4096)
    assert layout.bytes_per_token == 4 * 2 * 8 * 128 * 2
    assert layout.num_bytes_for(100) == 100 * layout.bytes_per_token + 2 * shape.state_elements
    assert layout.num_blocks_for(0) == -(-2 * shape.state_elements // layout.bytes_per_block)


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        (
            {"model_type": "bamba", "mamba_expand": 2, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4},
            64 * 16 + 96 * 3,
        ),
        (
            {
                "model_type": "nemotron_h",
                "mamba_num_heads": 4,
                "mamba_head_dim": 8,
                "ssm_state_size": 16,
                "n_groups": 2,
                "conv_kernel": 4,
            },
            32 * 16 + 96 * 3,
        ),
        (
            {
                "model_type": "qwen3_next",
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_conv_kernel_dim": 4,
            },
            32 * 8 + 64 * 3,
        ),
    ],
)
def test_states_of_families(config: dict, elements: int):
    assert state_elements(config | {"hidden_size": 32}, config["model_type"]) == elements


def test_a_multimodal_config_is_read_by_its_text_part():
    nested = {"model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text", "sliding_window": 16}}
    assert len(shape_of(nested, name="x", source="").kv_layers) == 2


def test_a_folder_is_counted_by_its_weights(smollm2):
    shape = find_model(str(smollm2))
    assert shape.exact_parameters == shape.counted_parameters == 134_515_008
    assert find_model(str(smollm2 / "config.json")).exact_parameters is None


# What is wrong is said in a line.


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (
            {},
            ConfigError,
            "lacks num_hidden_layers, num_attention_heads, hidden_size, vocab_size, max_position_embeddings",
        ),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, ConfigError, "lacks hidden_size"),
        (LLAMA | {"num_hidden_layers": -2}, ConfigError, "num_hidden_layers = -2"),
        (LLAMA | {"hidden_size": 2**60}, ConfigError, "hidden_size ="),
        (LLAMA | {"vocab_size": "many"}, ConfigError, "vocab_size = 'many'"),
        (LLAMA | {"num_key_value_heads": 3}, UnsupportedModelError, "4 attention heads for 3 KV heads"),
        (LLAMA | {"layer_types": ["full_attention"]}, UnsupportedModelError, "2 layers, and layer_types is of 1"),
        (LLAMA | {"layer_types": ["full_attention", "wishful"]}, UnsupportedModelError, "layers of wishful"),
        (LLAMA | {"layer_types": ["full_attention", "mamba"]}, UnsupportedModelError, "how large their state is"),
        (
            LLAMA | {"layer_types": ["sliding_attention"] * 2},
            UnsupportedModelError,
            "sliding_attention, and sliding_window is None",
        ),
        (
            LLAMA | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0},
            UnsupportedModelError,
            "layers of sliding_attention, and sliding_window is 0",
        ),
        (LLAMA | {"model_type": "mistral", "sliding_window": 0}, UnsupportedModelError, "sliding_window is 0"),
        (LLAMA | {"sliding_window": -1}, ConfigError, "sliding_window = -1"),
        (
            LLAMA | {"model_type": "mixtral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            UnsupportedModelError,
            "lists layer_types, which its layers do not follow: all are sliding_attention",
        ),
        (
            LLAMA | {"model_type": "qwen3_moe", "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
            UnsupportedModelError,
            "all are full_attention",
        ),
        (
            LLAMA
            | {"model_type": "llama4_text", "layer_types": ["chunked_attention"] * 2, "attention_chunk_size": None},
            UnsupportedModelError,
            "layers of chunked_attention, and attention_chunk_size is None",
        ),
        (
            LLAMA | {"num_kv_shared_layers": 2},
            UnsupportedModelError,
            "num_kv_shared_layers is 2: there is no layer of full",
        ),
        (
            LLAMA
            | {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 8,
                "num_kv_shared_layers": 1,
            },
            UnsupportedModelError,
            "num_kv_shared_layers is 1: there is no layer of full_attention",
        ),
    ],
)
def test_bad_configs(raw: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        shape_of(raw, name="x", source="")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Llama-3.1-80B", "Llama-3.1-70B"),
        ("qwen3-9b", "Qwen3-8B"),
        ("deepseek-v4", "DeepSeek-V"),
        ("smollm-135m", "SmolLM2-135M"),
    ],
)
def test_an_unknown_model_names_the_nearest(name: str, nearest: str):
    with pytest.raises(ModelNotFoundError, match=nearest):
        find_model(name)


@pytest.mark.parametrize(("name", "nearest"), [("H10O", "H100"), ("A100-8OGB", "A100-80GB"), ("mi300", "MI300X")])
def test_an_unknown_device_names_the_nearest(name: str, nearest: str):
    with pytest.raises(ConfigError, match=nearest):
        find_device(name)


@pytest.mark.parametrize("content", ["", "[1]", "{", "\x00"])
def test_a_file_that_is_no_config(tmp_path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError):
        find_model(str(tmp_path))


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelNotFoundError, match="cannot be read"):
        find_model(str(tmp_path))


# Families that say in words of their own what their layers keep.


@pytest.mark.parametrize(
    ("changes", "num_kv_heads"),
    [
        ({"model_type": "falcon", "multi_query": True, "num_kv_heads": 71}, 1),  # Falcon 7B
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),  # 40B
        ({"model_type": "gpt_bigcode", "multi_query": True}, 1),
        ({"model_type": "dbrx", "attn_config": {"kv_n_heads": 2, "model_type": ""}}, 2),
        ({"model_type": "gpt2"}, 4),
    ],
)
def test_kv_heads_by_other_names(changes: dict, num_kv_heads: int):
    plain = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    shape = shape_of(plain | changes, name="x", source="")
    assert {layer.num_kv_heads for layer in shape.kv_layers} == {num_kv_heads}
    assert shape.num_kv_heads == num_kv_heads


def test_experts_in_a_part_of_the_config():
    experts = {"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 48}}
    plain = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    layer = shape_of(plain | {"model_type": "dbrx"} | experts, name="x", source="").layers[0]
    assert (layer.expert_parameters, layer.active_share) == (16 * 3 * 32 * 48, 0.25)


def test_letters_of_layers():
    hybrid = {
        "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-M", "num_hidden_layers": 6, "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
    }  # fmt: skip
    shape = shape_of(LLAMA | hybrid, name="x", source="")
    assert [layer.kv is not None for layer in shape.layers] == [False, False, False, True, False, False]
    assert [layer.state_elements > 0 for layer in shape.layers] == [True, False, True, False, False, True]
    mlp, attention = shape.layers[1], shape.layers[3]
    assert mlp.split_parameters == 2 * 32 * 64, "a layer is one part, and its feed-forward part has no gate"
    assert attention.split_parameters + attention.kv_parameters == 2 * 32 * 32 + 2 * 32 * 16
    assert kinds(sliding_window=64, sliding_window_pattern="LLLG", model_type="exaone4") == [64, 64, 64, None] * 2


@pytest.mark.parametrize(
    "field", ["block_configs", "attn_type_list", "linear_attn_config", "block_types", "cross_attention_layers"]
)
def test_what_is_said_in_words_that_are_not_read_is_refused(field: str):
    with pytest.raises(UnsupportedModelError, match=f"says in {field} what its layers keep"):
        shape_of(LLAMA | {field: [1]}, name="x", source="")


@pytest.mark.quick(every=10)
@pytest.mark.parametrize(
    "row", {row["config"]["model_type"]: row for row in ROWS}.values(), ids=lambda row: row["name"]
)
def test_any_field_may_be_anything(row: dict):
    """Whatever a field holds, there is a shape or a line that says what is wrong."""
    more = (
        "layer_types", "no_rope_layers", "no_rope_layer_interval", "sliding_window", "sliding_window_pattern",
        "use_sliding_window", "max_window_layers", "attention_chunk_size", "rope_scaling", "quantization_config",
        "per_layer_config", "text_config",
    )  # fmt: skip
    wrong = (None, "x", "12", -1, 0, 1.5, float("nan"), True, [], ["x"], [[1]], {}, {"a": 1}, 2**60, 2**39)
    for field in {*row["config"], *more}:
        for value in wrong:
            try:
                shape = shape_of(row["config"] | {field: value}, name="x", source="")
                plan_memory(shape, find_device("H200"), PlanSettings(max_model_len="auto", pipeline_parallel_size=2))
            except PagefoldError as error:
                assert error.message  # noqa: PT017 - either is right


def test_files_that_hold_the_weights_again_are_not_counted(tmp_path):
    for name in ("model-00001-of-00002", "model-00002-of-00002", "consolidated"):
        header = json.dumps({"w": {"dtype": "F16", "shape": [3, 5], "data_offsets": [0, 30]}}).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(30)
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    assert count_parameters(tmp_path) is None, "no index says that they are weights"
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert count_parameters(tmp_path) == 30


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),  # zero points have 4 bit, as weights
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4 + 20 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}, 8.125),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"bits": 4, "group_size": 64}, 4.5),  # MLX
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}}
                },
            },
            4.125,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            8,
        ),
    ],
)
def test_bits_of_quantized_checkpoints(quantization: dict, bits: float):
    shape = shape_of(LLAMA | {"quantization_config": quantization}, name="x", source="")
    memory = plan_memory(shape, find_device("L4"), PlanSettings())
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    in_16_bit = 2 * (shape.num_parameters - matrices)
    assert memory.devices[0].shard.weight_bytes == math.ceil(matrices * bits / 8 + in_16_bit)


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ({"ignore": ["lm_head"]}, 0),
        ({"ignore": ["re:.*self_attn.*"]}, 2 * (2 * 32 * 32 + 2 * 32 * 16)),
        ({"modules_to_not_convert": ["self_attn"]}, 2 * (2 * 32 * 32 + 2 * 32 * 16)),
        ({"modules_to_not_convert": ["model.layers.1"]}, 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64),
        ({"exclude_modules": ["model.layers.*.mlp.down_proj"]}, 2 * 32 * 64),
        ({"modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj"]]}, 2 * (2 * 32 * 32 + 3 * 32 * 64)),
    ],
)
def test_what_a_checkpoint_names_stays_in_16_bit(named: dict, kept: int):
    plain, less = (
        plan_memory(
            shape_of(LLAMA | {"quantization_config": {"quant_method": "fp8"} | more}, name="x", source=""),
            find_device("L4"),
            PlanSettings(),
        )
        for more in ({}, named)
    )
    assert less.devices[0].shard.weight_bytes - plain.devices[0].shard.weight_bytes == kept


def test_an_expression_that_is_none_is_refused():
    named = {"quantization_config": {"quant_method": "fp8", "ignore": ["re:("]}}
    with pytest.raises(ConfigError, match=r"'re:\(' in quantization_config, which is no expression"):
        shape_of(LLAMA | named, name="x", source="")


def test_a_feed_forward_layer_without_a_gate_has_two_matrices():
    gated, ungated = (shape_of(LLAMA | {"model_type": each}, name="x", source="") for each in ("llama", "gpt2"))
    assert gated.layers[0].split_parameters - ungated.layers[0].split_parameters == 32 * 64


def test_a_tower_is_counted_beside_the_text():
    """Gemma 3's SigLIP: 417 million parameters by its authors, .8 GiB."""
    shape = find_model("google/gemma-3-27b-it")
    assert shape.vision.parameters == pytest.approx(417e6 + 1152 * 5376, rel=0.01)
    assert find_model("mistralai/Mistral-Small-3.1-24B-Instruct-2503").vision.parameters == pytest.approx(
        439e6, rel=0.01
    )


def test_a_quantization_that_nobody_knows_is_asked_for():
    shape = shape_of(LLAMA | {"quantization_config": {"quant_method": "magic"}}, name="x", source="")
    with pytest.raises(ConfigError, match=r"stored by 'magic'.* Give --weight-dtype"):
        plan_memory(shape, find_device("L4"), PlanSettings())
    assert plan_memory(shape, find_device("L4"), PlanSettings(weight_dtype="int4"))
