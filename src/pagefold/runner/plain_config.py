"""Plain configs: those that mean what they say, and are read without transformers, whose import takes seconds.

Such a config is of a family of the fused decoder, has all that matters written out, and nothing that is not known here.
Whatever else it is, however small, it is for transformers to read, with its defaults, its checks and its older names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PlainConfig", "read_plain_config"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_WINDOWED_EVERYWHERE = ("mistral",)
"""Families whose window, if there is one, is every layer's."""

_MAX_NUMBER = 2**53  # up to here a float is a whole number as well as an int is


class PlainConfig(SimpleNamespace):
    """A config's values as attributes, as transformers has them."""

    def to_dict(self) -> dict[str, Any]:
        """Return them by name."""
        return vars(self)


def read_plain_config(raw: Mapping[str, Any]) -> PlainConfig | None:
    """Return the config that a ``config.json`` holds, or None if it is not plain.

    Args:
        raw: the JSON of the file.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or raw.get("architectures") != [_ARCHITECTURES.get(family)]:
        return None
    needed, known = _NEEDED | _NEEDED_BY_FAMILY[family], _KNOWN | _KNOWN_BY_FAMILY[family]
    if not needed.keys() <= raw.keys() <= needed.keys() | known.keys():
        return None
    if not all((needed.get(name) or known[name])(value) for name, value in raw.items()):
        return None
    if not (_are_plain_sizes(raw) and _is_plain_rope(raw)):
        return None
    window = raw["sliding_window"] if family in _WINDOWED_EVERYWHERE else None  # of others it is not in use
    return PlainConfig(**{**raw, "sliding_window": window})


def _are_plain_sizes(raw: Mapping[str, Any]) -> bool:
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    head_dim = raw.get("head_dim", hidden_size // num_heads)
    layer_types = raw.get("layer_types")
    is_all_full = layer_types is None or layer_types == ["full_attention"] * raw["num_hidden_layers"]
    return hidden_size % num_heads == 0 and head_dim % 2 == 0 and is_all_full


def _is_plain_rope(raw: Mapping[str, Any]) -> bool:
    """Whether the rope is of kind ``default`` or ``llama3``, in one of its two spellings."""
    if raw.get("rope_scaling") and raw.get("rope_parameters"):
        return False
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    names = {"rope_type", "type", "rope_theta"} & rope.keys()
    if not _is_positive(rope.get("rope_theta", raw.get("rope_theta"))):
        return False
    if kind == "default":
        return rope.keys() == names
    return bool(
        kind == "llama3"
        and rope.keys() == names | _LLAMA3.keys()
        and all(is_right(rope[name]) for name, is_right in _LLAMA3.items())
        and rope["low_freq_factor"] < rope["high_freq_factor"]
    )


def _is(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def _is_false(value: Any) -> bool:  # noqa: ANN401 - of JSON
    return value is False


def _is_of(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types  # and so True is no 1


def _is_count(value: Any) -> bool:  # noqa: ANN401
    return type(value) is int and value > 0


def _is_positive(value: Any) -> bool:  # noqa: ANN401
    return type(value) in (int, float) and 0 < value < _MAX_NUMBER


def _is_window(value: Any) -> bool:  # noqa: ANN401
    return value is None or (type(value) is int and value > 1)


def _is_share(value: Any) -> bool:  # noqa: ANN401
    return type(value) is float and 0 <= value <= 1


_IS_TOKEN_ID = _is_of(int, type(None))
_IS_DTYPE = _is("float16", "bfloat16", "float32", "float64")

_LLAMA3: dict[str, Callable[[Any], bool]] = {
    "factor": _is_positive,
    "low_freq_factor": _is_positive,
    "high_freq_factor": _is_positive,
    "original_max_position_embeddings": _is_count,
}

_NEEDED: dict[str, Callable[[Any], bool]] = {
    "model_type": _is_of(str),
    "architectures": _is_of(list),
    "vocab_size": _is_count,
    "hidden_size": _is_count,
    "intermediate_size": _is_count,
    "num_hidden_layers": _is_count,
    "num_attention_heads": _is_count,
    "num_key_value_heads": _is_count,
    "max_position_embeddings": _is_count,
    "rms_norm_eps": lambda value: type(value) is float and 0 < value < 1,
    "hidden_act": _is("silu"),
    "tie_word_embeddings": _is_of(bool),
    "eos_token_id": lambda value: all(map(_IS_TOKEN_ID, value if type(value) is list else [value])),
}
"""What matters, with what makes it right. Families have other defaults, and those may change: so none is relied on."""

_KNOWN: dict[str, Callable[[Any], bool]] = {
    "head_dim": _is_count,
    "rope_theta": _is_positive,
    "rope_scaling": _is_of(dict, type(None)),
    "rope_parameters": _is_of(dict, type(None)),
    "attention_bias": _is_false,
    "mlp_bias": _is_false,
    # From here on, what changes nothing in inference.
    "_name_or_path": _is_of(str),
    "attention_dropout": _is_share,
    "bos_token_id": _IS_TOKEN_ID,
    "dtype": _IS_DTYPE,
    "initializer_range": _is_share,
    "is_llama_config": _is_of(bool),
    "pad_token_id": _IS_TOKEN_ID,
    "pretraining_tp": _is(1),
    "rope_interleaved": _is_false,
    "torch_dtype": _IS_DTYPE,
    "transformers.js_config": _is_of(dict),
    "transformers_version": _is_of(str),
    "use_cache": _is_of(bool),
}

_WINDOWS: dict[str, Callable[[Any], bool]] = {
    "use_sliding_window": _is_false,
    "sliding_window": _is_of(int, type(None)),
    "max_window_layers": _is_of(int),
    "layer_types": _is_of(list, type(None)),
}
"""Windows that are not in use."""

_NEEDED_BY_FAMILY: dict[str, dict[str, Callable[[Any], bool]]] = {
    "llama": {},
    "mistral": {"sliding_window": _is_window},
    "qwen2": {},
    "qwen3": {"head_dim": _is_count},
}
_KNOWN_BY_FAMILY: dict[str, dict[str, Callable[[Any], bool]]] = {
    "llama": {},
    "mistral": {},
    "qwen2": _WINDOWS,
    "qwen3": _WINDOWS,
}
