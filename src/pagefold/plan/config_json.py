"""From a model's ``config.json`` to its shape: read, not loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from pagefold.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from pagefold.kv import KeepRule, LayerKV
from pagefold.plan.config_fields import check_fields, check_kinds, lacks
from pagefold.plan.kept import KEEPS_NOTHING, Kept, kept_of
from pagefold.plan.layer_kinds import kind_throughout, kinds_of, with_defaults
from pagefold.plan.own_server import is_fused, num_ropes, served_limit, why_not_served
from pagefold.plan.parameters import (
    COUNTED_FAMILIES,
    attention_parameters,
    experts_of,
    has_gate,
    mlp_parameters,
    norm_parameters,
)
from pagefold.plan.quantization import quantization_of
from pagefold.plan.quantized import LayerFacts, quantized_of
from pagefold.plan.recurrent import recurrent_parameters, state_elements
from pagefold.plan.ropes import rope_elements
from pagefold.plan.shape import DecoderLayer, ModelShape
from pagefold.plan.vision import vision_of

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

_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's ``hybrid_override_pattern``, one a layer."""

_TIED = (
    "bloom", "cohere", "falcon", "gemma", "gpt2", "gpt_bigcode", "gpt_neo_", "granite", "mpt", "opt", "starcoder2",
)  # fmt: skip
"""What the names of families begin with whose output layer is the embedding again, if a config says nothing."""
_NORMS_WITH_BIASES = ("gpt_neox", "phi")
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt")

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
        UnsupportedModelError: fields contradict each other, or it has layers of a kind that nobody told us the size of.
    """
    config = _Fields(name, _flatten(raw))
    check_fields(config, name)
    model_type = str(config.get("model_type") or "")
    kinds = kinds_of(config, model_type)
    check_kinds(config, name, kinds, throughout=kind_throughout(config, model_type))
    kept = kept_of(config, name)
    layers = tuple(_layer(config, model_type, index, kind, name, kept) for index, kind in enumerate(kinds))
    head_dim = _head_dim(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    embedding, other = vocab * hidden, hidden * (2 if model_type in _NORMS_WITH_BIASES else 1)
    if model_type in _LEARNED_POSITIONS:
        embedding += config["max_position_embeddings"] * hidden
    if model_type == "gemma3n_text":
        embedding, other, layers = _gemma3n(config, layers)
    is_tied = config.get("tie_word_embeddings", model_type.startswith(_TIED))
    head = 0 if is_tied else vocab * hidden + (vocab if model_type == "phi" else 0)
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
        head_parameters=head,
        other_parameters=other,
        served_limit=served_limit(config, model_type),
        not_served=why_not_served(
            config, model_type, kinds, is_of_text=_text_of(raw) is None and raw.get("model_type") != "gemma3"
        ),
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch."),
        quantization=quantization_of(config),
        is_fused=is_fused(config, model_type, head_dim),
        num_ropes=num_ropes(config, model_type, kinds),
        is_estimate=model_type not in COUNTED_FAMILIES,
        rope_elements=rope_elements(config, model_type, head_dim, num_ropes(config, model_type, kinds)),
        vision=vision_of(raw, hidden),
        has_quantized_head=kept.has_quantized_head and not is_tied,
    )


def _text_of(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text part of a config that has others too."""
    text = raw.get("text_config") or raw.get("llm_config")
    return text if isinstance(text, dict) else None


def _flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text part of a config, with one name for each thing."""
    config = dict(raw)
    text = _text_of(raw)
    if text is not None:
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
    return with_defaults(config)


def _list_patterns(config: dict[str, Any]) -> None:
    """Write out what families say of their layers in letters: Nemotron-H's ``M-M*``, EXAONE's ``LLLG``."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and config.get("layers_block_type") is None:
        config["layers_block_type"] = [_PATTERN.get(letter, letter) for letter in pattern if letter != "|"]
    windows, num_layers = config.get("sliding_window_pattern"), config.get("num_hidden_layers")
    if isinstance(windows, str):
        del config["sliding_window_pattern"]
        every = ["full_attention" if letter == "G" else "sliding_attention" for letter in windows]
        if every and config.get("layers_block_type") is None and type(num_layers) is int:
            config["layers_block_type"] = [every[index % len(every)] for index in range(min(num_layers, _MANY))]


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("kv_lora_rank"):
        return int(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


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
        return LayerKV(num_kv_heads, key_dim, value_dim, KeepRule(config["sliding_window"]))
    if kind == "chunked_attention":
        return LayerKV(num_kv_heads, key_dim, value_dim, KeepRule(config["attention_chunk_size"], is_chunked=True))
    return LayerKV(num_kv_heads, key_dim, value_dim)


def _layer(  # noqa: PLR0913, PLR0917 - a config, which of its layers, and what of it stays in 16 bit
    config: Mapping[str, Any], model_type: str, index: int, kind: str, name: str, kept: Kept = KEEPS_NOTHING
) -> DecoderLayer:
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
    dense_width = 0
    if has_one_part and kind not in _NOTHING:
        expert_parameters, active_share, activation = 0, 1.0, 0
    elif experts is None:
        dense_width = _dense_width(config, model_type, index)
        split += mlp_parameters(config, model_type, dense_width)
        expert_parameters, active_share, activation = 0, 1.0, 2 * dense_width
    else:
        split, whole = split + experts.shared_parameters, whole + experts.router_parameters
        expert_parameters, active_share = experts.parameters, experts.num_active / experts.num_experts
        activation = 2 * experts.width
    facts = LayerFacts(
        index=index,
        head_dim=_head_dim(config),
        keeps_kv=keeps_kv,
        has_own_kv=kv_parameters > 0,
        recurrent=recurrent_parameters(config, model_type) if keeps_state else 0,
        dense_width=dense_width,
        experts=experts,
    )
    inner_width = (3 if has_gate(model_type) else 2) * (
        dense_width if experts is None else experts.shared_parameters // hidden // 3
    )
    absorbed = 0
    if keeps_kv and config.get("kv_lora_rank"):
        absorbed = config["kv_lora_rank"] * num_heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
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
        inner_width=inner_width,
        expert_width=0 if experts is None else config.get("moe_intermediate_size") or config["intermediate_size"],
        num_active_experts=0 if experts is None else experts.num_active,
        absorbed_parameters=absorbed,
        quantized=quantized_of(config, model_type, facts, kept),
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
