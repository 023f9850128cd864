"""The slow tiers that a config asks for, faster ones first."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from pagefold.config import DROPPED_BITS
from pagefold.store.disk import DiskStore
from pagefold.store.remote import open_remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.config import EngineConfig
    from pagefold.store.breaker import Change
    from pagefold.store.frame import FrameFormat
    from pagefold.store.protocol import BlockStore
    from pagefold.transport.block_form import BlockForm

__all__ = ["open_stores"]

_log = logging.getLogger(__name__)


def open_stores(config: EngineConfig, frames: FrameFormat, form: Callable[[], BlockForm]) -> list[BlockStore]:
    """Open the slow tiers that a config names.

    Args:
        config: says where they are.
        frames: of the model's blocks.
        form: returns how they are made, for packing what goes over a network. Places on a disk are all of one
            size, so there nothing is packed.

    Raises:
        ConfigError: one cannot be used, and must be.
    """
    with contextlib.ExitStack() as opened:
        stores = _opened(config, frames, form, opened)
        opened.pop_all()
    return stores


def _opened(
    config: EngineConfig, frames: FrameFormat, form: Callable[[], BlockForm], opened: contextlib.ExitStack
) -> list[BlockStore]:
    stores: list[BlockStore] = []
    if config.kv_disk_path is not None:
        limit_bytes = int(config.kv_disk_size * 2**30)
        disk = DiskStore(config.kv_disk_path, limit_bytes, frames, label=config.model)
        opened.callback(disk.close)
        for note in disk.notes:
            _log.warning("%s", note)
        stores.append(disk)
    if config.kv_remote_url is not None:
        packed = frames.for_transport(form(), DROPPED_BITS[config.kv_transport_codec])
        remote = open_remote(config.kv_remote_url, packed, on_change=_tell)
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
