"""The slow tiers behind the connector's memory of the host: opened, tried out, and looked into."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, NamedTuple

from pagefold.integrations.vllm.connector_orders import Link
from pagefold.kv.names import root_digest
from pagefold.store.disk import DiskStore
from pagefold.store.frame import FrameFormat
from pagefold.store.remote import open_remote

if TYPE_CHECKING:
    from pagefold.integrations.vllm.connector_settings import ConnectorSettings
    from pagefold.store.breaker import Change
    from pagefold.store.protocol import BlockStore

__all__ = ["Tiers", "open_tiers"]

_log = logging.getLogger("vllm.pagefold")

_KEY_BYTES = 32
"""Of a frame: vLLM's hash of the block stands where Pagefold's own frames have the block's tokens."""

_LEAST_BYTES_PER_S, _LEAST_LATENCY_S = 1e6, 1e-4
"""What a tier is thought to do that was out when it was tried."""


class Tiers(NamedTuple):
    """The slow tiers, and what is known of them at the start.

    Attributes:
        stores: faster ones first.
        links: how fast they are.
        on_disk: digests of what the disk holds of this layout, used longest ago first.
        most_on_disk: how many blocks it may hold.
    """

    stores: list[BlockStore]
    links: list[Link]
    on_disk: list[bytes]
    most_on_disk: int


def open_tiers(settings: ConnectorSettings, layout: bytes, block_bytes: int, *, label: str) -> Tiers:
    """Open the tiers that settings name, and try them out.

    Args:
        settings: say where they are.
        layout: names how a block's bytes are to be read.
        block_bytes: of a block.
        label: what people call the model.

    Raises:
        ConfigError: a folder cannot be used or is in use, its limit is too small, or a URL is none.
    """
    frames = FrameFormat(root_digest(layout), block_bytes, _KEY_BYTES)
    stores: list[BlockStore] = []
    on_disk: list[bytes] = []
    most_on_disk = 0
    with contextlib.ExitStack() as opened:
        if settings.disk_path is not None:
            disk = DiskStore(settings.disk_path, settings.disk_bytes, frames, label=f"vLLM: {label}")
            opened.callback(disk.close)
            for note in disk.notes:
                _log.warning("%s", note)
            on_disk = disk.digests()
            most_on_disk = disk.known_use().num_blocks
            stores.append(disk)
        if settings.remote_url is not None:
            remote = open_remote(settings.remote_url, frames, on_change=_tell)
            opened.callback(remote.close)
            stores.append(remote)
        links = [_link(store) for store in stores]
        opened.pop_all()
    return Tiers(stores, links, on_disk, most_on_disk)


def _link(store: BlockStore) -> Link:
    tested = store.self_test()
    (_log.info if tested.ok else _log.warning)("%s", tested.told)
    if not tested.ok:
        return Link(store.tier, _LEAST_LATENCY_S, _LEAST_BYTES_PER_S)
    return Link(store.tier, max(tested.latency_s, _LEAST_LATENCY_S), max(tested.read_bytes_per_s, _LEAST_BYTES_PER_S))


def _tell(change: Change) -> None:
    if change.is_out:
        _log.warning("the remote tier is out, and is asked again: %s", change.why)
    else:
        _log.warning("the remote tier is back after %.1f s", change.lasted_s)
