"""From a model's ``config.json`` to its shape: read, not loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from pagefold.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from pagefold.kv import LayerKV
from pagefold.plan.config_fields import check_fields, check_kinds, lacks
from pagefold.plan.parameters import (
    COUNTED_FAMILIES,
    attention_parameters,
    experts_of,
    mlp_parameters,
    norm_parameters,
)
from pagefold.plan.quantization import quantization_of
from pagefold.plan.recurrent import recurrent_parameters, state_elements
from pagefold.plan.shape import DecoderLayer, ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["read_config_file", "shape_of"]

_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "d_ff"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads"),
    "num_local_experts": ("moe_num_experts",),
    "num_experts_per_tok": ("moe_top_k",),
}
"""What families call the same thing."""

_MANY = 10_000
"""How many layers are read: a config that has more is refused in a moment."""

_OTHER_KINDS = {"attention": "full_attention", "full": "full_attention"}

_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's ``hybrid_override_pattern``, one a layer."""

_WINDOWED_THROUGHOUT = ("mistral", "mixtral", "phi3", "qwen3_moe")
"""Families whose layers all have the window, if there is one: they read no ``layer_types``. See the runner's."""
_WINDOWED_EVERYWHERE = (*_WINDOWED_THROUGHOUT, "ministral", "starcoder2")
_WINDOWED_BY_PATTERN = ("gemma2", "gemma3_text", "gemma3n_text", "gpt_oss", "qwen2", "qwen3")
"""Families whose pattern of windows is known here, where a config does not list ``layer_types``."""
_SHARING = ("gemma3n_text",)
"""Families that are served though some layers read the K and V of others."""
_CHUNKED = ("llama4_text",)
"""Families that are served with chunked attention."""

_FUSED = {
    "llama": "hidden_act",
    "mistral": "hidden_act",
    "qwen2": "hidden_act",
    "qwen3": "hidden_act",
    "gemma2": "hidden_activation",
    "gemma3_text": "hidden_activation",
}
"""Families of the server's fused decoder, with the field that names their activation."""
_FUSED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Numbers that it needs of a rope of such a kind."""
_FUSED_HEAD = 8
"""What it takes a head's numbers in."""

_STATE = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")
_NOTHING = ("mlp", "moe")
_BOTH = ("hybrid",)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises:
        ModelNotFoundError: the file is not there, or cannot be read.
        ConfigError: it holds no JSON object.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}."
        raise ModelNotFoundError(message, remedy="Name a folder with a config.json, or the file.") from None
    except ValueError as error:
        message = f"{path} is not JSON: {error}."
        raise ConfigError(message, remedy="Fetch it again.") from None
    if not isinstance(loaded, dict):
        message = f"{path} holds a {type(loaded).__name__}, not a config."
        raise ConfigError(message, remedy="Name a config.json as transformers writes it.")
    return loaded


class _Fields(dict[str, Any]):
    """A config without what is null; to ask it for a field that it lacks is the user's error."""

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        super().__init__({field: value for field, value in fields.items() if value is not None})
        self._name = name

    def __missing__(self, field: str) -> NoReturn:
        raise lacks(self._name, [field])


