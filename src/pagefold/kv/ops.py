"""What the core asks the edge to do. The core decides; the runner and the store carry these out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv.block import BlockId
    from pagefold.kv.names import BlockName

__all__ = ["NO_HOST_OPS", "CopyOp", "FetchOp", "HostOps", "LoadOp", "ResidualCopy", "StoreOp", "WriteOp"]


class CopyOp(NamedTuple):
    """Copy a whole block before the step's first write (copy-on-write).

    Only the first ``num_tokens`` positions of ``dst`` mean anything afterwards; a block is one contiguous copy, so the
    rest is copied too and overwritten later. Both blocks stay pinned until :meth:`Moves.copies_done`.

    No copy of a step reads what another one writes: they may be made in any order, or all at once.
    """

    src: BlockId
    dst: BlockId
    num_tokens: int


class ResidualCopy(NamedTuple):
    """Copy a residual before the step's first write: a fork goes on from what its sequence has of an unsealed block."""

    src: int
    dst: int


class StoreOp(NamedTuple):
    """Copy a block into a block of the host arena, before anything of the step writes it.

    Attributes:
        block_id: where it is.
        host_id: the block of the arena that it is copied to.
        is_live: whether it is still cached; then it is pinned until the step is over. Otherwise it was just evicted.
    """

    block_id: BlockId
    host_id: int
    is_live: bool = False


class LoadOp(NamedTuple):
    """Check a block of the host arena and copy it into a block, before the step computes."""

    host_id: int
    block_id: BlockId


class HostOps(NamedTuple):
    """What a step moves between device and host arena: first all stores, then all loads, and then its copies.

    Then blocks of the arena are checked that the step is the first to read where they are.

    A load may read what a store of the same step wrote. No two stores write one host block, and none writes what a load
    reads otherwise.
    """

    stores: Sequence[StoreOp]
    loads: Sequence[LoadOp]
    checks: Sequence[int] = ()

    @property
    def ids_read(self) -> set[int]:
        """Blocks of the arena whose bytes may be found damaged."""
        return {load.host_id for load in self.loads}.union(self.checks)


NO_HOST_OPS = HostOps((), ())


class FetchOp(NamedTuple):
    """Bring a block from a slow tier into a block of the host arena, at any time."""

    host_id: int
    name: BlockName


class WriteOp(NamedTuple):
    """Give a block of the host arena to the slow tiers, at any time.

    Attributes:
        host_id: where it is.
        name: names what it holds.
        note: what goes with it, of a packed chunk (``chunk_notes.py``).
    """

    host_id: int
    name: BlockName
    note: bytes = b""
