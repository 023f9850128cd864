"""ModelSpec: what a model folder holds, read without loading weights; and which models are refused, by name.

Any decoder of transformers that calls its attention through ``AttentionInterface`` works, with the windows that its
``layer_types`` say. Refused is what this attention would get wrong: latent KV, a recurrent state, positions that depend
on the batch. What a family says in words of its own, chunks, windows without ``layer_types``, layers that read the K
and V of others, is taken in the families where that has been tested, and refused in others. What is right only up to
some length, a rope that changes behind its original length, or a window where that is not computed, limits
``max_model_len``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.errors import ModelNotFoundError, UnsupportedModelError
from pagefold.files.json_object import read_json_object
from pagefold.files.weights import find_weight_files, num_elements, read_header, tensor_headers
from pagefold.kv import KEEP_ALL
from pagefold.memory.limit import MAX_ROPE_POSITIONS, Limit
from pagefold.quantized import Part, count_elements, read_quantization
from pagefold.runner.fused.families import FusedConfig, read_fused_config
from pagefold.runner.kept_layers import WINDOWED_THROUGHOUT, read_kept_layers
from pagefold.runner.plain_config import PlainConfig, read_plain_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PretrainedConfig

    from pagefold.kv import KeepRule
    from pagefold.quantized import Quantization

__all__ = ["ModelSpec", "inspect_model"]

_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Rope kinds whose frequencies do not depend on which positions are in the batch. ``dynamic`` and ``longrope`` do."""

_CHUNKED_FAMILIES = ("llama4_text",)
"""Families that are taken with chunked attention, which layers say by a mask alone: nobody else could find it out."""

_LONGROPE_FAMILIES = ("phi3",)
"""Families that are taken with ``longrope``: its frequencies change once the longest sequence of the batch, whichever
that is, passes ``original_max_position_embeddings``; up to there they are the same for all."""

_NOT_TEXT = "more than text"
_REMEDIES = {_NOT_TEXT: "Use a model that is of text alone."}
_REMEDY = "Use another model: the README lists the families that are tested."

_REFUSED_ATTRIBUTES = {
    "attn_logit_softcapping": "soft-capping of attention scores",
    "kv_lora_rank": "latent attention (MLA)",
    "num_kv_shared_layers": "KV shared across layers",
    "attention_chunk_size": "chunked attention",
}

_TAKEN_ATTRIBUTES = {
    "attn_logit_softcapping": ("gemma2",),
    "num_kv_shared_layers": ("gemma3n_text",),
    "attention_chunk_size": _CHUNKED_FAMILIES,
}
"""Families that are taken with such an attribute all the same: Gemma 2 hands it to its attention as ``softcap``."""


