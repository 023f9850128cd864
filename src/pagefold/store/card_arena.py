"""CardArena: the host arena of a card: its memory is page-locked, and blocks move on a stream of their own.

What a store reads, steps before have written: the copying stream waits for theirs. What a load writes, the step reads,
layer by layer: a block's layers lie in it one after another, so blocks come in *slices of layers*, first the first
layers of all blocks, and a layer's attention waits for its own slice alone, whichever cache group's blocks that is in.
The host waits for nothing of this.

Checksums are of whole blocks. The host compares them while copies and the step's computing are under way; where one is
wrong, the step fails, and nothing of it counts.

A host block that is loaded is not written before the step has ended, which is when the core gives it back, and then the
copy has ended too.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import torch
import xxhash

from pagefold.errors import ConfigError
from pagefold.steps import DamagedBlocksError
from pagefold.store.arena import HostArena
from pagefold.store.copy_stream import CopyStream, CudaCopyStream, NoCopyStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pagefold.kv import HostOps
    from pagefold.store.copy_stream import Mark

__all__ = ["CardArena", "CardMoves"]

_SLICE_BYTES = 2**18
"""A copy of less does not fill the link."""

_MAX_SLICES = 4
"""The first of so many slices is what computing waits for; more would only be more copies to queue."""

_NUM_MEASURED = 32
"""Blocks that are copied to measure the link."""


class CardArena(HostArena):
    """Blocks in page-locked host memory, for blocks on a card.

    Args:
        num_blocks: how many blocks it holds.
        block_bytes: bytes of a block.
        device: where the blocks are that it moves; a CPU's need neither a pin nor a stream.
        stream: where copies are queued; None for one of the device's.

    Attributes:
        on_restored: told of each step that loads how many bytes came, and in how many seconds, when it has ended.

    Raises:
        ConfigError: the system lets no process pin so much.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, device: torch.device, stream: CopyStream | None = None
    ) -> None:
        super().__init__(num_blocks, block_bytes)
        self._tensor = torch.from_numpy(self.blocks)
        if device.type == "cuda":
            _pin(self._tensor)
            stream = stream or CudaCopyStream(device)
        self._stream: CopyStream = stream or NoCopyStream()
        self.on_restored: Callable[[int, float], None] = _ignore

    def begin(
        self, ops: HostOps, blocks: NDArray[np.uint8] | torch.Tensor, layer_ends: Sequence[int] = ()
    ) -> CardMoves | None:
        """Queue a step's stores, and behind them its loads, slice by slice; None where there is nothing to do."""
        if not (ops.stores or ops.loads or ops.checks):
            return None
        blocks = torch.as_tensor(blocks)
        marks: list[Mark] = []
        with self._stream.behind_current():
            for store in ops.stores:
                self._tensor[store.host_id].copy_(blocks[store.block_id], non_blocking=True)
            begun = self._stream.mark()
            ends = _slice_ends(blocks.shape[1], layer_ends) if ops.loads else [blocks.shape[1]]
            for part in map(slice, [0, *ends], ends):
                for load in ops.loads:
                    blocks[load.block_id, part].copy_(self._tensor[load.host_id, part], non_blocking=True)
                marks.append(self._stream.mark())
        return CardMoves(self, ops, begun, marks, [bisect_left(ends, end) for end in layer_ends])

    def carry_out(self, ops: HostOps, blocks: NDArray[np.uint8] | torch.Tensor) -> None:
        """Make stores and loads outside a step, or before all of it, as a host arena does.

        Every store is there when this returns. A load is there when what is queued on the current stream after this
        runs.

        Args:
            ops: what the core decided.
            blocks: uint8 ``[num_blocks, block_bytes]``: the device's blocks, which this reads and writes.

        Raises:
            DamagedBlocksError: some loads; all stores and all other loads were made.
        """
        moves = self.begin(ops, blocks)
        if moves is not None:
            moves.hold_all()
            moves.verify()

    def measure(self, blocks: NDArray[np.uint8] | torch.Tensor) -> tuple[float, float]:
        """Measure the link, before any block is in use: seconds until the first byte, and bytes a second from then."""
        blocks = torch.as_tensor(blocks)
        num_blocks = min(_NUM_MEASURED, len(self.blocks), len(blocks))
        one_s, all_s = (self._copy_s(blocks, num) for num in (1, num_blocks))
        num_bytes = self.blocks.shape[1]
        bytes_per_s = (num_blocks - 1) * num_bytes / (all_s - one_s) if all_s > one_s else num_bytes / max(one_s, 1e-9)
        return max(0.0, one_s - num_bytes / bytes_per_s), bytes_per_s

    def _copy_s(self, blocks: torch.Tensor, num_blocks: int) -> float:
        times: list[float] = []
        for _ in range(2):  # the first may find memory that was never touched
            with self._stream.behind_current():
                begun = self._stream.mark()
                for index in range(num_blocks):
                    blocks[index].copy_(self._tensor[index], non_blocking=True)
                ended = self._stream.mark()
            ended.wait()
            times.append(ended.seconds_since(begun))
        return times[-1]


