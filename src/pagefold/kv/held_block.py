"""HeldBlock: a block that the host's memory holds, under the name of what is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pagefold.kv.names import BlockName

__all__ = ["HOST", "HeldBlock", "HeldChunk"]

HOST = "host"
"""The origin of what came from the device itself."""


class HeldChunk(NamedTuple):
    """What was kept of a chunk, and is held in blocks.

    Attributes:
        number: which chunk of its path it is.
        num_blocks: how many blocks it fills.
        counts: as of :class:`~pagefold.kv.PackedChunk`.
        note: how slow tiers have it (``chunk_notes.py``); empty where there are none.
    """

    number: int
    num_blocks: int
    counts: object
    note: bytes = b""

    def is_as(self, other: HeldChunk) -> bool:
        """Whether blocks of both are of one packing."""
        return (self.number, self.num_blocks, self.note) == (other.number, other.num_blocks, other.note)


class HeldBlock:
    """A block in the host arena.

    Attributes:
        name: names what the block holds.
        host_id: where it is; -1 when it is there no more.
        num_pins: how many planned copies and transfers read or write it, and requests wait for it.
        num_hits: how often it had been found on the device when it left.
        origin: the tier that it came from, until it is used: ``host``, ``disk`` or ``remote``.
        chunk: of a block of a packed chunk (``host_chunks.py``): which chunk that is; else None.
        claim: that of its node when it left the device (``block.py``); None where no session had it.
        is_superseded: nobody has a use for it any more: it makes room before all others.
    """

    __slots__ = ("chunk", "claim", "host_id", "is_superseded", "name", "num_hits", "num_pins", "origin")

    def __init__(self, name: BlockName, host_id: int, *, num_hits: int = 0, origin: str = HOST) -> None:
        self.name = name
        self.host_id = host_id
        self.num_hits = num_hits
        self.origin = origin
        self.num_pins = 0
        self.chunk: HeldChunk | None = None
        self.claim: object = None
        self.is_superseded = False

    def count_use(self, num_tokens: dict[str, int], block_size: int) -> None:
        """Count it in ``num_tokens`` under the tier that it came from; from now on it is the host's."""
        num_tokens[self.origin] = num_tokens.get(self.origin, 0) + block_size
        self.origin = HOST
