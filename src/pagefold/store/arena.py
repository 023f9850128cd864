"""HostArena: host memory for blocks, each with a checksum that is compared whenever a block comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

from pagefold.memory.host import host_memory
from pagefold.steps import DamagedBlocksError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pagefold.kv import HostOps
    from pagefold.steps import MovesInFlight

__all__ = ["HostArena"]

_CHUNK_BYTES = 2**18
"""What is copied and digested at a time: small enough to be read from memory once for both, and few calls."""


class HostArena:
    """Blocks in host memory.

    The bytes of a block and their checksum (XXH3, 128 bits) are written together; a load compares them. So a bit that
    turned, or a block that was never written, is found before anything is computed with it.

    The first block is at the beginning of a page: where a block is a multiple of a page, direct I/O can read into it.

    Args:
        num_blocks: how many blocks it holds.
        block_bytes: bytes of a block.
        blocks: uint8 ``[num_blocks, block_bytes]``: memory to use, where it is not to take some itself.
    """

    def __init__(self, num_blocks: int, block_bytes: int, blocks: NDArray[np.uint8] | None = None) -> None:
        if blocks is None:
            blocks = host_memory(num_blocks * block_bytes).reshape(num_blocks, block_bytes)
        self.blocks = blocks
        self._checksums = [b""] * num_blocks

    @property
    def num_blocks(self) -> int:
        """How many blocks it holds."""
        return len(self.blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks.nbytes

    def payload(self, host_id: int) -> memoryview:
        """Return the bytes of a block, for a transfer to read or write."""
        return memoryview(self.blocks[host_id])

    def checksum(self, host_id: int) -> bytes:
        """Return the checksum of a block."""
        return self._checksums[host_id]

    def arrived(self, host_id: int, checksum: bytes) -> None:
        """A transfer has written a block, whose bytes had this checksum."""
        self._checksums[host_id] = checksum

    def begin(
        self,
        ops: HostOps,
        blocks: Any,  # noqa: ANN401 - as below
        layer_ends: Sequence[int] = (),  # noqa: ARG002
    ) -> MovesInFlight | None:
        """Begin a step's moves; return what is still on its way: here nothing, since the host itself moves them.

        Args:
            ops: what the core decided.
            blocks: uint8 ``[num_blocks, block_bytes]``: the device's blocks, which this reads and writes.
            layer_ends: where each layer ends in a block, in bytes; layers may come one after another.

        Raises:
            DamagedBlocksError: as :meth:`carry_out` does, if it is known already; else :meth:`MovesInFlight.verify`
                does.
        """
        self.carry_out(ops, blocks)
        return None

    def carry_out(self, ops: HostOps, blocks: Any) -> None:  # noqa: ANN401 - below; a card's are torch's
        """Make a step's stores, then its loads, and then its checks.

        Args:
            ops: what the core decided.
            blocks: uint8 ``[num_blocks, block_bytes]``: the device's blocks, which this reads and writes.

        Raises:
            DamagedBlocksError: some of what was loaded or checked; all stores and all other loads were made.
        """
        for store in ops.stores:
            self._checksums[store.host_id] = _copy(blocks[store.block_id], self.blocks[store.host_id])
        damaged = {
            load.host_id
            for load in ops.loads
            if _copy(self.blocks[load.host_id], blocks[load.block_id]) != self._checksums[load.host_id]
        }
        damaged |= {
            host_id
            for host_id in ops.checks
            if xxhash.xxh3_128_digest(self.blocks[host_id].data) != self._checksums[host_id]
        }
        if damaged:
            raise DamagedBlocksError(frozenset(damaged))


def _copy(src: NDArray[np.uint8], dst: NDArray[np.uint8]) -> bytes:
    """Copy bytes and return their digest."""
    digest = xxhash.xxh3_128()
    for start in range(0, len(src), _CHUNK_BYTES):
        chunk = src[start : start + _CHUNK_BYTES]
        digest.update(chunk.data)
        dst[start : start + _CHUNK_BYTES] = chunk
    return digest.digest()