class CardMoves:
    """What a step moves between a card and the host, on its way.

    Args:
        arena: the host's blocks.
        ops: what moves.
        begun: when all stores are made.
        marks: when each slice of layers is there, the stores included.
        slice_of_layer: in which of them each layer ends.
    """

    def __init__(
        self, arena: CardArena, ops: HostOps, begun: Mark, marks: list[Mark], slice_of_layer: Sequence[int]
    ) -> None:
        self._arena = arena
        self._ops = ops
        self._begun = begun
        self._marks = marks
        self._slice_of_layer = slice_of_layer
        self._num_held = 0  # the current stream waits for so many of the marks

    def hold(self, layer: int) -> None:
        """Let what is queued from now on wait for ``layer`` of all blocks, and for what the step may overwrite."""
        self._hold(self._slice_of_layer[layer])

    def hold_all(self) -> None:
        """Let what is queued from now on wait for all of it."""
        self._hold(len(self._marks) - 1)

    def _hold(self, index: int) -> None:
        if index >= self._num_held:
            self._marks[index].hold()  # they come in order
            self._num_held = index + 1

    def verify(self) -> None:
        """Compare checksums: the host's work, while the card does its own.

        Raises:
            DamagedBlocksError: some loads or checks.
        """
        arena, ops = self._arena, self._ops
        if ops.stores:
            self._begun.wait()
        for store in ops.stores:
            arena.arrived(store.host_id, _digest(arena, store.host_id))
        read = dict.fromkeys([*(load.host_id for load in ops.loads), *ops.checks])
        damaged = [host_id for host_id in read if _digest(arena, host_id) != arena.checksum(host_id)]
        if damaged:
            raise DamagedBlocksError(frozenset(damaged))

    def learn(self) -> None:
        """The step has ended: tell how long its loads took."""
        ops = self._ops
        if ops.loads:
            num_bytes = len(ops.loads) * self._arena.blocks.shape[1]
            self._marks[-1].wait()
            self._arena.on_restored(num_bytes, self._marks[-1].seconds_since(self._begun))


def _slice_ends(block_bytes: int, layer_ends: Sequence[int]) -> list[int]:
    """Cut a block into slices of layers; return where each ends, in bytes, the last one with the block."""
    ends = [*sorted(set(layer_ends))[:-1], block_bytes]
    num_slices = max(1, min(_MAX_SLICES, len(ends), block_bytes // _SLICE_BYTES))
    return [ends[-(-index * len(ends) // num_slices) - 1] for index in range(1, num_slices + 1)]


def _digest(arena: CardArena, host_id: int) -> bytes:
    return xxhash.xxh3_128_digest(arena.payload(host_id))


def _ignore(_num_bytes: int, _seconds: float) -> None:
    pass


def _pin(memory: torch.Tensor) -> None:
    """Pin memory that is there: torch's own allocator would take the next power of two."""
    if not memory.nbytes:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        msg = f"The host's memory for blocks, {memory.nbytes:,} bytes, cannot be page-locked (CUDA error {int(error)})."
        raise ConfigError(msg, remedy="Use a smaller kv_offloading_size, or raise the limit of locked memory.")