_MAX_WHY = 200
"""Characters of somebody else's error that ours repeats."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model, before its weights are loaded.

    Attributes:
        folder: where it lies.
        model_type: transformers' name of the family.
        num_layers, num_heads, num_kv_heads, head_dim: of its attention.
        max_positions: how long a sequence it was made for.
        max_exact_len: the longest sequence that Pagefold computes as the model is meant where windows are not computed:
            ``max_positions`` or less.
        limit: what of the model ends that before ``max_positions``; empty where nothing does.
        windowed_limit: both where windows are computed.
        endless_limit: both where no layer looks further back than it was made for, whatever the position is.
        has_rope: whether it tells positions by rope.
        keeps: what each layer keeps; empty where all keep all.
        sources: the layer whose K and V each layer reads; empty where each has its own.
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: each of them ends a sequence.
        num_parameters: elements of all weight tensors, of quantized ones as they are dequantized.
        fingerprint: changes when config or weight files change.
        fused: the model as the fused decoder computes it; None where it does not.
        not_fused: what of it the fused decoder does not compute; empty where there is nothing.
        quantization: how its matrices are stored; None where they are not quantized.
    """

    folder: Path
    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    max_exact_len: int
    limit: str
    windowed_limit: Limit
    endless_limit: Limit
    has_rope: bool
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    fingerprint: str
    keeps: tuple[KeepRule, ...] = ()
    sources: tuple[int, ...] = ()
    fused: FusedConfig | None = None
    not_fused: str = ""
    quantization: Quantization | None = None

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that attend to all tokens before a token, ascending; a window that none passes is none."""
        longest = self.windowed_limit.length
        keeps = self.keeps or (KEEP_ALL,) * self.num_layers
        return tuple(layer for layer, keep in enumerate(keeps) if keep.window is None or keep.window >= longest)

    def keeps_within(self, max_len: int) -> tuple[KeepRule, ...]:
        """Return what each layer keeps of sequences of at most ``max_len`` tokens; empty where all keep all of them."""
        is_trimmed = any(keep.window is not None and keep.window < max_len for keep in self.keeps)
        return self.keeps if is_trimmed else ()


def inspect_model(folder: Path) -> ModelSpec:
    """Read ``config.json`` and the headers of the weight files.

    Raises:
        ModelNotFoundError: no config or no weights.
        UnsupportedModelError: transformers lacks the class, or the model is one that would be computed wrongly. Or its
            quantized matrices are not whole.
    """
    if not (folder / "config.json").is_file():
        msg = f"{folder} has no config.json."
        raise ModelNotFoundError(msg, remedy="Name a folder that save_pretrained wrote, or a built-in name.")
    raw = read_json_object(folder / "config.json")
    quantization = _quantization_of(raw, folder)
    plain = read_plain_config({name: value for name, value in raw.items() if name != "quantization_config"})
    config: Any = plain or _config_of_transformers(folder)
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    if num_heads % num_kv_heads:
        msg = f"{folder} names {num_heads} attention heads for {num_kv_heads} KV heads, which cannot share them evenly."
        raise UnsupportedModelError(msg, remedy="Check num_attention_heads and num_key_value_heads in config.json.")
    weight_files = find_weight_files(folder)
    if not weight_files:
        msg = f"{folder} has a config but no weights: neither model.safetensors nor an index of its parts."
        raise ModelNotFoundError(msg, remedy="Download the whole model, or name another folder.")
    max_positions = int(config.max_position_embeddings)
    fused = read_fused_config(config.to_dict())
    whole = Limit(max_positions)
    kept = read_kept_layers(config, f"{config.model_type} ({folder.name})")
    windows, of_ropes = _window_limits(str(config.model_type), kept.keeps), _rope_limits(config)
    others = [*of_ropes, whole]
    return ModelSpec(
        folder=folder,
        model_type=str(config.model_type),
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
        max_positions=max_positions,
        max_exact_len=min([*windows, *others]).length,
        limit=min([*windows, *others]).what,
        windowed_limit=min(others),
        endless_limit=min([*of_ropes, Limit(MAX_ROPE_POSITIONS)]),
        has_rope=isinstance(config, PlainConfig) or bool(getattr(config, "rope_parameters", None)),
        vocab_size=int(config.vocab_size),
        eos_token_ids=_eos_token_ids(folder, config),
        num_parameters=_count(weight_files, quantization, folder),
        fingerprint=_fingerprint(folder / "config.json", weight_files),
        keeps=kept.keeps if windows else (),
        sources=kept.sources,
        fused=fused if isinstance(fused, FusedConfig) else None,
        not_fused=fused if isinstance(fused, str) else "",
        quantization=quantization,
    )


def _quantization_of(raw: Mapping[str, Any], folder: Path) -> Quantization | None:
    """Return how a model's matrices are quantized; refuse, with the model's name, what is not computed."""
    try:
        return read_quantization(raw)
    except UnsupportedModelError as error:
        msg = f"{raw.get('model_type')} ({folder.name}): {error.message}"
        raise UnsupportedModelError(msg, remedy=error.remedy) from None


def _count(files: list[Path], quantization: Quantization | None, folder: Path) -> int:
    """Return the elements of a model's tensors; of quantized ones after they have been seen to be whole."""
    if quantization is None:
        return sum(num_elements(file) for file in files)
    pickled = next((file.name for file in files if file.suffix != ".safetensors"), "")
    if pickled:
        msg = f"{folder} has quantized weights in {pickled}, a pickled file."
        raise UnsupportedModelError(msg, remedy="Use a copy of it in safetensors.")
    stored = {name: Part(*one) for file in files for name, one in tensor_headers(file).items()}
    try:
        return count_elements(quantization, stored)
    except UnsupportedModelError as error:
        msg = f"{folder}: {error.message}"
        raise UnsupportedModelError(msg, remedy=error.remedy) from None


