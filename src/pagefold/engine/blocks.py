"""The blocks of an engine, in the memory of the device that it runs on, and how much of the host's is for blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.config import EngineConfig
    from pagefold.engine.blueprint import Blueprint
    from pagefold.kv import KVGeometry
    from pagefold.runner.slab import AnySlab

__all__ = ["allocate_blocks", "host_bytes_for"]

_MIN_STAGING_BLOCKS, _MAX_STAGING_BYTES, _STAGING_SHARE = 64, 2**30, 16
"""Host memory that slower tiers get if none is asked for: a share of what is free, within bounds."""


def allocate_blocks(blueprint: Blueprint, num_blocks: int, num_residuals: int) -> AnySlab:
    """Return so many blocks, and residuals where blocks are sealed when they are full. Nothing is written yet.

    Args:
        blueprint: says what a block holds, and where.
        num_blocks: how many blocks.
        num_residuals: how many residuals; 0 where blocks are not sealed.
    """
    from pagefold.runner.codec_slab import CodecSlab  # noqa: PLC0415 - torch comes with it
    from pagefold.runner.sealed_slab import SealedSlab  # noqa: PLC0415
    from pagefold.runner.slab import Slab, layout_on  # noqa: PLC0415

    geometry, constants, device = blueprint.geometry, blueprint.constants, blueprint.device
    if geometry.codec is None:
        layout = layout_on(device, in_pairs=blueprint.computes_pairs)
        return Slab.allocate(geometry, num_blocks, blueprint.dtype, device, layout)
    if num_residuals:
        centres = None if constants is None else constants.key_centres[:, :2].contiguous()
        return SealedSlab.allocate(geometry, num_blocks, num_residuals, centres, device)
    return CodecSlab.allocate(geometry, num_blocks, constants, device)


def host_bytes_for(config: EngineConfig, geometry: KVGeometry, available_bytes: int) -> int:
    """Return how much of the host's memory is for blocks: what was asked, or a little if all go through it."""
    if config.kv_offloading_size or not config.has_slow_tiers:
        return int(config.kv_offloading_size * 2**30)
    least = _MIN_STAGING_BLOCKS * geometry.bytes_per_block
    return max(least, min(_MAX_STAGING_BYTES, available_bytes // _STAGING_SHARE))
