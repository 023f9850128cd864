"""BlockStore: what a slow tier can do. Disk, Redis and Mooncake are such stores.

A store is a bounded cache of frames: it makes room by itself, least recently used first, and may lose anything at any
time. It never returns a block that was not found to be the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import BlockName
    from pagefold.kv.transfers import MissCause, TierUse

__all__ = ["BlockStore", "Get", "Put", "SelfTest", "StoreUse"]


class Put(NamedTuple):
    """A block to keep.

    Attributes:
        name: names what the block holds.
        payload: uint8, its bytes, contiguous. They do not change until the call returns.
        checksum: checksum of the payload.
        note: what goes with it: see :class:`~pagefold.kv.WriteOp`.
    """

    name: BlockName
    payload: memoryview
    checksum: bytes
    note: bytes = b""


class Get(NamedTuple):
    """A block to bring.

    Attributes:
        name: names what the block holds.
        into: uint8, where its bytes go, contiguous. After a miss they mean nothing.
        note: where its note goes, empty before; None if nobody wants it.
    """

    name: BlockName
    into: memoryview
    note: bytearray | None = None


class StoreUse(NamedTuple):
    """What a store holds.

    Attributes:
        num_blocks: of this model and layout; -1 if it cannot tell.
        num_bytes: all that it takes of its medium, index and leftovers included; -1 if it cannot tell.
        limit_bytes: what it may take at most; 0 if that is somebody else's to say.
    """

    num_blocks: int
    num_bytes: int
    limit_bytes: int


class SelfTest(NamedTuple):
    """What came of trying a store out.

    Attributes:
        tier: the store's tier.
        ok: whether it can be used.
        read_bytes_per_s, write_bytes_per_s: of a few blocks, checks included; 0 if it cannot be used.
        latency_s: of a question without blocks; 0 if it cannot be used.
        told: one line for people.
    """

    tier: str
    ok: bool
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    told: str


class BlockStore(Protocol):
    """Keeps blocks by name. Any thread may call it, several at once.

    Every method but ``close`` raises :class:`~pagefold.kv.transfers.StoreError` when the store cannot be used.

    Attributes:
        tier: what users call it: "disk" or "remote".
    """

    tier: str

    @property
    def is_out(self) -> bool:
        """Whether it did not answer, and is asked again from time to time: until then it holds nothing."""

    def put(self, puts: Sequence[Put]) -> int:
        """Keep blocks, making room as needed. Return how many are kept now; known ones count, and are not rewritten."""

    def get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        """Bring blocks. For each its checksum, or why it is not there; a frame that is wrong is dropped.

        The blocks are of one path, first to last; what is behind the first miss need not be brought, and is ``ABSENT``.
        """

    def count(self, names: Sequence[BlockName]) -> int:
        """Return how many of ``names``, from the first on in a row, it probably holds."""

    def delete(self, digests: Sequence[bytes]) -> None:
        """Forget blocks, if it holds them."""

    def clear(self) -> int:
        """Forget all blocks of this layout; return how many, or -1 if it cannot tell."""

    def self_test(self) -> SelfTest:
        """Try it: write, read, and find a flipped bit. What it keeps stays."""

    def use(self) -> StoreUse:
        """Return what it holds."""

    def known_use(self) -> TierUse | None:
        """Return what it holds, if it knows without asking anybody or waiting; else None. It never raises."""

    def close(self) -> None:
        """Finish what was begun and let go of all resources. Again does nothing."""
