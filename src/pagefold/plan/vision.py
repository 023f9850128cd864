"""The tower that a model sees with: its parameters, and what one image takes, from the config's other part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Vision", "vision_of"]

_GATED = ("pixtral", "qwen2_5_vl")
"""Towers whose layers have three matrices behind attention."""
_WITHOUT_BIASES = ("pixtral",)
_MOST = 2**24
"""A number beyond it is no width, depth or size."""


@dataclass(frozen=True, slots=True)
class Vision:
    """A tower.

    Attributes:
        parameters: of it and of what brings its outputs to the text's width.
        pixels: elements of the largest image.
        tokens: of the text that such an image becomes.
    """

    parameters: int
    pixels: int
    tokens: int


def vision_of(raw: Mapping[str, Any], hidden: int) -> Vision | None:
    """Return the tower of a model whose text is ``hidden`` wide; None without one of a size that is known.

    Layers with attention (four matrices) and two matrices behind it, or three; patches; and two matrices to the text.
    """
    config = raw.get("vision_config")
    if not isinstance(config, dict):
        return None
    kind = str(config.get("model_type") or "")
    own = _number(config, "embed_dim") or _number(config, "hidden_size")
    depth = _number(config, "num_hidden_layers") or _number(config, "depth")
    if not own or not depth:
        return None
    inner = _number(config, "intermediate_size") or 4 * own
    patch = _number(config, "patch_size") or 14
    size = _number(config, "image_size") or 1024
    biases = 0 if kind in _WITHOUT_BIASES else 4 * own + inner + own
    each = 4 * own * own + (3 if kind in _GATED else 2) * own * inner + biases + 2 * own * (1 if not biases else 2)
    num_patches = (size // patch) ** 2
    learned = num_patches * own if kind in {"siglip_vision_model", "clip_vision_model", "llama4_vision_model"} else 0
    merge = _number(raw, "spatial_merge_size") or _number(config, "spatial_merge_size") or _first(config) or 1
    tokens = _number(raw, "mm_tokens_per_image") or max(1, num_patches // merge**2)
    whole = "gemma3" if _number(raw, "mm_tokens_per_image") else kind
    parameters = depth * each + 3 * patch * patch * own + learned + 2 * own
    return Vision(parameters + _projector(whole, own, hidden, merge), 3 * size * size, tokens)


def _projector(kind: str, own: int, hidden: int, merge: int) -> int:
    """Return the parameters between the tower and the text: one matrix in Gemma 3, two in most others."""
    if kind == "gemma3":
        return own * hidden + own
    merged = merge * merge * own
    if kind == "moonvit":
        return merged * merged + merged * hidden
    if kind == "pixtral":
        return merged * own + own + own * hidden + hidden * hidden
    return merged * hidden + hidden * hidden


def _first(config: Mapping[str, Any]) -> int:
    """Return how many patches a side become one token, where a config says it of both sides."""
    sides = config.get("merge_kernel_size")
    return _number({"side": sides[0]}, "side") if isinstance(sides, list) and sides else 0


def _number(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    return value if type(value) is int and 0 < value <= _MOST else 0
