"""KeptLayers: what each layer keeps of a sequence, and whose K and V it reads, as a model's config says it.

What contradicts itself is refused here, by the names of its fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import UnsupportedModelError
from pagefold.kv import KEEP_ALL, KeepRule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pagefold.runner.plain_config import PlainConfig

__all__ = ["WINDOWED_THROUGHOUT", "KeptLayers", "read_kept_layers"]

WINDOWED_THROUGHOUT = ("mistral", "mixtral", "phi3", "qwen3_moe")
"""Families whose layers all have the window, if there is one: they read no ``layer_types``."""

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_SIZES = {_SLIDING: "sliding_window", _CHUNKED: "attention_chunk_size"}
"""The field that says how many tokens layers of a kind keep."""


class KeptLayers(NamedTuple):
    """What the layers of a model keep.

    Attributes:
        keeps: of each layer.
        sources: the layer whose K and V each layer reads; empty where each has its own.
    """

    keeps: tuple[KeepRule, ...]
    sources: tuple[int, ...] = ()


def read_kept_layers(config: PretrainedConfig | PlainConfig, name: str) -> KeptLayers:
    """Return what the layers of ``config`` keep, which has layers of the kinds that are known here.

    Args:
        config: of the model.
        name: of the model, for errors.

    Raises:
        UnsupportedModelError: fields contradict each other, or a window holds no token; names them.
    """
    kinds = _kinds(config, name)
    rules = {kind: _rule(config, kind, name) for kind in set(kinds)}
    return KeptLayers(tuple(rules[kind] for kind in kinds), _sources(config, kinds, name))


def _kinds(config: PretrainedConfig | PlainConfig, name: str) -> list[str]:
    """Return the kind of each layer."""
    listed = getattr(config, "layer_types", None)
    num_layers = int(config.num_hidden_layers)
    if config.model_type in WINDOWED_THROUGHOUT:
        kind = _FULL if getattr(config, "sliding_window", None) is None else _SLIDING
        if listed is not None and listed != [kind] * num_layers:
            msg = f"{name} lists layer_types, which its layers do not follow: all are {kind}, by sliding_window."
            raise UnsupportedModelError(msg, remedy="Take layer_types out of config.json, or mend it.")
        return [kind] * num_layers
    if listed is None:
        return [_FULL] * num_layers
    if len(listed) != num_layers:
        msg = f"{name} has {num_layers} layers, and layer_types is of {len(listed)}."
        raise UnsupportedModelError(msg, remedy="Check num_hidden_layers and layer_types in config.json.")
    return [str(kind) for kind in listed]


def _rule(config: PretrainedConfig | PlainConfig, kind: str, name: str) -> KeepRule:
    """Return what layers of a kind keep."""
    if kind == _FULL:
        return KEEP_ALL
    field = _SIZES[kind]
    size: Any = getattr(config, field, None)
    if type(size) is not int or size < 1:
        msg = f"{name} has layers of {kind}, and {field} is {size!r}."
        raise UnsupportedModelError(msg, remedy=f"Check layer_types and {field}, a whole number of at least 1.")
    return KeepRule(size, is_chunked=kind == _CHUNKED)


def _sources(config: PretrainedConfig | PlainConfig, kinds: list[str], name: str) -> tuple[int, ...]:
    """Return whose K and V each layer reads: the last layers those of the last layer of their kind before them."""
    num_shared = getattr(config, "num_kv_shared_layers", None) or 0
    if not num_shared:
        return ()
    num_own = len(kinds) - num_shared
    last = {kind: layer for layer, kind in enumerate(kinds[: max(0, num_own)])}
    lacking = sorted(set(kinds) - last.keys())
    if lacking:
        msg = (
            f"{name} has {len(kinds)} layers, and num_kv_shared_layers is {num_shared}: "
            f"there is no layer of {lacking[0]} whose K and V they could read."
        )
        raise UnsupportedModelError(msg, remedy="Check num_kv_shared_layers and layer_types in config.json.")
    return (*range(num_own), *(last[kind] for kind in kinds[num_own:]))
