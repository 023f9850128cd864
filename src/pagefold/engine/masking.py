"""Masking: which older tokens an engine keeps, where it does not keep all (``kv_keep``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pagefold.engine.kinds import EXACT, Kind
from pagefold.engine.namespace import namespace_of
from pagefold.errors import ConfigError, NotCalibratedError
from pagefold.kv import NO_MASK, KeepRule
from pagefold.masks.packed import PACKED
from pagefold.masks.rule import CHUNK

if TYPE_CHECKING:
    from pagefold.config import EngineConfig
    from pagefold.engine.blueprint import Blueprint
    from pagefold.kv import KVGeometry
    from pagefold.runner.keeping import Keeping
    from pagefold.runner.models import ModelSpec

__all__ = ["EngineMask", "check_groups", "check_masking", "find_mask", "kinds_of", "packing_keeps"]


class EngineMask(NamedTuple):
    """By what an engine keeps older tokens.

    Attributes:
        keeping: what the decoder takes, of all masks.
        names: of each mask: tells blocks that were made so from all others.
    """

    keeping: Keeping
    names: tuple[str, ...]


def check_masking(config: EngineConfig, spec: ModelSpec, not_fused: str) -> None:
    """See that ``kv_keep`` can be had for a model, and does something.

    Args:
        config: what was asked.
        spec: the model.
        not_fused: why the fused decoder does not compute it; empty if it does.

    Raises:
        ConfigError: it is not so.
    """
    name = spec.folder.name
    if spec.stored_kinds and config.quantization is None:
        msg = f"kv_keep is set, and {name} is quantized: its scorers are of the model's own numbers."
        raise ConfigError(msg, remedy="Set quantization=none, or leave kv_keep out.")
    if not_fused:
        msg = f"kv_keep takes the fused decoder for {name}, and that does not go with {not_fused}."
        raise ConfigError(msg, remedy="Leave kv_keep out, or change that.")
    longest = spec.windowed_limit.length
    if isinstance(config.max_model_len, int):
        longest = min(longest, config.max_model_len)
    if spec.sources or not spec.full_layers:
        what = "read the K and V of others" if spec.sources else "have windows, all of them"
        msg = f"kv_keep is set, and layers of {name} {what}."
        raise ConfigError(msg, remedy="Leave it out: it is for models with layers that attend to all tokens.")
    if CHUNK % config.block_size:
        msg = f"block_size is {config.block_size}, and kv_keep takes chunks of {CHUNK} tokens apart."
        raise ConfigError(msg, remedy=f"Use a block_size that divides {CHUNK}, as 16 or 32.")
    if longest <= 2 * CHUNK:
        msg = f"kv_keep is set, and the last {CHUNK} to {2 * CHUNK} tokens are kept anyway: all of {longest}."
        raise ConfigError(msg, remedy="Leave it out, or give a larger max_model_len.")


def packing_keeps(spec: ModelSpec) -> tuple[KeepRule, ...]:
    """Return what each layer keeps: what it kept before, where it has a window."""
    return tuple(PACKED if layer in spec.full_layers else spec.keeps[layer] for layer in range(spec.num_layers))


def check_groups(geometry: KVGeometry, spec: ModelSpec) -> None:
    """See that what is packed lies in one cache group, and is read where it lies.

    Raises:
        ConfigError: it is not so.
    """
    name, groups = spec.folder.name, [group.keeps.packs for group in geometry.groups]
    if groups.count(True) > 1:
        msg = f"kv_keep is set, and the layers of {name} that attend to all tokens are more than others."
        raise ConfigError(msg, remedy="Leave it out: it is for models with fewer of these than of layers with windows.")
    if len(groups) > 1 and geometry.codec is not None:
        msg = f"kv_keep is set with a kv_cache_dtype, and layers of {name} have windows."
        raise ConfigError(msg, remedy="Leave out one of them: both together are for models without windows yet.")


def find_mask(config: EngineConfig, spec: ModelSpec) -> EngineMask:
    """Return by what older tokens of a model are kept.

    Raises:
        NotCalibratedError: nobody has fitted a scorer to the model's weights.
    """
    assert config.masks, "nobody asked"
    from pagefold.masks.calibration import kept_scorer  # noqa: PLC0415 - torch comes with it

    kept = kept_scorer(spec.folder)
    if kept is None:
        msg = f"kv_keep is set, and it is not known which tokens of {spec.folder.name} get attention."
        raise NotCalibratedError(msg, remedy=f"Run: pagefold calibrate {config.model}. It takes some minutes, once.")
    scorer = kept.scorer
    names = tuple(f"mask {scorer.digest} keeps {share}" for share in config.masks)
    return EngineMask(scorer.keeping(*config.masks), names)


def kinds_of(blueprint: Blueprint) -> tuple[Kind, ...]:
    """Return the kinds of blocks that requests may ask for: one where all is kept."""
    config, mask, codec = blueprint.config, blueprint.mask, blueprint.geometry.codec
    base, found, codec_name = namespace_of(blueprint), [], "" if codec is None else codec.name
    if mask is None:
        return (Kind(1.0, 0, base, codec_name),)
    for share in config.kv_keep:
        number = NO_MASK if share == 1 else config.masks.index(share)
        name = EXACT if share == 1 else mask.names[number]
        found.append(Kind(float(share), number, replace(base, layout=f"{base.layout}/{name}"), codec_name))
    return tuple(found)
