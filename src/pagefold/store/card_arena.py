"""CardArena: the host arena of a card: its memory is pinned, and blocks move on a stream of their own.

What a store reads, steps before have written: the copying stream waits for theirs. What a load writes, the step reads:
its stream waits for the copies, and the host does not. A host block that is loaded is not written before the step has
ended, which is when the core gives it back, and then the copy has ended too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import xxhash

from pagefold.errors import ConfigError
from pagefold.steps import DamagedBlocksError
from pagefold.store.arena import HostArena

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from pagefold.kv import HostOps

__all__ = ["CardArena"]


class CardArena(HostArena):
    """Blocks in pinned host memory, for blocks on a card.

    Args:
        num_blocks: how many blocks it holds.
        block_bytes: of a block.
        device: where the blocks are that it moves; a CPU's need neither a pin nor a stream.

    Raises:
        ConfigError: the system lets no process pin so much.
    """

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        super().__init__(num_blocks, block_bytes)
        self._tensor = torch.from_numpy(self.blocks)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            _pin(self._tensor)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def carry_out(self, ops: HostOps, blocks: NDArray[np.uint8] | torch.Tensor) -> None:
        """Make a step's stores, then its loads, as a host arena does.

        Every store is there when this returns. A load is there when what is queued on the current stream after this
        runs.

        Args:
            ops: what the core decided.
            blocks: uint8 ``[num_blocks, block_bytes]``: the device's blocks, which this reads and writes.

        Raises:
            DamagedBlocksError: some loads; all stores and all other loads were made.
        """
        blocks = torch.as_tensor(blocks)
        if not (ops.stores or ops.loads):
            return
        damaged: set[int] = set()
        with self._copying() as stream:
            for store in ops.stores:
                self._tensor[store.host_id].copy_(blocks[store.block_id], non_blocking=True)
            if ops.stores and stream is not None:
                stream.synchronize()
            for store in ops.stores:
                self._checksums[store.host_id] = self._digest(store.host_id)
            for load in ops.loads:  # while one is on its way, the next is digested
                if self._digest(load.host_id) == self._checksums[load.host_id]:
                    blocks[load.block_id].copy_(self._tensor[load.host_id], non_blocking=True)
                else:
                    damaged.add(load.host_id)
        if self._stream is not None:
            torch.cuda.current_stream(blocks.device).wait_stream(self._stream)
        if damaged:
            raise DamagedBlocksError(frozenset(damaged))

    def _copying(self) -> AbstractContextManager[torch.cuda.Stream | None]:
        """Return the copying stream as the current one, behind all that is queued; or nothing on a CPU."""
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return _entered(self._stream)

    def _digest(self, host_id: int) -> bytes:
        return xxhash.xxh3_128_digest(self.payload(host_id))


@contextlib.contextmanager
def _entered(stream: torch.cuda.Stream) -> Iterator[torch.cuda.Stream]:
    with torch.cuda.stream(stream):
        yield stream


def _pin(memory: torch.Tensor) -> None:
    """Pin memory that is there: torch's own allocator would take the next power of two."""
    if not memory.nbytes:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        msg = f"The host's memory for blocks, {memory.nbytes:,} bytes, cannot be pinned (CUDA error {int(error)})."
        raise ConfigError(msg, remedy="Use a smaller kv_offloading_size, or raise the limit of locked memory.")
