"""The slow tiers that a config asks for, faster ones first."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from pagefold.store.disk import DiskStore
from pagefold.store.remote import open_remote

if TYPE_CHECKING:
    from pagefold.config import EngineConfig
    from pagefold.store.breaker import Change
    from pagefold.store.frame import FrameFormat
    from pagefold.store.protocol import BlockStore

__all__ = ["open_stores"]

_log = logging.getLogger(__name__)


def open_stores(config: EngineConfig, frames: FrameFormat) -> list[BlockStore]:
    """Open them.

    Args:
        config: says where they are.
        frames: of the model's blocks.

    Raises:
        ConfigError: one cannot be used, and must be.
    """
    with contextlib.ExitStack() as opened:
        stores = _opened(config, frames, opened)
        opened.pop_all()
    return stores


def _opened(config: EngineConfig, frames: FrameFormat, opened: contextlib.ExitStack) -> list[BlockStore]:
    stores: list[BlockStore] = []
    if config.kv_disk_path is not None:
        limit_bytes = int(config.kv_disk_size * 2**30)
        stores.append(DiskStore(config.kv_disk_path, limit_bytes, frames, label=config.model))
        opened.callback(stores[-1].close)
    if config.kv_remote_url is not None:
        remote = open_remote(config.kv_remote_url, frames, on_change=_tell)
        opened.callback(remote.close)
        if config.kv_remote_required:
            remote.connect()
        stores.append(remote)
    return stores


def _tell(change: Change) -> None:
    if change.is_out:
        _log.warning("the remote tier is out, and is asked again: %s", change.why)
    else:
        _log.warning("the remote tier is back after %.1f s", change.lasted_s)
