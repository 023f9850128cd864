"""What was kept of chunks (``packing.py``) and has left the device for the host: each of its blocks is one here too.

A packed chunk is named by the path that ends with it, as a block of that path is, and its blocks by numbers behind
those of the cache groups. Its first block knows which chunk it is, and of how many blocks. All of a chunk's blocks are
of one packing: where some are gone, the others are of no use, and are kept anew together.

A chunk of which nothing was kept has no block, and is not held here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.held_block import HeldChunk
from pagefold.kv.names import in_group, name_of

if TYPE_CHECKING:
    from pagefold.kv.block import Node, PackedChunk
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.host_blocks import HostBlocks
    from pagefold.kv.host_tier import HostTier

__all__ = ["held_chunk", "keep_chunk"]


def held_chunk(host: HostBlocks, path: bytes, key: bytes, num_groups: int) -> list[HeldBlock]:
    """Return what the host holds of a packed chunk: all of its blocks, in order, or none.

    Args:
        host: the blocks of the host.
        path: digest of the path that ends with the chunk.
        key: packed tokens of that path's last block.
        num_groups: how many cache groups there are.
    """
    first = host.get(in_group(path, num_groups))
    if first is None or first.name.key != key:
        return []
    assert first.chunk is not None, "the first block of a packed chunk says which that is"
    found = [first]
    for part in range(1, first.chunk.num_blocks):
        held = host.get(in_group(path, num_groups + part))
        if held is None or held.name.key != key:
            return []
        found.append(held)
    return found


def keep_chunk(host: HostTier, node: Node, chunk: PackedChunk, chunk_blocks: int) -> None:
    """Keep the bytes of a packed chunk, which is being evicted: plan to store them, unless they are held.

    Nothing is kept of it where there is not room for all.

    Args:
        host: the host tier.
        node: that publishes it.
        chunk: what was kept.
        chunk_blocks: how many blocks a chunk fills whole.
    """
    num_groups = len(node.blocks)
    if not host.is_on or not chunk.blocks:
        return
    names = [name_of(node, num_groups + part) for part in range(len(chunk.blocks))]
    whole = held_chunk(host.blocks, names[0].path, node.key, num_groups)
    if whole:
        for held in reversed(whole):
            host.blocks.touch(held)
        return
    for name in names:  # of another packing
        left = host.blocks.get(name.digest)
        if left is not None:
            host.blocks.forget(left)
    if not host.blocks.has_room(len(names), besides=set()):
        host.blocks.num_dropped += len(names)
        return
    number = (node.depth + 1) // chunk_blocks - 1
    held_as: HeldChunk | None = HeldChunk(number, len(names), chunk.counts)
    for name, block in zip(names, chunk.blocks, strict=True):
        host.keep(name, block.block_id, num_hits=node.num_hits, chunk=held_as)
        held_as = None