def shape_of(raw: Mapping[str, Any], *, name: str, source: str) -> ModelShape:
    """Return the shape of the model that ``raw``, a config as transformers writes it, describes.

    Raises:
        ConfigError: it lacks fields, or one is absurd; names them.
        UnsupportedModelError: it has layers of a kind that nobody told us the size of.
    """
    config = _Fields(name, _flatten(raw))
    check_fields(config, name)
    model_type = str(config.get("model_type") or "")
    kinds = _layer_kinds(config, model_type)
    check_kinds(config, name, kinds, throughout=_kind_throughout(config, model_type))
    layers = tuple(_layer(config, model_type, index, kind, name) for index, kind in enumerate(kinds))
    head_dim = _head_dim(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    embedding, other = vocab * hidden, hidden * (2 if model_type == "gpt_neox" else 1)
    if model_type == "gemma3n_text":
        embedding, other, layers = _gemma3n(config, layers)
    is_tied = config.get("tie_word_embeddings", model_type.startswith(("gemma", "cohere")))
    return ModelShape(
        name=name,
        source=source,
        model_type=model_type,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=config["max_position_embeddings"],
        layers=layers,
        embedding_parameters=embedding,
        head_parameters=0 if is_tied else vocab * hidden,
        other_parameters=other,
        served_limit=_served_limit(config, model_type),
        not_served=_why_not_served(config, model_type, kinds),
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch."),
        quantization=quantization_of(config),
        is_fused=_is_fused(config, model_type),
        is_estimate=model_type not in COUNTED_FAMILIES,
    )


def _flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text part of a config, with one name for each thing."""
    config = dict(raw)
    text = raw.get("text_config") or raw.get("llm_config")
    if isinstance(text, dict):
        outer = {key: raw[key] for key in ("torch_dtype", "dtype", "quantization_config") if raw.get(key)}
        config = outer | text
        config.setdefault("model_type", f"{raw.get('model_type', '')}_text")
    if config.get("model_type") == "gemma3":
        config["model_type"] = "gemma3_text"
    if config.get("model_type") == "mistral" and "layer_types" in config:  # as transformers reads it
        config["model_type"] = "ministral"
    for part in ("attn_config", "ffn_config"):  # of DBRX and MPT
        inner = config.get(part)
        config = (inner | config) if isinstance(inner, dict) else config
    is_multi_query = config.get("multi_query") and not config.get("new_decoder_architecture")  # as Falcon has it
    if is_multi_query and config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = 1
    for wanted, others in _OTHER_NAMES.items():
        if config.get(wanted) is None:
            found = next((config[other] for other in others if config.get(other) is not None), None)
            if found is not None:
                config[wanted] = found
    _list_patterns(config)
    blocks = config.get("layers_block_type")
    if config.get("num_hidden_layers") is None and isinstance(blocks, list):
        config["num_hidden_layers"] = len(blocks)
    return config


def _list_patterns(config: dict[str, Any]) -> None:
    """Write out what families say of their layers in letters: Nemotron-H's ``M-M*``, EXAONE's ``LLLG``."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and config.get("layers_block_type") is None:
        config["layers_block_type"] = [_PATTERN.get(letter, letter) for letter in pattern if letter != "|"]
    windows, num_layers = config.get("sliding_window_pattern"), config.get("num_hidden_layers")
    if isinstance(windows, str):
        del config["sliding_window_pattern"]
        every = ["full_attention" if letter == "G" else "sliding_attention" for letter in windows]
        if every and config.get("layer_types") is None and type(num_layers) is int:
            config["layer_types"] = [every[index % len(every)] for index in range(min(num_layers, _MANY))]


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("kv_lora_rank"):
        return int(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _layer_kinds(config: Mapping[str, Any], model_type: str) -> list[str]:  # noqa: C901, PLR0911 - one family each
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window")
    listed = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(listed, list) and len(listed) == num_layers:
        return [_OTHER_KINDS.get(str(kind), str(kind)) for kind in listed]
    if config.get("attn_layer_period"):
        period, offset = config["attn_layer_period"], config.get("attn_layer_offset") or 0
        return ["full_attention" if index % period == offset else "mamba" for index in range(num_layers)]
    if config.get("attn_layer_indices") is not None:
        return ["full_attention" if i in config["attn_layer_indices"] else "mamba" for i in range(num_layers)]
    if config.get("attention_chunk_size"):
        no_rope = config.get("no_rope_layers") or [int((i + 1) % 4 != 0) for i in range(num_layers)]
        return ["chunked_attention" if uses_rope else "full_attention" for uses_rope in no_rope]
    if config.get("full_attention_interval"):
        every = config["full_attention_interval"]
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    if window is None:
        return ["full_attention"] * num_layers
    if model_type in {"gemma2", "gpt_oss"}:
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    if model_type.startswith("qwen"):
        if not config.get("use_sliding_window"):
            return ["full_attention"] * num_layers
        first = 0 if model_type in _WINDOWED_THROUGHOUT else config.get("max_window_layers") or 0
        return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if pattern is None and model_type.startswith("gemma3"):
        pattern = 5 if model_type.startswith("gemma3n") else 6
    if pattern:
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    kind = "sliding_attention" if model_type in _WINDOWED_EVERYWHERE else "full_attention"
    return [kind] * num_layers


def _kind_throughout(config: Mapping[str, Any], model_type: str) -> str:
    """Return of what kind all layers are of a family that reads no ``layer_types``; empty of others."""
    if model_type not in _WINDOWED_THROUGHOUT:
        return ""
    is_windowed = config.get("sliding_window") is not None
    if model_type.startswith("qwen"):
        is_windowed = is_windowed and bool(config.get("use_sliding_window"))
    return "sliding_attention" if is_windowed else "full_attention"


def _layer_kv(config: Mapping[str, Any], index: int, kind: str) -> LayerKV | None:
    num_layers = config["num_hidden_layers"]
    if index >= num_layers - (config.get("num_kv_shared_layers") or 0):
        return None  # reads what an earlier layer keeps
    every = config.get("cla_share_factor") if config.get("use_cla") else None
    if every and index % every:
        return None
    if config.get("kv_lora_rank"):
        return LayerKV(1, config["kv_lora_rank"] + config["qk_rope_head_dim"], 0)
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    key_dim = _head_dim(config)
    if kind == "full_attention":
        num_kv_heads = config.get("num_global_key_value_heads") or num_kv_heads
        key_dim = config.get("global_head_dim") or key_dim
    own = (config.get("per_layer_config") or {}).get(f"{index:02d}") or {}
    key_dim = own.get("head_dim", key_dim)
    value_dim = config.get("v_head_dim") or key_dim
    if kind == "sliding_attention":
        return LayerKV(num_kv_heads, key_dim, value_dim, window=config["sliding_window"])
    if kind == "chunked_attention":
        return LayerKV(num_kv_heads, key_dim, value_dim, window=config["attention_chunk_size"], is_chunked=True)
    return LayerKV(num_kv_heads, key_dim, value_dim)


def _layer(config: Mapping[str, Any], model_type: str, index: int, kind: str, name: str) -> DecoderLayer:
    keeps_state = kind in _STATE or kind in _BOTH or model_type == "falcon_h1"
    keeps_kv = kind in {"full_attention", "sliding_attention", "chunked_attention"} or kind in _BOTH
    if not keeps_kv and not keeps_state and kind not in _NOTHING:
        message = f"{name} has layers of {kind}, of which it is not known what they keep."
        remedy = "Check layer_types, or plan for a model with attention or state-space layers."
        raise UnsupportedModelError(message, remedy=remedy)
    elements = state_elements(config, model_type) if keeps_state else 0
    if elements is None:
        message = f"{name} has layers of {kind} ({model_type}), of which it is not known how large their state is."
        raise UnsupportedModelError(message, remedy="Plan for another model.")
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    kv = _layer_kv(config, index, kind) if keeps_kv else None
    split = recurrent_parameters(config, model_type) if keeps_state else 0
    whole = norm_parameters(config, model_type)
    kv_parameters = 0
    if keeps_kv:
        more, kv_parameters, more_whole = attention_parameters(config, model_type, _head_dim(config))
        split, whole = split + more, whole + more_whole
    if kv is None and model_type == "gemma3n_text":  # it has no projections, nor the norm of K, either
        kv_parameters, whole = 0, whole - _head_dim(config)
    experts = experts_of(config, model_type, index)
    has_one_part = model_type == "nemotron_h"  # attention, a state, a feed-forward layer or experts: each is a layer
    if has_one_part and kind != "moe":
        experts = None
    if has_one_part and kind not in _NOTHING:
        expert_parameters, active_share, activation = 0, 1.0, 0
    elif experts is None:
        width = _dense_width(config, model_type, index)
        split += mlp_parameters(config, model_type, width)
        expert_parameters, active_share, activation = 0, 1.0, 2 * width
    else:
        split, whole = split + experts.shared_parameters, whole + experts.router_parameters
        expert_parameters, active_share = experts.parameters, experts.num_active / experts.num_experts
        activation = 2 * experts.width
    key_dim = _head_dim(config)
    value_dim = config.get("v_head_dim") or key_dim
    projected = (
        num_heads * key_dim + (2 * kv.num_kv_heads * key_dim if kv is not None else 0) if keeps_kv else 4 * hidden
    )
    return DecoderLayer(
        kv=kv,
        state_elements=elements,
        split_parameters=split,
        whole_parameters=whole,
        kv_parameters=kv_parameters,
        expert_parameters=expert_parameters,
        active_share=active_share,
        score_width=num_heads * (key_dim + value_dim) if keeps_kv else 0,
        activation_width=max(projected, activation),
    )


def _dense_width(config: Mapping[str, Any], model_type: str, index: int) -> int:
    width = config.get("intermediate_size")
    if model_type == "llama4_text" and config.get("intermediate_size_mlp"):
        width = config["intermediate_size_mlp"]
    if isinstance(width, list):
        width = width[index]
    return int(width) if width else 4 * int(config["hidden_size"])


def _gemma3n(config: Mapping[str, Any], layers: tuple[DecoderLayer, ...]) -> tuple[int, int, tuple[DecoderLayer, ...]]:
    """Return (tables, others, layers) of Gemma 3n: it has embeddings for each layer, and four residual streams."""
    hidden, own = config["hidden_size"], config["hidden_size_per_layer_input"]
    streams, rank, num_layers = config["altup_num_inputs"], config["laurel_rank"], config["num_hidden_layers"]
    tables = config["vocab_size"] * hidden + config["vocab_size_per_layer_input"] * num_layers * own
    others = hidden + hidden * num_layers * own + own + 2 * (streams - 1) * hidden * hidden
    altup = hidden + streams * streams + hidden * streams + streams**3 + hidden
    laurel = 2 * hidden * rank + hidden
    more = altup + laurel + 2 * hidden * own + hidden
    return tables, others, tuple(_with_more(layer, more) for layer in layers)


def _with_more(layer: DecoderLayer, parameters: int) -> DecoderLayer:
    return replace(layer, whole_parameters=layer.whole_parameters + parameters)


def _served_limit(config: Mapping[str, Any], model_type: str) -> int | None:
    """Return how long a sequence the server takes on a CPU, where windows are computed; None for all positions."""
    limits: list[int] = []
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") if isinstance(rope, dict) else None
    if kind == "longrope" and model_type == "phi3":
        original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        limits += [original] if type(original) is int and original > 0 else []
    limit = min(limits, default=None)
    return limit if limit is not None and limit < config["max_position_embeddings"] else None


def _is_fused(config: Mapping[str, Any], model_type: str) -> bool:
    """Whether the server's fused decoder computes it: see ``read_fused_config`` of the runner."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {}
    by_layer = [one for one in rope.values() if isinstance(one, dict)]
    has_odd_bias = config.get("mlp_bias") or (config.get("attention_bias") and model_type != "qwen2")
    return (
        model_type in _FUSED
        and (config.get(_FUSED[model_type]) or _FUSED_ACTIVATIONS[0]) in _FUSED_ACTIVATIONS
        and not has_odd_bias
        and not config.get("use_bidirectional_attention")
        and all(_is_fused_rope(one, config.get("partial_rotary_factor")) for one in by_layer or [rope])
        and _head_dim(config) % _FUSED_HEAD == 0
    )


def _is_fused_rope(rope: Mapping[str, Any], partial_factor: object) -> bool:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    is_whole = rope.get("partial_rotary_factor", partial_factor) in (None, 1)
    numbers = [rope.get(name) for name in _ROPE_NUMBERS.get(kind, ())]
    return (is_whole or kind == "proportional") and all(type(one) in (int, float) for one in numbers)


def _why_not_served(config: Mapping[str, Any], model_type: str, kinds: list[str]) -> str:
    if config.get("kv_lora_rank"):
        return "latent attention"
    if (config.get("num_kv_shared_layers") and model_type not in _SHARING) or config.get("use_cla"):
        return "KV shared across layers"
    served = {"full_attention", "sliding_attention"} | ({"chunked_attention"} if model_type in _CHUNKED else set())
    odd = sorted(set(kinds) - served)
    if odd:
        return f"layers of {' and '.join(odd)}"
    is_known = model_type in (*_WINDOWED_THROUGHOUT, *_WINDOWED_BY_PATTERN)
    if "sliding_attention" in kinds and not is_known and not config.get("layer_types"):
        return "sliding windows of this family"
    return ""