def _config_of_transformers(folder: Path) -> PretrainedConfig:
    """Read a config with transformers, and refuse what would be computed wrongly."""
    from transformers import AutoConfig  # noqa: PLC0415 - heavy, and not needed to import this module
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - each config class checks the user's values in its own way
        raw = read_json_object(folder / "config.json")
        name = raw.get("model_type") or raw.get("architectures") or "no model_type"
        why = " ".join(str(error).split()) or type(error).__name__
        msg = f"transformers cannot read the config of {folder} ({name}): {why[:_MAX_WHY]}"
        raise UnsupportedModelError(
            msg, remedy="Check the config, or install a transformers that has this model."
        ) from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        msg = f"{config.model_type} is not a decoder that generates text."
        raise UnsupportedModelError(msg, remedy="Use a causal language model.")
    reason = _why_refused(config)
    if reason:
        msg = f"{config.model_type} ({folder.name}) uses {reason}, which Pagefold does not compute rightly yet."
        raise UnsupportedModelError(msg, remedy=_REMEDIES.get(reason, _REMEDY))
    return config


def _why_refused(config: PretrainedConfig) -> str | None:  # noqa: PLR0911 - one reason after another
    """Return what about the model would be computed wrongly, or None."""
    if config.is_encoder_decoder:
        return "an encoder"
    if config.get_text_config() is not config:
        return _NOT_TEXT
    for name, what in _REFUSED_ATTRIBUTES.items():
        if getattr(config, name, None) and config.model_type not in _TAKEN_ATTRIBUTES.get(name, ()):
            return what
    layer_types = getattr(config, "layer_types", None)
    known = {"full_attention", "sliding_attention"}
    known |= {"chunked_attention"} if config.model_type in _CHUNKED_FAMILIES else set()
    odd = sorted(set(layer_types or ()) - known)
    if odd:
        return f"layers of {' and '.join(odd)}"
    window = getattr(config, "sliding_window", None)
    if layer_types is None and window is not None and config.model_type not in WINDOWED_THROUGHOUT:
        return f"a sliding window of {window} tokens"
    if getattr(config, "alibi", False):
        return "ALiBi position biases"
    taken = {*_STATIC_ROPE, "longrope"} if config.model_type in _LONGROPE_FAMILIES else {*_STATIC_ROPE}
    odd_ropes = sorted(_rope_types(config) - taken)
    if odd_ropes:
        return f"rope of type {' and '.join(odd_ropes)}"
    if not _uses_attention_interface(config):
        return "an attention of its own, not transformers' AttentionInterface"
    return None


def _window_limits(family: str, keeps: tuple[KeepRule, ...]) -> list[Limit]:
    """Return up to where the windows of layers hide nothing."""
    names = {False: "sliding window", True: "chunked attention"}
    limits = {keep: f"{family}'s {names[keep.is_chunked]}" for keep in keeps}
    return [Limit(keep.window, what) for keep, what in limits.items() if keep.window is not None]


def _rope_limits(config: PretrainedConfig | PlainConfig) -> list[Limit]:
    if _rope_types(config) != {"longrope"}:
        return []
    original = int(config.rope_parameters["original_max_position_embeddings"])
    return [Limit(original, f"{config.model_type}'s longrope")]


def _rope_types(config: PretrainedConfig | PlainConfig) -> set[str]:
    """Return the kinds of rope; families with windows may have another one in their layers with windows."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [kind for kind in rope.values() if isinstance(kind, dict)]
    return {str(kind.get("rope_type", "default")) for kind in by_layer or [rope]}


def _uses_attention_interface(config: PretrainedConfig) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return bool(getattr(model_class, "_supports_attention_backend", False))


def _eos_token_ids(folder: Path, config: PretrainedConfig | PlainConfig) -> tuple[int, ...]:
    """Return the end-of-sequence ids; generation_config.json knows better than config.json."""
    eos = getattr(config, "eos_token_id", None)
    file = folder / "generation_config.json"
    if file.is_file():
        generation = read_json_object(file)
        if not generation:
            msg = f"{file} is not a JSON object."
            raise UnsupportedModelError(msg, remedy="Mend it, or take it away: config.json will do.")
        eos = generation.get("eos_token_id", eos)
    token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token_id) is not int for token_id in token_ids):
        msg = f"{folder} names eos_token_id {eos!r}."
        raise UnsupportedModelError(msg, remedy="It must be a token id, or a list of them.")
    return tuple(token_ids)


def _fingerprint(config_file: Path, weight_files: list[Path]) -> str:
    digest = hashlib.sha256(config_file.read_bytes())
    for file in weight_files:
        stat = file.stat()
        digest.update(f"\n{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        if file.suffix in (".safetensors", ".gguf"):
            digest.update(read_header(file))
    return digest.hexdigest()
