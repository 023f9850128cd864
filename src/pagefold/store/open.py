"""The slow tiers that a config asks for, faster ones first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.config import EngineConfig
    from pagefold.store.frame import FrameFormat
    from pagefold.store.protocol import BlockStore

__all__ = ["open_stores"]


def open_stores(config: EngineConfig, frames: FrameFormat, say: Callable[[str], None]) -> list[BlockStore]:
    """Open them.

    Args:
        config: says where they are.
        frames: of the model's blocks.
        say: takes lines for people.

    Raises:
        ConfigError: one cannot be used, and must be.
    """
    return []
