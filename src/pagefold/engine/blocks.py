"""The blocks of an engine, in the memory of the device that it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.engine.blueprint import Blueprint
    from pagefold.runner.slab import AnySlab

__all__ = ["allocate_blocks"]


def allocate_blocks(blueprint: Blueprint, num_blocks: int, num_residuals: int) -> AnySlab:
    """Return so many blocks, and residuals where blocks are sealed when they are full. Nothing is written yet.

    Args:
        blueprint: says what a block holds, and where.
        num_blocks: how many.
        num_residuals: how many; 0 where blocks are not sealed.
    """
    from pagefold.runner.codec_slab import CodecSlab  # noqa: PLC0415 - torch comes with it
    from pagefold.runner.sealed_slab import SealedSlab  # noqa: PLC0415
    from pagefold.runner.slab import Slab  # noqa: PLC0415

    geometry, constants, device = blueprint.geometry, blueprint.constants, blueprint.device
    if geometry.codec is None:
        return Slab.allocate(geometry, num_blocks, blueprint.dtype, device)
    if num_residuals:
        centres = None if constants is None else constants.key_centres[:, :2].contiguous()
        return SealedSlab.allocate(geometry, num_blocks, num_residuals, centres, device)
    return CodecSlab.allocate(geometry, num_blocks, constants, device)
