"""The layout of an engine's blocks as a prefix file says it: from a blueprint, or from a config alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagefold.engine.namespace import namespace_of
from pagefold.engine.planning import hardware_of, plan_engine
from pagefold.errors import ConfigError
from pagefold.store.prefix_layout import PrefixLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.config import EngineConfig
    from pagefold.engine.blueprint import Blueprint
    from pagefold.hub.progress import Progress

__all__ = ["find_prefix_layout", "prefix_layout_of", "why_no_prefixes"]


def why_no_prefixes(blueprint: Blueprint) -> str:
    """Return why a prefix of this engine is not one path of blocks that can be had as a file; empty if it is."""
    if blueprint.geometry.packing is not None:
        return "older tokens are packed (kv_keep), and what is kept of them hangs on what follows"
    if len(blueprint.geometry.groups) > 1 or blueprint.geometry.groups[0].keeps.window is not None:
        return f"layers of {blueprint.spec.folder.name} keep windows of their own, of which a prefix has only the last"
    return ""


def prefix_layout_of(blueprint: Blueprint) -> PrefixLayout:
    """Return how an engine's blocks are made; the codec's constants are known, and :func:`why_no_prefixes` is empty."""
    namespace, geometry = namespace_of(blueprint), blueprint.geometry
    return PrefixLayout(
        label=_label_of(blueprint.config.model),
        model=namespace.model,
        layout=namespace.layout,
        dtype=namespace.dtype,
        block_size=geometry.block_size,
        block_bytes=geometry.bytes_per_block,
        head_dim=geometry.head_dim,
    )


def _label_of(model: str) -> str:
    """Return what people call a model, for others: its name alone where it lies on this machine, and not where."""
    name = Path(model).resolve().name if Path(model).exists() else model
    return "".join(character if character.isprintable() else "?" for character in name)


def find_prefix_layout(
    config: EngineConfig, progress: Progress, say: Callable[[str], None]
) -> tuple[PrefixLayout, Path]:
    """Return how the blocks of an engine of this config would be made, and the model's folder. Loads no weights.

    Args:
        config: with a slow tier: that names models by what their files hold.
        progress: is told of downloads.
        say: takes a line when a codec has to be calibrated, which loads them after all.

    Raises:
        ConfigError, ModelNotFoundError, UnsupportedModelError: as :func:`~pagefold.engine.planning.plan_engine`; or
            prefixes of this engine cannot be had as files.
    """
    assert config.has_slow_tiers, "a model by where it lies"
    blueprint = plan_engine(config, progress=progress)
    why = why_no_prefixes(blueprint)
    if why:
        msg = f"A prefix of {config.model} cannot be a file: {why}."
        raise ConfigError(msg, remedy="Export the whole folder: leave out --prompt.")
    if blueprint.geometry.codec is not None:
        from pagefold.engine.calibration import find_constants  # noqa: PLC0415 - torch comes with it

        constants = find_constants(blueprint, hardware_of(blueprint).decoder, say)
        blueprint = replace(blueprint, constants=constants)
    return prefix_layout_of(blueprint), blueprint.spec.folder
