"""read_kept_layers: what each layer keeps and whose K and V it reads, from configs as families write them.

A config whose fields contradict each other is refused by their names, before weights are loaded.
"""

from __future__ import annotations

import pytest
from model_folders import SIZES, save_config

from pagefold.errors import UnsupportedModelError
from pagefold.kv import KEEP_ALL, KeepRule
from pagefold.runner.models import inspect_model

W, ALL, CHUNK = KeepRule(16), KEEP_ALL, KeepRule(16, is_chunked=True)
WINDOWED = {"use_sliding_window": True, "sliding_window": 16}
SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}


@pytest.mark.parametrize(
    ("config", "settings", "keeps"),
    [
        ("MistralConfig", {"sliding_window": 16}, [W, W]),
        ("MistralConfig", {"sliding_window": 1}, [KeepRule(1)] * 2),
        ("MinistralConfig", {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, [ALL, W]),
        ("MixtralConfig", {"sliding_window": 16}, [W, W]),
        ("MixtralConfig", {"sliding_window": None}, []),
        ("Phi3Config", {"sliding_window": 16}, [W, W]),
        ("Qwen2Config", WINDOWED | {"max_window_layers": 1}, [ALL, W]),
        ("Qwen2Config", {"sliding_window": 0}, []),
        ("Qwen3Config", WINDOWED | {"max_window_layers": 0}, [W, W]),
        ("Qwen3MoeConfig", WINDOWED | {"max_window_layers": 1}, [W, W]),
        ("Qwen3MoeConfig", {"sliding_window": 16}, []),
        ("Gemma2Config", {"sliding_window": 16}, [W, ALL]),
        ("Gemma3TextConfig", {"sliding_window": 16}, [W, W]),
        ("GptOssConfig", {"sliding_window": 16, "num_local_experts": 4}, [W, ALL]),
        ("Cohere2Config", {"sliding_window": 16, "sliding_window_pattern": 2}, [W, ALL]),
        ("Olmo3Config", {"sliding_window": 16}, [W, W]),
        ("Llama4TextConfig", {"attention_chunk_size": 16, "no_rope_layers": [1, 0]}, [CHUNK, ALL]),
    ],
)
def test_what_each_layer_keeps_follows_from_the_config(tmp_path, config, settings, keeps):
    spec = inspect_model(save_config(tmp_path, config, SIZES | settings))
    assert list(spec.keeps) == keeps
    assert spec.sources == ()
    assert spec.windowed_limit.length == 128
    assert spec.max_exact_len == min([keep.window for keep in keeps if keep.window], default=128)
    longest = max([keep.window for keep in keeps if keep.window], default=0)
    assert spec.keeps_within(longest) == ()
    assert list(spec.keeps_within(longest + 1)) == keeps


def test_whose_k_and_v_each_layer_reads_follows_from_the_config(tmp_path):
    settings = SIZES | SHARED | {"num_hidden_layers": 4, "sliding_window": 16, "activation_sparsity_pattern": [0.0] * 4}
    spec = inspect_model(save_config(tmp_path, "Gemma3nTextConfig", settings))
    assert spec.sources == (0, 1, 0, 1)
    assert spec.keeps == (W, ALL, W, ALL)


GEMMA3N = SIZES | {"activation_sparsity_pattern": [0.0, 0.0]}
CONTRADICTIONS = {
    "a window that holds no token": (
        "MistralConfig",
        SIZES | {"sliding_window": 0},
        {},
        "mistral .* layers of sliding_attention, and sliding_window is 0",
    ),
    "a window below none": (
        "Cohere2Config",
        SIZES | {"sliding_window": -3},
        {},
        "cohere2 .* layers of sliding_attention, and sliding_window is -3",
    ),
    "a window that is missing": (
        "Cohere2Config",
        SIZES,
        {"sliding_window": None},
        "cohere2 .* layers of sliding_attention, and sliding_window is None",
    ),
    "kinds of layers that the family does not follow": (
        "MixtralConfig",
        SIZES | {"sliding_window": 16},
        {"layer_types": ["sliding_attention", "full_attention"]},
        "mixtral .* lists layer_types, which its layers do not follow: all are sliding_attention, by sliding_window",
    ),
    "windows listed without one": (
        "Phi3Config",
        SIZES | {"sliding_window": None},
        {"layer_types": ["sliding_attention"] * 2},
        "phi3 .* lists layer_types, which its layers do not follow: all are full_attention",
    ),
    "too few kinds of layers": (
        "Olmo3Config",
        SIZES,
        {"layer_types": ["full_attention"]},
        r"\(olmo3\).*`num_hidden_layers` \(2\) must be equal to the number of `layer_types` \(1\)",
    ),
    "an unknown kind of layer": (
        "Olmo3Config",
        SIZES,
        {"layer_types": ["full_attention", "diagonal_attention"]},
        r"\(olmo3\).*`layer_types` entries must be",
    ),
    "chunks that hold no token": (
        "Llama4TextConfig",
        SIZES | {"attention_chunk_size": 0},
        {},
        "llama4_text .* layers of chunked_attention, and attention_chunk_size is 0",
    ),
    "chunks of no size": (
        "Llama4TextConfig",
        SIZES | {"attention_chunk_size": None},
        {},
        "llama4_text .* layers of chunked_attention, and attention_chunk_size is None",
    ),
    "shared K and V without a layer that has them": (
        "Gemma3nTextConfig",
        GEMMA3N | {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 1},
        {},
        "gemma3n_text .* num_kv_shared_layers is 1: there is no layer of full_attention whose K and V they could read",
    ),
    "more layers that share than there are": (
        "Gemma3nTextConfig",
        GEMMA3N | {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 3},
        {},
        "gemma3n_text .* has 2 layers, and num_kv_shared_layers is 3",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_the_names_of_its_fields(tmp_path, kind):
    config, settings, written, message = CONTRADICTIONS[kind]
    folder = save_config(tmp_path, config, settings, **written)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        inspect_model(folder)
    assert refused.value.remedy
