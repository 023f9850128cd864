"""From a model's ``config.json`` to its shape: read, not loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from pagefold.kv import LayerKV
from pagefold.plan.parameters import (
    COUNTED_FAMILIES,
    attention_parameters,
    experts_of,
    mlp_parameters,
    norm_parameters,
)
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
}
"""What families call the same thing."""

_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
_LARGEST = 2**40

_WINDOWED_EVERYWHERE = ("mistral", "mixtral", "phi3", "ministral", "starcoder2")
_SERVED_WITH_WINDOWS = ("gemma2", "mistral", "phi3", "qwen2", "qwen3")

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


def shape_of(raw: Mapping[str, Any], *, name: str, source: str) -> ModelShape:
    """Return the shape of the model that ``raw``, a config as transformers writes it, describes.

    Raises:
        ConfigError: it lacks fields, or one is absurd; names them.
        UnsupportedModelError: it has layers of a kind that nobody told us the size of.
    """
    config = _flatten(raw)
    _check(config, name)
    model_type = str(config.get("model_type") or "")
    kinds = _layer_kinds(config, model_type)
    layers = tuple(_layer(config, model_type, index, kind, name) for index, kind in enumerate(kinds))
    head_dim = _head_dim(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    embedding, other = vocab * hidden, hidden * (2 if model_type == "gpt_neox" else 1)
    if model_type == "gemma3n_text":
        embedding, other, layers = _gemma3n(config, layers)
    is_tied = config.get("tie_word_embeddings", model_type.startswith("gemma"))
    windows = [layer.kv.window for layer in layers if layer.kv is not None and layer.kv.window is not None]
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
        served_limit=_served_limit(config, model_type, windows),
        not_served=_why_not_served(config, model_type, kinds, windows),
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch."),
        quantization=_quantization(config),
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
    for wanted, others in _OTHER_NAMES.items():
        if config.get(wanted) is None:
            found = next((config[other] for other in others if config.get(other) is not None), None)
            if found is not None:
                config[wanted] = found
    if config.get("multi_query") and config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = 1
    blocks = config.get("layers_block_type")
    if config.get("num_hidden_layers") is None and isinstance(blocks, list):
        config["num_hidden_layers"] = len(blocks)
    return config


def _check(config: Mapping[str, Any], name: str) -> None:
    missing = [field for field in _NEEDED if config.get(field) is None]
    if missing:
        message = f"The config of {name} lacks {', '.join(missing)}."
        raise ConfigError(message, remedy="Give a whole config.json, as transformers writes it.")
    for field in (
        *_NEEDED,
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "kv_lora_rank",
        "num_kv_shared_layers",
    ):
        value = config.get(field)
        least = 0 if field in {"sliding_window", "num_kv_shared_layers", "kv_lora_rank"} else 1
        if value is not None and (type(value) is not int or not least <= value <= _LARGEST):
            message = f"The config of {name} says {field} = {value!r}."
            raise ConfigError(message, remedy=f"It must be a whole number, at least {least}.")
    num_heads, num_kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        message = f"The config of {name} has {num_heads} attention heads for {num_kv_heads} KV heads."
        raise ConfigError(message, remedy="KV heads must divide the attention heads.")
    listed = config.get("layer_types")
    if listed is not None and len(listed) != config["num_hidden_layers"]:
        message = f"The config of {name} has {config['num_hidden_layers']} layers and names kinds of {len(listed)}."
        raise ConfigError(message, remedy="Check num_hidden_layers and layer_types.")


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("kv_lora_rank"):
        return int(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _layer_kinds(config: Mapping[str, Any], model_type: str) -> list[str]:  # noqa: C901, PLR0911 - one family each
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window")
    listed = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(listed, list) and len(listed) == num_layers:
        return [{"attention": "full_attention", "full": "full_attention"}.get(kind, str(kind)) for kind in listed]
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
    if not window:
        return ["full_attention"] * num_layers
    if model_type in {"gemma2", "gpt_oss"}:
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    if model_type.startswith("qwen"):
        if not config.get("use_sliding_window"):
            return ["full_attention"] * num_layers
        first = config.get("max_window_layers") or 0
        return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if pattern is None and model_type.startswith("gemma3"):
        pattern = 5 if model_type.startswith("gemma3n") else 6
    if pattern:
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    kind = "sliding_attention" if model_type in _WINDOWED_EVERYWHERE else "full_attention"
    return [kind] * num_layers


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
        return LayerKV(num_kv_heads, key_dim, value_dim, window=config.get("sliding_window") or None)
    if kind == "chunked_attention":
        return LayerKV(num_kv_heads, key_dim, value_dim, window=config["attention_chunk_size"], is_chunked=True)
    return LayerKV(num_kv_heads, key_dim, value_dim)


def _layer(config: Mapping[str, Any], model_type: str, index: int, kind: str, name: str) -> DecoderLayer:
    keeps_state = kind in _STATE or kind in _BOTH or model_type == "falcon_h1"
    keeps_kv = kind in {"full_attention", "sliding_attention", "chunked_attention"} or kind in _BOTH
    if not keeps_kv and not keeps_state and kind not in _NOTHING:
        message = f"{name} has layers of {kind}, of which it is not known what they keep."
        raise UnsupportedModelError(message, remedy="Plan for a model with attention or state-space layers.")
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
    if experts is None:
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


def _served_limit(config: Mapping[str, Any], model_type: str, windows: list[int]) -> int | None:
    limits = list(windows) if model_type in _SERVED_WITH_WINDOWS else []
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") if isinstance(rope, dict) else None
    if kind == "longrope" and model_type == "phi3":
        original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        limits += [int(original)] if original else []
    limit = min(limits, default=None)
    return limit if limit is not None and limit < config["max_position_embeddings"] else None


def _why_not_served(config: Mapping[str, Any], model_type: str, kinds: list[str], windows: list[int]) -> str:
    if config.get("kv_lora_rank"):
        return "latent attention"
    if config.get("num_kv_shared_layers") or config.get("use_cla"):
        return "KV shared across layers"
    odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if odd:
        return f"layers of {' and '.join(odd)}"
    if windows and model_type not in _SERVED_WITH_WINDOWS:
        return "sliding windows of this family"
    return ""


def _quantization(config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return ""
    method = str(quantization.get("quant_method") or "")
    if method in {"gptq", "awq"}:
        group = quantization.get("group_size") or 128
        return f"int{quantization.get('bits', 4)}-g{group}" if group > 0 else f"int{quantization.get('bits', 4)}"
    return method
