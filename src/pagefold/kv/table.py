"""BlockTable: which blocks of one cache group hold a sequence's tokens, and where in them a position lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv.block import BlockId

__all__ = ["BlockTable", "num_blocks_for", "slot_of"]


class BlockTable:
    """The blocks of one cache group that a sequence holds, in order of position.

    Attributes:
        block_ids: position ``p`` lies in block ``block_ids[p // block_size - num_trimmed]``, at ``p % block_size``. Ids
            from the number of the device's blocks on are blocks of the host's arena, of a sequence that streams.
        num_trimmed: how many blocks before these were given back, since the group keeps what was in them no more.
        sink_ids: the first blocks of the sequence, which hold the group's sinks, where blocks behind them were given
            back. Else these are the first of ``block_ids``, and this is empty.
    """

    __slots__ = ("block_ids", "num_trimmed", "sink_ids")

    def __init__(self, block_ids: Iterable[BlockId] = (), num_trimmed: int = 0, sink_ids: Iterable[BlockId] = ()) -> None:
        self.block_ids = list(block_ids)
        self.num_trimmed = num_trimmed
        self.sink_ids = list(sink_ids)

    @property
    def end(self) -> int:
        """How many blocks the sequence has had in it: those that it holds, and those given back before them."""
        return self.num_trimmed + len(self.block_ids)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks ``num_tokens`` need: a ceiling division."""
    return -(-num_tokens // block_size)


def slot_of(block_ids: list[BlockId], position: int, block_size: int) -> int:
    """Return the slot of ``position`` in the slab: ``block_id * block_size + offset``."""
    return block_ids[position // block_size] * block_size + position % block_size
