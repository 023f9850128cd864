"""KVPages: vLLM's blocks as bytes. A block here is one of vLLM's, of all layers; nobody looks into it.

What is inside a page differs by platform and instruction set (on CPUs K is stored transposed, before V), so pages are
copied whole, and all that decides how they are to be read is in the name of their layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import xxhash

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pagefold.kv.ops import LoadOp, StoreOp
    from pagefold.store.arena import HostArena

__all__ = ["KVPages", "PagesOnCard", "PagesOnHost", "page_views", "pages_of"]

_STAGING_BYTES = 64 * 2**20
"""What is copied from or to a card at a time."""


class KVPages(Protocol):
    """Copies blocks between vLLM's tensors and the host's memory.

    Attributes:
        block_bytes: of a block, all layers.
    """

    block_bytes: int

    def store(self, ops: Sequence[StoreOp], arena: HostArena) -> None:
        """Copy blocks of vLLM's into host blocks, each with its checksum."""

    def load(self, ops: Sequence[LoadOp], arena: HostArena) -> frozenset[int]:
        """Copy host blocks into blocks of vLLM's; return those whose bytes are not what their checksums are of."""

    def read(self, block_id: int) -> NDArray[np.uint8]:
        """Return the bytes of a block of vLLM's, in a copy."""


def page_views(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int, page_bytes: Mapping[str, int]
) -> list[torch.Tensor]:
    """Return of each layer its pages: uint8 ``[num_blocks, page_bytes]``, a view. Layers that share pages have one.

    Args:
        kv_caches: vLLM's tensors, by layer.
        num_blocks: of vLLM's block pool.
        page_bytes: of each layer's page, its padding included.

    Raises:
        ConfigError: a layer's blocks are not in a row.
    """
    views: dict[tuple[int, int], torch.Tensor] = {}
    for layer, cache in sorted(kv_caches.items()):
        if not isinstance(cache, torch.Tensor) or not cache.dim() or cache.shape[0] % num_blocks:
            shape = tuple(cache.shape) if isinstance(cache, torch.Tensor) else type(cache).__name__
            msg = f"PagefoldConnector cannot keep the KV of {layer}: {shape} does not begin with {num_blocks} blocks."
            raise ConfigError(msg, remedy="Leave the connector out for this model or attention backend.")
        stride = cache.stride(0) * cache.element_size() * (cache.shape[0] // num_blocks)
        page = page_bytes[layer]
        if page > stride:
            msg = (
                f"PagefoldConnector cannot keep the KV of layer {layer}: pages of {page:,} bytes lie {stride:,} apart."
            )
            raise ConfigError(msg, remedy="Leave the connector out for this model or attention backend.")
        view = torch.empty(0, dtype=torch.uint8, device=cache.device)
        offset = cache.storage_offset() * cache.element_size()
        view.set_(cache.untyped_storage(), offset, (num_blocks, page), (stride, 1))
        views.setdefault((view.data_ptr(), stride), view)
    return list(views.values())


def pages_of(views: list[torch.Tensor]) -> KVPages:
    """Return what copies the pages: by the processor where they are in its memory, else by their card."""
    if all(view.device.type == "cpu" for view in views):
        return PagesOnHost([view.numpy() for view in views])
    return PagesOnCard(views)


class PagesOnHost:
    """Pages in the host's own memory: a block is digested and copied page by page, while it is in the cache.

    Args:
        views: of each layer, uint8 ``[num_blocks, page_bytes]``.
    """

    def __init__(self, views: Sequence[NDArray[np.uint8]]) -> None:
        self._views = list(views)
        ends = np.cumsum([view.shape[1] for view in views]).tolist()
        self._parts = [slice(end - view.shape[1], end) for view, end in zip(views, ends, strict=True)]
        self.block_bytes: int = ends[-1]

    def store(self, ops: Sequence[StoreOp], arena: HostArena) -> None:
        """Copy blocks into host blocks; see :class:`KVPages`."""
        for op in ops:
            row = arena.blocks[op.host_id]
            digest = xxhash.xxh3_128()
            for view, part in zip(self._views, self._parts, strict=True):
                page = view[op.block_id]
                digest.update(page.data)
                row[part] = page
            arena.arrived(op.host_id, digest.digest())

    def load(self, ops: Sequence[LoadOp], arena: HostArena) -> frozenset[int]:
        """Copy host blocks into blocks; see :class:`KVPages`."""
        damaged: set[int] = set()
        for op in ops:
            row = arena.blocks[op.host_id]
            digest = xxhash.xxh3_128()
            for view, part in zip(self._views, self._parts, strict=True):
                page = row[part]
                digest.update(page.data)
                view[op.block_id] = page
            if digest.digest() != arena.checksum(op.host_id):
                damaged.add(op.host_id)
        return frozenset(damaged)

    def read(self, block_id: int) -> NDArray[np.uint8]:
        """Return a block's bytes; see :class:`KVPages`."""
        return np.concatenate([view[block_id] for view in self._views])


class PagesOnCard:
    """Pages in a card's memory: many blocks' pages of a layer go through one buffer at a time, on the current stream.

    Args:
        views: of each layer, uint8 ``[num_blocks, page_bytes]``, on the card.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = list(views)
        self._device = views[0].device
        ends = np.cumsum([view.shape[1] for view in views]).tolist()
        self._parts = [slice(end - view.shape[1], end) for view, end in zip(views, ends, strict=True)]
        self.block_bytes: int = ends[-1]
        self._at_once = max(1, _STAGING_BYTES // self.block_bytes)
        pins = self._device.type == "cuda"
        self._staging = torch.empty(self._at_once, self.block_bytes, dtype=torch.uint8, pin_memory=pins)

    def store(self, ops: Sequence[StoreOp], arena: HostArena) -> None:
        """Copy blocks into host blocks; see :class:`KVPages`."""
        for start in range(0, len(ops), self._at_once):
            some = ops[start : start + self._at_once]
            blocks = self._gather([op.block_id for op in some])
            for op, block in zip(some, blocks, strict=True):
                arena.blocks[op.host_id] = block
                arena.arrived(op.host_id, xxhash.xxh3_128_digest(block.data))

    def load(self, ops: Sequence[LoadOp], arena: HostArena) -> frozenset[int]:
        """Copy host blocks into blocks; see :class:`KVPages`."""
        damaged: set[int] = set()
        for start in range(0, len(ops), self._at_once):
            some = ops[start : start + self._at_once]
            staging = self._staging.numpy()
            for at, op in enumerate(some):
                staging[at] = arena.blocks[op.host_id]
                if xxhash.xxh3_128_digest(staging[at].data) != arena.checksum(op.host_id):
                    damaged.add(op.host_id)
            ids = torch.tensor([op.block_id for op in some], device=self._device)
            for view, part in zip(self._views, self._parts, strict=True):
                view.index_copy_(0, ids, self._staging[: len(some), part].to(self._device))
        return frozenset(damaged)

    def read(self, block_id: int) -> NDArray[np.uint8]:
        """Return a block's bytes; see :class:`KVPages`."""
        block: NDArray[np.uint8] = self._gather([block_id])[0].copy()
        return block

    def _gather(self, block_ids: list[int]) -> NDArray[np.uint8]:
        """Return blocks' bytes, in the buffer. Waits for all that the current stream has to do before."""
        ids = torch.tensor(block_ids, device=self._device)
        for view, part in zip(self._views, self._parts, strict=True):
            self._staging[: len(block_ids), part].copy_(view.index_select(0, ids))
        gathered: NDArray[np.uint8] = self._staging[: len(block_ids)].numpy()
        return gathered
