"""What was kept of chunks (``packing.py``) and has left the device for the host: each of its blocks is one here too.

A packed chunk is named by the path that ends with it, as a block of that path is, and its blocks by numbers behind
those of the cache groups. Each knows which chunk it is of, and how many blocks that has. All of a chunk's blocks are
of one packing: where some are gone, the others are of no use, and are kept anew together.

A chunk of which nothing was kept has no block, and is not held here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.held_block import HeldChunk
from pagefold.kv.names import in_group, name_of

if TYPE_CHECKING:
    from pagefold.kv.block import Node, PackedChunk
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.host_blocks import HostBlocks
    from pagefold.kv.host_tier import HostTier

__all__ = ["ChunkPlace", "held_chunk", "keep_chunk"]


class ChunkPlace(NamedTuple):
    """Where a packed chunk is among the names of a path.

    Attributes:
        number: which chunk of the path it is.
        path: digest of the path that ends with it.
        key: packed tokens of that path's last block.
        num_groups: how many cache groups there are.
    """

    number: int
    path: bytes
    key: bytes
    num_groups: int

    def held(self, host: HostBlocks, part: int) -> HeldBlock | None:
        """Return the chunk's block ``part``, if the host holds it."""
        held = host.get(in_group(self.path, self.num_groups + part))
        if held is None or held.name.key != self.key or held.chunk is None or held.chunk.number != self.number:
            return None
        return held


def held_chunk(host: HostBlocks, place: ChunkPlace) -> list[HeldBlock]:
    """Return what the host holds of a packed chunk: all of its blocks, in order, or none."""
    first = place.held(host, 0)
    if first is None or first.chunk is None:
        return []
    found = [first]
    for part in range(1, first.chunk.num_blocks):
        held = place.held(host, part)
        if held is None or held.chunk is None or not held.chunk.is_as(first.chunk):
            return []
        found.append(held)
    return found


def keep_chunk(host: HostTier, node: Node, chunk: PackedChunk, chunk_blocks: int, *, is_live: bool = False) -> int:
    """Keep the bytes of a packed chunk: plan to store them, unless they are held. Return how many stores were planned.

    Nothing is kept of it where there is not room for all.

    Args:
        host: the host tier.
        node: that publishes it.
        chunk: what was kept.
        chunk_blocks: how many blocks a chunk fills whole.
        is_live: whether it stays what it is, so that the caller pins its blocks until the stores are over; else it is
            being evicted.
    """
    num_groups = len(node.blocks)
    if not host.is_on or not chunk.blocks:
        return 0
    names = [name_of(node, num_groups + part) for part in range(len(chunk.blocks))]
    number = (node.depth + 1) // chunk_blocks - 1
    whole = held_chunk(host.blocks, ChunkPlace(number, names[0].path, node.key, num_groups))
    if whole:
        for held in reversed(whole):
            host.blocks.touch(held)
        return 0
    for name in names:  # of another packing
        left = host.blocks.get(name.digest)
        if left is not None:
            host.blocks.forget(left)
    if not host.blocks.has_room(len(names), besides=set()):
        host.blocks.num_dropped += len(names)
        return 0
    note = b"" if host.notes is None else host.notes.write(number, len(names), chunk.counts)
    held_as = HeldChunk(number, len(names), chunk.counts, note)
    for name, block in zip(names, chunk.blocks, strict=True):
        host.keep(name, block.block_id, num_hits=node.num_hits, is_live=is_live, chunk=held_as, claim=node.claim)
    return len(names)
